"""Alarms: which stand after a round of metrics, as a pure function of the lines, and the words for them."""

import math
from collections.abc import Iterator

from rsi_fast.config import Monitor

CLEARS = 0.8  # an alarm that stands goes once its value is below this part of its limit, so that it does not flicker
CRITIC_CLEARS = 0.05  # explained variance above which that alarm goes
EARLIER_ROUNDS = 8  # that a rise is measured against
FEWEST_ROUNDS = 3  # with fewer before it nothing is called a rise

# name -> (what to say, the keys that show it)
MEANINGS = {
    "entropy": ("the policy's entropy collapses", ("actor/entropy",)),
    "ratio": ("the policy's ratio to the one that sampled explodes", ("actor/ratio_mean",)),
    "kl": ("an update moves the policy too far", ("actor/approx_kl",)),
    "explained_variance": ("the critic is worse than a constant", ("critic/explained_variance",)),
    "invalid": ("sandboxes or verifiers fail too often", ("rollout/invalid", "rollout/attempts")),
    "truncated": ("attempts meet a limit too often", ("rollout/truncated", "rollout/attempts")),
}


def find_alarms(history: list[dict], line: dict, limits: Monitor) -> list[str]:
    """Names of the alarms that stand after a round. `history`: all lines before, rounds with their own `alarms`."""
    rounds = [earlier for earlier in history if "alarms" in earlier]
    standing = rounds[-1]["alarms"] if rounds else []
    conditions = _conditions(history, rounds, line, limits)
    return [name for name, on, stays in conditions if on or (stays and name in standing)]


def alarm_texts(before: list[str], line: dict) -> list[str]:
    """What a line changes, given the alarms that stood before it: one text for each that is new or over."""
    after = line.get("alarms", before)
    changed = [("alarm", name) for name in after if name not in before]
    changed += [("alarm over", name) for name in before if name not in after]
    texts = []
    for what, name in changed:
        meaning, keys = MEANINGS[name]
        numbers = ", ".join(f"{key} {line[key]:.4g}" for key in keys if key in line)
        texts.append(f"{what}: {name}: {meaning} ({numbers})" if what == "alarm" else f"{what}: {name} ({numbers})")
    return texts


def _conditions(
    history: list[dict], rounds: list[dict], line: dict, limits: Monitor
) -> Iterator[tuple[str, bool, bool]]:
    """(name, is beyond its limit, is not clear of it yet)"""

    def over(name: str, part: float) -> tuple[str, bool, bool]:
        return name, part > 1, part > CLEARS  # part: of the limit

    first = _first_entropy(history, line)
    yield over("entropy", limits.min_entropy_fraction * first / max(line["actor/entropy"], 1e-12))
    if "actor/ratio_mean" in line:
        yield over("ratio", abs(line["actor/ratio_mean"] - 1) / limits.max_ratio_distance)
        yield over("kl", line["actor/approx_kl"] / limits.max_approx_kl)
    variance = line["critic/explained_variance"]
    warm = len(rounds) >= limits.critic_warmup_rounds
    yield "explained_variance", warm and variance < 0, variance < CRITIC_CLEARS
    for name, limit in (("invalid", limits.max_invalid), ("truncated", limits.max_truncated)):
        share = line[f"rollout/{name}"] / line["rollout/attempts"]
        yield over(name, max(share / limit, _rise(rounds[-EARLIER_ROUNDS:], line, f"rollout/{name}")))


def _first_entropy(history: list[dict], line: dict) -> float:
    """Of the first round since the policy was last fine-tuned."""
    for earlier in reversed(history):
        if earlier["kind"] == "sft":
            break
        line = earlier if "actor/entropy" in earlier else line
    return line["actor/entropy"]


def _rise(rounds: list[dict], line: dict, key: str) -> float:
    """The round's count as a part of twice what the rounds before lead one to expect, or of what chance still allows
    (three standard deviations of a Poisson count) where that is more."""
    if len(rounds) < FEWEST_ROUNDS:
        return 0.0
    rate = sum(earlier[key] for earlier in rounds) / sum(earlier["rollout/attempts"] for earlier in rounds)
    expected = rate * line["rollout/attempts"]
    return line[key] / max(2 * expected, expected + 3 * math.sqrt(expected + 1))
