"""Child processes that never outlive the launcher, and end as a whole tree."""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
STOP_GRACE_S = 10.0


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """To be called in a child: the kernel sends it this signal when its parent ends, also when killed with -9."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


class Stopped(Exception):
    """SIGINT or SIGTERM."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def signals_raise():
    """Turns SIGINT and SIGTERM into Stopped, so that what is under way is undone in order."""

    def handler(number, _frame):
        for sign in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sign, signal.SIG_IGN)  # the first one counts; stopping takes seconds and must not be cut
        raise Stopped(number)

    before = {sign: signal.signal(sign, handler) for sign in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for sign, old in before.items():
            signal.signal(sign, old)


class Child:
    """A process with its output in a log file."""

    def __init__(self, name: str, command: list[str], log: Path, env: dict[str, str]):
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            # A session of its own: Ctrl-C reaches the launcher alone, which then stops everything in order.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | env,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def exit_code(self) -> int | None:
        return self.process.poll()


def stop(children: list[Child]) -> None:
    """SIGTERM to every child, SIGKILL after the grace to what is left of their trees. Returns when none lives."""
    below = _trees(children)
    for child in children:
        if child.exit_code() is None:
            child.process.terminate()
    deadline = time.monotonic() + STOP_GRACE_S
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(timeout=max(0.0, deadline - time.monotonic()))
    _, alive = psutil.wait_procs(below, timeout=max(0.0, deadline - time.monotonic()))
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for child in children:
        if child.exit_code() is None:
            child.process.kill()
            child.process.wait(timeout=5)
    psutil.wait_procs(alive, timeout=5)


def _trees(children: list[Child]) -> list[psutil.Process]:
    """All that the children started: by descent, and by session where a child has died before its own children."""
    sessions = {child.process.pid for child in children}
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            if process.pid in sessions:
                found |= set(process.children(recursive=True))
            elif os.getsid(process.pid) in sessions:
                found.add(process)
    return list(found)


def last_lines(log: Path, count: int = 15) -> str:
    """The end of a log, for an error message."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-count:])
    except FileNotFoundError:
        return "(no log was written)"


def wait_until(condition, timeout_s: float, poll_s: float = 0.1) -> bool:
    """Polls until the condition holds; False when time ran out."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True
