"""What became of every trajectory: consumed by one round, or dropped with a reason.

RUN/ledger/02-ppo-0003.json   {"consumed": {id: [task, success]}, "dropped": {id: reason}} of that round

Written by rank 0 before the round trains. A resumed run removes the entries of the rounds that it does again, as it
does with their lines of metrics, so that at any time each id stands in at most one entry.
"""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

from rsi_fast.errors import UserError
from rsi_fast.spool import Order, Spool, Trajectory, write_json_atomic
from rsi_fast.trainer.curriculum import History

POLL_S = 0.1


@dataclass
class Round:
    """What a round has to learn from."""

    trajectories: dict[str, Trajectory] = field(default_factory=dict)  # by id: the consumed ones
    dropped: dict[str, str] = field(default_factory=dict)  # id -> reason

    @classmethod
    def of(cls, trajectories: dict[str, Trajectory]) -> "Round":
        """All that are valid, whatever weights sampled them."""
        valid = {i: t for i, t in trajectories.items() if t.valid}
        taken = cls(valid, {i: f"invalid: {t.invalid_reason}" for i, t in trajectories.items() if not t.valid})
        taken.check()
        return taken

    def check(self) -> None:
        if not self.trajectories:
            reasons = "\n  ".join(sorted(set(self.dropped.values()))[:5])
            raise UserError(f"no trajectory of the round can be trained on. Reasons:\n  {reasons}")

    def counts(self) -> dict[str, int]:
        """Of the round, as metrics."""
        counts = {f"rollout/{kind}": self._num_dropped(kind) for kind in ("invalid", "stale")}
        return counts | {"rollout/attempts": len(self.trajectories) + len(self.dropped)}

    def _num_dropped(self, kind: str) -> int:
        return sum(reason.startswith(kind) for reason in self.dropped.values())


class Ledger:
    def __init__(self, run_dir: Path):
        self.folder = Path(run_dir) / "ledger"
        self.spool = Spool(run_dir)
        self._read: dict[str, Trajectory] = {}  # finished, and in no entry yet

    def entries(self) -> dict[str, dict]:
        """Name of the round -> its entry, oldest first."""
        return {path.stem: json.loads(path.read_text()) for path in sorted(self.folder.glob("[!.]*.json"))}

    def remove_from(self, name: str) -> None:
        """The entries of this round and of all later ones go."""
        for path in self.folder.glob("[!.]*.json"):
            if path.stem >= name:
                path.unlink()

    def history(self) -> History:
        found = History()
        for entry in self.entries().values():
            found.add_round([tuple(outcome) for outcome in entry["consumed"].values()])
        return found

    def _used(self) -> set[str]:
        return {i for entry in self.entries().values() for part in entry.values() for i in part}

    def take(self, orders: list[Order], wanted: int, version: int, max_staleness: int, timeout_s: float) -> Round:
        """Waits for `wanted` fresh trajectories, or until no more are to come; takes the oldest.

        orders: of this stage, given so far, oldest first. Not fresh are invalid ones and those with a turn of weights
        more than max_staleness versions old. Raises UserError when there is none, or after timeout_s.
        """
        used = self._used()
        names = {order.name for order in orders}
        deadline = time.monotonic() + timeout_s
        while True:
            found = [i for order in orders for i in self.spool.finished(order) if i not in used]
            for i in found:
                if i not in self._read:
                    self._read[i] = self.spool.read_one(i)
            dropped = {i: why for i in found if (why := _unfit(self._read[i], version, max_staleness))}
            fresh = [i for i in found if i not in dropped]
            outstanding = sum(len(order.tasks) for order in orders) - len(found)
            outstanding -= sum(i.rpartition("/")[0] in names for i in used)
            if len(fresh) >= wanted or not outstanding:
                break
            if time.monotonic() > deadline:
                raise UserError(
                    f"{wanted - len(fresh)} of the round's {wanted} trajectories were still missing after "
                    f"rollout.round_timeout_s = {timeout_s:g} s; see logs/collector.log, or raise the limit"
                )
            time.sleep(POLL_S)
        taken = Round({i: self._read[i] for i in fresh[:wanted]}, dropped)
        taken.check()
        return taken

    def record(self, name: str, taken: Round) -> None:
        consumed = {i: [t.task, t.success] for i, t in taken.trajectories.items()}
        for i in [*consumed, *taken.dropped]:
            self._read.pop(i, None)
        write_json_atomic(
            self.folder / f"{name}.json", json.dumps({"consumed": consumed, "dropped": taken.dropped}, indent=0)
        )

    def close(self, name: str, orders: list[Order]) -> None:
        """The stage is over: what its orders asked for and no round took, finished or not, is dropped."""
        used = self._used()
        every = [f"{order.name}/{i:05d}" for order in orders for i in range(len(order.tasks))]
        if left := {i: "the stage was over" for i in every if i not in used}:
            path = self.folder / f"{name}.json"
            entry = json.loads(path.read_text())
            write_json_atomic(path, json.dumps(entry | {"dropped": entry["dropped"] | left}, indent=0))


def _unfit(trajectory: Trajectory, version: int, max_staleness: int) -> str | None:
    if not trajectory.valid:
        return f"invalid: {trajectory.invalid_reason}"
    oldest = min((turn.weight_version for turn in trajectory.turns), default=version)
    if version - oldest > max_staleness:
        return f"stale: sampled by weights {oldest}, the actor is at {version}"
    return None


def find_problems(run_dir: Path) -> list[str]:
    """What is wrong with the ledger of a finished run: a training trajectory in two entries or in none, or an entry's
    that the spool lacks."""
    ledger = Ledger(run_dir)
    spool = ledger.spool
    places: dict[str, list[str]] = {}
    for name, entry in ledger.entries().items():
        for part, ids in entry.items():
            for i in ids:
                places.setdefault(i, []).append(f"{part} by {name}")
    problems = [f"{i} was {' and '.join(where)}" for i, where in places.items() if len(where) > 1]
    finished = {i for order in spool.orders() if order.task_set == "train" for i in spool.finished(order)}
    problems += [f"{i} was neither consumed nor dropped" for i in sorted(finished - places.keys())]
    consumed = {i for i, where in places.items() if where[0].startswith("consumed")}
    return problems + [f"{i} was consumed and is not in the spool" for i in sorted(consumed - finished)]
