"""Runs a task's verifier after the agent has finished, and reads its verdict and its checks."""

import fnmatch
import json
import math
from dataclasses import dataclass
from typing import Any

from rsi_fast.sandbox import Sandbox
from rsi_fast.spool import Check
from rsi_fast.tasks import Task

LOGS = "/logs/verifier"
_MAX_REPORT_BYTES = 4 * 2**20
_OTHER = "other"  # family of checks that no pattern of the task names
_UNCOUNTED = ("skipped", "pending")  # a check that was not made says nothing


class VerifierError(Exception):
    """The verifier gave no usable verdict: the attempt is invalid, it is not a failure."""


@dataclass(frozen=True)
class Verdict:
    success: bool  # strict: the verifier's reward is 1
    checks: list[Check]


async def verify(task: Task, sandbox: Sandbox, timeout_s: float) -> Verdict:
    """Runs tests/test.sh in a shell of its own over the agent's files. `timeout_s`: where the task gives none.

    Whatever the agent left in /tests and /logs/verifier is removed first.

    Raises VerifierError when the verifier runs out of time, leaves no verdict, or one that is not a number from 0
    to 1, or a ctrf.json that is no CTRF report; SandboxError when the sandbox fails.
    """
    await sandbox.empty_directory("/tests")
    await sandbox.empty_directory(LOGS)
    await sandbox.put_files(task.test_files())
    timeout_s = task.verifier_timeout_s or timeout_s
    result = await sandbox.run("bash /tests/test.sh", timeout_s, output_limit_bytes=65536, new_shell=True)
    if result.timed_out:
        raise VerifierError(f"the verifier was stopped after {timeout_s:g} s")
    reward = await _reward(sandbox)
    if reward is None:
        raise VerifierError(
            f"the verifier ended with exit code {result.exit_code} and left neither reward.txt nor reward.json; "
            f"its output ends with: {result.output[-300:]!r}"
        )
    success = reward == 1.0
    report = await sandbox.read_file(f"{LOGS}/ctrf.json", _MAX_REPORT_BYTES)
    if report is None:
        return Verdict(success, [Check(name="reward", family="reward", passed=reward)])
    return Verdict(success, read_checks(report, task.families))


async def _reward(sandbox: Sandbox) -> float | None:
    text = await sandbox.read_file(f"{LOGS}/reward.txt", 4096)
    if text is not None:
        value: Any = text.decode("utf-8", "replace").strip()
    else:
        text = await sandbox.read_file(f"{LOGS}/reward.json", 65536)
        if text is None:
            return None
        try:
            value = json.loads(text)
        except ValueError:
            raise VerifierError(f"reward.json is not JSON: {text[:100]!r}") from None
        if isinstance(value, dict):
            value = value.get("reward")
    try:
        reward = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        reward = math.nan
    if not 0 <= reward <= 1:  # false for NaN
        raise VerifierError(f"the verifier's reward is {value!r}, expected a number from 0 to 1")
    return reward


def read_checks(report: bytes, families: dict[str, list[str]]) -> list[Check]:
    """The checks of a CTRF report (ctrf.io). Skipped and pending tests are left out. Raises VerifierError."""
    try:
        tests = json.loads(report)["results"]["tests"]
        tests = [test for test in tests if test["status"] not in _UNCOUNTED]
        return [
            Check(name=test["name"], family=_family(test, families), passed=float(test["status"] == "passed"))
            for test in tests
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise VerifierError(f"ctrf.json is not a CTRF report: {error!r}"[:300]) from None


def _family(test: dict[str, Any], families: dict[str, list[str]]) -> str:
    """By the task's patterns, else the suite, the first tag, the test's file or class, else one family for all."""
    if families:
        name = test["name"]
        return next((f for f, ps in families.items() if any(fnmatch.fnmatchcase(name, p) for p in ps)), _OTHER)
    suite = test.get("suite")
    if suite:
        return suite if isinstance(suite, str) else " > ".join(map(str, suite))
    if test.get("tags"):
        return str(test["tags"][0])
    if "::" in test["name"]:
        return test["name"].rpartition("::")[0]
    return test.get("filePath") or _OTHER
