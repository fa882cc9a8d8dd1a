"""The sandbox: state lasts, limits hold, and nothing that an agent types is an error of the sandbox."""

import asyncio
import time
from pathlib import Path

import pytest

from rsi_fast import config
from rsi_fast.sandbox import SandboxError, open_sandbox
from rsi_fast.tasks import Environment, Task


def make_task(tmp_path: Path) -> Task:
    files = tmp_path / "environment" / "files"
    (files / "sub").mkdir(parents=True)
    (files / "a.txt").write_text("alpha\n")
    (files / "sub" / "run.sh").write_text("#!/bin/bash\necho ran $1\n")
    (files / "sub" / "run.sh").chmod(0o755)
    (files / "bytes").write_bytes(b"\xff\xfe\0")
    environment = Environment("/app", ("/app/empty",), ((files, "/app"),))
    return Task("t", tmp_path, "do it", environment, {}, None, None)


@pytest.fixture
def started(tmp_path):
    """Calls an async function with a started sandbox."""

    def call(function):
        async def run():
            sandbox = open_sandbox(config.Sandbox())
            await sandbox.start(make_task(tmp_path))
            try:
                return await function(sandbox)
            finally:
                await sandbox.close()

        return asyncio.run(run())

    return call


async def output(sandbox, command: str, timeout_s: float = 5, limit: int = 10_000, **kwargs) -> str:
    return (await sandbox.run(command, timeout_s, limit, **kwargs)).output


def test_environment_and_state(started):
    async def check(sandbox):
        assert await output(sandbox, "pwd; cat a.txt; ls -d empty; sub/run.sh x") == "/app\nalpha\nempty\nran x\n"
        assert await sandbox.read_file("/app/bytes", 100) == b"\xff\xfe\0"
        result = await sandbox.run("cd sub; x=1; f() { echo f; }; false", 5, 100)
        assert (result.output, result.exit_code, result.timed_out, result.truncated) == ("", 1, False, False)
        assert await output(sandbox, "pwd; echo $x; f") == "/app/sub\n1\nf\n"
        assert await output(sandbox, "pwd; echo [$x]; f 2>/dev/null; cat a.txt", new_shell=True) == "/app\n[]\nalpha\n"

    started(check)


def test_stdout_and_stderr_come_in_order(started):
    async def check(sandbox):
        assert await output(sandbox, "echo 1; echo 2 >&2; echo 3") == "1\n2\n3\n"

    started(check)


@pytest.mark.parametrize(
    "command", ["while true; do :; done", ":(){ :|:& };:", "sleep 100", "sleep 100 & sleep 100", "sleep 50 | sleep 50"]
)
def test_endless_command_is_stopped_and_told(started, command):
    async def check(sandbox):
        await sandbox.run("cd sub", 5, 100)
        before = time.monotonic()
        result = await sandbox.run(f"echo begun; {command}", 0.3, 1000)
        assert time.monotonic() - before < 3
        if result.timed_out:  # bashkit's own limits may come first
            assert result.exit_code is None
            assert "[stopped after 0.3 s]" in result.output
        else:
            assert result.exit_code
            assert "limit" in result.output
        assert result.output.startswith("begun\n")
        before = time.monotonic()
        assert await output(sandbox, "pwd; cat ../a.txt") == "/app/sub\nalpha\n"
        assert time.monotonic() - before < 1

    started(check)


def test_background_job_ends_with_the_command_that_was_stopped(started):
    async def check(sandbox):
        await sandbox.run("(sleep 0.6; echo late > /app/late) & sleep 100", 0.2, 1000)
        await asyncio.sleep(1)
        assert await sandbox.read_file("/app/late", 10) is None

    started(check)


@pytest.mark.parametrize("command", ["yes", "cat /dev/zero", "seq 1 100000", "while true; do echo flood; done"])
def test_flood_is_cut_and_told(started, command):
    async def check(sandbox):
        result = await sandbox.run(command, 5, 1000)
        assert result.truncated
        assert "[output cut after 1000 bytes]" in result.output
        assert len(result.output) < 1300
        assert await output(sandbox, "cat a.txt") == "alpha\n"

    started(check)


@pytest.mark.parametrize(
    "command",
    [
        "",
        " \n\t",
        "echo a\0b",
        "echo \ud800",
        "printf '\\xff\\xfe'",
        "echo 'open",
        'echo "open',
        "cat <<EOF",
        "$(",
        "((((",
        "if",
        "}",
        "x" * 100_000,
        "echo " + "a " * 50_000,
        "exit 3",
        "exec ls",
        "kill -9 $$",
        "cd /nowhere",
        "rm -rf /*",
        "set -e; false",
        "trap 'echo bye' EXIT",
        "readonly PATH",
        "exec >/dev/null",
        "ulimit -t 0",
        "cat",
        "read line",
        "\x1b[31m\x07\u202e🙂",
    ],
)
def test_weird_command_is_only_a_command(started, command):
    async def check(sandbox):
        result = await sandbox.run(command, 5, 1000)
        assert isinstance(result.output, str)
        result.output.encode()
        after = await sandbox.run("echo still here", 5, 1000)
        if command != "exec >/dev/null":
            assert after.output == "still here\n"

    started(check)


def test_slow_commands_do_not_block_others(started):
    async def check(sandbox):
        async def tick():
            longest = 0.0
            for _ in range(50):
                before = time.monotonic()
                await asyncio.sleep(0.01)
                longest = max(longest, time.monotonic() - before)
            return longest

        ticking = asyncio.create_task(tick())
        await sandbox.run("sleep 0.3; seq 1 50000 | sort | wc -l", 5, 1000)
        assert await ticking < 0.4

    started(check)


def test_files_in_and_out(started):
    async def check(sandbox):
        await sandbox.put_files({"/new/deep/x.sh": b"echo hi\n", "/new/b": b"\0\xff"})
        assert await output(sandbox, "/new/deep/x.sh") == "hi\n"
        assert await sandbox.read_file("/new/b", 1) == b"\0"
        assert await sandbox.read_file("/none", 10) is None
        assert await sandbox.read_file("/new", 10) is None

    started(check)


@pytest.mark.parametrize(
    "plant",
    [
        "true",
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
        "echo file > /logs",
        "mkdir /logs; echo file > /logs/verifier",
        "mkdir -p /app/real; ln -s /app/real /logs",
        "mkdir -p /logs /app/real; ln -s /app/real /logs/verifier",
        "ln -s /nowhere /logs",
        "mkdir -p /logs/verifier/a/b/c; chmod 000 /logs/verifier /logs",
    ],
)
def test_empty_directory(started, plant):
    async def check(sandbox):
        await sandbox.run(plant, 5, 1000)
        await sandbox.empty_directory("/logs/verifier")
        await sandbox.put_files({"/logs/verifier/new": b"1"})
        assert await output(sandbox, "ls -A /logs/verifier; ls -A /app/real 2>/dev/null", new_shell=True) == "new\n"

    started(check)


def test_closed_sandbox_is_a_sandbox_error(tmp_path):
    async def check():
        sandbox = open_sandbox(config.Sandbox())
        with pytest.raises(SandboxError):
            await sandbox.run("ls", 1, 100)

    asyncio.run(check())
