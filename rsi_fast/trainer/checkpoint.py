"""Checkpoints of a run: both engines, random states and the place in the plan, published with one rename.

RUN/checkpoints/step-00000012/{actor,critic}/index.json              every parameter's shape; ranks; optimizer step
RUN/checkpoints/step-00000012/{actor,critic}/rank-00000.safetensors  this rank's part of fp32 weights and both moments
RUN/checkpoints/step-00000012/rng-00000.json                         this rank's random states
RUN/checkpoints/step-00000012/state.json                             State, and size and checksum of every other file
RUN/checkpoints/step-00000012/score.json                             what its weights were worth; comes later, or never

ZeRO-3 gives rank r of R the numbers [r*n, (r+1)*n) of a flattened parameter, n = ceil(size / R); the files hold just
these. So a run goes on with another number of ranks by reading other ranges, and a Hugging Face folder can be made from
the files alone. Nothing is pickled.
"""

import base64
import json
import os
import random
import shutil
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
import torch
import torch.distributed as dist
from safetensors import safe_open

from rsi_fast.errors import UserError
from rsi_fast.spool import read_json, write_json_atomic
from rsi_fast.trainer.tensor_files import TensorFile, crc32_of, remove_folder, sync_folder

if TYPE_CHECKING:
    from rsi_fast.trainer.engines import Engine

FORMAT = 2  # 1 was DeepSpeed's own, which only the same number of ranks can load
WEIGHTS, MOMENTS = "fp32", ("exp_avg", "exp_avg_sq")


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


# ---- which there are


def checkpoints(run_dir: Path) -> list[Path]:
    """Published checkpoints, oldest first."""
    return sorted(p.parent for p in (Path(run_dir) / "checkpoints").glob("step-????????/state.json"))


def latest_checkpoint(run_dir: Path) -> Path | None:
    found = checkpoints(run_dir)
    return found[-1] if found else None


def note_score(run_dir: Path, success: float) -> None:
    """The strict success of the first training attempts after a checkpoint: its weights made them. For keep_best."""
    newest = latest_checkpoint(run_dir)
    if newest and not (newest / "score.json").exists():
        write_json_atomic(newest / "score.json", json.dumps({"success": success}))


def best_checkpoints(run_dir: Path) -> list[Path]:
    """Those with a score, best first; of equal ones the newer first."""
    scores = {folder: read_json(folder / "score.json") for folder in checkpoints(run_dir)}
    scored = [folder for folder, score in scores.items() if score]
    return sorted(scored, key=lambda folder: (scores[folder]["success"], folder.name), reverse=True)


def tidy(run_dir: Path, keep_last: int, keep_best: int) -> None:
    """Removes checkpoints that are neither among the last nor among the best, and what kills left half done."""
    found = checkpoints(run_dir)
    for old in set(found[:-keep_last]) - set(best_checkpoints(run_dir)[:keep_best]):
        trash = old.with_name(f".{old.name}.trash")  # a kill in the middle of the removal leaves no half checkpoint
        old.rename(trash)
    for rest in (Path(run_dir) / "checkpoints").glob(".step-*"):
        remove_folder(rest)


# ---- saving


def save_checkpoint(
    run_dir: Path, state: State, engines: "dict[str, Engine]", keep_last: int, keep_best: int = 0
) -> None:
    """A collective. A kill or a power cut at any moment leaves the previous checkpoint in place; so does a full disk,
    which ends in UserError on every rank."""
    folder = Path(run_dir) / "checkpoints"
    target = folder / f"step-{state.step:08d}"
    rank = dist.get_rank()
    there = [(target / "state.json").exists()]
    dist.broadcast_object_list(there, src=0)
    if there[0]:
        # Every change of the engines is followed by a line of metrics, a step. So only the place in the plan is new.
        if rank == 0:
            record = json.loads((target / "state.json").read_text())
            write_json_atomic(target / "state.json", json.dumps(record | {"state": asdict(state)}))
        dist.barrier()
        return
    temporary = folder / f".{target.name}.part"
    if rank == 0:
        for rest in folder.glob(".step-*"):
            remove_folder(rest)
        for name in engines:
            (temporary / name).mkdir(parents=True)
    dist.barrier()
    try:
        outcome: dict | str = _write_rank(temporary, engines)
    except OSError as error:
        outcome = f"rank {rank}: {error.strerror}"
    outcomes: list = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome)
    failures = [text for text in outcomes if isinstance(text, str)]
    if not failures and rank == 0:
        try:
            _publish(run_dir, temporary, target, state, {k: v for files in outcomes for k, v in files.items()})
            tidy(run_dir, keep_last, keep_best)
        except OSError as error:
            failures = [f"rank 0: {error.strerror}"]
    verdict = [failures]
    dist.broadcast_object_list(verdict, src=0)
    if verdict[0]:
        if rank == 0:
            remove_folder(temporary)
        previous = latest_checkpoint(run_dir)
        raise UserError(
            f"the checkpoint {target} could not be written ({'; '.join(verdict[0])}). "
            + (f"{previous} is whole and stays" if previous else "There is none before it")
            + ". Make room, or lower trainer.keep_checkpoints or keep_best, then start again"
        )


def _write_rank(temporary: Path, engines: "dict[str, Engine]") -> dict[str, list[int]]:
    """This rank's files; returns [size, checksum] of each. No collective: a rank that fails must not hold up others."""
    from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

    rank, world_size = dist.get_rank(), dist.get_world_size()
    written = {}
    for name, engine in engines.items():
        step = _optimizer_step(engine)
        kinds = (WEIGHTS, *MOMENTS) if step else (WEIGHTS,)
        path = temporary / name / f"rank-{rank:05d}.safetensors"
        trained = [(n, p) for n, p in engine.parameters() if p.requires_grad]
        spans = {n: _span(p.ds_numel, rank, world_size) for n, p in trained}
        entries = [(f"{k}/{n}", (spans[n][1] - spans[n][0],), torch.float32) for k in kinds for n, _ in trained]
        with TensorFile(path, entries) as file:
            for kind in kinds:
                for n, p in trained:
                    local = safe_get_local_fp32_param(p) if kind == WEIGHTS else safe_get_local_optimizer_state(p, kind)
                    file.add(f"{kind}/{n}", local[: spans[n][1] - spans[n][0]])  # what is beyond is padding
        written[f"{name}/{path.name}"] = [file.size, file.crc32]
        if rank == 0:
            shapes = {n: list(p.ds_shape) for n, p in trained}
            index = {"num_ranks": world_size, "optimizer_step": step, "parameters": shapes}
            written |= _write_json(temporary, f"{name}/index.json", index)
    return written | _write_json(temporary, f"rng-{rank:05d}.json", random_states())


def _write_json(folder: Path, name: str, content: dict) -> dict[str, list[int]]:
    path = folder / name
    write_json_atomic(path, json.dumps(content))
    return {name: [path.stat().st_size, crc32_of(path)]}


def _publish(run_dir: Path, temporary: Path, target: Path, state: State, files: dict[str, list[int]]) -> None:
    record = {"format": FORMAT, "state": asdict(state), "files": files}
    write_json_atomic(temporary / "state.json", json.dumps(record))
    for part in [temporary, *(p for p in temporary.iterdir() if p.is_dir())]:
        sync_folder(part)
    if (metrics := Path(run_dir) / "metrics.jsonl").exists():  # its lines belong to the checkpoint's step
        with metrics.open("ab") as lines:
            os.fsync(lines.fileno())
    if target.exists():  # without a state.json: not one of ours
        shutil.rmtree(target)
    temporary.rename(target)
    sync_folder(target.parent)


def _span(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """The part of a flattened parameter that ZeRO-3 keeps on a rank."""
    length = -(-numel // world_size)
    return min(rank * length, numel), min((rank + 1) * length, numel)


def _optimizer_step(engine: "Engine") -> int:
    """Optimizer steps since the moments were 0; 0 means that there are none."""
    steps = {int(state["step"]) for state in engine.engine.optimizer.optimizer.state.values() if "step" in state}
    if len(steps) > 1:
        raise RuntimeError(f"parts of the {engine.name} have made different numbers of optimizer steps: {steps}")
    return steps.pop() if steps else 0


# ---- loading


def load_state(checkpoint: Path) -> State:
    """Raises UserError when the checkpoint is of another format."""
    record = json.loads((checkpoint / "state.json").read_text())
    if record.get("format") != FORMAT:
        raise UserError(f"{checkpoint} was written by another version of rsi-fast; go on with that one, or start anew")
    return State(**record["state"])


def find_damage(checkpoint: Path, part: int = 0, num_parts: int = 1) -> list[str]:
    """What is wrong with the files of a checkpoint: missing, of another size, or with another checksum. Looks at every
    num_parts-th file, so that ranks can share the work."""
    problems = []
    files = sorted(json.loads((checkpoint / "state.json").read_text())["files"].items())
    for name, (size, crc32) in files[part::num_parts]:
        path = checkpoint / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != size:
            problems.append(f"{name} has {path.stat().st_size} bytes, expected {size}")
        elif crc32_of(path) != crc32:
            problems.append(f"{name} has another checksum than when it was written")
    return problems


def check(checkpoint: Path) -> None:
    """A collective. Raises UserError on every rank when a file of the checkpoint is not as it was written."""
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, find_damage(checkpoint, dist.get_rank(), dist.get_world_size()))
    if problems := [text for texts in found for text in texts]:
        raise UserError("; ".join(problems[:5]))


class Shards:
    """One engine's files, of whatever number of ranks. A context manager."""

    def __init__(self, folder: Path):
        index = json.loads((folder / "index.json").read_text())
        self.num_ranks: int = index["num_ranks"]
        self.optimizer_step: int = index["optimizer_step"]
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(shape) for name, shape in index["parameters"].items()}
        self._folder = folder
        self._open: dict[int, safe_open] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Shards":
        return self

    def __exit__(self, *exception) -> None:
        self._stack.close()

    def read(self, kind: str, name: str, start: int, stop: int) -> torch.Tensor:
        """The numbers [start, stop) of a flattened parameter's weights or of one of its moments, fp32."""
        numel = torch.Size(self.shapes[name]).numel()
        parts = [torch.empty(0)]
        for rank in range(self.num_ranks):
            low, high = _span(numel, rank, self.num_ranks)
            if max(low, start) < min(high, stop):
                part = self._file(rank).get_slice(f"{kind}/{name}")
                parts.append(part[max(low, start) - low : min(high, stop) - low])
        return torch.cat(parts)

    def whole(self, kind: str, name: str) -> torch.Tensor:
        shape = torch.Size(self.shapes[name])
        return self.read(kind, name, 0, shape.numel()).view(shape)

    def _file(self, rank: int):
        if rank not in self._open:
            path = self._folder / f"rank-{rank:05d}.safetensors"
            self._open[rank] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._open[rank]


def load_engines(checkpoint: Path, engines: "dict[str, Engine]") -> None:
    """A collective. Restores weights, optimizers and this rank's random states; the checkpoint may be of another number
    of ranks, and then a rank that it did not have keeps the random states it has."""
    for name, engine in engines.items():
        with Shards(checkpoint / name) as shards:
            _load_engine(engine, shards)
    if states := read_json(checkpoint / f"rng-{dist.get_rank():05d}.json"):
        restore_random_states(states)


def _load_engine(engine: "Engine", shards: Shards) -> None:
    names = {id(p): name for name, p in engine.parameters() if p.requires_grad}
    ours = {name: tuple(p.ds_shape) for name, p in engine.parameters() if p.requires_grad}
    if ours != shards.shapes:
        others = sorted(ours.items() ^ shards.shapes.items())
        raise ValueError(f"the {engine.name} has other parameters than the checkpoint: {others[:5]}")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    zero = engine.engine.optimizer
    states = zero.optimizer.state
    zero.checkpoint_event_prologue()
    for i, group in enumerate(zero.fp16_groups):
        swapped = zero._swappable_optimizer_subgroup(i)
        if swapped:
            zero._optimizer_states_and_gradient_swap_in(i)
        weights = zero.fp32_partitioned_groups_flat[i]
        targets = {WEIGHTS: weights.data}
        states.pop(weights, None)
        if shards.optimizer_step:
            targets |= {kind: torch.zeros_like(weights.data) for kind in MOMENTS}
            # torch's optimizers count in a tensor, DeepSpeed's in a number
            in_torch = isinstance(zero.optimizer, torch.optim.Adam | torch.optim.AdamW)
            step = torch.tensor(float(shards.optimizer_step)) if in_torch else shards.optimizer_step
            states[weights] = {"step": step} | {kind: targets[kind] for kind in MOMENTS}
        offset = 0
        for parameter in group:
            name = names[id(parameter)]
            start, stop = _span(parameter.ds_numel, rank, world_size)
            for kind, flat in targets.items():
                flat[offset : offset + stop - start].copy_(shards.read(kind, name, start, stop))
            offset += parameter.partition_numel()
        zero._reassign_or_swap_out_partitioned_parameters(i)  # the weights in model.dtype, from those in fp32
        if swapped:
            zero._optimizer_states_and_gradient_swap_out(i)
    zero.checkpoint_event_epilogue()


# ---- random states


def random_states() -> dict:
    """Of torch (on the GPU too), numpy and Python, whole."""
    kind, keys, position, has_gauss, gauss = numpy.random.get_state()
    return {
        "torch": _to_text(torch.get_rng_state()),
        "cuda": _to_text(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
        "numpy": [kind, keys.tolist(), position, has_gauss, gauss],
        "python": random.getstate(),
    }


def restore_random_states(states: dict) -> None:
    torch.set_rng_state(_from_text(states["torch"]))
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_text(states["cuda"]))
    kind, keys, *rest = states["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _from_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
