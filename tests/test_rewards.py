"""family_rewards: worked examples, what the definition promises, what bad input gets."""

import pytest
import torch
from kernel_checks import NAN, poisoned, vectors
from rsi_kernels import family_rewards, reference, runtime

pytestmark = pytest.mark.usefixtures(poisoned.__name__)


def arguments(case):
    inputs = {k: torch.tensor(case[k]) for k in ("passed", "family", "success")}
    return inputs | dict(family_weights=case["weights"], partial_cap=case["partial_cap"])


@pytest.mark.parametrize("case", vectors("family_rewards"))
@pytest.mark.parametrize("function", [family_rewards, reference.family_rewards])
def test_worked_examples(case, function):
    reward, progress, fraction = function(**arguments(case))
    expected = torch.tensor([[NAN if x is None else x for x in row] for row in case["family_fraction"]])
    torch.testing.assert_close(reward.float(), torch.tensor(case["reward"]), rtol=0, atol=1e-6)
    torch.testing.assert_close(progress.float(), torch.tensor(case["phi"]), rtol=0, atol=1e-6)
    torch.testing.assert_close(fraction.float(), expected, rtol=0, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("weighted", [False, True])
def test_agrees_with_the_reference(seed, weighted):
    g = torch.Generator().manual_seed(seed)
    rows, num_checks = [(50, 9), (1, 1), (7, 33), (20, 2), (3, 100)][seed]
    family = torch.randint(-1, 6, (rows, num_checks), generator=g, dtype=[torch.int32, torch.int64][seed % 2])
    passed = torch.rand(rows, num_checks, generator=g).where(family >= 0, torch.tensor(NAN))
    success = torch.rand(rows, generator=g) < 0.3
    weights = torch.rand(6, generator=g) * torch.tensor([1, 0, 1, 1, 5, 1]) if weighted else None
    out = family_rewards(passed, family, success, family_weights=weights, partial_cap=0.7)
    expected = reference.family_rewards(passed, family, success, family_weights=weights, partial_cap=0.7)
    for a, e in zip(out, expected, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=0, atol=1e-6, equal_nan=True)


def test_strict_success_beats_every_partial_one():
    family = torch.zeros(2, 3).int()
    out = family_rewards(torch.tensor([[0, 0, 0], [1, 1, 1]]), family, torch.tensor([1, 0]), partial_cap=0.99)
    assert out.reward[0] == 1 > out.reward[1]


def test_trap_duplicated_checks_cannot_raise_progress():
    once = family_rewards(torch.tensor([[1, 0]]), torch.tensor([[0, 1]]), torch.tensor([0]))
    often = family_rewards(torch.tensor([[1] * 50 + [0]]), torch.tensor([[0] * 50 + [1]]), torch.tensor([0]))
    assert once.progress == often.progress == 0.5


def test_weight_sum_of_zero_gives_no_progress():
    out = family_rewards(torch.ones(1, 2), torch.tensor([[0, 0]]), torch.tensor([0]), family_weights=[0.0, 1.0])
    assert out.progress == 0
    assert out.family_fraction[0, 0] == 1


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_no_rows_or_no_checks(shape):
    out = family_rewards(torch.zeros(shape), torch.zeros(shape).int(), torch.ones(shape[0]).bool())
    assert (out.reward == 1).all()
    assert out.progress.shape == (shape[0],)


def test_non_contiguous_input():
    passed, family = torch.rand(9, 4).t(), torch.randint(-1, 3, (9, 4)).t()
    success = torch.zeros(8).bool()[::2]
    out = family_rewards(passed, family, success)
    expected = family_rewards(passed.contiguous(), family.contiguous(), success.contiguous())
    assert torch.equal(out.reward, expected.reward)


GOOD = dict(passed=torch.ones(2, 3), family=torch.zeros(2, 3).int(), success=torch.zeros(2).bool())
BAD = [
    ("passed", torch.ones(2, 3).double(), "float32"),
    ("passed", torch.ones(2, 4), r"shape \[2, 3\]"),
    ("passed", torch.ones(2, 3, device="meta"), "device cpu"),
    ("family", torch.zeros(2, 3), "int32 or int64"),
    ("family", torch.zeros(3).int(), r"shape \[R, C\]"),
    pytest.param("family", torch.full((2, 3), -2), r"\[-1, 0\), got -2 at row 0, check 0", marks=pytest.mark.host),
    ("success", torch.zeros(2), "bool"),
    ("success", torch.zeros(3).bool(), r"shape \[2\]"),
    ("family_weights", torch.ones(1, 1), r"shape \[F\]"),
    ("family_weights", torch.ones(1).double(), "float32"),
    pytest.param("family_weights", [-1.0], "at least 0", marks=pytest.mark.host),
    pytest.param("family_weights", [NAN], "finite", marks=pytest.mark.host),
    ("partial_cap", 1.0, r"\[0, 1\), got 1.0"),
    ("partial_cap", -0.1, "got -0.1"),
    ("partial_cap", NAN, "got nan"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_bad_argument(name, value, message):
    family_rewards(**GOOD)
    with pytest.raises(ValueError, match=rf"^{name}: expected .*{message}"):
        family_rewards(**GOOD | {name: value})


@pytest.mark.host
def test_family_beyond_the_weights():
    with pytest.raises(ValueError, match=r"^family: expected ids in \[-1, 2\), got 2 at row 0, check 1"):
        family_rewards(torch.ones(1, 2), torch.tensor([[0, 2]]), torch.tensor([0]), family_weights=[1.0, 1.0])


@pytest.mark.parametrize("value", [3.0, -0.5, NAN, float("inf")])
def test_a_part_that_passed_is_between_0_and_1(value):
    """More than 1 gave a partial success a reward above a strict one."""
    passed, family = torch.tensor([[1.0, 0.5], [value, value]]), torch.tensor([[0, 0], [-1, 0]], dtype=torch.int32)
    success = torch.tensor([False, False])
    if runtime.uses_triton(family):
        assert family_rewards(passed, family, success).progress[1].isnan()
        return
    with pytest.raises(ValueError, match="^passed: expected parts from 0 to 1, got .* at row 1, check 1"):
        family_rewards(passed, family, success)
