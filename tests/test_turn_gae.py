"""turn_gae on CPU: worked examples, properties, the bugs of other trainers, what bad input gets."""

import sys

import pytest
import torch
from kernel_checks import (
    NAN,
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
from rsi_kernels import reference, turn_gae

pytestmark = pytest.mark.usefixtures(poisoned.__name__)


@pytest.mark.parametrize("case", vectors("turn_gae"))
def test_worked_examples(case):
    expected = [torch.tensor(case[key], dtype=torch.float64) for key in ("advantages", "returns")]
    for actual, exact in zip(reference.turn_gae(**tensors(case["inputs"], torch.float64)), expected, strict=True):
        torch.testing.assert_close(actual, exact, rtol=0, atol=1e-12)
    inputs = tensors(case["inputs"])
    for actual, exact in zip(turn_gae(**inputs), expected, strict=True):
        torch.testing.assert_close(actual.double(), exact, rtol=0, atol=1e-6)
        assert (actual[inputs["action_mask"] == 0] == 0).all()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("seed", range(6))
def test_agrees_with_the_reference(options, seed):
    """All reward forms at once, bootstrap, NaN values and wild turn ids at masked positions."""
    num_rows, length = [(3, 40), (1, 1), (4, 67), (2, 33), (5, 100), (1, 31)][seed]
    inputs = random_trajectories(seed, num_rows, length) | option_arguments(options, num_rows)
    exact, plain = reference.turn_gae(**as_float64(inputs)), reference.turn_gae(**inputs)
    for actual, e, p in zip(turn_gae(**inputs), exact, plain, strict=True):
        assert_as_good_as(actual, e, p)


@pytest.mark.parametrize("form", ["token_rewards", "turn_rewards", "final_rewards", "bootstrap_values"])
@pytest.mark.parametrize("options", OPTIONS[:3])
def test_each_reward_form_alone(form, options):
    inputs = random_trajectories(7)
    inputs = {k: inputs[k] for k in ("values", "action_mask", "turn_ids", form)} | options
    exact, plain = reference.turn_gae(**as_float64(inputs)), reference.turn_gae(**inputs)
    for actual, e, p in zip(turn_gae(**inputs), exact, plain, strict=True):
        assert_as_good_as(actual, e, p)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_values_are_computed_in_fp32(dtype):
    inputs = random_trajectories(3)
    inputs["values"] = inputs["values"].to(dtype)
    out = turn_gae(**inputs)
    assert out.advantages.dtype == out.returns.dtype == torch.float32
    exact = turn_gae(**inputs | {"values": inputs["values"].float()})
    assert torch.equal(out.advantages, exact.advantages)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_mask_and_id_dtypes(mask_dtype, id_dtype):
    inputs = random_trajectories(4)
    expected = turn_gae(**inputs)
    mask = inputs["action_mask"].to(mask_dtype) * (1 if mask_dtype == torch.bool else 3)
    out = turn_gae(**inputs | {"action_mask": mask, "turn_ids": inputs["turn_ids"].to(id_dtype)})
    assert torch.equal(out.returns, expected.returns)


def test_turn_ids_beyond_32_bits():
    inputs = random_trajectories(4)
    del inputs["turn_rewards"]
    expected = turn_gae(**inputs)
    out = turn_gae(**inputs | {"turn_ids": inputs["turn_ids"].long() + 2**40})
    assert torch.equal(out.advantages, expected.advantages)


def test_non_contiguous_input():
    inputs = random_trajectories(5, num_rows=4)
    expected = turn_gae(**inputs)
    strided = {k: inputs[k].t().contiguous().t() for k in PER_TOKEN}
    strided["final_rewards"] = torch.stack([inputs["final_rewards"], torch.zeros(4)], 1)[:, 0]
    out = turn_gae(**inputs | strided)
    assert torch.equal(out.advantages, expected.advantages)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (2, 1)])
def test_empty_and_tiny_input(shape):
    zeros = torch.zeros(shape)
    out = turn_gae(zeros, zeros.int(), zeros.int(), final_rewards=torch.ones(shape[0]), turn_rewards=torch.zeros(shape))
    assert out.advantages.shape == out.returns.shape == shape
    assert not out.advantages.any()


def test_outputs_carry_no_gradient():
    inputs = random_trajectories(1)
    inputs["values"].requires_grad_()
    inputs["token_rewards"].requires_grad_()
    out = turn_gae(**inputs)
    assert not out.advantages.requires_grad
    assert not out.returns.requires_grad


# Properties


def insert_masked(inputs: dict, seed: int) -> tuple[dict, torch.Tensor]:
    """Every row stretched by masked tokens at random places; the new position of each old one, [B, T]."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, length = inputs["values"].shape
    places = torch.stack([torch.randperm(3 * length, generator=generator)[:length].sort()[0] for _ in range(num_rows)])
    out = dict(inputs)
    for key, fill in zip(PER_TOKEN, (NAN, 0, 77, 0.0), strict=True):
        out[key] = torch.full((num_rows, 3 * length), fill, dtype=inputs[key].dtype).scatter_(1, places, inputs[key])
    return out, places


@pytest.mark.parametrize("options", OPTIONS)
def test_inserted_masked_tokens_change_nothing(options):
    inputs = random_trajectories(11) | option_arguments(options, 3)
    stretched, places = insert_masked(inputs, 0)
    for a, b in zip(turn_gae(**inputs), turn_gae(**stretched), strict=True):
        torch.testing.assert_close(b.gather(1, places), a, rtol=0, atol=1e-5)
        assert not b.scatter(1, places, 0.0).any()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 1025])
def test_padded_and_packed_agree_bit_for_bit(options, length):
    """Rows of every length up to one past the block, empty ones included."""
    inputs = random_trajectories(length, num_rows=5, length=length) | option_arguments(options, 5)
    lengths = [length, 0, length // 2, max(length - 1, 0), length]
    for b, n in enumerate(lengths):
        inputs["action_mask"][b, n:] = False
        inputs["token_rewards"][b, n:] = 0
    first = inputs["action_mask"].int().argmax(1) if length else torch.zeros(5)
    for b in range(5):  # rows without action tokens drop their rewards; in the others none may be lost
        inputs["turn_rewards"][b] *= torch.arange(8) >= (inputs["turn_ids"][b, int(first[b])] if length else 0)
    a, b = turn_gae(**inputs), turn_gae(**packed(inputs, lengths))
    for x, y in zip(a, b, strict=True):
        assert torch.equal(torch.cat([x[i, :n] for i, n in enumerate(lengths)]), y)


@pytest.mark.parametrize("options", OPTIONS)
def test_batch_order_changes_nothing_bit_for_bit(options):
    inputs = random_trajectories(13, num_rows=6, length=90) | option_arguments(options, 6)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
    shuffled = {k: v[order] if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    for a, b in zip(turn_gae(**inputs), turn_gae(**shuffled), strict=True):
        assert torch.equal(a[order], b)
    alone = {k: v[2:3] if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    assert torch.equal(turn_gae(**alone).advantages[0], turn_gae(**inputs).advantages[2])


def test_gamma_and_lambda_one_give_reward_to_go():
    inputs = random_trajectories(17)
    del inputs["turn_rewards"], inputs["bootstrap_values"]
    out = turn_gae(**inputs, gamma=1.0, lam=1.0)
    rewards = inputs["token_rewards"].double()
    to_go = rewards.flip(1).cumsum(1).flip(1) + inputs["final_rewards"][:, None]
    m = inputs["action_mask"]
    torch.testing.assert_close(out.returns[m].double(), to_go[m], rtol=0, atol=1e-5)
    torch.testing.assert_close(out.advantages[m], (to_go - inputs["values"])[m].float(), rtol=0, atol=1e-5)


def test_equal_decays_are_standard_gae_over_action_tokens():
    inputs = random_trajectories(19)
    del inputs["turn_rewards"]
    out = turn_gae(**inputs, gamma=0.9, lam=0.8, token_gamma=0.9, token_lam=0.8)
    for b in range(3):
        at = inputs["action_mask"][b].nonzero()[:, 0].tolist()
        ends = [*at[1:], 40]
        v = [*inputs["values"][b, at].double().tolist(), float(inputs["bootstrap_values"][b])]
        a = 0.0
        for i in reversed(range(len(at))):
            r = float(inputs["token_rewards"][b, at[i] : ends[i]].double().sum())
            r += float(inputs["final_rewards"][b]) if i == len(at) - 1 else 0.0
            a = r + 0.9 * v[i + 1] - v[i] + 0.9 * 0.8 * a
            assert abs(float(out.advantages[b, at[i]]) - a) < 1e-5


def test_turn_credit_equals_turn_level_gae_on_first_token_values():
    inputs = random_trajectories(23)
    del inputs["token_rewards"]
    out = turn_gae(**inputs, gamma=0.9, lam=0.8, credit="turn")
    for b in range(3):
        at = inputs["action_mask"][b].nonzero()[:, 0]
        turns = inputs["turn_ids"][b, at]
        first = [int(at[turns == u][0]) for u in turns.unique()]
        one_a_turn = {
            "values": inputs["values"][b : b + 1, first],
            "action_mask": torch.ones(1, len(first), dtype=torch.bool),
            "turn_ids": turns.unique()[None],
        } | {k: inputs[k][b : b + 1] for k in ("turn_rewards", "final_rewards", "bootstrap_values")}
        level = reference.turn_gae(**as_float64(one_a_turn), gamma=0.9, lam=0.8)[0][0].float()
        for u, expected in zip(turns.unique(), level, strict=True):
            got = out.advantages[b, at[turns == u]]
            torch.testing.assert_close(got, expected.expand_as(got), rtol=0, atol=1e-5)


def test_constant_added_to_values():
    """gamma 1, terminated: c leaves all deltas but the last, so A falls by c * lam ** (boundaries still ahead)."""
    inputs = random_trajectories(29)
    del inputs["bootstrap_values"]
    a = turn_gae(**inputs, lam=0.9).advantages
    b = turn_gae(**inputs | {"values": inputs["values"] + 3.0}, lam=0.9).advantages
    for row in range(3):
        at = inputs["action_mask"][row].nonzero()[:, 0]
        turns = inputs["turn_ids"][row, at]
        ahead = torch.tensor([len(turns[i:].unique()) - 1 for i in range(len(at))])
        torch.testing.assert_close((a - b)[row, at], 3.0 * 0.9**ahead, rtol=0, atol=1e-5)


def test_long_rows_with_decay_stay_exact():
    """No division by powers of the decay: 20,000 tokens at 0.9 would need 0.9 ** -20000."""
    n = 20_000
    values, mask, ids = torch.randn(1, n), torch.ones(1, n, dtype=torch.bool), torch.arange(n)[None] // 7
    kwargs = dict(gamma=0.9, lam=0.9, token_gamma=0.95, token_lam=0.9, final_rewards=torch.ones(1))
    out = turn_gae(values, mask, ids, **kwargs)
    a, v, u = 0.0, values[0].double().tolist(), ids[0].tolist()
    expected = [0.0] * n
    for i in range(n - 1, -1, -1):
        g, d = (0.9, 0.81) if i == n - 1 or u[i + 1] != u[i] else (0.95, 0.855)
        a = (1.0 if i == n - 1 else g * v[i + 1]) - v[i] + d * a
        expected[i] = a
    torch.testing.assert_close(out.advantages[0].double(), torch.tensor(expected).double(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("n", [2**14, pytest.param(2**18, marks=pytest.mark.host)])  # minutes in the interpreter
def test_a_long_row(n):
    """Turn after turn by hand: without token decay a turn has one target."""
    turn_tokens, observation_tokens = 8, 56
    mask = (torch.arange(n) % (turn_tokens + observation_tokens)) >= observation_tokens
    ids = torch.arange(n) // (turn_tokens + observation_tokens)
    values = torch.randn(1, n, generator=torch.Generator().manual_seed(1))
    out = turn_gae(values, mask[None], ids[None], final_rewards=torch.ones(1), gamma=0.999, lam=0.9)
    first = values[0, observation_tokens :: turn_tokens + observation_tokens].double().tolist()
    target, targets = 1.0, [1.0]
    for v in first[:0:-1]:
        target = 0.999 * (0.1 * v + 0.9 * target)
        targets.append(target)
    expected = torch.tensor(targets[::-1]).repeat_interleave(turn_tokens)
    torch.testing.assert_close(out.returns[0, mask], expected.float(), rtol=0, atol=1e-6)
    torch.testing.assert_close(out.advantages[0, mask], expected.float() - values[0, mask], rtol=0, atol=2e-6)


@pytest.mark.host  # the interpreter would take minutes
def test_70000_rows():
    inputs = random_trajectories(3, 70, 12)
    many = {k: v.repeat(1000, *[1] * (v.dim() - 1)) for k, v in inputs.items()}
    for x, y in zip(turn_gae(**many), turn_gae(**inputs), strict=True):
        assert torch.equal(x.view(1000, 70, 12), y.expand(1000, 70, 12))


@pytest.mark.host
@pytest.mark.parametrize("options", [{}, dict(token_gamma=0.99), dict(credit="turn", critic_lam=0.5)])
@pytest.mark.parametrize("turn_tokens", [1, 50])
def test_no_python_loop_over_tokens_or_turns(options, turn_tokens):
    """As many of our lines of Python are executed for 1,000 tokens as for 100,000."""

    def lines(n):
        mask, ids = torch.ones(2, n, dtype=torch.bool), (torch.arange(n) // turn_tokens).expand(2, n)
        inputs = dict(token_rewards=torch.randn(2, n), turn_rewards=torch.randn(2, n), final_rewards=torch.ones(2))
        count = 0

        def trace(frame, event, argument):
            nonlocal count
            if "rsi_kernels" not in frame.f_code.co_filename:  # torch's own, or a finalizer that is run just now
                return None
            count += 1
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            turn_gae(torch.randn(2, n), mask, ids, **inputs, **options)
        finally:
            sys.settrace(before)
        return count

    lines(10)
    few, many = lines(1_000), lines(100_000)
    assert few > 20
    assert many == few


# Bugs of other trainers (design: traps)


def test_trap_reward_on_a_masked_tail_is_not_lost_nor_attenuated():
    r = torch.zeros(1, 9)
    r[0, 8] = 1.0
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0, 0]])
    out = turn_gae(torch.zeros(1, 9), mask, mask * 0, token_rewards=r, lam=0.5, token_gamma=0.9, token_lam=0.5)
    torch.testing.assert_close(out.returns[0, :3], torch.tensor([0.45**2, 0.45, 1.0]))


def test_trap_masked_values_do_not_leak():
    mask, ids = torch.tensor([[0, 1, 0, 1, 0]]), torch.tensor([[5, 0, -3, 1, 0]])
    clean = torch.tensor([[0.0, 0.1, 0.0, 0.2, 0.0]])
    expected = turn_gae(clean, mask, ids, final_rewards=torch.ones(1))
    for poison in (NAN, float("inf"), -float("inf"), 3e38):
        for kwargs in ({}, dict(token_gamma=0.9, token_lam=0.9)):
            values = torch.where(mask == 1, clean, poison)
            out = turn_gae(values, mask, ids, final_rewards=torch.ones(1), **kwargs)
            assert out.advantages.isfinite().all()
            assert (out.advantages[mask == 0] == 0).all()
            if not kwargs:
                assert torch.equal(out.advantages, expected.advantages)


def test_trap_observations_do_not_decay_credit():
    length = 5000
    mask = torch.zeros(1, length, dtype=torch.bool)
    mask[0, 0] = mask[0, -1] = True
    ids = torch.zeros(1, length, dtype=torch.long)
    ids[0, -1] = 1
    out = turn_gae(torch.zeros(1, length), mask, ids, final_rewards=torch.ones(1), gamma=0.9, lam=1.0)
    assert out.returns[0, 0] == pytest.approx(0.9)


@pytest.mark.parametrize("kwargs", [{}, dict(token_gamma=0.9), dict(credit="turn"), dict(critic_lam=0.5)])
def test_trap_all_masked_rows_give_zeros_and_drop_rewards(kwargs):
    mask = torch.tensor([[0, 0, 0], [1, 0, 1], [0, 0, 0]])
    ones = torch.ones(3)
    out = turn_gae(
        torch.full((3, 3), NAN).where(mask == 0, torch.tensor(0.0)), mask, torch.arange(3).expand(3, 3),
        token_rewards=torch.ones(3, 3), turn_rewards=torch.ones(3, 2), final_rewards=ones, bootstrap_values=ones,
        **kwargs,
    )  # fmt: skip
    assert not out.advantages[[0, 2]].any()
    assert out.returns[1, 0] != 0


# What cannot be credited


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[2]])
def test_rewards_before_the_first_action_token(options):
    values, mask = torch.zeros(2, 4), torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0]])
    ids = torch.tensor([[0, 2, 0, 3], [0, 0, 0, 0]])
    token = torch.tensor([[1.0, 0, 0, 0], [1.0, 0, 0, 0]])
    turn = torch.tensor([[0, 1.0, 0, 0], [1.0, 0, 0, 0]])
    clean = turn_gae(values, mask, ids, **options).returns
    for name, reward in (("token_rewards", token), ("turn_rewards", turn)):
        with pytest.raises(ValueError, match=rf"{name}: expected .*before a row's first action token.* row 0"):
            turn_gae(values, mask, ids, **{name: reward}, **options)
        assert torch.equal(turn_gae(values, mask, ids, **{name: reward}, validate=False, **options).returns, clean)
        turn_gae(values[1:], mask[1:], ids[1:], **{name: reward[1:]}, **options)  # no action token: never raises


def test_turns_beyond_the_rewards_get_none():
    ids = torch.tensor([[0, 5, 9]])
    out = turn_gae(torch.zeros(1, 3), torch.ones(1, 3).int(), ids, turn_rewards=torch.ones(1, 3), gamma=1.0, lam=1.0)
    torch.testing.assert_close(out.returns, torch.tensor([[3.0, 0.0, 0.0]]))  # rewards 0, 1, 2 all belong to turn 0


# What bad input gets

GOOD = dict(values=torch.zeros(2, 3), action_mask=torch.ones(2, 3).int(), turn_ids=torch.zeros(2, 3).int())
PACKED = dict(
    values=torch.zeros(6),
    action_mask=torch.ones(6).int(),
    turn_ids=torch.zeros(6).int(),
    cu_seqlens=torch.tensor([0, 2, 6], dtype=torch.int32),
)
BAD = [
    ("values", [[0.0]], "a tensor"),
    ("values", torch.zeros(2, 3).double(), "float32 or bfloat16 or float16"),
    ("values", torch.zeros(2, 3, 1), r"shape \[B, T\]"),
    ("action_mask", torch.zeros(2, 3), "dtype bool or uint8"),
    ("action_mask", torch.zeros(2, 4).int(), r"shape \[2, 3\], got \[2, 4\]"),
    ("action_mask", torch.zeros(2, 3, device="meta").int(), "device cpu"),
    ("turn_ids", torch.zeros(2, 3).short(), "int32 or int64"),
    ("turn_ids", torch.zeros(3, 2).int(), r"shape \[2, 3\]"),
    ("turn_ids", torch.tensor([[0, 1, 2], [1, 2, 1]]), "2 then 1 at row 1, position 2"),
    ("token_rewards", torch.zeros(2, 3).int(), "float32"),
    ("token_rewards", torch.zeros(2, 2), r"shape \[2, 3\]"),
    ("turn_rewards", torch.zeros(3, 2), r"shape \[2, K\]"),
    ("turn_rewards", torch.zeros(2), r"shape \[2, K\]"),
    ("turn_rewards", torch.zeros(2, 2).long(), "float32"),
    ("final_rewards", torch.zeros(3), r"shape \[2\], got \[3\]"),
    ("final_rewards", torch.zeros(2).bool(), "float32"),
    ("bootstrap_values", torch.zeros(2, 1), r"shape \[2\]"),
    ("bootstrap_values", torch.zeros(2).double(), "float32"),
    ("gamma", 1.1, r"finite number in \[0, 1\], got 1.1"),
    ("gamma", NAN, "got nan"),
    ("gamma", "1", "got str"),
    ("lam", -0.1, "got -0.1"),
    ("lam", float("inf"), "got inf"),
    ("lam", torch.tensor([0.5, 1.5]), r"finite numbers in \[0, 1\], got 1.5 at 1"),
    ("lam", torch.tensor([0.5, NAN]), "got nan"),
    ("lam", torch.tensor([0.5]), r"shape \[2\]"),
    ("lam", torch.tensor([1, 1]), "float32"),
    ("critic_lam", 2, "got 2"),
    ("critic_lam", torch.tensor([-0.5, 1.0]), "got -0.5 at 0"),
    ("token_gamma", 1.5, "got 1.5"),
    ("token_lam", -1, "got -1"),
    ("credit", "tokens", "got 'tokens'"),
]
BAD_PACKED = [
    ("values", torch.zeros(2, 3), r"shape \[N\]"),
    ("cu_seqlens", torch.tensor([0, 2, 6]), "int32"),
    ("cu_seqlens", torch.tensor([[0, 6]], dtype=torch.int32), r"shape \[B \+ 1\]"),
    ("cu_seqlens", torch.zeros(0, dtype=torch.int32), r"shape \[B \+ 1\]"),
    ("cu_seqlens", torch.tensor([0, 4, 2, 6], dtype=torch.int32), "4 then 2 at 2"),
    ("cu_seqlens", torch.tensor([0, 2, 5], dtype=torch.int32), "end with 6"),
    ("cu_seqlens", torch.tensor([1, 2, 6], dtype=torch.int32), "begin with 0"),
    ("action_mask", torch.ones(7).int(), r"shape \[6\]"),
    ("final_rewards", torch.zeros(3), r"shape \[2\]"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_bad_argument(name, value, message):
    turn_gae(**GOOD)
    with pytest.raises(ValueError, match=rf"^{name}: expected .*{message}"):
        turn_gae(**GOOD | {name: value})


@pytest.mark.parametrize(("name", "value", "message"), BAD_PACKED)
def test_bad_argument_packed(name, value, message):
    turn_gae(**PACKED)
    with pytest.raises(ValueError, match=rf"^{name}: expected .*{message}"):
        turn_gae(**PACKED | {name: value})


def test_values_are_not_checked_without_validation():
    falling = GOOD | {"turn_ids": torch.tensor([[0, 1, 0], [0, 0, 0]])}
    turn_gae(**falling, validate=False)
    with pytest.raises(ValueError, match="turn_ids"):
        turn_gae(**falling, validate=True)
