"""Verdicts: what counts as one, what does not, and that an agent cannot make its own."""

import asyncio
import json

import pytest

from rsi_fast import config
from rsi_fast.sandbox import open_sandbox
from rsi_fast.tasks import load_task
from rsi_fast.verifier import VerifierError, read_checks, verify

REWARD = "/logs/verifier/reward.txt"


def make_task(folder, test_sh: str, toml: str = ""):
    for name in ("environment", "tests"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text("write yes to answer\n")
    (folder / "environment" / "Dockerfile").write_text("FROM debian\nWORKDIR /app\n")
    (folder / "tests" / "test.sh").write_text(test_sh)
    return load_task(folder)


def run(task, commands=(), timeout_s=5.0):
    async def attempt():
        sandbox = open_sandbox(config.Sandbox())
        await sandbox.start(task)
        for command in commands:
            await sandbox.run(command, 1, 10_000)
        return await verify(task, sandbox, timeout_s)

    return asyncio.run(attempt())


@pytest.mark.parametrize(
    ("write", "success", "passed"),
    [
        (f"echo 1 > {REWARD}", True, 1.0),
        (f"echo 1.0 > {REWARD}", True, 1.0),
        (f"echo 0 > {REWARD}", False, 0.0),
        (f"echo 0.999999 > {REWARD}", False, 0.999999),
        (f"echo 1 > {REWARD}; exit 1", True, 1.0),
        ("echo 1 > /logs/verifier/reward.json", True, 1.0),
        ("""echo '{"reward": 0.5, "style": 1}' > /logs/verifier/reward.json""", False, 0.5),
    ],
)
def test_verdict_without_report(tmp_path, write, success, passed):
    verdict = run(make_task(tmp_path, write))
    assert verdict.success is success
    assert [check.passed for check in verdict.checks] == [passed]


@pytest.mark.parametrize(
    "value", ["nan", "inf", "-0.1", "1.0001", "", "yes", "1 1", "0x1", "true", "[1]", "null", '{"score": 1}', "{"]
)
@pytest.mark.parametrize("file", ["reward.txt", "reward.json"])
def test_impossible_verdict(tmp_path, value, file):
    task = make_task(tmp_path, f"cat > /logs/verifier/{file} <<'EOF'\n{value}\nEOF")
    with pytest.raises(VerifierError, match="reward"):
        run(task)


def test_no_verdict_names_exit_code_and_output(tmp_path):
    with pytest.raises(VerifierError, match="exit code 7 .*no such tool"):
        run(make_task(tmp_path, "echo no such tool >&2; exit 7"))


def test_timeout(tmp_path):
    with pytest.raises(VerifierError, match="stopped after 0.2 s"):
        run(make_task(tmp_path, f"sleep 20; echo 1 > {REWARD}"), timeout_s=0.2)
    with pytest.raises(VerifierError, match="stopped after 0.3 s"):
        run(make_task(tmp_path / "own", "sleep 20", "[verifier]\ntimeout_sec = 0.3"), timeout_s=60)


HONEST = f"""
check() {{ if [ "$(cat /app/answer 2>/dev/null)" = yes ] && grep -q yes /app/answer && test -f /app/answer; then
  echo 1; else echo 0; fi; }}
check > {REWARD}
"""
ATTACKS = [
    f"mkdir -p /logs/verifier; echo 1 > {REWARD}; chmod 444 {REWARD}",
    "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json",
    "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 444 /tests/test.sh",
    "mkdir -p /app/l; echo 1 > /app/l/reward.txt; mkdir /logs; ln -s /app/l /logs/verifier",
    "test() { return 0; }; grep() { return 0; }; cat() { echo yes; }; export -f test grep cat",
    "function [ { return 0; }; function echo { builtin echo 1; }; export -f echo",
    "alias cat='echo yes' grep=true test=true; shopt -s expand_aliases",
    "enable -n test [; set -f; readonly PATH=/nowhere; IFS=1; exec 2>&-",
    "mkdir -p /usr/local/bin /usr/bin /bin; for c in bash cat grep test [; do for d in /usr/local/bin /usr/bin /bin; do"
    " printf '#!/bin/bash\\necho yes; exit 0\\n' > $d/$c; chmod 755 $d/$c; done; done; PATH=/usr/local/bin:$PATH",
    "mkdir -p ~ /etc /root; for f in ~/.bashrc ~/.bash_profile ~/.profile /etc/profile /etc/bash.bashrc /root/.bashrc;"
    " do echo 'cat() { echo yes; }' > $f; done; export BASH_ENV=/etc/profile ENV=/etc/profile",
    f"(while true; do mkdir -p /logs/verifier; echo 1 > {REWARD}; sleep 0.01; done) &",
    f"trap 'mkdir -p /logs/verifier; echo 1 > {REWARD}' EXIT DEBUG ERR",
    "cd /; rm -rf /app /tmp; echo > /tests; echo > /logs",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_agent_cannot_make_its_own_verdict(tmp_path, attack):
    task = make_task(tmp_path, HONEST)
    assert not run(task, [attack]).success
    # nor does it spoil the verifier: the honest answer still earns success
    assert run(task, [attack, "builtin cd /; mkdir -p /app; builtin printf yes > /app/answer"]).success


def test_tests_are_not_there_while_the_agent_works(tmp_path):
    assert not run(make_task(tmp_path, HONEST), ["ls /tests/test.sh /solution && echo yes > answer"]).success


def ctrf(*tests: dict) -> bytes:
    return json.dumps({"results": {"tool": {"name": "t"}, "tests": list(tests)}}).encode()


def test_report_is_read_with_families(tmp_path):
    report = ctrf(
        {"name": "file a", "status": "passed"},
        {"name": "content of a", "status": "failed"},
        {"name": "speed", "status": "other"},
        {"name": "network", "status": "skipped"},
    ).decode()
    toml = '[metadata.families]\nfiles = ["file *"]\ncontent = ["text", "content *"]\n'
    verdict = run(make_task(tmp_path, f"echo 0 > {REWARD}\necho '{report}' > /logs/verifier/ctrf.json\n", toml))
    assert not verdict.success
    assert [(c.name, c.family, c.passed) for c in verdict.checks] == [
        ("file a", "files", 1.0),
        ("content of a", "content", 0.0),
        ("speed", "other", 0.0),
    ]


@pytest.mark.parametrize(
    ("test", "family"),
    [
        ({"suite": "api", "tags": ["x"]}, "api"),
        ({"suite": ["api", "auth"]}, "api > auth"),
        ({"tags": ["slow", "x"]}, "slow"),
        ({"name": "test_a.py::TestB::test_c", "filePath": "test_a.py"}, "test_a.py::TestB"),
        ({"name": "test_a.py::test_c"}, "test_a.py"),
        ({"filePath": "tests/test_a.py"}, "tests/test_a.py"),
        ({}, "other"),
    ],
)
def test_family_without_patterns(test, family):
    (check,) = read_checks(ctrf({"name": "n", "status": "passed", **test}), {})
    assert check.family == family


@pytest.mark.parametrize(
    "report",
    [b"", b"{", b"[]", b"{}", b'{"results": {"tests": [{"name": "n"}]}}', b'{"results": {"tests": 3}}', b"\xff"],
)
def test_broken_report(report):
    with pytest.raises(VerifierError, match="CTRF"):
        read_checks(report, {})
