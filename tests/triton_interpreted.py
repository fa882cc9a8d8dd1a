"""Tests of the Triton kernels in Triton's interpreter, run by test_triton.py in a process of its own.

TRITON_INTERPRET=1 has to be set before anything imports Triton, so these cannot share a process with compiled kernels.
"""

import pytest
import torch
from kernel_checks import (
    OPTIONS,
    PER_TOKEN,
    as_float64,
    assert_as_good_as,
    option_arguments,
    packed,
    poisoned,
    random_trajectories,
    tensors,
    vectors,
)
from rsi_kernels import reference, runtime
from rsi_kernels.turn_gae_triton import launch

assert runtime.interpreting(), "run with TRITON_INTERPRET=1"
pytestmark = pytest.mark.usefixtures(poisoned.__name__)


def kernel(block, group, **inputs):
    """launch with the keywords of turn_gae."""
    defaults = dict.fromkeys(
        ("token_rewards", "turn_rewards", "final_rewards", "bootstrap_values", "critic_lam", "cu_seqlens")
    )
    arguments = defaults | dict(gamma=1.0, lam=0.95, token_gamma=1.0, token_lam=1.0) | inputs
    turn_credit = arguments.pop("credit", "token") == "turn"
    return launch(**arguments, turn_credit=turn_credit, block=block, group=group)


@pytest.mark.parametrize("case", vectors("turn_gae"))
def test_worked_examples(case):
    inputs = tensors(case["inputs"])
    for actual, key in zip(kernel(16, 2, **inputs), ("advantages", "returns"), strict=True):
        torch.testing.assert_close(actual, torch.tensor(case[key]), rtol=0, atol=2e-6)
        assert (actual[inputs["action_mask"] == 0] == 0).all()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("length", "block", "group"), [(1, 16, 2), (33, 8, 2), (128, 128, 4)])
def test_agrees_with_the_reference(options, length, block, group):
    """One token, one past a chunk, several groups of chunks, exactly one chunk; gaps of whole chunks."""
    inputs = random_trajectories(length, 2, length, turn_tokens=12, gap_tokens=20) | option_arguments(options, 2)
    exact, plain = reference.turn_gae(**as_float64(inputs)), reference.turn_gae(**inputs)
    for actual, e, p in zip(kernel(block, group, **inputs), exact, plain, strict=True):
        assert_as_good_as(actual, e, p, 2e-6)


@pytest.mark.parametrize("options", [OPTIONS[2], OPTIONS[6]])
def test_padded_and_packed_agree_bit_for_bit(options):
    """An empty row, one token, one past a chunk; and 24 columns of padding more, which make another group of chunks."""
    lengths = [33, 0, 17, 1]
    inputs = random_trajectories(5, 4, 33, gap_tokens=9) | option_arguments(options, 4)
    for b, n in enumerate(lengths):
        inputs["action_mask"][b, n:] = False
        inputs["token_rewards"][b, n:] = 0
    padded, flat = kernel(8, 2, **inputs), kernel(8, 2, **packed(inputs, lengths))
    longer = inputs | {k: torch.nn.functional.pad(inputs[k], (0, 24)) for k in PER_TOKEN}
    for x, y, z in zip(padded, flat, kernel(8, 2, **longer), strict=True):
        assert torch.equal(torch.cat([x[i, :n] for i, n in enumerate(lengths)]), y)
        assert torch.equal(x, z[:, :33])
        assert not z[:, 33:].any()


def test_batch_order_changes_nothing_bit_for_bit():
    inputs = random_trajectories(6, 4, 40)
    order = torch.tensor([2, 0, 3, 1])
    shuffled = {k: v[order] for k, v in inputs.items()}
    for x, y in zip(kernel(16, 2, **inputs), kernel(16, 2, **shuffled), strict=True):
        assert torch.equal(x[order], y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_and_strides(dtype):
    inputs = random_trajectories(7, 2, 40)
    inputs["values"] = inputs["values"].to(dtype)
    expected = kernel(16, 2, **inputs)
    other = inputs | dict(
        values=inputs["values"].t().contiguous().t(),
        action_mask=inputs["action_mask"].long() * 5,
        turn_ids=inputs["turn_ids"].long(),
    )
    for x, y in zip(kernel(16, 2, **other), expected, strict=True):
        assert x.dtype == torch.float32
        assert torch.equal(x, y)


def test_turn_ids_beyond_32_bits():
    inputs = random_trajectories(8, 2, 40)
    del inputs["turn_rewards"]
    far = inputs | dict(turn_ids=inputs["turn_ids"].long() + 2**40)
    assert torch.equal(kernel(16, 2, **far, credit="turn")[0], kernel(16, 2, **inputs, credit="turn")[0])


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_empty_input(shape):
    zeros = torch.zeros(shape)
    assert kernel(16, 2, values=zeros, action_mask=zeros.int(), turn_ids=zeros.int())[0].shape == shape


def test_rows_without_action_tokens():
    """All masked: zeros, rewards dropped, and the values (NaN) unread."""
    nan, ones = torch.full((2, 20), float("nan")), torch.ones(2, 20)
    out = kernel(8, 2, values=nan, action_mask=ones.int() * 0, turn_ids=ones.int(), token_rewards=ones,
                 turn_rewards=ones, final_rewards=ones[:, 0], bootstrap_values=ones[:, 0], credit="turn")  # fmt: skip
    assert not out[0].any()
    assert not out[1].any()
