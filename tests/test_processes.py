"""Child processes end with their parent, and as whole trees."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from rsi_fast.processes import Child, Stopped, last_lines, signals_raise, stop, wait_until

IGNORES_SIGTERM = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(100)"])
print("ready", flush=True)
time.sleep(100)
"""


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_stop_ends_a_tree_that_ignores_sigterm(tmp_path, monkeypatch):
    monkeypatch.setattr("rsi_fast.processes.STOP_GRACE_S", 0.5)
    child = Child("stubborn", [sys.executable, "-c", IGNORES_SIGTERM], tmp_path / "log", {})
    assert wait_until(lambda: "ready" in last_lines(tmp_path / "log"), 20)
    assert wait_until(lambda: len(psutil.Process(child.process.pid).children()) == 1, 5)
    pids = [child.process.pid, *(p.pid for p in psutil.Process(child.process.pid).children())]
    stop([child])
    assert not any(alive(pid) for pid in pids)
    assert child.exit_code() == -signal.SIGKILL


def test_children_end_when_the_launcher_is_killed(tmp_path):
    script = f"""
import sys, time
from pathlib import Path
from rsi_fast.processes import Child
child = Child("sleeper", [sys.executable, "-c", "import time; time.sleep(100)"], Path({str(tmp_path / "log")!r}), {{}})
print(child.process.pid, flush=True)
time.sleep(100)
"""
    launcher = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pid = int(launcher.stdout.readline())
    assert alive(pid)
    launcher.kill()
    launcher.wait(timeout=5)
    assert wait_until(lambda: not alive(pid), 5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_become_an_exception(number):
    def interrupted() -> None:
        with signals_raise():
            os.kill(os.getpid(), number)
            time.sleep(5)

    with pytest.raises(Stopped) as caught:
        interrupted()
    assert caught.value.number == number


def test_a_child_gets_its_environment_and_log(tmp_path):
    child = Child("echo", ["sh", "-c", "echo $WORD; exit 3"], tmp_path / "logs" / "log", {"WORD": "hello"})
    assert wait_until(lambda: child.exit_code() is not None, 5)
    assert child.exit_code() == 3
    assert last_lines(child.log) == "hello"
