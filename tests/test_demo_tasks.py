"""The demo's tasks: every kind is solved by its solution and by nothing else."""

import asyncio

import pytest

from rsi_fast import config as run_config
from rsi_fast.demo.kinds import KINDS, NAMES, make_instance, needs_output, split_of
from rsi_fast.demo.tasks import write_task, write_tasks
from rsi_fast.sandbox import open_sandbox
from rsi_fast.tasks import Task, load_task, load_task_set
from rsi_fast.verifier import Verdict, verify


async def attempt(task: Task, commands: list[str]) -> Verdict:
    sandbox = open_sandbox(run_config.Sandbox())
    await sandbox.start(task)
    for command in commands:
        await sandbox.run(command, 5.0, 1000)
    return await verify(task, sandbox, 5.0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_solution_earns_strict_success_and_nothing_else_does(kind, tmp_path):
    for i in range(6):
        instance = make_instance(kind, ("train", "dev", "heldout")[i % 3], f"test/{i}")
        write_task(tmp_path / f"{kind}-{i}", instance, "train")
        task = load_task(tmp_path / f"{kind}-{i}")
        solved = asyncio.run(attempt(task, instance.commands))
        assert solved.success, (instance, solved.checks)
        assert len(solved.checks) >= 3
        assert len({check.family for check in solved.checks}) >= 2
        idle = asyncio.run(attempt(task, []))
        assert not idle.success
        for mistake in instance.mistakes:
            verdict = asyncio.run(attempt(task, mistake))
            assert not verdict.success, (instance.instruction, mistake)
        vandal = asyncio.run(attempt(task, [*instance.commands, "touch extra"]))
        assert not vandal.success


def test_the_solution_script_is_what_was_checked(tmp_path):
    instance = make_instance("look_set_from", "train", "s")
    write_task(tmp_path / "t", instance, "train")
    assert (tmp_path / "t/solution/solve.sh").read_text().splitlines()[1:] == instance.commands


def test_there_are_enough_kinds_and_turns():
    assert len(KINDS) >= 20
    assert sum(map(needs_output, KINDS)) * 3 >= len(KINDS)
    turns = [len(make_instance(kind, "train", str(i)).commands) + 1 for kind in KINDS for i in range(5)]
    assert sum(turns) / len(turns) >= 3.1


def test_what_must_be_read_stands_in_no_instruction():
    for kind in filter(needs_output, KINDS):
        instance = make_instance(kind, "train", "x")
        words = {name for name in NAMES if name in " ".join(instance.commands)}
        assert any(name not in instance.instruction for name in words), instance


def test_splits_share_no_combination_of_kind_place_and_name():
    used: dict[str, set[tuple[str, int, str]]] = {}
    for split in ("train", "dev", "heldout"):
        for kind in KINDS:
            for i in range(20):
                instance = make_instance(kind, split, f"{i}")
                words = instance.instruction.replace(".", " ").split()
                used.setdefault(split, set()).update((kind, p, w) for p, w in enumerate(words) if w in NAMES)
    assert not used["train"] & used["heldout"]
    assert not used["train"] & used["dev"]
    assert not used["dev"] & used["heldout"]
    assert {split_of("replace", 1, name) for name in NAMES} == {"train", "dev", "heldout"}


def test_the_same_seed_gives_the_same_set(tmp_path):
    for name in ("a", "b"):
        write_tasks(tmp_path / name, "train", 30, seed=4)
    first, second = (sorted(p for p in (tmp_path / n).rglob("*") if p.is_file()) for n in ("a", "b"))
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]
    assert len(load_task_set(run_config.TaskSet(path=tmp_path / "a"), 0, tmp_path)) == 30
