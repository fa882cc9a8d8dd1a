"""Writes demo tasks as Harbor task folders."""

import shlex
from pathlib import Path

from rsi_fast.demo.kinds import KINDS, Instance, make_instance

TASK_TOML = """version = "1.0"

[metadata]
kind = "{kind}"
split = "{split}"

[metadata.families]
files = ["files/*"]
content = ["content/*"]
no_collateral = ["no_collateral/*"]

[verifier]
timeout_sec = 5.0
"""

DOCKERFILE = """FROM bash:5
WORKDIR /app
COPY files/ /app/
"""  # empty directories follow as RUN lines

TEST_HEAD = """#!/bin/bash
# Checks the files of /app; the verdict goes to reward.txt, every check to ctrf.json.
cd /app || exit 1
mkdir -p /logs/verifier
tests=""
failed=0
check() { # name, exit status of the test before
  status=passed
  if [ "$2" != 0 ]; then status=failed; failed=1; fi
  tests="$tests${tests:+,}{\\"name\\":\\"$1\\",\\"status\\":\\"$status\\",\\"duration\\":0}"
}
"""

TEST_TAIL = """
printf '{"results":{"tool":{"name":"test.sh"},"tests":[%s]}}' "$tests" > /logs/verifier/ctrf.json
if [ "$failed" = 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""


def write_tasks(folder: Path, split: str, count: int, seed: int) -> None:
    """`count` tasks of the split, all kinds in turn, as folders named "<kind>-<number>"."""
    kinds = list(KINDS)
    for i in range(count):
        kind = kinds[i % len(kinds)]
        write_task(folder / f"{kind}-{i:06d}", make_instance(kind, split, f"{seed}/{i}"), split)


def write_task(folder: Path, instance: Instance, split: str) -> None:
    files = folder / "environment" / "files"
    files.mkdir(parents=True)
    for path, content in instance.files.items():
        (files / path).parent.mkdir(parents=True, exist_ok=True)
        (files / path).write_text(content)
    for name in ("tests", "solution"):
        (folder / name).mkdir()
    empty = "".join(f"RUN mkdir -p {directory}\n" for directory in instance.directories)
    (folder / "environment" / "Dockerfile").write_text(DOCKERFILE + empty)
    (folder / "task.toml").write_text(TASK_TOML.format(kind=instance.kind, split=split))
    (folder / "instruction.md").write_text(instance.instruction + "\n")
    (folder / "tests" / "test.sh").write_text(test_script(instance))
    (folder / "solution" / "solve.sh").write_text("#!/bin/bash\n" + "\n".join(instance.commands) + "\n")


def test_script(instance: Instance) -> str:
    script = [TEST_HEAD]

    def check(name: str, test: str) -> None:
        script.append(f"{test}\ncheck {shlex.quote(name)} $?")

    for path, content in instance.want.items():
        check(f"files/{path} is there", f"[ -f {path} ]")
        check(f"content/{path}", f"printf %s {shlex.quote(content)} | cmp -s - {path}")
    for path in instance.gone:
        check(f"files/{path} is gone", f"[ ! -e {path} ]")
    for path in instance.made:
        check(f"files/{path} is a directory", f"[ -d {path} ]")
    for path in instance.executable:
        check(f"files/{path} is executable", f"[ -x {path} ]")

    touched = {*instance.want, *instance.gone, *instance.made}
    kept = {path: text for path, text in instance.files.items() if path not in touched}
    same = " && ".join(f"printf %s {shlex.quote(text)} | cmp -s - {path}" for path, text in kept.items())
    check("no_collateral/other files are as they were", same)
    allowed = {*instance.want, *instance.made, *kept, *instance.directories} - set(instance.gone)
    allowed |= {path.rpartition("/")[0] for path in allowed if "/" in path}
    listing = "\\n".join(sorted(f"./{path}" for path in allowed) + [""])
    check(
        "no_collateral/nothing else is there",
        f"find . -mindepth 1 | LC_ALL=C sort > /tmp/found && printf '{listing}' | cmp -s - /tmp/found",
    )
    return "\n".join(script) + TEST_TAIL
