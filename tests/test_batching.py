"""Shifts, dealing and micro-batches of the trainer."""

import random

import pytest
import torch

from rsi_fast.spool import Trajectory
from rsi_fast.trainer.batching import (
    Cut,
    MicroBatch,
    Sample,
    prediction_targets,
    to_token_positions,
)

CPU = torch.device("cpu")


def sample(length: int, actions: tuple[int, ...] = ()) -> Sample:
    mask = torch.zeros(length, dtype=torch.bool)
    mask[list(actions)] = True
    return Sample(torch.arange(length), mask, torch.zeros(length, dtype=torch.int32), torch.zeros(length))


def test_logprob_of_a_token_comes_from_the_state_before_it():
    """Trap 4, off by one: a model that always predicts its own input plus one is right about every token."""
    token_ids = torch.tensor([[3, 4, 5, 6]])
    action_mask = torch.tensor([[False, True, False, True]])
    targets, mask = prediction_targets(token_ids, action_mask)
    prediction = token_ids + 1
    assert torch.equal(prediction[mask], targets[mask])
    assert to_token_positions(mask).tolist() == action_mask.tolist()


def test_the_last_state_predicts_nothing_and_the_first_token_has_no_state():
    _, mask = prediction_targets(torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 3, dtype=torch.bool))
    assert mask.tolist() == [[True, True, False]]
    assert to_token_positions(torch.tensor([[1.0, 2.0, 3.0]])).tolist() == [[0.0, 1.0, 2.0]]


def test_an_action_token_without_prefix_is_refused():
    trajectory = Trajectory(
        id="x/0",
        task="t",
        token_ids=[1],
        action_mask=[1],
        turn_ids=[0],
        behaviour_logprobs=[0.0],
        turns=[],
        finish_reason="submit",
    )
    with pytest.raises(ValueError, match="x/0 begins with an action token"):
        Sample.from_trajectory(trajectory)


def lengths_of(samples: list[Sample]) -> list[int]:
    return [len(s) for s in samples]


def random_samples(count: int, longest: int, seed: int = 0) -> list[Sample]:
    rng = random.Random(seed)
    return [sample(rng.randint(1, longest)) for _ in range(count)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("attention_length", [50.0, 1e9])
def test_every_sample_is_dealt_once_and_ranks_get_alike_costs(world_size, attention_length):
    samples = random_samples(57, 100)
    cut = Cut(256, True, attention_length)
    hands = cut.deal(samples, world_size)
    assert sorted(id(s) for hand in hands for s in hand) == sorted(map(id, samples))
    costs = [sum(cut.cost(len(s)) for s in hand) for hand in hands]
    assert max(costs) - min(costs) <= cut.cost(min(map(len, samples)) + 10)


def test_ranks_are_balanced_by_operations_not_by_number_or_tokens():
    """One sample of 100 tokens costs as much as 55 of 10 where attention takes as much as the rest at length 10."""
    samples = [sample(100), *(sample(10) for _ in range(55))]
    one, other = Cut(1000, True, attention_length=10.0).deal(samples, 2)
    assert lengths_of(one) == [100]
    assert len(other) == 55
    one, other = Cut(1000, True, attention_length=1e9).deal(samples, 2)
    assert sum(lengths_of(one)) == pytest.approx(sum(lengths_of(other)), abs=10)


@pytest.mark.parametrize("packed", [False, True])
def test_micro_batches_hold_the_token_budget_and_are_equal_in_number(packed):
    cut = Cut(256, packed, 1000.0)
    hands = [random_samples(100, 64), random_samples(3, 64, seed=1), []]
    groups = cut.groups(hands)
    assert {len(own) for own in groups} == {len(groups[0])}
    assert [sorted(id(s) for g in own for s in g) for own in groups] == [sorted(map(id, hand)) for hand in hands]
    batches = [cut.micro_batches(hands, rank, CPU) for rank in range(3)]
    assert all(b.token_ids.numel() <= 256 for own in batches for b in own)
    assert all(b.token_ids.shape == (1, 1) and not b.samples for b in batches[2])
    needed = sum(map(len, hands[0])) / 256
    assert len(batches[0]) <= 1.2 * needed, "little room is lost"


def test_waste_by_hand():
    hands = [[sample(4), sample(2)], [sample(3)]]  # padded: 2 x 4 and 1 x 3 tokens for 9; one rank waits 5 of 2 x 8
    waste = Cut(8, False, 1e9).waste(hands)
    assert waste == {"batch/padding": pytest.approx(2 / 11), "batch/imbalance": pytest.approx(5 / 16)}
    packed = Cut(8, True, 1e9)
    assert packed.waste(hands) == {"batch/padding": 0.0, "batch/imbalance": pytest.approx(3 / 12)}
    assert packed.waste([[], []]) == {"batch/padding": 0.0, "batch/imbalance": 0.0}


def test_a_packed_micro_batch_says_where_its_samples_lie():
    batch = MicroBatch.of([sample(3), sample(1), sample(2)], CPU, packed=True)
    assert batch.token_ids.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert batch.apart["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1]]
    assert batch.apart["cu_seq_lens_q"].tolist() == [0, 3, 4, 6]
    assert batch.apart["max_length_q"] == 3


def test_no_samples_make_one_masked_token():
    batch = MicroBatch.of([], CPU)
    assert batch.token_ids.shape == (1, 1)
    assert not batch.action_mask.any()
    assert batch.stack("values").tolist() == [[0.0]]


@pytest.mark.parametrize("packed", [False, True])
def test_stack_and_unstack_are_inverse(packed):
    samples = [sample(3, (1,)), sample(5, (2, 4))]
    batch = MicroBatch.of(samples, CPU, packed)
    x = torch.rand(batch.token_ids.shape)
    batch.unstack("old_values", x)
    assert [s.values["old_values"].shape for s in samples] == [(3,), (5,)]
    assert torch.equal(batch.stack("old_values"), torch.where(batch.action_mask, x, 0.0))
    assert all((s.values["old_values"] > 0).equal(s.action_mask) for s in samples)
