"""`summary.json`: what a finished run came to, from its metrics, its spool and its launches."""

import json
import statistics
from itertools import zip_longest
from pathlib import Path

from rsi_fast.config import load_config
from rsi_fast.report import TRAINING, kernel_shares
from rsi_fast.spool import Spool, Trajectory, write_json_atomic
from rsi_fast.tasks import load_task_set


def write_summary(run_dir: Path) -> dict:
    config = load_config(run_dir / "config.toml")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    launches = [json.loads(line) for line in (run_dir / "launches.jsonl").read_text().splitlines()]
    syncs = [line for line in lines if "sync/bytes" in line]
    seconds = {name: sum(launch.get(name, 0.0) for launch in launches) for name in ("setup", "serve_start", "total")}
    rounds = [line for line in lines if line["kind"] in ("critic", "ppo")]
    seconds |= {
        "sft": _total(lines, "seconds/total", kind="sft"),
        "collect": _total(rounds, "seconds/collect"),
        "train": sum(_total(rounds, f"seconds/{phase}") for phase in TRAINING),
        "sync": _total(lines, "seconds/sync"),
        "eval": _total(lines, "seconds/total", kind="eval"),
    }
    summary = {
        "heldout": {
            line["eval/name"]: {key: line[f"eval/{key}"] for key in ("strict", "progress", "n", "ci95", "by_kind")}
            for line in lines
            if line["kind"] == "eval"
        },
        "stages": [_stage(stage, [line for line in lines if line["stage"] == stage.label]) for stage in config.stages],
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "weight_sync": {
            "count": len(syncs),
            "median_s": statistics.median(line["seconds/sync"] for line in syncs) if syncs else None,
            "bytes": max((line["sync/bytes"] for line in syncs), default=0),
        },
        "logprob_abs_diff_max": max((line["rollout/logprob_abs_diff"] for line in rounds), default=None),
        "kernels": {line["stage"]: shares for line in lines if (shares := kernel_shares(line))},
        "seed": config.run.seed,
        "launches": len(launches),
        "examples": _examples(config, run_dir),
    }
    write_json_atomic(run_dir / "summary.json", json.dumps(summary, indent=1))
    return summary


def _total(lines: list[dict], key: str, kind: str | None = None) -> float:
    return sum(line.get(key, 0.0) for line in lines if kind is None or line["kind"] == kind)


def _stage(stage, lines: list[dict]) -> dict:
    own = [line for line in lines if line["kind"] == stage.kind]
    keys = ("sft/loss", "rollout/success", "reward/mean", "critic/loss", "critic/explained_variance")
    first_last = {key: [own[0][key], own[-1][key]] for key in keys if own and key in own[0]}
    return {"name": stage.label, "kind": stage.kind, "rounds": len(own), "first_and_last": first_last}


def _examples(config, run_dir: Path, count: int = 3) -> list[dict]:
    """The same held-out tasks before and after: of those that the last evaluation solved and the one before did not,
    the first of different kinds, in turn one whose solution read an output and one that needed none. Empty when there
    are not two evaluations."""
    spool = Spool(run_dir)
    evaluations = [order for order in spool.orders() if order.task_set == "heldout"]
    if len(evaluations) < 2:
        return []
    first_of_kind: dict[str, tuple[Trajectory, Trajectory]] = {}
    for old, new in zip(*(spool.read(order) for order in evaluations[-2:]), strict=True):
        if new.success and not old.success:
            first_of_kind.setdefault(new.task.rpartition("-")[0], (old, new))
    pairs = list(first_of_kind.values())
    reading = [pair for pair in pairs if any(turn.observation for turn in pair[1].turns)]
    others = [pair for pair in pairs if pair not in reading]
    chosen = [pair for both in zip_longest(reading, others) for pair in both if pair][:count]
    tasks = load_task_set(config.tasks.heldout, config.run.seed, run_dir)
    return [
        {
            "task": new.task,
            "instruction": tasks[new.task].instruction.strip(),
            "before": transcript(old),
            "after": transcript(new),
        }
        for old, new in chosen
    ]


def transcript(trajectory: Trajectory) -> str:
    """An attempt as a terminal would show it, and how it ended."""
    lines = []
    for turn in trajectory.turns:
        lines.append(f"$ {turn.command if turn.command is not None else turn.reply}")
        if turn.observation:
            lines.append(turn.observation.rstrip())
    passed = sum(check.passed == 1 for check in trajectory.checks)
    verdict = "strict success" if trajectory.success else f"no success ({trajectory.finish_reason})"
    return "\n".join([*lines, f"-> {verdict}, {passed} of {len(trajectory.checks)} checks passed"])
