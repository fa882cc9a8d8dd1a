"""Shifts, dealing and micro-batches of the trainer."""

import random

import pytest
import torch

from rsi_fast.spool import Trajectory
from rsi_fast.trainer.batching import (
    MicroBatch,
    Sample,
    deal,
    prediction_targets,
    split_by_tokens,
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


def test_every_sample_is_dealt_once_and_ranks_get_alike_tokens():
    rng = random.Random(0)
    lengths = [rng.randint(1, 100) for _ in range(57)]
    for world_size in (1, 2, 3, 4):
        hands = deal(lengths, world_size)
        assert sorted(i for hand in hands for i in hand) == list(range(57))
        tokens = [sum(lengths[i] for i in hand) for hand in hands]
        assert max(tokens) - min(tokens) <= 100


def test_micro_batches_hold_the_token_budget():
    rng = random.Random(1)
    samples = [sample(rng.randint(1, 64)) for _ in range(100)]
    groups = split_by_tokens(samples, 256)
    assert sum(len(g) for g in groups) == 100
    assert all(len(g) * max(len(s) for s in g) <= 256 for g in groups)


def test_no_samples_make_one_masked_token():
    batch = MicroBatch.of([], CPU)
    assert batch.token_ids.shape == (1, 1)
    assert not batch.action_mask.any()
    assert batch.stack("values").tolist() == [[0.0]]


def test_stack_and_unstack_are_inverse():
    samples = [sample(3, (1,)), sample(5, (2, 4))]
    batch = MicroBatch.of(samples, CPU)
    x = torch.rand(2, 5)
    batch.unstack("old_values", x)
    assert samples[0].values["old_values"].shape == (3,)
    assert torch.equal(batch.stack("old_values")[1], x[1])
    assert torch.equal(batch.stack("old_values")[0], torch.cat([x[0, :3], torch.zeros(2)]))
