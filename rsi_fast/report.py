"""What a run came to, read from its directory: also of a run that goes on, or that was killed."""

import json
import math
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rsi_fast.errors import UserError
from rsi_fast.trainer.alarms import MEANINGS

PHASES = ("wait_servers", "collect", "score", "forward", "credit", "critic", "actor", "sync")
TRAINING = ("score", "forward", "credit", "critic", "actor")


def wilson_interval(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """The 95% interval of a success rate (Wilson, 1927). (0, 1) where n is 0."""
    if n == 0:
        return 0.0, 1.0
    rate = successes / n
    centre = rate + z * z / (2 * n)
    spread = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def read_metrics(run_dir: Path) -> list[dict]:
    """The lines of metrics.jsonl; one that a crash cut short is left out."""
    path = Path(run_dir) / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{run_dir} holds no metrics.jsonl: expected the directory of a run that has begun to train")
    lines = []
    for text in path.read_text(errors="replace").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def summarise(run_dir: Path) -> dict:
    """Stages, evaluations, seconds by phase and health, as plain data."""
    lines = read_metrics(run_dir)
    stages: dict[str, dict] = {}
    for line in lines:
        if line["kind"] not in ("sft", "critic", "ppo"):
            continue
        stage = stages.setdefault(line["stage"], {"kind": line["kind"], "rounds": 0, "seconds": 0.0, "first": line})
        stage["rounds"] += 1
        stage["seconds"] += line.get("seconds/total", 0.0)
        stage["last"] = line
    phases = {p: sum(line.get(f"seconds/{p}", 0.0) for line in lines if line["kind"] != "eval") for p in PHASES}
    phases["eval"] = sum(line.get("seconds/total", 0.0) for line in lines if line["kind"] == "eval")
    syncs = sorted(line["seconds/sync"] for line in lines if "sync/bytes" in line)
    evaluations = [line for line in lines if line["kind"] == "eval"]
    return {
        "stages": stages,
        "heldout": {
            e["eval/name"]: {k: e[f"eval/{k}"] for k in ("strict", "progress", "n", "ci95")} for e in evaluations
        },
        "by_kind": {e["eval/name"]: e["eval/by_kind"] for e in evaluations},
        "seconds": {name: value for name, value in phases.items() if value},
        "kernels": {x["stage"]: shares for x in lines if (shares := kernel_shares(x))},
        "weight_sync": {"count": len(syncs), "median_s": syncs[len(syncs) // 2] if syncs else None},
        "logprob_abs_diff_max": max(
            (x["rollout/logprob_abs_diff"] for x in lines if "rollout/logprob_abs_diff" in x), default=None
        ),
        "alarms": dict(Counter(name for line in lines for name in line.get("alarms", ()))),  # rounds that each stood
        "invalid": sum(line.get("rollout/invalid", 0) for line in lines),
        "truncated": sum(line.get("rollout/truncated", 0) for line in lines),
        "finished": (Path(run_dir) / "done.json").exists(),
    }


def kernel_shares(line: dict) -> dict[str, float]:
    """Of a profiled line: each operation of rsi_kernels -> its part of the seconds spent in training."""
    training = sum(line.get(f"seconds/{phase}", 0.0) for phase in TRAINING)
    return {k.removeprefix("kernels/"): v / training for k, v in line.items() if k.startswith("kernels/")}


def print_report(run_dir: Path, console: Console) -> None:
    found = summarise(run_dir)
    console.print(f"run {run_dir}, {'finished' if found['finished'] else 'not finished'}")
    _print_stages(found, console)
    _print_heldout(found, console)
    total = sum(found["seconds"].values()) or 1.0
    table = Table("phase", "seconds", "share", title="where the time went", box=None, title_justify="left")
    for name, value in sorted(found["seconds"].items(), key=lambda item: -item[1]):
        table.add_row(name, f"{value:.1f}", f"{value / total:.0%}")
    console.print(table)
    for name, shares in found["kernels"].items():
        parts = ", ".join(
            f"{operation} {share:.1%}" for operation, share in sorted(shares.items(), key=lambda x: -x[1])
        )
        console.print(f"rsi_kernels in {name}: {sum(shares.values()):.0%} of a round's training time ({parts})")
    sync, difference = found["weight_sync"], found["logprob_abs_diff_max"]
    if sync["count"]:
        console.print(f"{sync['count']} weight syncs, median {sync['median_s']:.2f} s")
    if difference is not None:
        console.print(f"largest mean difference of log-probs, trainer against vLLM: {difference:.2g}")
    for name, rounds in found["alarms"].items():
        console.print(f"alarm: {name}: {MEANINGS[name][0]}, in {rounds} round(s)", highlight=False)
    console.print(f"{found['invalid']} invalid attempts, {found['truncated']} that met a limit")
    examples = _examples(run_dir)
    for example in examples:
        for when in ("before", "after"):
            console.print(f"\n[bold]{when}[/]: ", end="")
            console.print(f"{example['instruction']}\n{example[when]}", markup=False, highlight=False)


def _print_stages(found: dict, console: Console) -> None:
    table = Table(
        "stage",
        "kind",
        "rounds",
        "success",
        "reward",
        "value loss",
        "seconds",
        box=None,
        title="stages",
        title_justify="left",
    )
    for name, stage in found["stages"].items():
        changes = [
            f"{stage['first'][key]:.3g} -> {stage['last'][key]:.3g}" if key in stage["first"] else ""
            for key in ("rollout/success", "reward/mean", "critic/loss")
        ]
        table.add_row(name, stage["kind"], str(stage["rounds"]), *changes, f"{stage['seconds']:.0f}")
    console.print(table)


def _print_heldout(found: dict, console: Console) -> None:
    names = list(found["heldout"])
    if not names:
        return
    table = Table("held-out tasks", *names, box=None, title="before and after", title_justify="left")
    rows = found["heldout"]
    table.add_row("strict success", *(f"{rows[n]['strict']:.3f}" for n in names))
    table.add_row("95% interval", *("{:.3f} to {:.3f}".format(*rows[n]["ci95"]) for n in names))
    table.add_row("progress", *(f"{rows[n]['progress']:.3f}" for n in names))
    table.add_row("attempts", *(str(rows[n]["n"]) for n in names))
    for kind in sorted({kind for n in names for kind in found["by_kind"][n]}):
        cells = ("{}/{}".format(*found["by_kind"][n].get(kind, (0, 0))) for n in names)
        table.add_row(f"  {kind}", *cells)
    console.print(table)


def _examples(run_dir: Path) -> list[dict]:
    path = Path(run_dir) / "summary.json"
    return json.loads(path.read_text())["examples"] if path.exists() else []
