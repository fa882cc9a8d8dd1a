"""Checkpoints of a run: both engines, random states and the place in the plan, published with one rename.

RUN/checkpoints/step-00000012/{actor,critic}/   DeepSpeed's, from every rank
RUN/checkpoints/step-00000012/rng-<rank>.pt
RUN/checkpoints/step-00000012/state.json
"""

import json
import random
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

from rsi_fast.trainer.engines import Engine


@dataclass
class State:
    """Where the run stands. `stage` and `round` name what comes next."""

    stage: int = 0  # index into config.stages; the number in order names is one more
    round: int = 0  # within the stage; of sft, the step
    step: int = 0  # lines of metrics written
    weight_version: int = 0  # of the actor; 0 is the model as it was given
    started: bool = False  # the evaluation at the start is done
    stage_open: bool = False  # engines and optimizers are set up for `stage`
    critic_from: str | None = None  # folder whose backbone the critic began with; None: there is no critic yet
    first_value_loss: float | None = None  # of the open critic stage
    gate_met: bool = False


def latest_checkpoint(run_dir: Path) -> Path | None:
    folder = Path(run_dir) / "checkpoints"
    found = sorted(p for p in folder.glob("step-*") if (p / "state.json").is_file()) if folder.is_dir() else []
    return found[-1] if found else None


def save_checkpoint(run_dir: Path, state: State, engines: dict[str, Engine], keep: int) -> None:
    """A collective. A kill at any moment leaves the previous checkpoint in place."""
    folder = Path(run_dir) / "checkpoints"
    target = folder / f"step-{state.step:08d}"
    temporary = folder / f".{target.name}.part"
    rank = dist.get_rank()
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    for name, engine in engines.items():
        engine.engine.save_checkpoint(str(temporary / name), tag="0", save_latest=False)
    torch.save(
        {"torch": torch.get_rng_state(), "numpy": numpy.random.get_state()[1], "python": random.getstate()[1]},
        temporary / f"rng-{rank}.pt",
    )
    dist.barrier()
    if rank == 0:
        (temporary / "state.json").write_text(json.dumps(asdict(state)))
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
        for old in sorted(folder.glob("step-*"))[:-keep]:
            shutil.rmtree(old)
    dist.barrier()


def load_state(checkpoint: Path) -> State:
    return State(**json.loads((checkpoint / "state.json").read_text()))


def load_engines(checkpoint: Path, engines: dict[str, Engine]) -> None:
    """A collective. Restores weights, optimizers and this rank's random states."""
    for name, engine in engines.items():
        path, _ = engine.engine.load_checkpoint(str(checkpoint / name), tag="0")
        if path is None:
            raise RuntimeError(f"DeepSpeed found no checkpoint of the {name} in {checkpoint}")
    rng = checkpoint / f"rng-{dist.get_rank()}.pt"
    if rng.is_file():
        states = torch.load(rng, weights_only=False)  # this run's own file
        torch.set_rng_state(states["torch"])
        numpy_state = numpy.random.get_state()
        numpy.random.set_state((numpy_state[0], states["numpy"], *numpy_state[2:]))
        random.setstate((3, states["python"], None))
