"""`python -m bench.gpu`: checks every operation on this GPU against float64, then times it. See README.md here.

Prints a table, writes results/<gpu>.json after each case. Needs torch, triton, numpy and this repository. Device time
comes from a CUDA graph over rotated inputs, so that nothing waits in the cache; the full call's, from Python, stands
beside it.
"""

import argparse
import datetime
import functools
import gc
import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from . import cpu, gpu_checks, inputs
from .rivals import OURS, RIVALS, Rival, Unavailable

RESULTS = Path(__file__).parent / "results"
SIZES = dict(
    gae=[(64, 4096), (64, 32_768), (8, 262_144), (512, 84_000)],
    families=(4096, 256),
    losses=2**20,
    logits=(32_768, 248_320),
    linear=(32_768, 5120, 248_320),
    filler=2**28,  # numbers
    product=8192,
)
# Of an H200: (op, shape, mode): what may be at most or has to be at least.
BARS = {
    ("turn_gae", "64x4096", "fwd"): dict(device_us=("<=", 8), full_call_us=("<=", 60)),
    ("turn_gae", "64x32768", "fwd"): dict(device_us=("<=", 18), full_call_us=("<=", 60)),
    ("turn_gae", "8x262144", "fwd"): dict(device_us=("<=", 18), full_call_us=("<=", 60)),
    ("turn_gae", "512x84000", "fwd"): dict(device_us=("<=", 300)),
    ("family_rewards", "4096x256", "fwd"): dict(device_us=("<=", 5)),
    ("policy_loss", "1048576", "fwd_bwd"): dict(device_us=("<=", 9)),
    ("value_loss", "1048576", "fwd_bwd"): dict(device_us=("<=", 9)),
    ("token_logprobs", "32768x248320", "fwd"): dict(device_us=("<=", 4300), percent_of_ceiling=(">=", 88)),
    ("token_logprobs", "32768x248320", "fwd_bwd"): dict(device_us=("<=", 12_900), percent_of_ceiling=(">=", 88)),
    ("token_logprobs_entropy", "32768x248320", "fwd"): dict(over_without_entropy=("<=", 1.05)),
    ("linear_token_logprobs", "32768x5120x248320", "fwd"): dict(device_us=("<=", 26_000)),
    ("linear_ppo_loss", "32768x5120x248320", "fwd_bwd"): dict(device_us=("<=", 80_000)),
}
RIVAL_BARS = {("token_logprobs", "TRL"), ("token_logprobs_masked", "TRL"), ("token_logprobs_entropy", "TRL")}
BARS_ARE_FOR = "H200"
DEVICE = "cuda"
REPLAYS = 20
CALLS, ROUNDS = 20, 5  # of the full call; the best round counts
SLOW_MS = 50.0  # beyond this a tenth of the replays and calls do
PATIENCE_MS = 2000.0  # beyond this the first call counts
COLD_BYTES = 2**28  # all sets of inputs together, several times any L2 cache
MOST_SETS = 64


def cases(sizes: dict) -> Iterator[cpu.Case]:
    yield from map(cpu.gae_case, sizes["gae"])
    yield cpu.families_case(sizes["families"])
    yield from cpu.loss_cases(sizes["losses"])
    yield from cpu.logits_cases(sizes["logits"], torch.bfloat16)
    make = partial(inputs.linear, *sizes["linear"], torch.bfloat16)
    yield cpu.linear_case("linear_token_logprobs", "fwd", make)
    yield cpu.linear_case("linear_token_logprobs", "fwd_bwd", make)
    yield cpu.linear_case("linear_ppo_loss", "fwd_bwd", make)


# Checks


def failed_checks(only: str, seed: int) -> list[str]:
    """Names of the checks that fail. One for which this GPU has no room is named and left out."""
    failed, graphs = [], set()
    for check in gpu_checks.checks(gpu_checks.SIZES):
        if not check.name.startswith(only):
            continue
        case = check.case
        wants_graph = case and case.op not in gpu_checks.WAITS and (case.op, case.dtype, case.mode) not in graphs
        begin = time.monotonic()
        try:
            problems = gpu_checks.problems(check, seed, DEVICE)
            if wants_graph:
                graphs.add((case.op, case.dtype, case.mode))
                problems += gpu_checks.graph_problems(case, seed, DEVICE, capture)
        except Exception as e:  # a kernel that does not compile or faults has failed; the rest is of interest
            if lack := out_of_memory(e):
                print(f"left out: {check.name}: {no_room(lack)}", flush=True)
                continue
            problems = [f"{type(e).__name__}: {first_line(e)}"]
        finally:
            torch.cuda.empty_cache()
        outcome = f"FAILED, {'; '.join(problems)}" if problems else f"right{', also in a graph' if wants_graph else ''}"
        print(f"check {check.name}: {outcome} ({time.monotonic() - begin:.1f} s)", flush=True)
        if problems:
            failed.append(check.name)
    return failed


def out_of_memory(e: BaseException | None) -> torch.OutOfMemoryError | None:
    """It, where a lack of memory is behind the error: ending a graph's capture then fails as well."""
    gc.collect()  # what failed may hold memory in a cycle
    while e is not None and not isinstance(e, torch.OutOfMemoryError):
        e = e.__context__
    return e


def no_room(e: torch.OutOfMemoryError) -> str:
    wanted = re.search(r"Tried to allocate ([\d.]+ \w+)", str(e))
    total = torch.cuda.get_device_properties(0).total_memory / 2**30
    return f"no room on this GPU of {total:.0f} GiB{f', for {wanted[1]} more' if wanted else ''}"


def first_line(e: Exception) -> str:
    return (str(e).splitlines() or [""])[0][:200]


# Time


class Captured(NamedTuple):
    """results, of each call, are kept, or their memory would be used again within the graph."""

    replay: Callable[[], None]
    results: list
    graph: torch.cuda.CUDAGraph


def capture(calls: list[Callable]) -> Captured:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = [run() for run in calls]
    return Captured(graph.replay, results, graph)


def event_ms(run: Callable) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def replayed_ms(calls: list[Callable]) -> float:
    """Device time of one call, the best of the replays."""
    graph = capture(calls)
    event_ms(graph.replay)
    return best_ms(lambda: event_ms(graph.replay)) / len(calls)


def queued_ms(run: Callable, filler: torch.Tensor) -> float:
    """Device time of a call that no graph can hold, or of a rival. Filling memory empties the cache, and meanwhile the
    host gets ahead, so that a call which does not wait for the device shows no time of the host's."""

    def queued():
        filler.zero_()
        return event_ms(run)

    return best_ms(queued)


def best_ms(measure: Callable[[], float]) -> float:
    times = [measure()]
    while len(times) < (REPLAYS // 10 if times[0] > SLOW_MS else REPLAYS):
        times.append(measure())
    return min(times)


def full_call_ms(calls: list[Callable], count: int) -> float:
    """From Python, back to back: the longer of what the host and the device take."""

    def round_ms():
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for i in range(count):
            calls[i % len(calls)]()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin) / count

    return min(round_ms() for _ in range(ROUNDS if count > 1 else 1))


def timed(calls: list[Callable], in_graph: bool, filler: torch.Tensor, compiles=True) -> dict:
    """compiles: the first call does more than the next, and says nothing about time."""
    first_ms = event_ms(calls[0])
    if first_ms > PATIENCE_MS and not compiles:
        return dict(device_ms=first_ms, full_call_ms=first_ms, peak_mib=None)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    calls[0]()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    device_ms = replayed_ms(calls) if in_graph else queued_ms(calls[0], filler)
    count = 1 if device_ms > SLOW_MS else CALLS
    return dict(device_ms=device_ms, full_call_ms=full_call_ms(calls, count), peak_mib=peak / 2**20)


def ceilings(sizes: dict, filler: torch.Tensor) -> dict[str, float]:
    """Copy: bytes read plus bytes written. Product: of square bf16 matrices."""
    target = torch.empty_like(filler)
    copy_ms = replayed_ms([lambda: target.copy_(filler)] * 4)
    n = sizes["product"]
    a, b = (inputs.normal(n, n, g=torch.Generator(DEVICE), dtype=torch.bfloat16) for _ in range(2))
    product_ms = replayed_ms([lambda: a @ b] * 4)
    return dict(copy_gb_s=2 * filler.nbytes / copy_ms / 1e6, matmul_gflop_s=2 * n**3 / product_ms / 1e6)


# Cases


def time_ours(case: cpu.Case, seed: int, limits: dict, filler: torch.Tensor) -> dict:
    x = case.make(torch.Generator(DEVICE).manual_seed(seed), exact=False)
    num_bytes = sum(t.nbytes for t in vars(x).values() if isinstance(t, torch.Tensor))
    in_graph = case.op not in gpu_checks.WAITS
    sets = [x] + [copied(x) for _ in range(min(MOST_SETS, COLD_BYTES // num_bytes) if in_graph else 0)]
    function = OURS[case.op].load()
    record = timed([partial(cpu.call, function, y, case.mode) for y in sets], in_graph, filler)
    rate = float(case.work(x)) / record["device_ms"] / 1e6
    ceiling = limits["copy_gb_s" if case.unit == "gb_s" else "matmul_gflop_s"]
    masked = getattr(x, "mask", None)
    return record | {
        case.unit: rate,
        "percent_of_ceiling": 100 * rate / ceiling,
        "action_tokens": None if masked is None else int(masked.sum()),
    }


def copied(x):
    copy = type(x)(**{k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in vars(x).items()})
    copy.leaves = [next(getattr(copy, k) for k, v in vars(x).items() if v is leaf) for leaf in x.leaves]
    return copy


def time_rival(rival: Rival, case: cpu.Case, seed: int, filler: torch.Tensor, deadline: float) -> dict:
    """Checked first, on the inputs that ours was checked on; reason says why there is no time."""
    record = dict(rival_version=None, reason=None)
    try:
        record["rival_version"] = rival.version()
        if time.monotonic() > deadline:
            raise Unavailable("out of time")
        if problem := rival_problem(rival, case.op, case.mode, case.dtype, seed):
            raise Unavailable(problem)
        x = case.make(torch.Generator(DEVICE).manual_seed(seed), exact=False)
        record |= timed([partial(cpu.call, rival.load(), x, case.mode)], False, filler, rival.compiles)
    except Exception as e:  # that a rival fails is a result
        if lack := out_of_memory(e):
            record["reason"] = no_room(lack)
        else:
            record["reason"] = first_line(e) if isinstance(e, Unavailable) else f"{type(e).__name__}: {first_line(e)}"
    finally:
        x = None
        torch.cuda.empty_cache()
    return record


@functools.cache
def rival_problem(rival: Rival, op: str, mode: str, dtype: torch.dtype, seed: int) -> str | None:
    for case in gpu_checks.cases(gpu_checks.SIZES):
        if (case.op, case.mode, case.dtype) == (op, mode, dtype):
            x = case.make(torch.Generator(DEVICE).manual_seed(seed))
            return cpu.check(cpu.call(rival.load(), x, mode), rival, x, case)[1]
    raise LookupError(f"no checked case of {op} {mode} {dtype}")


def judged(record: dict, bars: dict, gpu: str) -> list[dict]:
    """The bars of a record, each with what was measured and whether it is met."""
    if BARS_ARE_FOR not in gpu or record.get("device_ms") is None:
        return []
    found = []
    for what, (relation, bar) in bars.items():
        in_us = what.endswith("_us")
        measured = record.get(what.removesuffix("_us") + "_ms" if in_us else what)
        if measured is not None:
            measured *= 1e3 if in_us else 1
            is_met = measured <= bar if relation == "<=" else measured >= bar
            found.append(dict(bar=f"{what} {relation} {bar}", measured=measured, met=is_met))
    return found


# The run


def describe(seed: int) -> dict:
    driver = Path("/proc/driver/nvidia/version")
    number = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", driver.read_text()) if driver.exists() else None
    major, minor = torch.cuda.get_device_capability()
    return dict(
        gpu=torch.cuda.get_device_name(),
        capability=f"{major}.{minor}",
        memory_gib=torch.cuda.get_device_properties(0).total_memory / 2**30,
        versions=cpu.versions()
        | dict(
            torch=torch.__version__,
            triton=triton.__version__,
            cuda=torch.version.cuda,
            driver=number[1] if number else "unknown",
        ),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        seed=seed,
    )


HEAD = (
    f"{'op':<22} {'shape':<17} {'dtype':<8} {'mode':<7} {'contestant':<21} {'device ms':>10} {'call ms':>10}"
    f" {'ratio':>7} {'GB|GF/s':>8} {'ceil':>5} {'MiB':>7}"
)


def show(r: dict) -> str:
    def number(key, form):
        return "-" if r.get(key) is None else format(r[key], form)

    rate = number("gb_s" if "gb_s" in r else "gflop_s", ".0f")
    note = ", ".join(f"{b['bar']} {'met' if b['met'] else 'MISSED'}" for b in r["bars"]) or r["reason"] or ""
    return (
        f"{r['op']:<22} {r['shape']:<17} {r['dtype']:<8} {r['mode']:<7} {r['rival'] or 'rsi-fast':<21}"
        f" {number('device_ms', '.4f'):>10} {number('full_call_ms', '.4f'):>10} {number('ratio', '.2f'):>7}"
        f" {rate:>8} {number('percent_of_ceiling', '.0f'):>4}% {number('peak_mib', '.0f'):>7}  {note}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--only", default="", help="operations whose name begins with this")
    parser.add_argument("--minutes", type=float, default=7.5, help="what would begin later than this is left out")
    parser.add_argument("--seed", type=int, help="of the inputs; default: a new one")
    parser.add_argument("--out", type=Path, help="default: bench/results/<gpu>.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: no CUDA GPU here; `make bench` is for a CPU, `make compile-report` needs no GPU")
    deadline = time.monotonic() + 60 * args.minutes
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    report = describe(seed)
    name = report["gpu"]
    out = args.out or RESULTS / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"
    print(name, report["versions"], f"seed {seed}", flush=True)
    if failed := failed_checks(args.only, seed):
        sys.exit(f"error: nothing is timed, since {len(failed)} checks failed (--seed {seed}): {'; '.join(failed)}")
    filler = torch.ones(SIZES["filler"], device=DEVICE)
    report |= dict(ceilings=ceilings(SIZES, filler), results=[])
    torch.cuda.empty_cache()
    print(", ".join(f"{k} {v:.0f}" for k, v in report["ceilings"].items()))
    print(HEAD)

    def add(record: dict, bars: dict) -> None:
        record["bars"] = judged(record, bars, name)
        print(show(record), flush=True)
        report["results"].append(record)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n")

    chosen = [case for case in cases(SIZES) if case.op.startswith(args.only)]
    device_ms = {}
    for case in chosen:
        record = case.key | dict(rival=None, ratio=None, reason=None)
        try:
            if time.monotonic() > deadline:
                raise Unavailable("out of time")
            record |= time_ours(case, seed, report["ceilings"], filler)
            device_ms[case.op, case.shape, case.mode] = record["device_ms"]
        except Unavailable as e:
            record["reason"] = str(e)
        except Exception as e:
            if not (lack := out_of_memory(e)):
                raise
            record["reason"] = f"left out: {no_room(lack)}"
        torch.cuda.empty_cache()
        plain_ms = device_ms.get((case.op.removesuffix("_entropy"), case.shape, case.mode))
        if case.op.endswith("_entropy") and plain_ms and record.get("device_ms"):
            record["over_without_entropy"] = record["device_ms"] / plain_ms
        add(record, BARS.get((case.op, record["shape"], case.mode), {}))
    # Rivals come last, so that none of them, however slow, can keep an operation of ours from being timed.
    for case in chosen:
        for rival in RIVALS[case.op] if (case.op, case.shape, case.mode) in device_ms else []:
            if rival.answer is None and case.mode == "fwd_bwd":  # a floor for the forward pass
                continue
            record = case.key | dict(rival=rival.name, ratio=None) | time_rival(rival, case, seed, filler, deadline)
            if record.get("device_ms"):
                record["ratio"] = record["device_ms"] / device_ms[case.op, case.shape, case.mode]
            add(record, dict(ratio=(">=", 1)) if (case.op, rival.name) in RIVAL_BARS else {})
    bars = [bar for record in report["results"] for bar in record["bars"]]
    left_out = [r for r in report["results"] if r["reason"]]
    print(f"{sum(b['met'] for b in bars)} of {len(bars)} bars met, {len(left_out)} lines without a time; {out}")


if __name__ == "__main__":
    main()
