"""Trajectories and orders on disk."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsi_fast.errors import UserError
from rsi_fast.spool import Order, Spool, Trajectory, Turn, write_json_atomic
from rsi_fast.trainer.rollouts import read_from


def order(name: str = "01-ppo-0000", tasks: int = 3) -> Order:
    names = [f"t{i}" for i in range(tasks)]
    return Order(name=name, task_set="train", tasks=names, weight_version=1, temperature=1.0, seed=5)


def trajectory(ids: list[int], logprobs: list[float] | None = None) -> Trajectory:
    return Trajectory(
        id="x/0",
        task="t0",
        token_ids=ids,
        action_mask=[1] * len(ids),
        turn_ids=[0] * len(ids),
        behaviour_logprobs=[-1.0] * len(ids) if logprobs is None else logprobs,
        turns=[Turn(reply="ls", command="ls", observation="a\n", weight_version=0)],
        finish_reason="submit",
    )


@given(st.lists(st.integers(0, 300_000), max_size=50), st.lists(st.floats(-50, 0), max_size=50))
def test_what_is_written_is_read(tmp_path_factory, ids, logprobs):
    n = min(len(ids), len(logprobs))
    spool = Spool(tmp_path_factory.mktemp("spool"))
    written = trajectory(ids[:n], logprobs[:n])
    spool.write(order(tasks=1), 0, written)
    assert spool.read(order(tasks=1)) == [written]


def test_missing_names_what_is_to_be_done(tmp_path):
    spool = Spool(tmp_path)
    assert spool.missing(order()) == [0, 1, 2]
    spool.write(order(), 1, trajectory([1]))
    assert spool.missing(order()) == [0, 2]
    with pytest.raises(FileNotFoundError):
        spool.read(order())


def test_half_written_files_do_not_count(tmp_path):
    spool = Spool(tmp_path)
    spool.write(order(), 0, trajectory([1]))
    (spool.spool_dir / order().name / ".00001.json.abc").write_text("{")
    assert spool.missing(order()) == [1, 2]


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_json_atomic(tmp_path / "a.json", "{}")
    assert list(tmp_path.iterdir()) == []


def test_orders_come_oldest_first_and_only_once(tmp_path):
    spool = Spool(tmp_path)
    for name in ("02-ppo-0001", "02-ppo-0000", "01-critic-0000", "02-ppo-eval", "00-base-eval"):
        spool.give_order(order(name))
    spool.give_order(order("02-ppo-0000"))  # the same again is fine
    names = [o.name for o in spool.orders()]
    assert names == ["00-base-eval", "01-critic-0000", "02-ppo-0000", "02-ppo-0001", "02-ppo-eval"]
    assert [o.name for o in spool.orders(skip={"00-base-eval", "02-ppo-eval"})] == names[1:4]


def test_an_order_never_changes(tmp_path):
    spool = Spool(tmp_path)
    spool.give_order(order())
    with pytest.raises(ValueError, match="differs from the one this run would give"):
        spool.give_order(order(tasks=4))


def test_training_from_a_spool_takes_its_orders_as_they_are_and_names_what_lacks(tmp_path):
    spool = Spool(tmp_path)
    standing = order("02-ppo-0000", tasks=2)
    spool.give_order(standing)
    spool.write(standing, 1, trajectory([1, 2]))
    with pytest.raises(UserError, match="lacks 1 of 2 trajectories of 02-ppo-0000"):
        read_from(spool, "02-ppo-0000")
    spool.write(standing, 0, trajectory([3]))
    assert [t.token_ids for t in read_from(spool, "02-ppo-0000")] == [[3], [1, 2]]
    with pytest.raises(UserError, match="lacks the order 02-ppo-0001"):
        read_from(spool, "02-ppo-0001")


@pytest.mark.parametrize("damage", [b"", b'{"id": "x/0", "ta', b"\xff\xfe", b"{}"])
def test_a_damaged_file_is_named(tmp_path, damage):
    spool = Spool(tmp_path)
    standing = order(tasks=1)
    spool.write(standing, 0, trajectory([1]))
    [path] = spool.spool_dir.rglob("*.json")
    path.write_bytes(damage)
    with pytest.raises(UserError, match=f"{path} is damaged"):
        spool.read(standing)


def test_lists_of_different_length_are_refused():
    """Trap 22: log-probs that do not match the ids."""
    with pytest.raises(ValueError, match="lists of different length"):
        trajectory([1, 2, 3], logprobs=[-1.0, -2.0])


def test_unknown_fields_are_refused(tmp_path):
    text = trajectory([1]).model_dump_json().replace('"task"', '"tusk"', 1)
    with pytest.raises(ValueError, match="tusk"):
        Trajectory.model_validate_json(text)
