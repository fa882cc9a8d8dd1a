"""metrics.jsonl of a run: one line a step. docs/metrics.md lists the keys."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from rsi_fast.spool import write_json_atomic


class Stopwatch:
    """Seconds by phase of one step."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@contextmanager
def profiled(trace: Path | None) -> Iterator[dict[str, float]]:
    """Afterwards holds this rank's seconds in each operation of rsi_kernels (on a GPU: of the device), and `trace` is a
    Chrome trace (JSON, gzip) of all that was done. Nothing of this where it is None.

    What an operation calls, such as the matrix product with the head's weight, counts with it.
    """
    seconds: dict[str, float] = {}
    if trace is None:
        yield seconds
        return
    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu) as record:
        yield seconds
    for event in record.key_averages():
        if event.key.startswith("rsi_kernels::"):
            microseconds = event.device_time_total if on_gpu else event.cpu_time_total
            seconds[f"kernels/{event.key.removeprefix('rsi_kernels::')}"] = round(microseconds / 1e6, 5)
    try:
        trace.parent.mkdir(exist_ok=True)
        record.export_chrome_trace(str(trace))
    except (OSError, RuntimeError) as error:  # a full disk; the run is worth more than its trace
        print(f"the profile {trace} could not be written: {error}", flush=True)


def append(path: Path, line: dict, watch: Stopwatch) -> dict:
    """Writes a line with its seconds; returns it whole."""
    line = line | {f"seconds/{name}": round(value, 4) for name, value in watch.seconds.items()}
    if "rollout/tokens" in line and watch.seconds.get("total"):
        line["throughput/tokens_per_s"] = line["rollout/tokens"] / watch.seconds["total"]
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    return line


def drop_after(path: Path, step: int) -> None:
    """Lines of steps that a resumed run does again go, and a line that a crash cut."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] > step:
                break
        except json.JSONDecodeError:
            break
        kept.append(line + "\n")
    write_json_atomic(path, "".join(kept))
