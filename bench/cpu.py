"""`python -m bench.cpu`: operations beside their rivals on one CPU thread. Prints a table, writes results/cpu.json."""

import argparse
import gc
import json
import os
import platform
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from rsi_kernels.runtime import cpu_multiplies_bf16

from . import inputs, timing
from .rivals import OURS, RIVALS, Rival, Unavailable

RESULTS = Path(__file__).parent / "results" / "cpu.json"
FULL = dict(gae=[(64, 4096), (16, 32768)], logits=(2048, 32768), linear=(2048, 1024, 32768), families=(4096, 256))
CHECKED_TOKENS = 256  # of those whose logits are given
TINY = dict(gae=[(2, 2048)], logits=(1024, 64), linear=(1024, 16, 64), families=(32, 16))


@dataclass(frozen=True)
class Case:
    """work: bytes (or floating-point operations) of the op at its least, as README.md has the formulas."""

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    mode: str  # "fwd" without gradient, or "fwd_bwd"
    make: Callable
    work: Callable[[SimpleNamespace], float]
    unit: str = "gb_s"

    @property
    def key(self) -> dict:
        shape = "x".join(map(str, self.shape))
        return dict(op=self.op, shape=shape, dtype=str(self.dtype).removeprefix("torch."), mode=self.mode)


def gae_case(shape, **options) -> Case:
    make = partial(inputs.gae, *shape, **options)
    return Case("turn_gae", shape, torch.float32, "fwd", make, lambda x: 13 * x.mask.numel() + 12 * x.mask.sum())


def families_case(shape) -> Case:
    make = partial(inputs.families, *shape)
    return Case("family_rewards", shape, torch.float32, "fwd", make, lambda x: 5 * x.family.numel())


def loss_cases(num_tokens: int) -> Iterator[Case]:
    for op, make in (("policy_loss", inputs.policy), ("value_loss", inputs.value)):
        work = lambda x: 5 * x.mask.numel() + 12 * x.mask.sum()  # noqa: E731
        yield Case(op, (num_tokens,), torch.float32, "fwd_bwd", partial(make, num_tokens), work)


def logits_cases(shape, dtype, num_checked=None) -> Iterator[Case]:
    def case(op, mode, make):
        passes = 3 if mode == "fwd_bwd" else 1
        work = lambda x: passes * x.mask.sum() * x.logits.shape[-1] * x.logits.element_size()  # noqa: E731
        return Case(op, shape, dtype, mode, make, work)

    all_tokens = partial(inputs.logits, *shape, dtype, False, num_checked=num_checked)
    yield case("token_logprobs", "fwd", all_tokens)
    yield case("token_logprobs", "fwd_bwd", all_tokens)
    yield case("token_logprobs_entropy", "fwd", all_tokens)
    yield case("token_logprobs_masked", "fwd", partial(inputs.logits, *shape, dtype, True, num_checked=num_checked))


def linear_case(op, mode, make) -> Case:
    """Products: one for the logits; with gradient two more, and for log-probs the logits once again."""
    num_products = {"linear_token_logprobs": 4, "linear_ppo_loss": 3}[op] if mode == "fwd_bwd" else 1
    work = lambda x: 2 * num_products * x.mask.sum() * x.weight.numel()  # noqa: E731
    return Case(op, make.args[:3], make.args[3], mode, make, work, "gflop_s")


def cases(sizes: dict) -> Iterator[Case]:
    fp32, bf16 = torch.float32, torch.bfloat16
    yield from map(gae_case, sizes["gae"])
    yield families_case(sizes["families"])
    # bf16 products come last, and of fewer tokens where the CPU has no instruction for them: a call then takes minutes.
    for dtype in (fp32, bf16):
        num_tokens, *weight = sizes["linear"]
        num_tokens = num_tokens if dtype == fp32 or cpu_multiplies_bf16() else 512
        products = partial(inputs.linear, num_tokens, *weight, dtype)
        if dtype == fp32:
            yield linear_case("linear_token_logprobs", "fwd", products)
            yield linear_case("linear_ppo_loss", "fwd_bwd", products)
        yield from logits_cases(sizes["logits"], dtype, CHECKED_TOKENS)
        if dtype == bf16:
            yield linear_case("linear_ppo_loss", "fwd_bwd", products)


def run_case(case: Case, x: SimpleNamespace, ceilings: dict, skip_compiled: bool, deadline: float) -> list[dict]:
    """One record a rival. All contestants answer before any is timed."""
    calls, first_s, errors, reasons, versions, peaks = {}, {}, {}, {}, {}, {}
    for rival in [OURS[case.op], *RIVALS[case.op]]:
        name, is_ours = rival.name, rival is OURS[case.op]
        try:
            versions[name] = rival.version()
            if skip_compiled and rival.compiles:
                raise Unavailable("compiles; left out of the tiny form")
            if time.monotonic() > deadline and not is_ours:
                raise Unavailable("out of time")
            calls[name] = partial(call, rival.load(), x, case.mode)
            answer, first_s[name], peaks[name] = timing.measured(calls[name])
            is_quick = first_s[name] < (timing.PATIENCE_S if rival.compiles else timing.QUICK_S)
            if is_ours or is_quick:
                _, first_s[name], peaks[name] = timing.measured(calls[name])  # without what happens only once
            errors[name], problem = check(answer, rival, x, case)
            if problem:
                reasons[name] = problem
            del answer
        except Exception as e:  # that a rival fails is a result
            if is_ours:
                raise
            calls.pop(name, None)
            reasons[name] = str(e).splitlines()[0] if isinstance(e, Unavailable) else f"{type(e).__name__}: {e}"[:200]
    best = timing.interleaved(calls, first_s)
    ours = OURS[case.op].name
    ours_s, work = best[ours][0], float(case.work(x))
    rate = work / ours_s / 1e9
    ceiling = ceilings["copy_gb_s" if case.unit == "gb_s" else "matmul_gflop_s"]
    records = []
    for rival in RIVALS[case.op]:
        rival_s, runs = best.get(rival.name, (None, 0))
        right = rival_s is not None and not {ours, rival.name} & reasons.keys()
        records.append(
            case.key
            | dict(
                rival=rival.name,
                rival_version=versions.get(rival.name),
                ours_ms=1e3 * ours_s,
                rival_ms=None if rival_s is None else 1e3 * rival_s,
                ratio=rival_s / ours_s if right else None,
                reason=reasons.get(ours, reasons.get(rival.name)),
                ours_error=errors.get(ours),
                rival_error=errors.get(rival.name),
                runs=runs,
            )
            | {case.unit: rate}
            | dict(
                percent_of_ceiling=100 * rate / ceiling,
                peak_mib=peaks.get(ours),
                rival_peak_mib=peaks.get(rival.name),
            )
        )
    return records


def call(function, x, mode: str):
    """Results of the forward pass, and the gradient of each leaf in mode fwd_bwd."""
    if mode == "fwd":
        with torch.no_grad():
            return function(x)
    for leaf in x.leaves:
        leaf.requires_grad_()
    out = function(x)
    upstream = x.upstream.to(out.dtype) if out.dim() else getattr(x, "of_loss", None)
    return out.detach(), *torch.autograd.grad(out, x.leaves, upstream)


def check(answer, rival: Rival, x, case: Case) -> tuple[float | None, str | None]:
    """(largest error over the largest magnitude, what is wrong). float32 results of ours from bf16 inputs are held to
    float32 accuracy; the rivals round on the way and are held to that of bf16."""
    if rival.answer is None:
        return None, None
    worst = 0.0
    answer = answer if isinstance(answer, tuple) else (answer,)
    key = rival.answer + (" and gradient" if case.mode == "fwd_bwd" else "")
    for actual, exact in zip(answer, x.exact[key], strict=True):
        if actual is None:
            continue
        if hasattr(x, "checked"):
            actual = actual.flatten(0, 1)[x.checked]
        is_exact = (actual if rival is OURS[case.op] else x.leaves[0] if x.leaves else actual).dtype == torch.float32
        error = relative_error(actual, exact)
        worst = max(worst, error)
        if not error < (1e-4 if is_exact else 2e-2):
            return error, f"wrong by {error:.1e}"
    return worst, None


def relative_error(actual, exact) -> float:
    """Of elements that have a finite exact value. In pieces, since float64 copies cost."""
    compared = exact.isfinite()
    if not compared.all():
        actual, exact = actual[compared], exact[compared]
    pieces = zip(*(y.reshape(-1).split(2**22) for y in (actual, exact)), strict=True)
    errors = [(a.double() - e.double()).abs().max() for a, e in pieces]
    return float(torch.stack(errors).nan_to_num(nan=torch.inf).max() / exact.abs().max())


def machine() -> dict:
    names = [line for line in _read("/proc/cpuinfo").splitlines() if line.startswith("model name")]
    return dict(
        cpu=names[0].split(":")[1].strip() if names else platform.processor(),
        cores=os.cpu_count(),
        vector=torch.backends.cpu.get_cpu_capability(),
        system=platform.system(),
        load_average=os.getloadavg()[0],
    )


def _read(path: str) -> str:
    return Path(path).read_text() if Path(path).exists() else ""


def versions() -> dict:
    out = dict(python=platform.python_version())
    packages = {rival.package for rivals in (*RIVALS.values(), OURS.values()) for rival in rivals} | {"numpy", "triton"}
    for package in sorted(packages):
        try:
            out[package] = Rival(package, package, None).version()
        except Unavailable as e:
            out[package] = str(e)
    return out


def show(record: dict) -> str:
    def number(x, form):
        return "-" if x is None else format(x, form)

    return (
        f"{record['op']:<22} {record['shape']:<16} {record['dtype']:<8} {record['mode']:<7} {record['rival']:<21}"
        f" {record['ours_ms']:>9.2f} {number(record['rival_ms'], '.2f'):>10} {number(record['ratio'], '.2f'):>8}"
        f" {record['percent_of_ceiling']:>4.0f}% {number(record['peak_mib'], '.0f'):>6}"
        f" {number(record['rival_peak_mib'], '.0f'):>6}  {record['reason'] or ''}"
    )


HEAD = (
    f"{'op':<22} {'shape':<16} {'dtype':<8} {'mode':<7} {'rival':<21} {'ours ms':>9} {'rival ms':>10} {'ratio':>8}"
    f" {'ceil':>5} {'MiB':>6} {'rival':>6}"
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cpu", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small shapes, seconds; shows that the bench works")
    parser.add_argument(
        "--only", default="", help="cases with this in their op, shape, dtype and mode, as in the table"
    )
    parser.add_argument("--seed", type=int, help="of the inputs; default: a new one")
    parser.add_argument("--minutes", type=float, default=8.0, help="rivals that come later than this are left out")
    parser.add_argument("--out", type=Path, help="default: bench/results/cpu.json, but for --tiny and --only none")
    args = parser.parse_args()
    if args.out is None and not args.tiny and not args.only:
        args.out = RESULTS
    torch.set_num_threads(1)
    deadline = time.monotonic() + 60 * args.minutes
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    size = 2**20 if args.tiny else 2**28
    ceilings = dict(copy_gb_s=timing.copy_gb_s(size), matmul_gflop_s=timing.matmul_gflop_s(256 if args.tiny else 2048))
    report = dict(machine=machine(), versions=versions(), seed=seed, ceilings=ceilings, results=[])
    missing = [p for p, v in report["versions"].items() if v == "not installed"]
    report["missing"] = missing
    print(", ".join(f"{k} {v}" for k, v in (report["machine"] | ceilings).items()))
    if missing:
        print("not installed, so not compared:", ", ".join(missing))
    print(HEAD)
    made, x = None, None
    for case in cases(TINY if args.tiny else FULL):
        if args.only not in " ".join(case.key.values()):
            continue
        begin = time.monotonic()
        gc.collect()
        if case.make is not made:  # cases in a row share their inputs, since the exact answers take long
            x = None
            made, x = case.make, case.make(torch.Generator().manual_seed(seed))
        records = run_case(case, x, ceilings, args.tiny, deadline)
        for record in records:
            print(show(record))
        print(f"  ({time.monotonic() - begin:.0f} s)", flush=True)
        report["results"] += records
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
