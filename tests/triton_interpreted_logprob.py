"""Tests of the log-prob kernels in Triton's interpreter, run by test_triton.py (see triton_interpreted.py)."""

import contextlib

import pytest
import torch
from kernel_checks import NAN, as_on_a_gpu, assert_as_good_as, poisoned
from rsi_kernels import (
    linear_logprob,
    linear_ppo_loss,
    linear_token_logprobs,
    logprob_triton,
    reference,
    runtime,
    token_logprobs,
)

assert runtime.interpreting(), "run with TRITON_INTERPRET=1"
pytestmark = pytest.mark.usefixtures(poisoned.__name__)
INF = float("inf")


def both(logits, targets, mask=None, g=None, ge=None, temperature=1.0, entropy=True, splits=None, lanes=16, block=64):
    """(log-probs, entropy, gradient) of the kernels."""
    scores = logprob_triton.launch(logits, targets, mask, temperature, entropy, lanes, splits)
    out = torch.empty(logits.shape, dtype=logits.dtype)
    logprob_triton.launch_backward(g, ge, logits, targets, mask, *scores[1:], temperature, out, block=block)
    return *scores[:2], out


def plain(logits, targets, mask=None, g=None, ge=None, temperature=1.0):
    x = logits.detach().clone().requires_grad_()
    logprobs, entropy = reference.token_logprobs(x, targets, mask, temperature=temperature)
    total = (0 if g is None else (logprobs * g).sum()) + (0 if ge is None else (entropy * ge).sum())
    total.backward()
    return logprobs.detach(), entropy.detach(), x.grad


def case(seed, shape, vocabulary, dtype=torch.float32):
    """Half of the rows masked: NaN logits, wild targets."""
    rng = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=rng) < 0.6
    logits = (torch.randn(*shape, vocabulary, generator=rng) * 3).to(dtype)
    logits[~mask] = NAN
    targets = torch.randint(0, vocabulary, shape, generator=rng).where(mask, torch.tensor(-100))
    return logits, targets, mask, torch.randn(shape, generator=rng), torch.randn(shape, generator=rng)


def check(logits, targets, mask, g, ge, temperature=1.0, margins=(2e-6, 2e-6), **how):
    rounding = {torch.float32: 0, torch.bfloat16: 4e-3, torch.float16: 1e-3}[logits.dtype]
    exact = plain(logits.double(), targets, mask, g, ge, temperature)
    fp32 = plain(logits.float(), targets, mask, g, ge, temperature)
    actual = both(logits, targets, mask, g, ge, temperature, **how)
    for a, e, p in zip(actual[:2], exact, fp32, strict=False):
        assert a.dtype == torch.float32
        assert_as_good_as(a, e, p, margins[0])
    assert actual[2].dtype == logits.dtype
    assert_as_good_as(actual[2], exact[2], fp32[2].to(logits.dtype), margins[1] + rounding)
    if mask is not None:
        assert all((x[~mask] == 0).all() for x in actual)
    return actual


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("splits", [1, 4])
def test_agrees_with_the_reference(dtype, splits):
    """Several blocks and a piece of one; masked rows hold NaN and are not read."""
    check(*case(1, (2, 2), 333, dtype), splits=splits)


@pytest.mark.parametrize("vocabulary", [1, 2, 63, 64, 65])
@pytest.mark.parametrize("splits", [1, 2])
def test_vocabularies_and_splits(vocabulary, splits):
    """Around one block, and more splits than blocks."""
    check(*case(2, (2,), vocabulary), temperature=0.7, splits=splits)


def test_few_rows_are_split():
    """By launch itself; the outcome does not depend on it beyond rounding."""
    inputs = case(3, (2,), 300)
    for a, b in zip(check(*inputs), check(*inputs, splits=1), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_gradients_of_one_output_alone(temperature):
    logits, targets, mask, g, ge = case(4, (4,), 100)
    for of_logprobs, of_entropy in ((g, None), (None, ge)):
        check(logits, targets, mask, of_logprobs, of_entropy, temperature=temperature)
    assert torch.equal(
        both(logits, targets, mask, g, None, entropy=False)[2], both(logits, targets, mask, g, None, entropy=True)[2]
    )


def test_forms_of_mask_and_targets():
    logits, targets, mask, g, ge = case(5, (5,), 70)
    expected = both(logits, targets, mask, g, ge)
    for other in (mask.long() * 3, mask.to(torch.uint8)):
        for a, b in zip(both(logits, targets.int(), other, g, ge), expected, strict=True):
            assert torch.equal(a, b)
    check(logits.nan_to_num(), targets.clamp(min=0), None, g, ge)


def views(x):
    return {
        "sliced": x[:, :-1],
        "transposed": x.transpose(0, 1),
        "strided": x[:, ::2, 1:],
        "expanded": x[:1].expand(3, -1, -1),
        "column strides": x.transpose(1, 2),
        "three strides": x.view(2, 2, 2, -1).permute(2, 1, 0, 3),
    }


@pytest.mark.parametrize("view", views(torch.zeros(2, 4, 6)))
def test_strided_rows(view):
    logits = views(torch.randn(2, 4, 6))[view]
    targets = torch.randint(0, logits.shape[-1], logits.shape[:-1])
    g, ge = torch.randn(targets.shape), torch.randn(targets.shape)
    for splits in (1, 2):
        expected = both(logits.contiguous(), targets, None, g, ge, splits=splits)
        for a, b in zip(both(logits, targets, None, g, ge, splits=splits), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(0,), (2, 0), ()])
def test_no_or_one_row(shape):
    logits, targets = torch.randn(*shape, 5), torch.ones(shape, dtype=torch.long)
    logprobs, _, grad = both(logits, targets, None, torch.ones(shape), None)
    assert logprobs.shape == shape
    assert grad.shape == logits.shape


@pytest.mark.parametrize("splits", [1, 4])
def test_targets_outside_the_vocabulary_give_nan(splits):
    """Also -1, and ids beyond 32 bits; other rows do not notice."""
    logits, targets = torch.randn(5, 300), torch.tensor([0, 300, -1, 2**40, 299])
    logprobs, entropy, _ = both(logits, targets, g=torch.ones(5), splits=splits)
    assert logprobs.isnan().tolist() == [False, True, True, True, False]
    assert entropy.isfinite().all()


@pytest.mark.parametrize("splits", [1, 4])
def test_minus_infinity(splits):
    """Whole blocks and splits of it, at the target, all but one."""
    logits, g, ge = torch.randn(4, 300), torch.randn(4), torch.randn(4)
    logits[0, :200], logits[1, 64:], logits[2, :299], logits[3, ::2] = -INF, -INF, -INF, -INF
    targets = torch.tensor([250, 3, 299, 1])
    _, entropy, _ = check(logits, targets, None, g, ge, splits=splits)
    assert entropy[2] == 0
    impossible = both(logits, torch.tensor([0, 299, 0, 2]), g=g, splits=splits)[0]
    assert (impossible == -INF).all()


@pytest.mark.parametrize("splits", [1, 4])
def test_huge_logits(splits):
    """No overflow, and no digits lost: differences to the largest logit are exact."""
    logits = torch.randn(5, 300) + torch.tensor([1e4, -1e4, 3e4, 0.0, 0.0])[:, None]
    logits[3, :2], logits[4, 299] = torch.tensor([1e4, -1e4]), 1e4
    check(logits, torch.tensor([1, 2, 3, 1, 299]), None, torch.randn(5), torch.randn(5), splits=splits)


def test_nan_and_infinity_are_not_hidden():
    logits = torch.randn(2, 100)
    logits[0, 70], logits[1, 3] = NAN, INF
    logprobs, entropy, grad = both(logits, torch.tensor([0, 0]), g=torch.ones(2), ge=torch.ones(2))
    for x in (logprobs, entropy, grad[0]):
        assert x.isnan().all()


def test_rows_without_gradient_are_not_read():
    logits = torch.randn(3, 100)
    scores = logprob_triton.launch(logits, torch.zeros(3).long(), None, 1.0, False, 16)
    logits[1] = NAN
    grad = torch.empty(3, 100)
    g = torch.tensor([1.0, 0.0, -1.0])
    logprob_triton.launch_backward(g, None, logits, torch.zeros(3).long(), None, *scores[1:], 1.0, grad, block=64)
    assert not grad[1].any()
    assert grad.isfinite().all()


@pytest.mark.parametrize("splits", [1, 4])
def test_again_gives_the_same_bits(splits):
    inputs = case(6, (2,), 333, torch.bfloat16)
    for a, b in zip(both(*inputs, splits=splits), both(*inputs, splits=splits), strict=True):
        assert torch.equal(a, b)


# The public operations on these kernels


@pytest.mark.parametrize("inplace", [False, True])
def test_token_logprobs(monkeypatch, inplace):
    logits, targets, mask, g, ge = case(7, (2, 3), 90, torch.bfloat16)
    results = []
    for triton in (False, True):
        with as_on_a_gpu(monkeypatch) if triton else contextlib.nullcontext():
            x = logits.clone().requires_grad_()
            made = x * 1
            logprobs, entropy = token_logprobs(
                made, targets, mask, temperature=0.8, return_entropy=True, inplace_backward=inplace and triton
            )
            (logprobs * g + entropy * ge).sum().backward()
            results.append((logprobs.detach(), entropy.detach(), x.grad))
            assert not inplace or not triton or torch.equal(made, x.grad)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_operations(monkeypatch, dtype):
    """In chunks, against their torch path."""
    monkeypatch.setattr(linear_logprob, "CPU_CHUNK", 90 * 3)
    monkeypatch.setattr(linear_logprob, "CPU_ROWS", 1)
    torch.manual_seed(8)
    _, targets, mask, g, ge = case(8, (2, 4), 90)
    h, w = torch.randn(2, 4, 6).to(dtype), torch.randn(90, 6).to(dtype)
    old, advantages = -4 - torch.rand(2, 4), torch.randn(2, 4)
    results = []
    for triton in (False, True):
        with as_on_a_gpu(monkeypatch) if triton else contextlib.nullcontext():
            leaves = [x.clone().requires_grad_() for x in (h, w, h, w)]
            logprobs, entropy = linear_token_logprobs(
                *leaves[:2], targets, mask, temperature=0.8, return_entropy=True
            )  # fmt: skip
            loss, stats = linear_ppo_loss(*leaves[2:], targets, old, advantages, mask, temperature=0.8)
            ((logprobs * g + entropy * ge).sum() + loss).backward()
            scores = [x.detach() for x in (logprobs, entropy, loss, *stats.values())]
            results.append([*scores, *(x.grad for x in leaves)])
    for a, b in zip(*results, strict=True):
        # A sum whose terms cancel keeps the rounding of the terms: bf16 multiplies on one path, fp32 may on the other.
        rounding = {} if a.dtype == torch.float32 else {"rtol": 2**-6, "atol": 2**-7 * float(b.abs().max())}
        torch.testing.assert_close(a, b, **rounding)


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
def test_gradient_in_place_or_in_another_dtype(out):
    logits, targets, mask, g, ge = case(9, (4,), 100)
    scores = logprob_triton.launch(logits, targets, mask, 1.0, True, 16)
    expected = both(logits, targets, mask, g, ge)[2].to(out)
    grad = logits if out == logits.dtype else torch.empty(logits.shape, dtype=out)
    logprob_triton.launch_backward(g, ge, logits, targets, mask, *scores[1:], 1.0, grad, block=64)
    torch.testing.assert_close(grad, expected, rtol=0 if out == logits.dtype else 8e-3, atol=0)
