"""The task's verifier: runs tests/test.sh when the agent has finished, and reads its verdict and checks.

`/logs/verifier/reward.txt` (a number) or `reward.json` ({"reward": number}) holds the verdict: strict success is
exactly 1. `/logs/verifier/ctrf.json` (Common Test Report Format) holds the checks.
"""

import json
import math
from dataclasses import dataclass
from fnmatch import fnmatchcase

from rsi_fast.sandbox import Sandbox
from rsi_fast.spool import Check
from rsi_fast.tasks import Task

LIMIT_BYTES = 2**20  # of a result file


class VerifierError(Exception):
    """There is no verdict to trust. The attempt is invalid; it is never taken for a failure of the agent."""


@dataclass(frozen=True)
class Verdict:
    success: bool
    checks: list[Check]


async def verify(task: Task, sandbox: Sandbox, default_timeout_s: float) -> Verdict:
    """Whatever the agent laid in /tests and /logs/verifier is gone before the verifier's own files enter.

    Raises VerifierError when the verifier times out or leaves no verdict, or an impossible one.
    """
    for folder in ("/tests", "/logs/verifier"):
        await sandbox.remove(folder)
    await sandbox.put_files(task.verifier_files() | {"/logs/verifier/.keep": b""})
    timeout_s = task.verifier_timeout_s or default_timeout_s
    result = await sandbox.run_clean("bash /tests/test.sh", timeout_s)
    if result.timed_out:
        raise VerifierError(f"{task.name}: the verifier took more than {timeout_s:g} s")
    reward = await _reward(task, sandbox, result.output)
    report = await sandbox.read_file("/logs/verifier/ctrf.json", LIMIT_BYTES)
    if report is None:
        return Verdict(reward == 1, [Check(name="verdict", family="all", passed=reward)])
    return Verdict(reward == 1, read_ctrf(task, report))


async def _reward(task: Task, sandbox: Sandbox, output: str) -> float:
    text = await sandbox.read_file("/logs/verifier/reward.txt", LIMIT_BYTES)
    try:
        if text is not None:
            reward = float(text)
        else:
            text = await sandbox.read_file("/logs/verifier/reward.json", LIMIT_BYTES)
            if text is None:
                tail = " ".join(output.split())[-200:]
                raise VerifierError(f"{task.name}: the verifier left no reward.txt or reward.json; it said: {tail!r}")
            reward = float(json.loads(text)["reward"])
    except (ValueError, TypeError, KeyError):
        raise VerifierError(f"{task.name}: the verdict {text[:80]!r} is not a number") from None
    if not math.isfinite(reward) or not 0 <= reward <= 1:
        raise VerifierError(f"{task.name}: the verdict {reward} is outside [0, 1]")
    return reward


def read_ctrf(task: Task, report: bytes) -> list[Check]:
    """Checks of a CTRF report. Family: the first of the task's patterns that fits the name, else the test's suite or
    first tag, else its file or class, else one for all. Skipped and pending tests are no checks."""
    try:
        tests = json.loads(report)["results"]["tests"]
        checks = []
        for test in tests:
            if test["status"] in ("skipped", "pending"):
                continue
            checks.append(
                Check(name=str(test["name"]), family=_family(task, test), passed=float(test["status"] == "passed"))
            )
    except (ValueError, TypeError, KeyError) as error:
        raise VerifierError(f"{task.name}: ctrf.json is not a test report: {type(error).__name__} {error}") from None
    return checks


def _family(task: Task, test: dict) -> str:
    name = str(test["name"])
    for family, patterns in task.families.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return family
    suite, tags = test.get("suite"), test.get("tags")
    if suite:
        return suite if isinstance(suite, str) else "/".join(map(str, suite))
    if tags:
        return str(tags[0])
    if "::" in name:
        return name.rpartition("::")[0]
    return str(test.get("filePath") or "all")
