"""See soak.sh."""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil

from rsi_fast.config import load_config
from rsi_fast.launch import versions
from rsi_fast.spool import Spool
from rsi_fast.trainer.ledger import Ledger, find_problems

ROOT = Path(__file__).parent.parent
KINDS = {  # what may be killed -> words of its command line
    "rank": ["rsi_fast.trainer", "-u"],
    "server": ["vllm.entrypoints"],
    "collector": ["rsi_fast.rollout.collector"],
    "launcher": ["-m rsi_fast run"],
    "engine": ["EngineCore"],
}
SETTINGS = [
    "eval.at_start=false",
    "stages.0.steps=2",
    "stages.2.attempts=16",
    "stages.2.checkpoint_every=5",
    "stages.2.eval_after=false",
    "rollout.max_staleness=1",
    "rollout.max_concurrency=16",
    "rollout.request_timeout_s=60",
    "trainer.importance_cap=2.0",
    "trainer.sync_timeout_s=30",
    "server.max_num_seqs=64",
    "server.extra_args=[]",
    "curriculum.attempts=4",
]
END_S = 90.0  # of the command after a kill
SAMPLE_EVERY_S = 2.0
WARM_ROUNDS = 20  # of the last launch, in which memory may still grow


class Soak:
    def __init__(self, folder: Path, rounds: int):
        self.run_dir = folder / "run"
        settings = [f"run.dir={self.run_dir}", f"stages.2.rounds={rounds}", *SETTINGS]
        load_config(ROOT / "configs" / "smoke.toml", settings).save(folder / "run.toml")
        self.mark = uuid.uuid4().hex  # every process of the run inherits it
        self.folder, self.scratch = folder, folder / "tmp"
        self.scratch.mkdir()
        self.samples: list[dict] = []  # of the present launch

    def start(self) -> None:
        self.samples = []
        log = (self.folder / "output.txt").open("ab")
        command = [sys.executable, "-m", "rsi_fast", "run", str(self.folder / "run.toml")]
        env = os.environ | {"SOAK_MARK": self.mark, "TMPDIR": str(self.scratch)}
        self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=env)

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("SOAK_MARK") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def of_kind(self, kind: str) -> list[psutil.Process]:
        found = []
        for process in self.processes():
            try:
                line = " ".join([process.name(), *process.cmdline()])
            except psutil.NoSuchProcess:
                continue
            if all(word in line for word in KINDS[kind]):
                found.append(process)
        return found

    def rounds(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return sum(line["kind"] == "ppo" for line in lines)

    def sample(self) -> None:
        seen = {"round": self.rounds()}
        for kind in KINDS:
            for i, process in enumerate(self.of_kind(kind)):
                try:
                    seen[f"{kind}{i}"] = [process.memory_info().rss, process.num_fds()]
                except psutil.NoSuchProcess:
                    continue
        self.samples.append(seen)

    def watch_until(self, condition, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition() and self.process.poll() is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"not within {timeout_s:g} s; see {self.folder}")
            self.sample()
            time.sleep(SAMPLE_EVERY_S)

    def kill(self, kind: str, rng: random.Random) -> float:
        """One process of the kind dies by -9. Returns the seconds until the command has ended and left nothing."""
        start = time.monotonic()
        rng.choice(self.of_kind(kind)).kill()
        self.process.wait(timeout=END_S)
        while left := self.processes():
            if time.monotonic() - start > END_S:
                raise SystemExit(f"{kind} was killed, and these are left: {[p.cmdline() for p in left]}")
            time.sleep(0.2)
        return time.monotonic() - start


def growth(samples: list[dict]) -> dict[str, dict[str, float]]:
    """By process: its memory in MiB and open files in the first and last fifth of the launch after the warm rounds."""
    first_round = samples[0]["round"]
    warm = [s for s in samples if s["round"] >= first_round + WARM_ROUNDS]
    fifth = max(1, len(warm) // 5)
    found = {}
    for name in sorted({key for s in warm for key in s if key != "round"}):
        values = [s[name] for s in warm if name in s]
        if len(values) < 0.9 * len(warm):
            continue
        memory = [statistics.median(v[0] for v in part) / 2**20 for part in (values[:fifth], values[-fifth:])]
        files = [statistics.median(v[1] for v in part) for part in (values[:fifth], values[-fifth:])]
        found[name] = {"mib_first": round(memory[0], 1), "mib_last": round(memory[1], 1)}
        found[name] |= {"files_first": files[0], "files_last": files[1]}
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    folder = Path(tempfile.mkdtemp(prefix="rsi-fast-soak-"))
    started = time.monotonic()
    soak = Soak(folder, arguments.rounds)
    kills = []
    last_free = int(arguments.rounds * 0.4)  # rounds of the last launch, without kills, for the look at memory
    for number in range(arguments.kills):
        # Some in the middle of rounds, some while processes still start.
        kind = list(KINDS)[number % len(KINDS)]
        target = (number + 1) * (arguments.rounds - last_free) // arguments.kills
        soak.start()
        soak.watch_until(lambda target=target, kind=kind: soak.rounds() >= target and soak.of_kind(kind), 600)
        if soak.process.poll() is not None:
            raise SystemExit(f"the run ended by itself; see {folder}")
        time.sleep(rng.uniform(0, 3))
        at = soak.rounds()
        kills.append({"kind": kind, "after_round": at, "seconds_to_end": round(soak.kill(kind, rng), 1)})
        print(json.dumps(kills[-1]), flush=True)
    soak.start()
    soak.watch_until(lambda: False, 60 + 20 * arguments.rounds)
    code = soak.process.wait()
    ledger = Ledger(soak.run_dir)
    entries = ledger.entries().values()
    reasons = [reason.partition(":")[0] for entry in entries for reason in entry["dropped"].values()]
    finished = [i for o in Spool(soak.run_dir).orders() if o.task_set == "train" for i in ledger.spool.finished(o)]
    result = {
        "rounds": soak.rounds(),
        "seconds": round(time.monotonic() - started),
        "kills": kills,
        "exit_code": code,
        "trajectories": len(finished),
        "consumed": sum(len(entry["consumed"]) for entry in entries),
        "dropped": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        "ledger_problems": find_problems(soak.run_dir),
        "processes_left": len(soak.processes()),
        "temporary_files_left": len(list(soak.scratch.rglob("*"))),
        "checkpoints": len(list((soak.run_dir / "checkpoints").iterdir())),
        "last_launch": growth(soak.samples),
        "versions": versions(),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    leaks = [
        name
        for name, g in result["last_launch"].items()
        if g["mib_last"] > 1.1 * g["mib_first"] + 20 or g["files_last"] > g["files_first"] + 10
    ]
    problems = [*result["ledger_problems"], *(f"{name} grows: {result['last_launch'][name]}" for name in leaks)]
    problems += [f"exit code {code}"] if code else []
    problems += [f"{key}: {result[key]}" for key in ("processes_left", "temporary_files_left") if result[key]]
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    if problems:
        print(f"the run stays in {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
