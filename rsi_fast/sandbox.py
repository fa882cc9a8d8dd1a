"""Where commands of the agent run: a small interface, and the embedded sandbox on bashkit.

Model output is untrusted; it runs nowhere else. bashkit is a bash with an in-memory file system inside this process: it
has no host files, no network and no host programs.
"""

from dataclasses import dataclass
from typing import Protocol

import bashkit

from rsi_fast import config as run_config
from rsi_fast.tasks import Task

MAX_COMMANDS = 5000  # of one call: ends loops long before the time limit
VERIFIER_MAX_COMMANDS = 100_000
MAX_MEMORY_BYTES = 32 * 2**20


class SandboxError(Exception):
    """The sandbox itself failed. The attempt is invalid, through no fault of the agent."""


@dataclass(frozen=True)
class CommandResult:
    """What a command left: standard output and error in one text, cut at the limit with a note for the agent."""

    output: str
    exit_code: int
    timed_out: bool = False
    truncated: bool = False


class Sandbox(Protocol):
    """One attempt's place. The shell keeps its directory, variables and files from command to command."""

    async def start(self, task: Task) -> None: ...

    async def run(self, command: str) -> CommandResult:
        """A command of the agent, within the configured limits. Any text is fine; only the sandbox's own failure
        raises."""

    async def run_clean(self, command: str, timeout_s: float) -> CommandResult:
        """A command of ours on the agent's files, untouched by what the agent did to its shell."""

    async def put_files(self, files: dict[str, bytes]) -> None: ...

    async def read_file(self, path: str, limit_bytes: int) -> bytes | None:
        """The first bytes of a regular file; None where there is none."""

    async def remove(self, path: str) -> None: ...

    async def close(self) -> None: ...


def open_sandbox(settings: run_config.Sandbox) -> Sandbox:
    return BashkitSandbox(settings)


class BashkitSandbox:
    def __init__(self, settings: run_config.Sandbox):
        self._settings = settings
        self._shell: bashkit.Bash | None = None

    async def start(self, task: Task) -> None:
        layout = task.layout
        self._shell = bashkit.Bash(
            cwd=layout.workdir,
            timeout_seconds=self._settings.command_timeout_s,
            max_commands=MAX_COMMANDS,
            max_memory=MAX_MEMORY_BYTES,
        )
        files = self._shell.fs()
        for directory in layout.directories:
            files.mkdir(directory, True)
        await self.put_files(layout.files)

    async def run(self, command: str) -> CommandResult:
        return await self._execute(self._shell, command)

    async def run_clean(self, command: str, timeout_s: float) -> CommandResult:
        # A fresh interpreter over the same files: no function, alias, variable, trap or job of the agent is in it.
        shell = bashkit.Bash(cwd="/", timeout_seconds=timeout_s, max_commands=VERIFIER_MAX_COMMANDS)
        shell.mount("/", self._shell.fs())
        return await self._execute(shell, command)

    async def _execute(self, shell: bashkit.Bash, command: str) -> CommandResult:
        try:
            result = await shell.execute(command)
        except (bashkit.BashError, RuntimeError, ValueError) as error:
            raise SandboxError(f"bashkit failed: {error}") from error
        timed_out = "execution timeout" in (result.error or result.stderr)
        output = result.stdout + result.stderr
        limit = self._settings.output_limit_bytes
        data = output.encode(errors="replace")
        truncated = len(data) > limit
        if truncated:
            output = data[:limit].decode(errors="ignore") + "\n[output cut]\n"
        return CommandResult(output, result.exit_code, timed_out, truncated)

    async def put_files(self, files: dict[str, bytes]) -> None:
        target = self._shell.fs()
        for path, content in files.items():
            target.mkdir(path.rpartition("/")[0] or "/", True)
            target.write_file(path, content)

    async def read_file(self, path: str, limit_bytes: int) -> bytes | None:
        files = self._shell.fs()
        if not files.exists(path) or files.stat(path)["file_type"] != "file":
            return None
        return files.read_file(path)[:limit_bytes]

    async def remove(self, path: str) -> None:
        files = self._shell.fs()
        if files.exists(path):
            files.remove(path, True)

    async def close(self) -> None:
        self._shell = None
