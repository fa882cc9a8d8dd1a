"""Helper of the tests with real processes: starts `rsi-fast run` on a small demo and finds all that belongs to it."""

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent

RUN_FILE = """
[run]
dir = "{dir}"
[model]
path = "{root}/models/demo-base"
dtype = "float32"
device = "cpu"
max_tokens = 256
[tasks.train]
generator = "demo"
count = 300
[tasks.heldout]
generator = "demo"
split = "dev"
count = 16
[sandbox]
command_timeout_s = 1.0
output_limit_bytes = 200
[rollout]
agent = "plain"
max_turns = 8
max_turn_tokens = 32
max_observation_tokens = 40
max_concurrency = 6
request_timeout_s = 40
stall_timeout_s = 12
round_timeout_s = 300
[trainer]
num_ranks = 2
micro_batch_tokens = 4096
minibatches = 2
sync_timeout_s = 20
[trainer.zero]
param_persistence_threshold = 10000
[[stages]]
kind = "sft"
demonstrations = "demo"
num_demonstrations = 48
steps = 4
batch_size = 16
actor_lr = 1e-3
[[stages]]
kind = "critic"
rounds = 1
attempts = 32
critic_lr = 1e-3
[[stages]]
kind = "ppo"
rounds = {ppo_rounds}
attempts = 48
actor_lr = 3e-4
critic_lr = 1e-3
eval_after = true
"""


class LiveRun:
    """One run directory and the commands started on it."""

    def __init__(self, folder: Path, ppo_rounds: int):
        self.run_dir = folder / "run"
        self.file = folder / "run.toml"
        self.file.write_text(RUN_FILE.format(dir=self.run_dir, root=ROOT, ppo_rounds=ppo_rounds))
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
