"""The trainer as a whole, beside what it could at best be: `make bench-system`. Writes bench/results/system.json.

optimizer_step   critic and actor once, against plain PyTorch without DeepSpeed over the same tokens
collector        attempts with sandboxes, against bare requests of the same prompts and lengths to the same server
weight_sync      until the server runs new weights, against a bare broadcast of the same bytes
idle_share       of GPUs in a simulation with the latencies that the collector had: collection ahead, and synchronous
spool_*          listing, sampling and writing trajectories of 30,000 tokens
"""

import argparse
import heapq
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rsi_fast.launch import versions
from rsi_fast.spool import Order, Spool, Trajectory, Turn

ROOT = Path(__file__).parent.parent


def record(name: str, ours: float, reference: float, unit: str, bar: float | None, **more) -> dict:
    """ratio: ours over reference."""
    return {
        "name": name,
        "unit": unit,
        "ours": ours,
        "reference": reference,
        "ratio": ours / reference,
        "bar": bar,
    } | more


# ---- optimizer step


def optimizer_steps(folder: Path, tiny: bool) -> list[dict]:
    found = {}
    for ranks in (1, 2):
        out = folder / f"step-{ranks}.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["-m", "bench.system_step", str(out), *(["--tiny"] if tiny else [])]
        env = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(command, check=True, cwd=ROOT, timeout=1200, env=env | {"CUDA_VISIBLE_DEVICES": ""})
        found[ranks] = json.loads(out.read_text())
    one, two = found[1], found[2]
    for mine, theirs in zip(one["losses"], one["plain_losses"], strict=True):
        if abs(mine - theirs) > 1e-4 * abs(theirs) + 1e-6:
            raise SystemExit(f"the losses differ: {one['losses']} and {one['plain_losses']}")
    seconds = one["seconds"]
    return [
        record("optimizer_step", seconds["ours"], seconds["plain"], "s", 1.25, ranks=1, tokens=one["tokens"]),
        record(
            "optimizer_step",
            two["seconds"]["ours"],
            seconds["plain_2_threads"],
            "s",
            None,
            ranks=2,
            tokens=one["tokens"],
        ),
    ]


# ---- idle share


def simulate(latencies: list[float], slots: int, attempts: int, train_s: float, sync_s: float, ahead: int, rounds: int):
    """(idle part of the servers' slots, idle part of the trainer) when rounds take the first `attempts` finished ones,
    `ahead` rounds of them may be under way or waiting beside the present one, and servers rest during a sync.

    Latencies are drawn anew for each attempt. The first round, in which nothing can overlap, does not count.
    """
    rng = random.Random(0)
    running: list[float] = []  # ends of attempts
    now = busy = trained = 0.0
    started = finished = consumed = 0
    counted_from = None
    for round_ in range(rounds):
        given = (min(round_ + ahead, rounds - 1) + 1) * attempts
        ready_at = None
        # until the round's attempts are there, then until its training ends
        while True:
            while len(running) < slots and started < given:
                latency = rng.choice(latencies)
                heapq.heappush(running, now + latency)
                started += 1
            if ready_at is None and finished - consumed >= attempts:
                ready_at, end = now, now + train_s
            if ready_at is not None and (not running or running[0] > end):
                busy += len(running) * (end - now)
                now = end
                break
            step_to = running[0]
            busy += len(running) * (step_to - now)
            now = step_to
            heapq.heappop(running)
            finished += 1
        consumed += attempts
        running = [at + sync_s for at in running]  # frozen, and idle meanwhile
        heapq.heapify(running)
        now += sync_s
        if round_ == 0:
            counted_from, busy, trained = now, 0.0, 0.0
        else:
            trained += train_s
    total = now - counted_from
    return 1 - busy / (slots * total), 1 - trained / total


def idle_share(latencies: list[float], tiny: bool) -> list[dict]:
    """With as many attempts a round as 4 times the slots, and training that takes as long as collection would at best:
    then one half of equal GPUs trains and one half serves. ours: the mean idle part of both, a round ahead."""
    slots, attempts = 64, 256
    train_s = attempts * statistics.mean(latencies) / slots
    found = {}
    for ahead in (0, 1, 2):
        idle = simulate(latencies, slots, attempts, train_s, 0.02 * train_s, ahead, 20 if tiny else 200)
        found[ahead] = {"idle": statistics.mean(idle), "servers": idle[0], "trainer": idle[1]}
    spread = {"median_s": statistics.median(latencies), "longest_s": max(latencies)}
    return [
        record(
            "idle_share", found[k]["idle"], found[0]["idle"], "part of the time", None, max_staleness=k, bar_ours=0.1,
            servers=found[k]["servers"], trainer=found[k]["trainer"], **spread,
        )
        for k in (1, 2)
    ]  # fmt: skip


# ---- spool


def spool(folder: Path, tiny: bool) -> list[dict]:
    count, length = (1000, 3000) if tiny else (100_000, 30_000)
    rng = random.Random(0)
    trajectory = Trajectory(
        id="01-ppo-0000/00000",
        task="t",
        token_ids=[rng.randrange(248_000) for _ in range(length)],
        action_mask=[int(i % 400 >= 320) for i in range(length)],
        turn_ids=[i // 400 if i % 400 >= 320 else -1 for i in range(length)],
        behaviour_logprobs=[-rng.random() if i % 400 >= 320 else 0.0 for i in range(length)],
        turns=[Turn(reply="ls", command="ls", observation="x" * 1000, weight_version=0) for _ in range(length // 400)],
        finish_reason="submit",
    )
    text = trajectory.model_dump_json()
    held = Spool(folder / "held")
    orders = [
        Order(name=f"01-ppo-{i:04d}", task_set="train", tasks=["t"] * 500, weight_version=0, temperature=1.0, seed=0)
        for i in range(count // 500)
    ]
    held.spool_dir.mkdir(parents=True)
    (folder / "one.json").write_text(text)
    for order in orders:
        (held.spool_dir / order.name).mkdir()
        for i in range(500):
            os.link(folder / "one.json", held.spool_dir / order.name / f"{i:05d}.json")

    start = time.perf_counter()
    names = [name for order in orders for name in held.finished(order)]
    listed_s = time.perf_counter() - start
    assert len(names) == count
    start = time.perf_counter()
    for name in rng.sample(names, 100):
        held.read_one(name)
    sampled_s = (time.perf_counter() - start) / 100
    start = time.perf_counter()
    for _ in range(100):
        json.loads((folder / "one.json").read_text())
    parsed_s = (time.perf_counter() - start) / 100

    writes = 20 if tiny else 100
    order = orders[0].model_copy(update={"name": "01-ppo-9999"})
    best = {"ours": float("inf"), "plain": float("inf")}
    for repeat in range(3):
        start = time.perf_counter()
        for i in range(writes):
            held.write(order, i, trajectory)
        best["ours"] = min(best["ours"], time.perf_counter() - start)
        start = time.perf_counter()
        for i in range(writes):
            with (folder / f"plain-{repeat}-{i}.json").open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        best["plain"] = min(best["plain"], time.perf_counter() - start)
    rate = {name: writes * len(text) / seconds / 1e6 for name, seconds in best.items()}
    size = {"bytes_each": len(text), "trajectories": count}
    return [
        record("spool_write", rate["ours"], rate["plain"], "MB/s", 0.5, higher_is_better=True, **size),
        record("spool_sample", sampled_s, parsed_s, "s a trajectory, against json.loads", None, **size),
        {"name": "spool_list", "unit": "s", "ours": listed_s, "reference": None, "ratio": None, "bar": None} | size,
    ]


# ---- all


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true", help="small and quick: whether it runs, not how fast")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "system.json")
    arguments = parser.parse_args()
    from bench import system_serving

    console, tiny = Console(stderr=True), arguments.tiny
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results += optimizer_steps(folder, tiny)
        served = system_serving.collector(folder, 32 if tiny else 512, 1 if tiny else 3, console)
        latencies = served.pop("latencies")
        results.append(record("collector", served.pop("ours"), served.pop("reference"), bar=0.9, **served))
        sync = system_serving.weight_sync(folder, tiny, 1 if tiny else 5, console)
        results.append(record("weight_sync", sync.pop("ours"), sync.pop("reference"), bar=1.5, **sync))
        results += idle_share(latencies, tiny)
        results += spool(folder, tiny)
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "versions": versions()}
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps({"machine": machine, "tiny": tiny, "results": results}, indent=1) + "\n")
    table = Table("name", "ours", "reference", "ratio", "bar", "unit")
    for r in results:
        cells = (r["ours"], r["reference"], r["ratio"], r["bar"])
        table.add_row(r["name"], *("" if c is None else f"{c:.3g}" for c in cells), r["unit"])
    Console().print(table)


if __name__ == "__main__":
    main()
