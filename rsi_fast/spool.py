"""Trajectories and round orders on disk: the only thing that collector and trainer share.

    RUN/orders/02-ppo-0003.json        what to collect, written by the trainer
    RUN/spool/02-ppo-0003/00042.json   attempt 42 of that order, written by the collector

Every file is written whole beside its place, then renamed, and never changed. An attempt's name follows from the order,
so a collector that was killed goes on with the names that are missing, and a trainer can be run again from a spool.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from rsi_fast.errors import UserError

WEIGHTS_FILE = "weights.json"  # in the run directory: {"version": the last that is live in every server}

AnyModel = TypeVar("AnyModel", bound=BaseModel)

FINISH_REASONS = (
    "submit",  # the agent said it is done
    "max_turns",
    "turn_length",  # a reply was cut at max_turn_tokens (vLLM's finish_reason "length"): never taken for a success
    "max_tokens",  # no room for another turn in the context
    "wall_time",
    "empty_reply",  # the model sampled nothing
    "demonstration",
    "error",  # the attempt is invalid, `invalid_reason` says why
)


class Check(BaseModel):
    """One assertion of the verifier."""

    model_config = ConfigDict(extra="forbid")
    name: str
    family: str
    passed: float  # 0 to 1


class Turn(BaseModel):
    """One reply of the model, as text, for people and reports. The tokens stand in Trajectory."""

    model_config = ConfigDict(extra="forbid")
    reply: str
    command: str | None  # None: submitted, or nothing that could be run
    observation: str | None  # as the agent saw it, cut; None after the last turn
    exit_code: int | None = None
    weight_version: int  # of the weights that sampled it
    generate_s: float = 0.0
    sandbox_s: float = 0.0


class Trajectory(BaseModel):
    """One attempt at one task. Lists are parallel, one entry per token."""

    model_config = ConfigDict(extra="forbid")
    id: str  # "<order>/<index>"
    task: str  # name of the task, unique in its set
    token_ids: list[int]
    action_mask: list[int]  # 1 where the policy sampled the token
    turn_ids: list[int]  # of action tokens; -1 at masked positions
    behaviour_logprobs: list[float]  # log-prob of the token under the sampling distribution; 0 at masked positions
    turns: list[Turn]
    finish_reason: Literal[FINISH_REASONS]
    invalid_reason: str | None = None  # sandbox or verifier failed: kept and counted, never trained on
    success: bool = False  # strict success: the verifier's own verdict
    checks: list[Check] = []
    timing: dict[str, float] = {}  # seconds: generate, sandbox, verify, total

    @property
    def valid(self) -> bool:
        return self.invalid_reason is None

    @model_validator(mode="after")
    def _parallel(self):
        lengths = {
            name: len(getattr(self, name)) for name in ("token_ids", "action_mask", "turn_ids", "behaviour_logprobs")
        }
        if len(set(lengths.values())) != 1:
            raise ValueError(f"trajectory {self.id}: lists of different length: {lengths}")
        return self


class Order(BaseModel):
    """What to collect: attempt i is a try at tasks[i] of the task set, with a seed of its own."""

    model_config = ConfigDict(extra="forbid")
    name: str  # unique in the run, sorts in the order of work, such as "02-ppo-0003"
    task_set: Literal["train", "heldout"]
    tasks: list[str]  # names; one attempt each, repeats allowed
    weight_version: int  # collect with these weights live in the servers; training orders ahead, with these or newer
    temperature: float
    seed: int
    blank_observations: bool = False  # the agent gets empty observations: shows which tasks can be guessed
    next_draw: int = 0  # place in the shuffled passes over the tasks where the next round's draw begins

    @property
    def stage_number(self) -> int:
        number = self.name.partition("-")[0]
        return int(number) if number.isdigit() else 0


def write_json_atomic(path: Path, text: str) -> None:
    """Writes text so that a reader sees all of it or nothing, also after a crash of the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


class Spool:
    """The orders and trajectories of one run directory."""

    def __init__(self, run_dir: Path):
        self.orders_dir = Path(run_dir) / "orders"
        self.spool_dir = Path(run_dir) / "spool"

    def give_order(self, order: Order) -> None:
        """Trainer side. Giving an order that already stands changes nothing, but it must be the same order."""
        standing = self.find_order(order.name)
        if standing is None:
            write_json_atomic(self.orders_dir / f"{order.name}.json", order.model_dump_json())
        elif standing != order:
            raise ValueError(f"order {order.name} in {self.orders_dir} differs from the one this run would give")

    def orders(self, skip: frozenset[str] | set[str] = frozenset()) -> list[Order]:
        """All orders, oldest first, but those whose names are to be skipped."""
        paths = sorted(self.orders_dir.glob("[!.]*.json")) if self.orders_dir.is_dir() else []
        return [_read(Order, path) for path in paths if path.stem not in skip]

    def find_order(self, name: str) -> Order | None:
        path = self.orders_dir / f"{name}.json"
        return _read(Order, path) if path.exists() else None

    def missing(self, order: Order) -> list[int]:
        """Indices of the order's attempts that have no trajectory yet."""
        folder = self.spool_dir / order.name
        done = {p.name for p in folder.glob("[!.]*.json")} if folder.is_dir() else set()
        return [i for i in range(len(order.tasks)) if f"{i:05d}.json" not in done]

    def write(self, order: Order, index: int, trajectory: Trajectory) -> None:
        write_json_atomic(self.spool_dir / order.name / f"{index:05d}.json", trajectory.model_dump_json())

    def next_draw(self, before: str) -> int:
        """Where the draw of tasks for a training order begins: where that of the one before it ended."""
        names = sorted(path.stem for path in self.orders_dir.glob("[!.]*.json") if path.stem < before)
        earlier = [order for name in names if (order := self.find_order(name)).task_set == "train"]
        return earlier[-1].next_draw if earlier else 0

    def finished(self, order: Order) -> list[str]:
        """Ids of the order's attempts that are there."""
        lacking = set(self.missing(order))
        return [f"{order.name}/{i:05d}" for i in range(len(order.tasks)) if i not in lacking]

    def read_one(self, trajectory_id: str) -> Trajectory:
        return _read(Trajectory, self.spool_dir / f"{trajectory_id}.json")

    def read(self, order: Order) -> list[Trajectory]:
        """The trajectories of a finished order, by index. Raises FileNotFoundError for a missing one."""
        folder = self.spool_dir / order.name
        return [_read(Trajectory, folder / f"{i:05d}.json") for i in range(len(order.tasks))]


def read_folder(folder: Path) -> list[Trajectory]:
    """Every trajectory of a folder (demonstrations, say), by file name."""
    return [_read(Trajectory, path) for path in sorted(Path(folder).rglob("[!.]*.json"))]


def _read(model: type[AnyModel], path: Path) -> AnyModel:
    """Raises UserError that names the file when it is not what it should be."""
    try:
        return model.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(
            f"{path} is damaged: {where}{': ' if where else ''}{first['msg']}. Remove it, and an attempt is collected "
            "again, an order given again; or get the file anew"
        ) from None


def read_json(path: Path) -> dict | None:
    """A JSON object, or None where there is no such file yet."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
