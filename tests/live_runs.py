"""Helper of the tests with real processes: starts `rsi-fast run` on configs/smoke.toml and finds what belongs to it."""

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

from rsi_fast.config import load_config

ROOT = Path(__file__).parent.parent

SMOKE = ROOT / "configs" / "smoke.toml"


class LiveRun:
    """One run directory of configs/smoke.toml, with overrides as --set takes them, and the commands started on it."""

    def __init__(self, folder: Path, *overrides: str):
        self.run_dir = folder / "run"
        self.file = folder / "run.toml"
        load_config(SMOKE, [f"run.dir={self.run_dir}", *overrides]).save(self.file)
        self.mark = uuid.uuid4().hex  # every process of the run inherits it
        self.output = folder / "output.txt"
        self.process: subprocess.Popen | None = None
        self.seen: set[psutil.Process] = set()

    def start(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "rsi_fast", "run", str(self.file), *arguments]
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"RSI_TEST_MARK": self.mark},
                cwd=ROOT,
            )

    def finish(self, timeout_s: float) -> tuple[int, str]:
        """Waits for the command; returns its exit code and output."""
        code = self.process.wait(timeout=timeout_s)
        return code, self.output.read_text()

    def processes(self) -> list[psutil.Process]:
        """What is left of the run, zombies apart. vLLM's engine overwrites its environment with its title, so
        descendants count too, also those of processes that have ended since they were seen."""
        for process in psutil.process_iter():
            try:
                if process.environ().get("RSI_TEST_MARK") == self.mark:
                    self.seen |= {process, *process.children(recursive=True)}
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        self.seen = {process for process in self.seen if _runs(process)}
        return list(self.seen)

    def find(self, *words: str) -> psutil.Process:
        """The first process of the run whose command line has all the words."""
        for process in self.processes():
            try:
                line = " ".join(process.cmdline())
            except psutil.NoSuchProcess:
                continue
            if all(word in line for word in words):
                return process
        raise LookupError(f"no process with {words}")

    def lines(self) -> list[dict]:
        path = self.run_dir / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def rounds(self) -> int:
        """Finished rounds of ppo."""
        return sum(line["kind"] == "ppo" for line in self.lines())

    def attempts(self, order: str) -> int:
        return len(list((self.run_dir / "spool").glob(f"{order}/[!.]*.json")))

    def trajectories(self) -> set[str]:
        return {str(p.relative_to(self.run_dir)) for p in (self.run_dir / "spool").rglob("[!.]*.json")}

    def kill_all(self) -> None:
        """Every process of the run at once, with -9."""
        self._kill(self.processes())

    def kill_parents(self) -> None:
        """With -9 those that other processes of the run descend from; the others must end by themselves."""
        family = self.processes()
        self._kill([process for process in family if process.children()])

    def _kill(self, doomed: list[psutil.Process]) -> None:
        for process in doomed:
            process.kill()
        self.process.wait(timeout=10)
        deadline = time.monotonic() + 20
        while left := self.processes():
            assert time.monotonic() < deadline, [process.cmdline() for process in left]
            time.sleep(0.1)

    def wait_for(self, condition, timeout_s: float = 150) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the run ended:\n{self.output.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"not within {timeout_s} s:\n{self.output.read_text()[-3000:]}"
            time.sleep(0.02)
        self.processes()  # seen while their parents live


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
