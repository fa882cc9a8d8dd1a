"""Where a task's commands run: one small interface, and bashkit, a bash in this process with its files in memory."""

import asyncio
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Protocol

from rsi_fast import config
from rsi_fast.errors import UserError
from rsi_fast.tasks import Task

_CANCEL_GRACE_S = 0.2
_MAX_SHELL_TIME_S = 24 * 3600.0  # bashkit's own limit, which must not come before `timeout_s`


class SandboxError(Exception):
    """The sandbox itself failed, not the command that ran in it."""


@dataclass(frozen=True)
class CommandResult:
    output: str  # stdout and stderr as they came; fit for the model, so a cut or a stop is told in it
    exit_code: int | None  # None: stopped at the timeout
    timed_out: bool
    truncated: bool


class Sandbox(Protocol):
    """One attempt's machine. Every method raises SandboxError when the sandbox itself fails."""

    async def start(self, task: Task) -> None:
        """Lays out the task's environment. Once, before anything else."""

    async def run(
        self, command: str, timeout_s: float, output_limit_bytes: int, *, new_shell: bool = False
    ) -> CommandResult:
        """Runs a command in the agent's shell, whose directory and variables last from command to command.

        A command that is stopped at the timeout costs the shell its variables; it goes on in the directory where
        that command began.
        `new_shell`: in a shell of its own, in the task's working directory, which knows nothing of the agent's
        functions, aliases, variables and jobs, but sees the same files.
        """

    async def put_files(self, files: dict[str, bytes]) -> None:
        """Writes files by absolute path, directories included. Scripts (`*.sh`) are made executable."""

    async def empty_directory(self, path: str) -> None:
        """Makes `path` an empty directory, whatever the agent has put there or on the way."""

    async def read_file(self, path: str, limit_bytes: int) -> bytes | None:
        """The first `limit_bytes` of a file; None where there is none."""

    async def close(self) -> None: ...


def open_sandbox(settings: config.Sandbox) -> Sandbox:
    assert settings.kind == "bashkit"
    try:
        return BashkitSandbox()
    except ImportError:
        raise UserError('sandbox.kind = "bashkit" needs bashkit: pip install "rsi-fast[sandbox]"') from None


class BashkitSandbox:
    """The file system stands apart from the shells over it: a shell that hangs is thrown away, the files stay."""

    def __init__(self):
        import bashkit

        self._bashkit = bashkit
        self._files = bashkit.FileSystem()
        self._shell = None
        self._workdir = "/"
        self._directory = "/"  # of the agent's shell, after its last command that ended

    async def start(self, task: Task) -> None:
        environment = task.environment
        self._workdir = self._directory = environment.workdir
        try:
            for directory in (environment.workdir, *environment.directories):
                self._files.mkdir(directory, True)
            for path, (content, mode) in environment.read_files().items():
                self._write(path, content)
                self._files.chmod(path, mode)
        except RuntimeError as error:
            raise SandboxError(f"task {task.name}: its environment cannot be laid out: {error}") from error
        self._shell = self._new_shell(self._workdir)

    async def run(
        self, command: str, timeout_s: float, output_limit_bytes: int, *, new_shell: bool = False
    ) -> CommandResult:
        if self._shell is None:
            raise SandboxError("the sandbox is not started, or closed")
        shell = self._new_shell(self._workdir) if new_shell else self._shell
        collected = _Output(output_limit_bytes)
        # The command may hold what no file name or string of a shell can.
        command = command.replace("\0", "").encode("utf-8", "replace").decode()
        try:
            execution = shell.execute(command, collected.add)
            done, _ = await asyncio.wait([execution], timeout=timeout_s)
            if not done:
                await self._stop(shell, execution, replace=not new_shell)
                note = f"[stopped after {timeout_s:g} s]"
                return CommandResult(collected.text(note), None, timed_out=True, truncated=collected.cut)
            result = execution.result()
            if not new_shell:
                self._directory = shell.shell_state().cwd
        except asyncio.CancelledError:
            shell.cancel()
            raise
        except Exception as error:
            raise SandboxError(f"bashkit failed: {error}") from error
        note = result.error or ""
        return CommandResult(collected.text(note), result.exit_code, timed_out=False, truncated=collected.cut)

    async def put_files(self, files: dict[str, bytes]) -> None:
        try:
            for path, content in files.items():
                self._write(path, content)
                if path.endswith(".sh"):
                    self._files.chmod(path, 0o755)
        except RuntimeError as error:
            raise SandboxError(f"{path} cannot be written: {error}") from error

    async def empty_directory(self, path: str) -> None:
        try:
            for part in reversed((PurePosixPath(path), *PurePosixPath(path).parents)):
                if self._is_no_directory(part):
                    self._files.remove(str(part), False)
            if self._files.exists(path):
                self._files.remove(path, True)
            self._files.mkdir(path, True)
        except RuntimeError as error:
            raise SandboxError(f"{path} cannot be emptied: {error}") from error

    async def read_file(self, path: str, limit_bytes: int) -> bytes | None:
        if not self._files.exists(path) or self._files.stat(path)["file_type"] != "file":
            return None
        try:
            return self._files.read_file(path)[:limit_bytes]
        except RuntimeError as error:
            raise SandboxError(f"{path} cannot be read: {error}") from error

    async def close(self) -> None:
        self._shell = self._files = None

    def _new_shell(self, directory: str):
        shell = self._bashkit.Bash(cwd=directory, timeout_seconds=_MAX_SHELL_TIME_S)
        shell.mount("/", self._files)
        return shell

    async def _stop(self, shell, execution: asyncio.Future, replace: bool) -> None:
        """Ends a command that ran out of time. Its background jobs end with its shell."""
        shell.cancel()
        await asyncio.wait([execution], timeout=_CANCEL_GRACE_S)
        execution.cancel()
        if replace:
            self._shell = self._new_shell(self._directory)  # the old one may not even tell its own

    def _write(self, path: str, content: bytes) -> None:
        self._files.mkdir(str(PurePosixPath(path).parent), True)
        self._files.write_file(path, content)

    def _is_no_directory(self, path: PurePosixPath) -> bool:
        """There is something at `path`, such as a file or a link (to a directory, even)."""
        parent = str(path.parent)
        entries = self._files.read_dir(parent) if self._files.exists(parent) else []
        return any(e["name"] == path.name and e["metadata"]["file_type"] != "directory" for e in entries)


class _Output:
    """Keeps the first bytes of a command's output."""

    def __init__(self, limit_bytes: int):
        self._limit = limit_bytes
        self._room = limit_bytes
        self._parts: list[bytes] = []
        self.cut = False

    def add(self, stdout: str, stderr: str) -> None:
        """Called by bashkit, from its own thread."""
        data = (stdout + stderr).encode("utf-8", "replace")
        self.cut = self.cut or len(data) > self._room
        self._parts.append(data[: self._room])
        self._room -= len(self._parts[-1])

    def text(self, note: str) -> str:
        """The output; then, on a line of its own, what cut it short, if anything did."""
        text = b"".join(self._parts).decode("utf-8", "replace")
        notes = [f"[output cut after {self._limit} bytes]"] * self.cut + [note] * bool(note)
        if notes and text and not text.endswith("\n"):
            text += "\n"
        return text + "".join(f"{n}\n" for n in notes)
