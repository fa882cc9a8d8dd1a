"""Orders for the collector, the wait for their trajectories, and verifier reports made into rewards."""

import time
import zlib
from pathlib import Path

import torch
from rsi_kernels import family_rewards

from rsi_fast.config import Config
from rsi_fast.errors import UserError
from rsi_fast.spool import Order, Spool, Trajectory
from rsi_fast.trainer.batching import Sample
from rsi_fast.trainer.curriculum import History, draw

POLL_S = 0.1


def order_name(stage_number: int, label: str, part: int | str) -> str:
    """Sorts in the order of work: rounds by number, then "eval". Stage 0 is the model as it was given."""
    return f"{stage_number:02d}-{label}-{part:04d}" if isinstance(part, int) else f"{stage_number:02d}-{label}-{part}"


def training_order(
    config: Config,
    stage_number: int,
    round_: int,
    task_names: list[str],
    weight_version: int,
    start: int | None = None,
    history: History | None = None,
) -> Order:
    """The order of one round of a stage (counted from 1). start: where its draw of tasks begins, next_draw of the round
    before; None: where it does when no task ever rests."""
    stages = config.stages[: stage_number - 1]
    stage = config.stages[stage_number - 1]
    if start is None:
        start = sum(s.rounds * s.attempts for s in stages if s.rounds) + round_ * stage.attempts
    tasks, after = draw(task_names, stage.attempts, config.run.seed, start, history or History(), config.curriculum)
    name = order_name(stage_number, stage.label, round_)
    return _order(config, name, "train", tasks, weight_version, next_draw=after)


def eval_order(config: Config, stage_number: int, label: str, task_names: list[str], weight_version: int) -> Order:
    tasks = [name for name in task_names for _ in range(config.eval.attempts_per_task)]
    return _order(config, order_name(stage_number, label, "eval"), "heldout", tasks, weight_version)


def _order(
    config: Config, name: str, task_set: str, tasks: list[str], weight_version: int, next_draw: int = 0
) -> Order:
    return Order(
        name=name,
        task_set=task_set,
        tasks=tasks,
        weight_version=weight_version,
        temperature=config.rollout.temperature if task_set == "train" else config.eval.temperature,
        seed=zlib.crc32(f"{config.run.seed}/{name}".encode()),
        next_draw=next_draw,
    )


def wait_for(spool: Spool, order: Order, timeout_s: float) -> list[Trajectory]:
    """Blocks until the order's trajectories are all there."""
    deadline = time.monotonic() + timeout_s
    while missing := spool.missing(order):
        if time.monotonic() > deadline:
            raise UserError(
                f"{len(missing)} of {len(order.tasks)} trajectories of {order.name} were still missing after "
                f"rollout.round_timeout_s = {timeout_s:g} s; see logs/collector.log, or raise the limit"
            )
        time.sleep(POLL_S)
    return spool.read(order)


def read_from(spool: Spool, order_name: str) -> list[Trajectory]:
    """The trajectories of an order that someone else gave, of whatever size and weights."""
    order = spool.find_order(order_name)
    missing = spool.missing(order) if order else []
    if order is None or missing:
        lack = f"{len(missing)} of {len(order.tasks)} trajectories of" if order else "the order"
        raise UserError(
            f"the spool {spool.spool_dir.resolve()} lacks {lack} {order_name}, and `rsi-fast train` collects none: "
            "collect more, or give the run file the stages and rounds that the spool holds"
        )
    return spool.read(order)


def score(
    valid: list[Trajectory], partial_cap: float, family_weights: dict[str, float], weight_version: int | None
) -> tuple[list[Sample], dict[str, float]]:
    """Samples with their final reward, for valid trajectories; and what the round was like. weight_version: the
    actor's; None where the trajectories' own are of another run."""
    families = sorted({check.family for t in valid for check in t.checks})
    number = {family: i for i, family in enumerate(families)}
    width = max(1, max(len(t.checks) for t in valid))
    passed = torch.zeros(len(valid), width)
    family = torch.full((len(valid), width), -1, dtype=torch.int32)
    for row, t in enumerate(valid):
        for column, check in enumerate(t.checks):
            passed[row, column], family[row, column] = check.passed, number[check.family]
    success = torch.tensor([t.success for t in valid])
    weights = torch.tensor([family_weights.get(f, 1.0) for f in families] or [1.0])
    rewards = family_rewards(passed, family, success, family_weights=weights, partial_cap=partial_cap)
    samples = [
        Sample.from_trajectory(t, reward, weight_version)
        for t, reward in zip(valid, rewards.reward.tolist(), strict=True)
    ]
    turns = [turn for t in valid for turn in t.turns]
    staleness = {}
    if weight_version is not None:
        ages = [weight_version - turn.weight_version for turn in turns]
        staleness = {"rollout/staleness": sum(ages) / max(1, len(ages))}
    limits = ("max_turns", "turn_length", "max_tokens", "wall_time")
    return samples, {
        "reward/mean": float(rewards.reward.mean()),
        "rollout/success": float(success.float().mean()),
        "rollout/progress": float(rewards.progress.mean()),
        "rollout/turns": len(turns) / len(valid),
        "rollout/tokens": sum(len(t.token_ids) for t in valid),
        "rollout/action_tokens": sum(sum(t.action_mask) for t in valid),
        "rollout/truncated": sum(t.finish_reason in limits for t in valid),
    } | staleness


def evaluation(trajectories: list[Trajectory]) -> dict:
    """Strict success, progress and success by kind of task (the name up to its last dash) of an evaluation."""
    from rsi_fast.report import wilson_interval

    valid = [t for t in trajectories if t.valid]
    if not valid:
        reasons = "\n  ".join(sorted({t.invalid_reason for t in trajectories})[:5])
        raise UserError(f"every attempt of the evaluation is invalid. Reasons:\n  {reasons}")
    _, numbers = score(valid, 0.0, {}, weight_version=None)
    kinds: dict[str, list[int]] = {}
    for t in valid:
        entry = kinds.setdefault(t.task.rpartition("-")[0] or t.task, [0, 0])
        entry[0] += t.success
        entry[1] += 1
    successes = sum(t.success for t in valid)
    return {
        "eval/strict": successes / len(valid),
        "eval/progress": numbers["rollout/progress"],
        "eval/n": len(valid),
        "eval/ci95": list(wilson_interval(successes, len(valid))),
        "eval/by_kind": dict(sorted(kinds.items())),
        "rollout/turns": numbers["rollout/turns"],
        "rollout/attempts": len(trajectories),
        "rollout/invalid": len(trajectories) - len(valid),
        "rollout/truncated": numbers["rollout/truncated"],
    }


def load_demonstrations(folder: Path) -> list[Sample]:
    from rsi_fast.spool import read_folder

    samples = [Sample.from_trajectory(t) for t in read_folder(folder) if t.valid]
    if not samples:
        raise UserError(f"no valid demonstration in {folder}: expected trajectory files (*.json)")
    return samples
