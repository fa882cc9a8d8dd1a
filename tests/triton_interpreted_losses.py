"""Tests of the loss kernels in Triton's interpreter, run by test_triton.py (see triton_interpreted.py)."""

import contextlib

import pytest
import torch
from kernel_checks import NAN, as_on_a_gpu, assert_as_good_as, poisoned
from rsi_kernels import policy_loss, ppo_loss, ppo_loss_triton, reference, runtime, value_loss

assert runtime.interpreting(), "run with TRITON_INTERPRET=1"
pytestmark = pytest.mark.usefixtures(poisoned.__name__)
INF = float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPTIONS = [
    {},
    dict(clip_low=0.1, clip_high=0.3),
    dict(dual_clip=1.2),
    dict(behaviour=True),
    dict(behaviour=True, is_cap=1.05, dual_clip=3.0, denominator=11.0),
    dict(denominator=torch.tensor(7)),
    dict(denominator=torch.tensor(0.0)),
]
SIZES = [1, 15, 16, 17, 64, 150]  # around one block of 16; 4 programs of several blocks and a piece


def policy(new, old, advantages, mask, behaviour=None, denominator=None, block=16, programs=4, **clips):
    """(loss, *stats, scale, slope) of the kernel."""
    given = isinstance(denominator, torch.Tensor)
    clips = dict(clip_low=0.2, clip_high=0.2, dual_clip=None, is_cap=None) | clips
    return ppo_loss_triton.launch_policy(
        new, old, advantages, mask, behaviour, denominator if given else None, None if given else denominator,
        **clips, block=block, programs=programs,
    )  # fmt: skip


def value(v, old, returns, mask, denominator=None, clip=0.2, block=16, programs=4):
    given = isinstance(denominator, torch.Tensor)
    return ppo_loss_triton.launch_value(
        v, old, returns, mask, denominator if given else None, None if given else denominator, clip, block, programs
    )


def case(seed, shape, dtype=torch.float32):
    """(logprobs, old, advantages, behaviour, mask); NaN, infinity or 1e4 where masked, some advantages 0."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=g) < 0.6
    mask.view(-1)[-1:] = True
    wild = torch.tensor([NAN, INF, -INF, 1e4])[torch.randint(0, 4, shape, generator=g)]

    def masked(x):
        return x.where(mask, wild).to(dtype)

    new = -torch.rand(shape, generator=g) * 3
    old = new + 0.4 * torch.randn(shape, generator=g)
    behaviour = old + 0.2 * torch.randn(shape, generator=g)
    advantages = torch.randn(shape, generator=g) * (torch.rand(shape, generator=g) < 0.9)
    return masked(new), masked(old), masked(advantages), masked(behaviour), mask


def reference_policy(new, old, advantages, mask, behaviour=None, **options):
    """(loss, slope, the stats) with the slope divided, in the dtype of the input."""
    x = new.clone().requires_grad_()
    if options.get("denominator") is not None and options["denominator"] == 0:
        options["denominator"] = 1
    loss, fraction = reference.policy_loss(x, old, advantages, mask, behaviour_logprobs=behaviour, **options)
    loss.backward()
    log_ratio = (new - old)[mask.bool()]
    ratio = log_ratio.exp()
    kl = torch.expm1(log_ratio) - log_ratio
    return loss.detach(), x.grad, fraction, kl.mean(), ratio.mean(), ratio.max()


@pytest.mark.parametrize(
    ("num_tokens", "options"), [(n, OPTIONS[4]) for n in SIZES] + [(n, o) for n in (17, 150) for o in OPTIONS]
)
def test_policy_agrees_with_the_reference(options, num_tokens):
    new, old, advantages, behaviour, mask = case(num_tokens, (num_tokens,))
    options = dict(options)
    inputs = [new, old, advantages, mask, *([behaviour] if options.pop("behaviour", False) else [])]
    loss, *stats, num_kept, scale, slope = policy(*inputs, **options)
    exact = reference_policy(*(x.double() if x.is_floating_point() else x for x in inputs), **options)
    plain = reference_policy(*inputs, **options)
    for actual, e, p in zip((loss, slope / scale, *stats), exact, plain, strict=True):
        assert actual.dtype == torch.float32
        assert_as_good_as(actual, e, p, 5e-7)
    assert num_kept == mask.sum()
    assert num_kept.dtype == torch.int64
    assert torch.equal(scale, ppo_loss.divisor(num_kept, torch.tensor(options.get("denominator", num_kept)), None))
    assert (slope[~mask] == 0).all()


@pytest.mark.parametrize(
    ("num_tokens", "denominator"),
    [*((n, None) for n in SIZES), (17, 13.0), (64, torch.tensor(13)), (9, torch.tensor(0))],
)
def test_value_agrees_with_the_reference(denominator, num_tokens):
    v, old, returns, _, mask = case(num_tokens, (num_tokens,))
    loss, fraction, num_kept, scale, slope = value(v, old, returns, mask, denominator, clip=0.3)
    results = []
    for dtype in (torch.float64, torch.float32):
        x = v.to(dtype, copy=True).requires_grad_()
        number = 1 if denominator is not None and denominator == 0 else denominator
        args = (x, old.to(dtype), returns.to(dtype), mask)
        total, clipped = reference.value_loss(*args, clip=0.3, denominator=number)
        total.backward()
        results.append((total.detach(), clipped, x.grad))
    for actual, e, p in zip((loss, fraction, slope / scale), *results, strict=True):
        assert_as_good_as(actual, e, p, 5e-7)
    assert num_kept == mask.sum()
    assert scale == (
        denominator if denominator is not None and denominator != 0 else 1 if denominator == 0 else num_kept
    )
    assert (slope[~mask] == 0).all()


@pytest.mark.parametrize(("dtype", "of_mask"), zip(DTYPES, [torch.int64, torch.bool, torch.int16], strict=True))
def test_dtypes_are_computed_in_fp32(dtype, of_mask):
    """Also inputs of different dtypes."""
    new, old, advantages, behaviour, mask = case(1, (3, 7), dtype)
    other = mask if of_mask == torch.bool else mask.to(of_mask) * 3
    for function, inputs in (
        (policy, (new, old.float(), advantages, other, behaviour)),
        (value, (new, old, advantages.float(), other)),
    ):
        full = [x.float() if x.is_floating_point() else x != 0 for x in inputs]
        for a, e in zip(function(*inputs), function(*full), strict=True):
            assert torch.equal(a, e)


def test_the_sizes_that_are_launched():
    """Several blocks and a piece; more blocks than programs are left to the smaller tests."""
    new, old, advantages, _, mask = case(2, (3, 1031))
    sizes = dict(block=ppo_loss_triton.BLOCK, programs=ppo_loss_triton.PROGRAMS)
    for function in (policy, value):
        arguments = (new, old, advantages, mask)
        for a, e in zip(function(*arguments, **sizes), function(*arguments, block=256), strict=True):
            torch.testing.assert_close(a, e)


def test_again_gives_the_same_bits():
    inputs = case(3, (150,))
    for function, arguments in ((policy, (*inputs[:3], inputs[4], inputs[3])), (value, (*inputs[:3], inputs[4]))):
        for a, b in zip(function(*arguments), function(*arguments), strict=True):
            assert torch.equal(a, b)


def test_counts_are_exact_beyond_fp32_and_int32():
    """The first of two programs is told that it is the last; what it finds of the other was put there."""
    zeros, mask = torch.zeros(64), torch.ones(64, dtype=torch.uint8)
    loss, *_, num_kept, scale = stats = [torch.empty(()) for _ in range(7)]
    stats[5] = num_kept = torch.empty((), dtype=torch.int64)
    sums, counts = torch.zeros(4, 2), torch.tensor([[0, 0], [0, 2**31 - 1]], dtype=torch.int32)
    counter = torch.ones(1, dtype=torch.int32)
    ppo_loss_triton._policy[(2,)](
        zeros, zeros, zeros, zeros, mask, scale, torch.empty(64), *stats, sums, counts, counter,
        64, -1.0, 0.8, 1.2, INF, INF, BEHAVIOUR=False, GIVEN=False, BLOCK=16, PROGRAMS=4, num_warps=1,
    )  # fmt: skip
    assert num_kept == 2**31 + 31
    assert scale == 2.0**31
    assert loss == 0
    assert counter == 3


# Hard numbers


def test_first_step_has_ratio_one():
    new, _, advantages, _, mask = case(5, (50,))
    loss, clip_fraction, kl, mean, highest, _, _, slope = policy(new, new, advantages, mask)
    assert mean == highest == 1
    assert clip_fraction == kl == 0
    assert torch.equal(slope[mask], -advantages[mask])


@pytest.mark.parametrize("behaviour", [None, -1.0])
def test_overflowing_ratio_where_the_clip_rules(behaviour):
    new, old, advantages = torch.zeros(3), torch.full((3,), -1000.0), torch.tensor([2.0, 0.0, 1.0])
    kwargs = {} if behaviour is None else dict(behaviour=old + behaviour, is_cap=1.5)
    loss, clip_fraction, _, _, highest, _, _, slope = policy(new, old, advantages, torch.ones(3).bool(), **kwargs)
    assert loss == pytest.approx(-1.2 * (1 if behaviour is None else 1.5))
    assert not slope.any()
    assert clip_fraction == pytest.approx(2 / 3)
    assert highest == INF


def test_dual_clip_bounds_an_overflowing_ratio():
    inputs = torch.zeros(1), torch.full((1,), -1000.0), torch.tensor([-2.0]), torch.ones(1).bool()
    assert policy(*inputs)[0] == INF
    loss, *_, slope = policy(*inputs, dual_clip=3.0)
    assert loss == 6
    assert slope == 0


@pytest.mark.parametrize("which", [0, 1, 2, 3])
@pytest.mark.parametrize("bad", [NAN, -INF, 1e4])
def test_wild_numbers_of_action_tokens_as_on_a_cpu(monkeypatch, which, bad):
    """Not hidden, neither in the second block nor beside the cap."""
    inputs = [x.nan_to_num(0, 0, 0) for x in case(6, (40,))]
    inputs[which][20] = bad
    *inputs, behaviour, mask = inputs
    mask = torch.ones_like(mask)
    for kwargs in (dict(), dict(behaviour_logprobs=behaviour, is_cap=1.5, dual_clip=2.0)):
        for expected, actual in zip(*both_ways(monkeypatch, policy_loss, *inputs, mask, **kwargs), strict=True):
            torch.testing.assert_close(actual, expected, equal_nan=True)
    if which < 3:
        for expected, actual in zip(*both_ways(monkeypatch, value_loss, *inputs, mask), strict=True):
            torch.testing.assert_close(actual, expected, equal_nan=True)


def test_small_kl_is_accurate():
    old = torch.linspace(-1, 0, 64)
    for step in (-3.0, -0.501, -0.499, 1e-4, 0.3, 0.501):
        new = old + step
        x = new.double() - old.double()
        kl = policy(new, old, old, torch.ones(64).bool(), block=64)[2]
        assert kl == pytest.approx(float((torch.expm1(x) - x).mean()), rel=2e-6)


# The public functions on these kernels


def both_ways(monkeypatch, function, x, *args, upstream=1.0, **kwargs):
    """[loss, *stats, gradient] of the CPU path and of the kernel."""
    results = []
    for triton in (False, True):
        with as_on_a_gpu(monkeypatch) if triton else contextlib.nullcontext():
            leaf = x.clone().requires_grad_()
            loss, stats = function(leaf, *args, **kwargs)
            (loss * upstream).backward()
            assert all(s.dim() == 0 and not s.requires_grad for s in stats.values())
            results.append([loss.detach(), *stats.values(), leaf.grad])
    return results


@pytest.mark.parametrize(
    ("dtype", "options"), [(torch.float32, o) for o in OPTIONS] + [(d, OPTIONS[4]) for d in DTYPES[1:]]
)
def test_policy_loss(monkeypatch, options, dtype):
    new, old, advantages, behaviour, mask = case(7, (3, 700), dtype)
    options = dict(options)
    if options.pop("behaviour", False):
        options["behaviour_logprobs"] = behaviour
    expected, actual = both_ways(monkeypatch, policy_loss, new, old, advantages, mask, upstream=3.0, **options)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize(
    ("dtype", "denominator"),
    [*((d, None) for d in DTYPES), (torch.float32, 7), (torch.float32, torch.tensor(5.5)),
     (torch.float32, torch.tensor(9, dtype=torch.int32))],
)  # fmt: skip
def test_value_loss(monkeypatch, denominator, dtype):
    v, old, returns, _, mask = case(8, (3, 700), dtype)
    options = dict(clip=0.3, denominator=denominator, upstream=2.0)
    for e, a in zip(*both_ways(monkeypatch, value_loss, v, old, returns, mask, **options), strict=True):
        assert a.dtype == e.dtype
        torch.testing.assert_close(a, e)


def test_strides(monkeypatch):
    new, old, advantages, behaviour, mask = (x.t() for x in case(9, (6, 8)))
    wide = torch.stack([old, advantages], -1)
    forms = (new, wide[..., 0], wide[..., 1], mask)
    with as_on_a_gpu(monkeypatch):
        for function in (policy_loss, value_loss):
            grads = []
            for inputs in (forms, [x.contiguous() for x in forms]):
                leaf = inputs[0].detach().requires_grad_()
                loss, _ = function(leaf, *inputs[1:])
                loss.backward()
                grads += [leaf.grad, loss.detach()]
            assert torch.equal(grads[0], grads[2])
            assert torch.equal(grads[1], grads[3])


@pytest.mark.parametrize("function", [policy_loss, value_loss])
def test_micro_batches_add_up(monkeypatch, function):
    """One of them without action tokens."""
    new, old, advantages, _, mask = case(10, (6, 9))
    mask[3:5] = False
    whole, parts, total = new.clone().requires_grad_(), new.clone().requires_grad_(), 0
    with as_on_a_gpu(monkeypatch):
        expected, _ = function(whole, old, advantages, mask)
        expected.backward()
        for rows in (slice(0, 3), slice(3, 5), slice(5, 6)):
            loss, _ = function(parts[rows], old[rows], advantages[rows], mask[rows], denominator=mask.sum())
            loss.backward()
            total += loss.detach()
    torch.testing.assert_close(total, expected.detach())
    torch.testing.assert_close(parts.grad, whole.grad)


@pytest.mark.parametrize("function", [policy_loss, value_loss])
@pytest.mark.parametrize("denominator", [None, 0, torch.tensor(0)])
@pytest.mark.parametrize("shape", [(2, 3), (0, 3)])
def test_no_action_tokens_give_zero(monkeypatch, function, denominator, shape):
    nan, mask = torch.full(shape, NAN), torch.zeros(shape).bool()
    _, actual = both_ways(monkeypatch, function, nan, nan, nan, mask, denominator=denominator)
    assert all(not x.any() for x in actual)
    assert actual[-1].shape == shape


@pytest.mark.parametrize("function", [policy_loss, value_loss])
def test_zeros_stay_zero_under_an_overflowed_loss_scale(monkeypatch, function):
    new, old, advantages, _, mask = case(11, (30,))
    expected, actual = both_ways(monkeypatch, function, new, old, advantages, mask, upstream=INF)
    assert (actual[-1][~mask] == 0).all()
    assert torch.equal(actual[-1], expected[-1])
