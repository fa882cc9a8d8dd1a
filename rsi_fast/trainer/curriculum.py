"""Which tasks a round asks for: shuffled passes over the training set, in which tasks that teach nothing now rest."""

import random
from dataclasses import dataclass, field

from rsi_fast.config import Curriculum


@dataclass
class History:
    """Outcomes of training attempts, oldest first. Rounds are counted over all stages."""

    outcomes: dict[str, list[bool]] = field(default_factory=dict)  # by task
    last_round: dict[str, int] = field(default_factory=dict)  # of a task's newest outcome
    rounds: int = 0

    def add_round(self, outcomes: list[tuple[str, bool]]) -> None:
        for task, success in outcomes:
            self.outcomes.setdefault(task, []).append(success)
            self.last_round[task] = self.rounds
        self.rounds += 1

    def rests(self, task: str, rules: Curriculum) -> bool:
        """Its last `attempts` attempts all came out alike, the newest less than `rest_rounds` rounds ago."""
        if rules.attempts is None:
            return False
        last = self.outcomes.get(task, [])[-rules.attempts :]
        alike = len(last) == rules.attempts and len(set(last)) == 1
        return alike and self.rounds - self.last_round[task] <= rules.rest_rounds


def draw(
    names: list[str], count: int, seed: int, start: int, history: History, rules: Curriculum
) -> tuple[list[str], int]:
    """(tasks of a round, where the next draw begins). Place p of the endless row is in pass p // len(names); none comes
    twice before all came once or rested. A part `floor` of the resting ones comes all the same, and when all rest, all
    come."""
    resting = {name for name in names if history.rests(name, rules)}
    if len(resting) == len(names):
        resting = set()
    chosen, place = [], start
    while len(chosen) < count:
        lap, position = divmod(place, len(names))
        name = _shuffled(tuple(names), seed * 1_000_003 + lap)[position]
        if name not in resting or random.Random(f"{seed}/{place}").random() < rules.floor:
            chosen.append(name)
        place += 1
    return chosen, place


_laps: dict[tuple[int, int], list[str]] = {}


def _shuffled(names: tuple[str, ...], seed: int) -> list[str]:
    key = (len(names), seed)
    if key not in _laps:
        _laps[key] = random.Random(seed).sample(names, len(names))
    return _laps[key]
