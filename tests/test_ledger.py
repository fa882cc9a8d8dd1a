"""Every trajectory is consumed once or dropped with a reason; and which tasks come next."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_spool import order, trajectory

from rsi_fast.config import Curriculum
from rsi_fast.errors import UserError
from rsi_fast.spool import Spool, Turn
from rsi_fast.trainer.curriculum import History, draw
from rsi_fast.trainer.ledger import Ledger, find_problems


def finish(spool: Spool, work, index: int, versions=(1,), **changes) -> None:
    turns = [Turn(reply="", command=None, observation=None, weight_version=v) for v in versions]
    spool.write(work, index, trajectory([1, 2]).model_copy(update={"turns": turns, "task": f"t{index}"} | changes))


@pytest.fixture
def two_orders(tmp_path):
    spool, orders = Spool(tmp_path), [order("01-ppo-0000"), order("01-ppo-0001")]
    for work in orders:
        spool.give_order(work)
    return spool, orders, Ledger(tmp_path)


def test_without_lookahead_a_round_is_its_order(two_orders):
    spool, [first, _], ledger = two_orders
    finish(spool, first, 0)
    finish(spool, first, 2)
    with pytest.raises(UserError, match="1 of the round's 3 trajectories were still missing"):
        ledger.take([first], 3, version=1, max_staleness=0, timeout_s=0.0)
    finish(spool, first, 1, invalid_reason="VerifierError: crashed")
    taken = ledger.take([first], 3, version=1, max_staleness=0, timeout_s=0.0)
    assert list(taken.trajectories) == ["01-ppo-0000/00000", "01-ppo-0000/00002"]
    assert taken.dropped == {"01-ppo-0000/00001": "invalid: VerifierError: crashed"}


def test_with_lookahead_a_round_takes_what_is_there_and_leaves_the_slow_for_later(two_orders):
    spool, orders, ledger = two_orders
    finish(spool, orders[0], 0)
    finish(spool, orders[0], 2)
    finish(spool, orders[1], 1)
    taken = ledger.take(orders, 3, version=1, max_staleness=1, timeout_s=0.0)
    ledger.record("01-ppo-0000", taken)
    assert list(taken.trajectories) == ["01-ppo-0000/00000", "01-ppo-0000/00002", "01-ppo-0001/00001"]
    for work, index in ((orders[0], 1), (orders[1], 0), (orders[1], 2)):
        finish(spool, work, index, versions=(1, 2))
    rest = ledger.take(orders, 3, version=2, max_staleness=1, timeout_s=0.0)
    ledger.record("01-ppo-0001", rest)
    assert list(rest.trajectories) == ["01-ppo-0000/00001", "01-ppo-0001/00000", "01-ppo-0001/00002"]
    assert find_problems(ledger.spool.spool_dir.parent) == []


def test_too_old_ones_are_dropped_and_do_not_hold_up_the_round(two_orders):
    spool, orders, ledger = two_orders
    for index in range(3):
        finish(spool, orders[0], index, versions=(1, 3) if index else (3, 3))
        finish(spool, orders[1], index, versions=(2,))
    taken = ledger.take(orders, 6, version=3, max_staleness=1, timeout_s=0.0)
    assert len(taken.trajectories) == 4
    assert taken.counts() == {"rollout/invalid": 0, "rollout/stale": 2, "rollout/attempts": 6}
    assert taken.dropped["01-ppo-0000/00001"] == "stale: sampled by weights 1, the actor is at 3"


def test_a_round_of_nothing_fit_says_why(two_orders):
    spool, [first, _], ledger = two_orders
    for index in range(3):
        finish(spool, first, index, invalid_reason="SandboxError: no space")
    with pytest.raises(UserError, match="no trajectory of the round can be trained on(.|\n)*SandboxError: no space"):
        ledger.take([first], 3, version=1, max_staleness=0, timeout_s=0.0)


def test_rounds_that_come_again_are_taken_again(two_orders):
    spool, orders, ledger = two_orders
    for work in orders:
        for index in range(3):
            finish(spool, work, index)
        ledger.record(work.name, ledger.take([work], 3, version=1, max_staleness=0, timeout_s=0.0))
    again = Ledger(spool.spool_dir.parent)  # as a resumed trainer has it
    again.remove_from("01-ppo-0001")
    assert list(again.entries()) == ["01-ppo-0000"]
    assert len(again.take([orders[1]], 3, version=1, max_staleness=0, timeout_s=0.0).trajectories) == 3


def test_what_a_closed_stage_leaves_is_dropped(two_orders):
    spool, orders, ledger = two_orders
    for index in range(3):
        finish(spool, orders[0], index)
    ledger.record("01-ppo-0000", ledger.take(orders[:1], 3, version=1, max_staleness=1, timeout_s=0.0))
    finish(spool, orders[1], 0)
    run_dir = spool.spool_dir.parent
    assert find_problems(run_dir) == ["01-ppo-0001/00000 was neither consumed nor dropped"]
    for _ in range(2):  # the second after a kill
        ledger.close("01-ppo-0000", orders)
    finish(spool, orders[1], 1)  # was under way
    assert find_problems(run_dir) == []
    dropped = ledger.entries()["01-ppo-0000"]["dropped"]
    assert dropped == {f"01-ppo-0001/0000{i}": "the stage was over" for i in range(3)}


def test_problems_of_a_ledger_are_found(two_orders):
    spool, orders, ledger = two_orders
    for index in range(2):
        finish(spool, orders[0], index)
    entry = {"consumed": {"01-ppo-0000/00000": ["t0", True]}, "dropped": {}}
    ledger.folder.mkdir()
    for name in ("01-ppo-0000", "01-ppo-0001"):
        (ledger.folder / f"{name}.json").write_text(json.dumps(entry))
        entry = entry | {"consumed": entry["consumed"] | {"01-ppo-0001/00002": ["t2", False]}}
    assert find_problems(spool.spool_dir.parent) == [
        "01-ppo-0000/00000 was consumed by 01-ppo-0000 and consumed by 01-ppo-0001",
        "01-ppo-0000/00001 was neither consumed nor dropped",
        "01-ppo-0001/00002 was consumed and is not in the spool",
    ]


NAMES = [f"t{i}" for i in range(7)]


@given(st.integers(0, 5), st.integers(1, 20), st.integers(0, 100))
def test_without_rules_the_draw_is_shuffled_passes(seed, count, start):
    tasks, after = draw(NAMES, count, seed, start, History(), Curriculum())
    assert after == start + count
    again, _ = draw(NAMES, count + 50, seed, start, History(), Curriculum())
    assert again[:count] == tasks
    first_pass = draw(NAMES, 7, seed, 0, History(), Curriculum())[0]
    assert sorted(first_pass) == NAMES


def history(rounds: int = 3) -> History:
    found = History()
    for i in range(rounds):
        found.add_round([("t0", True), ("t1", False), ("t2", i % 2 == 0)])
    return found


def test_always_and_never_solved_tasks_rest_for_a_while():
    rules = Curriculum(attempts=3, rest_rounds=2, floor=1e-9)
    past = history()
    assert [name for name in NAMES if past.rests(name, rules)] == ["t0", "t1"]
    tasks, after = draw(NAMES, 10, 0, 0, past, rules)
    assert set(tasks) == set(NAMES[2:])
    assert after == 14
    past.add_round([("t2", True)])
    assert past.rests("t0", rules)
    past.add_round([("t2", False)])
    assert not past.rests("t0", rules), "two rounds without it are over"
    assert not history(rounds=2).rests("t0", rules), "two attempts say too little"


def test_a_part_of_the_resting_tasks_comes_all_the_same():
    rules = Curriculum(attempts=3, rest_rounds=5, floor=0.25)
    tasks, _ = draw(NAMES, 2000, 0, 0, history(), rules)
    share = sum(name in ("t0", "t1") for name in tasks) / (2000 * 2 / 7)
    assert 0.2 < share * (5 + 2 * 0.25) / 7 < 0.3


def test_when_all_tasks_rest_all_come():
    past = History()
    for _ in range(3):
        past.add_round([(name, True) for name in NAMES])
    tasks, _ = draw(NAMES, 7, 0, 0, past, Curriculum(attempts=3))
    assert sorted(tasks) == NAMES
