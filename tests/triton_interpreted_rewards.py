"""Tests of the reward kernel in Triton's interpreter, run by test_triton.py (see triton_interpreted.py)."""

import pytest
import torch
from kernel_checks import NAN, as_on_a_gpu, assert_as_good_as, poisoned, vectors
from rsi_kernels import family_rewards, reference, reward_triton, runtime

assert runtime.interpreting(), "run with TRITON_INTERPRET=1"
pytestmark = pytest.mark.usefixtures(poisoned.__name__)


def kernel(passed, family, success, family_weights=None, partial_cap=0.4, num_families=None, block=16, families=4):
    if num_families is None:
        num_families = int(family.max()) + 1 if family_weights is None else len(family_weights)
    return reward_triton.launch(passed, family, success, family_weights, num_families, partial_cap, block, families)


def case(seed, num_rows, num_checks, num_families=6, dtype=torch.float32, ids=torch.int32):
    """A quarter of the slots empty, with NaN there; one family in no row, the last one in the first row."""
    g = torch.Generator().manual_seed(seed)
    family = torch.randint(0, max(num_families, 1), (num_rows, num_checks), generator=g, dtype=ids)
    family[(torch.rand(family.shape, generator=g) < 0.25) | (family == 1) | (family >= num_families)] = -1
    if family.numel():
        family[0, -1] = num_families - 1
    passed = torch.rand(num_rows, num_checks, generator=g)
    if dtype.is_floating_point:
        passed = passed.where(family >= 0, torch.tensor(NAN)).to(dtype)
    else:
        passed = (passed > 0.4).to(dtype)
    weights = torch.rand(num_families, generator=g) * (torch.arange(num_families) != 2)
    return passed, family, torch.rand(num_rows, generator=g) < 0.3, weights


def check(passed, family, success, weights=None, **how):
    actual = kernel(passed, family, success, weights, 0.7, **how)
    exact = reference.family_rewards(passed, family, success, family_weights=weights, partial_cap=0.7)
    for a, e in zip(actual, exact, strict=True):
        assert a.dtype == torch.float32
        assert a.isnan().equal(e.isnan())
        assert_as_good_as(a, e, e.float(), 5e-7)
    return actual


@pytest.mark.parametrize("case", vectors("family_rewards"))
def test_worked_examples(case):
    passed, family, success = (torch.tensor(case[k]) for k in ("passed", "family", "success"))
    weights = None if case["weights"] is None else torch.tensor(case["weights"])
    actual = kernel(passed, family, success, weights, case["partial_cap"])
    expected = torch.tensor([[NAN if x is None else x for x in row] for row in case["family_fraction"]])
    for a, e in zip(actual, (torch.tensor(case["reward"]), torch.tensor(case["phi"]), expected), strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(("num_checks", "num_families"), [(1, 1), (7, 4), (16, 5), (17, 4), (50, 11)])
def test_blocks_of_checks_and_families(num_checks, num_families):
    """Around one block of each, and several."""
    passed, family, success, weights = case(num_checks, 3, num_checks, num_families)
    check(passed, family, success, weights)
    check(passed, family, success)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float16]
)
def test_dtypes(dtype):
    ids = torch.int64 if dtype in (torch.uint8, torch.bfloat16) else torch.int32
    passed, family, success, weights = case(1, 3, 21, dtype=dtype, ids=ids)
    expected = check(passed, family, success, weights)
    for other in (success.long() * 3, success.to(torch.uint8)):
        for a, e in zip(kernel(passed, family, other, weights, 0.7), expected, strict=True):
            assert torch.equal(a.nan_to_num(-1), e.nan_to_num(-1))


def test_the_sizes_that_are_launched():
    passed, family, success, weights = case(2, 2, 300, 19)
    check(passed, family, success, weights, block=reward_triton.BLOCK, families=reward_triton.FAMILIES)


@pytest.mark.parametrize("num_families", [3, 5, 0])
@pytest.mark.parametrize("unknown", ["the next", "minus two", "beyond 32 bits"])
def test_unknown_ids_make_their_row_nan(num_families, unknown):
    """Also one that shares its block of 4 with known ones; other rows do not notice."""
    passed, family, success = torch.ones(4, 20), torch.full((4, 20), min(num_families, 1) - 1).long(), torch.zeros(4)
    bad = {"the next": num_families, "minus two": -2, "beyond 32 bits": 2**32}[unknown]
    family[1, 18], family[2, 0], success[2] = bad, bad, 1
    weights = torch.ones(num_families)
    reward, progress, fraction = kernel(passed, family, success.int(), weights)
    expected = 1.0 if num_families else 0.0
    assert progress.isnan().tolist() == [False, True, True, False]
    assert reward.isnan().tolist() == [False, True, False, False]
    assert progress[0] == progress[3] == expected
    assert reward[2] == 1
    assert fraction.shape == (4, num_families)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
@pytest.mark.parametrize("num_families", [0, 2])
def test_no_rows_or_no_checks(shape, num_families):
    success = torch.arange(shape[0]) % 2
    reward, progress, fraction = kernel(
        torch.zeros(shape), torch.zeros(shape).int(), success, num_families=num_families
    )
    assert torch.equal(reward, success.float())
    assert torch.equal(progress, torch.zeros(shape[0]))
    assert fraction.shape == (shape[0], num_families)
    assert fraction.isnan().all()


def test_partial_credit_that_is_nan_is_not_hidden():
    passed, family = torch.ones(2, 5), torch.zeros(2, 5).int()
    passed[0, 3] = NAN
    reward, progress, fraction = kernel(passed, family, torch.zeros(2).bool())
    for x in (reward, progress, fraction[:, 0]):
        assert x.isnan().tolist() == [True, False]


# The public operation on this kernel


@pytest.mark.parametrize("weights", [None, [1.0, 0.0, 2.0, 0.5, 1.0, 3.0]])
def test_family_rewards(monkeypatch, weights):
    passed, family, success, _ = case(4, 9, 33)
    strided = passed.t().contiguous().t(), family.t().contiguous().t(), success.repeat_interleave(2)[::2]
    expected = family_rewards(passed, family, success, family_weights=weights)
    with as_on_a_gpu(monkeypatch):
        actual = family_rewards(passed, family, success, family_weights=weights)
        again = family_rewards(*strided, family_weights=weights)
    for a, b, e in zip(actual, again, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-6, equal_nan=True)
        assert torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights(monkeypatch, dtype):
    passed, family, success, weights = case(5, 4, 10)
    low = weights.to(dtype)
    with as_on_a_gpu(monkeypatch):
        actual = family_rewards(passed, family, success, family_weights=low)
        expected = family_rewards(passed, family, success, family_weights=low.float())
    assert torch.equal(actual.reward, expected.reward)
