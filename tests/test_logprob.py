"""token_logprobs and linear_token_logprobs: accuracy and gradients against float64, masks, hard numbers, bad input."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from kernel_checks import NAN, assert_as_good_as, poisoned
from rsi_kernels import (
    linear_logprob,
    linear_ppo_loss,
    linear_token_logprobs,
    logprob,
    logprob_host,
    reference,
    runtime,
    token_logprobs,
)

pytestmark = pytest.mark.usefixtures(poisoned.__name__)
INF = float("inf")


def leaf(x, dtype=None):
    return x.detach().to(dtype or x.dtype, copy=True).requires_grad_()


def case(seed=0, shape=(3, 7), vocabulary=33, hidden=5, dtype=torch.float32, density=0.5):
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=g) < density
    targets = torch.randint(0, vocabulary, shape, generator=g).where(mask, torch.tensor(-100))
    logits = (torch.randn(*shape, vocabulary, generator=g) * 3).to(dtype)
    h = torch.randn(*shape, hidden, generator=g).to(dtype)
    w = torch.randn(vocabulary, hidden, generator=g).to(dtype)
    logits[~mask], h[~mask] = NAN, NAN
    return logits, h, w, targets, mask, torch.randn(shape, generator=g), torch.randn(shape, generator=g)


def run(function, inputs, targets, mask, of_logprobs, of_entropy, **kwargs):
    """(log-probs, entropy, gradients of the inputs) of a function that gives log-probs and entropy."""
    inputs = [leaf(x) for x in inputs]
    logprobs, entropy = function(*inputs, targets, mask, **kwargs)
    (logprobs * of_logprobs + entropy * of_entropy).sum().backward()
    return logprobs.detach(), entropy.detach(), *[x.grad for x in inputs]


def check_all(function, plain, inputs, targets, mask, g, ge, margins, **kwargs):
    """function against `plain` in float64, allowed the error of `plain` in fp32 (gradients: rounded to the dtype)."""
    exact = run(plain, [x.double() for x in inputs], targets, mask, g, ge, **kwargs)
    fp32 = run(plain, [x.float() for x in inputs], targets, mask, g, ge, **kwargs)
    actual = run(function, inputs, targets, mask, g, ge, return_entropy=True, **kwargs)
    for a, e, p in zip(actual[:2], exact, fp32, strict=False):
        assert a.dtype == torch.float32
        assert_as_good_as(a, e, p, margins[0])
        assert (a[~mask] == 0).all()
    for x, a, e, p in zip(inputs, actual[2:], exact[2:], fp32[2:], strict=True):
        assert a.dtype == x.dtype
        assert_as_good_as(a, e, p.to(x.dtype), margins[1])
    return actual


DTYPES = [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 1e-3)]  # margin of gradients: one rounding


@pytest.mark.parametrize(("dtype", "margin"), DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("shape", [(3, 7), (41,), (2, 3, 5), (1, 1)])
def test_against_float64(monkeypatch, dtype, margin, temperature, shape):
    logits, h, w, targets, mask, g, ge = case(len(shape), shape, dtype=dtype, density=0.6)
    kwargs = dict(temperature=temperature)
    grad = check_all(token_logprobs, reference.token_logprobs, [logits], targets, mask, g, ge, (1e-6, margin), **kwargs)
    assert (grad[2][~mask] == 0).all()
    linear, plain = linear_token_logprobs, reference.linear_token_logprobs
    for has_bf16 in (False, True) if dtype == torch.bfloat16 else (False,):  # products of rounded gradients
        monkeypatch.setattr(runtime, "cpu_multiplies_bf16", lambda has_bf16=has_bf16: has_bf16)
        margins = 2e-6, 2 * margin if has_bf16 else margin
        grad = check_all(linear, plain, [h, w], targets, mask, g, ge, margins, **kwargs)
        assert (grad[2][~mask] == 0).all()


@pytest.mark.parametrize("vocabulary", [1, 2, 257])
def test_many_chunks(monkeypatch, vocabulary):
    """Chunks of a few rows, one row more than a chunk, and a vocabulary wider than one block of the weight."""
    monkeypatch.setattr(linear_logprob, "TILE_ROWS", 6)
    monkeypatch.setattr(logprob, "CPU_CHUNK", 3 * vocabulary)
    monkeypatch.setattr(linear_logprob, "CPU_CHUNK", 4 * vocabulary)
    monkeypatch.setattr(linear_logprob, "CPU_ROWS", 1)
    monkeypatch.setattr(linear_logprob, "VOCAB_BLOCK", 5 * 100)
    for dtype, margin in DTYPES[:2]:
        logits, h, w, targets, mask, g, ge = case(1, (13,), vocabulary, dtype=dtype, density=1.0)
        args = (targets, mask, g, ge)
        check_all(token_logprobs, reference.token_logprobs, [logits], *args, (2e-6, margin))
        for has_bf16, roundings in ((False, 1), (True, 3)):  # of the result; of factors and of each chunk's product too
            monkeypatch.setattr(runtime, "cpu_multiplies_bf16", lambda has_bf16=has_bf16: has_bf16)
            margins = 2e-6, roundings * margin
            check_all(linear_token_logprobs, reference.linear_token_logprobs, [h, w], *args, margins)


@pytest.mark.host
@pytest.mark.parametrize("shape", [(3, 7), (41,)])
def test_on_a_device_with_neither_triton_nor_numba(monkeypatch, shape):
    monkeypatch.setattr(runtime, "uses_numba", lambda tensor: False)
    for dtype, margin in DTYPES:
        logits, h, w, targets, mask, g, ge = case(3, shape, dtype=dtype)
        args = (targets, mask, g, ge, (2e-6, margin))
        check_all(token_logprobs, reference.token_logprobs, [logits], *args, temperature=0.7)
        check_all(linear_token_logprobs, reference.linear_token_logprobs, [h, w], *args, temperature=0.7)


@pytest.mark.host
def test_threads_change_nothing(monkeypatch):
    monkeypatch.setattr(runtime, "THREAD_WORK", 10)
    logits, h, w, targets, mask, g, ge = case(5, (40,))
    results = []
    for num_threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=num_threads: n)
        args = (targets, mask, g, ge)
        results.append(run(token_logprobs, [logits], *args, return_entropy=True))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.host  # the interpreter would take minutes
@pytest.mark.parametrize("vocabulary", [1, 5])
def test_70000_rows(vocabulary):
    logits, _, _, targets, mask, g, ge = case(8, (70_000,), vocabulary)
    check_all(token_logprobs, reference.token_logprobs, [logits], targets, mask, g, ge, (1e-6, 1e-6))


def test_offsets_beyond_32_bits():
    """Rows 2^30 elements apart, of memory that is only touched there: the third begins at element 2^31."""
    memory = torch.from_numpy(np.empty(2**31 + 40, np.float32))
    logits = memory.as_strided((3, 40), (2**30, 1))
    logits.copy_(torch.randn(3, 40))
    targets, g = torch.tensor([3, 0, 39]), torch.randn(3)
    out = [token_logprobs(x, targets, return_entropy=True) for x in (logits, logits.clone())]
    assert torch.equal(out[0][0], out[1][0])
    assert torch.equal(out[0][1], out[1][1])
    grads = []
    for x in (logits.detach().requires_grad_(), logits.clone().requires_grad_()):
        (token_logprobs(x, targets) * g).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


BLOCK = logprob_host.BLOCK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_rows_of_several_blocks(dtype, vocabulary):
    """Blocks whose logits rise or fall by little or much, or are -inf: where a new maximum is looked for, or not."""
    steps = torch.tensor(
        [[0, 0, 0, 0], [0, 3, 6, 9], [0, 50, -50, 1e4], [9, 6, 3, 0], [-INF, -INF, 1, 2], [0, -INF, 9, 0]]
    )
    g = torch.Generator().manual_seed(7)
    logits = torch.randn(6, vocabulary, generator=g) + steps.repeat_interleave(BLOCK, 1)[:, :vocabulary]
    logits[4, 1] = 0  # a block with one finite number
    targets = logits.argsort(-1, descending=True)[torch.arange(6), torch.randint(vocabulary // 9, (6,), generator=g)]
    mask = torch.ones(6, dtype=torch.bool)
    args = (
        targets,
        mask,
        torch.randn(6, generator=g),
        torch.randn(6, generator=g),
        (2e-6, 2e-6 if dtype == torch.float32 else 4e-3),
    )
    check_all(token_logprobs, reference.token_logprobs, [logits.to(dtype)], *args, temperature=1.3)


@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, 2 * BLOCK])
@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7F800000])
def test_nan_and_infinity_are_not_lost(at, bits):
    """As in log_softmax: NaN, of either sign and with any payload, and +inf make the row NaN."""
    logits = torch.randn(2, 2 * BLOCK + 1)
    logits[0].view(torch.int32)[at] = bits - (1 << 32 if bits >= 1 << 31 else 0)
    logprobs, entropy = token_logprobs(logits, torch.tensor([5, 5]), return_entropy=True)
    assert logprobs.isnan().tolist() == entropy.isnan().tolist() == [True, False]


def test_rows_of_nothing_but_minus_infinity():
    logits = torch.full((1, 9), -INF)
    assert token_logprobs(logits, torch.tensor([5])).isnan().all()


def test_mask_forms_agree():
    logits, h, w, targets, mask, *_ = case(2, density=1.0)
    expected = token_logprobs(logits, targets)
    assert torch.equal(token_logprobs(logits, targets.int(), mask.long() * 2), expected)
    assert torch.equal(token_logprobs(logits, targets, mask.to(torch.uint8)), expected)
    assert torch.equal(linear_token_logprobs(h, w, targets), linear_token_logprobs(h, w, targets.int(), mask))


def test_entropy_is_only_given_when_asked_for():
    logits, _, _, targets, mask, *_ = case(2)
    alone = token_logprobs(logits, targets, mask)
    logprobs, entropy = token_logprobs(logits, targets, mask, return_entropy=True)
    torch.testing.assert_close(alone, logprobs)
    assert entropy.shape == targets.shape


@pytest.mark.parametrize("view", ["sliced", "transposed", "strided", "expanded", "flat"])
def test_views_are_read_in_place(view):
    """logits[:, :-1] and other views give what a copy gives, values and gradients."""

    def views(x):
        return {
            "sliced": lambda: x[:, :-1],
            "transposed": lambda: x.transpose(0, 1),
            "strided": lambda: x[:, ::2, 1:],
            "expanded": lambda: x[:1].expand(3, -1, -1),
            "flat": lambda: x.flatten(0, 1)[1:-1],
        }[view]()

    x = torch.randn(3, 8, 11)
    a, b = leaf(x), leaf(x)
    seen, copied = views(a), views(b).contiguous()
    targets = torch.randint(0, seen.shape[-1], seen.shape[:-1])
    mask = torch.rand(targets.shape) < 0.6
    out, expected = token_logprobs(seen, targets, mask), token_logprobs(copied, targets, mask)
    assert torch.equal(out, expected)
    out.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(a.grad, b.grad)
    w = torch.randn(6, seen.shape[-1])
    t = targets % 6
    assert torch.equal(linear_token_logprobs(seen, w, t, mask), linear_token_logprobs(copied, w, t, mask))


MATRIX_VIEWS = {  # of a random x [12, 12]
    "columns": lambda x: x.T,
    "every second column": lambda x: x[:, ::2],
    "one row, expanded": lambda x: x[2:3].expand(6, 12),
    "the only row, expanded": lambda x: x[:1].clone().expand(6, 12),
    "one number, expanded": lambda x: x[:6, :1].expand(6, 12),
    "columns of a batch": lambda x: x.T[None],
    "last dimension first": lambda x: x.reshape(4, 3, 12).permute(1, 2, 0),
    "every second of a batch": lambda x: x.reshape(3, 4, 12)[..., ::2],
    "a column": lambda x: x[:, 1],
    "one logit": lambda x: x[:, 3:4],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("view", MATRIX_VIEWS)
def test_logits_of_any_strides_are_right(view, dtype):
    """Published here as a bug: logits that are not dense along the vocabulary gave wrong numbers on the CPU."""
    x = torch.randn(12, 12).to(dtype)
    a, b = leaf(x), leaf(x)
    seen, copied = MATRIX_VIEWS[view](a), MATRIX_VIEWS[view](b).contiguous()
    targets = torch.randint(0, seen.shape[-1], seen.shape[:-1])
    out = token_logprobs(seen, targets)
    expected = torch.log_softmax(copied.float(), -1).gather(-1, targets[..., None].long())[..., 0]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    out.sum().backward()
    token_logprobs(copied, targets).sum().backward()
    torch.testing.assert_close(a.grad, b.grad)
    hidden = seen.detach()
    weight = torch.randn(5, hidden.shape[-1]).to(dtype)
    found = linear_token_logprobs(hidden, weight, targets % 5)
    torch.testing.assert_close(found, linear_token_logprobs(hidden.contiguous(), weight, targets % 5))


@pytest.mark.host
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype, autocast):
    """The head's product was rounded to bf16 under autocast, or failed where the vocabulary takes several tiles."""
    hidden, weight = torch.randn(4, 64).to(dtype), torch.randn(20_000, 64).to(dtype)
    targets, old, advantages = torch.randint(20_000, (4,)), torch.full((4,), -10.0), torch.randn(4)

    def results():
        h, w = leaf(hidden), leaf(weight)
        logprobs = linear_token_logprobs(h, w, targets)
        logprobs.sum().backward()
        g, v = leaf(hidden), leaf(weight)
        loss = linear_ppo_loss(g, v, targets, old, advantages).loss
        loss.backward()
        return logprobs, h.grad, w.grad, loss, g.grad, v.grad

    expected = results()
    with torch.autocast("cpu", dtype=autocast):
        found = results()
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_the_lowest_finite_logits_are_numbers():
    logits = torch.full((2, 5000), torch.finfo(torch.float32).min)
    logits[1] = -torch.inf
    out = token_logprobs(logits, torch.tensor([3, 3]))
    assert out[0] == pytest.approx(-math.log(5000))
    assert out[1].isnan()


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3), ()])
def test_no_or_one_row(shape):
    logits, h, w = leaf(torch.randn(*shape, 5)), leaf(torch.randn(*shape, 4)), leaf(torch.randn(5, 4))
    targets = torch.ones(shape, dtype=torch.long)
    for out in (token_logprobs(logits, targets), linear_token_logprobs(h, w, targets)):
        assert out.shape == shape
        out.sum().backward()
    assert logits.grad.shape == logits.shape
    assert w.grad.isfinite().all()


def test_nothing_to_score():
    """All rows masked, NaN everywhere, no valid target: zeros and zero gradients."""
    logits, h, w = leaf(torch.full((2, 3, 5), NAN)), leaf(torch.full((2, 3, 4), NAN)), leaf(torch.randn(5, 4))
    targets, mask = torch.full((2, 3), -100), torch.zeros(2, 3, dtype=torch.bool)
    for pair in (
        token_logprobs(logits, targets, mask, return_entropy=True),
        linear_token_logprobs(h, w, targets, mask, return_entropy=True),
    ):
        assert not pair[0].any()
        assert not pair[1].any()
        (pair[0] + pair[1]).sum().backward()
    for x in (logits, h, w):
        assert not x.grad.any()


# Hard numbers


def test_logits_of_10000():
    """Nothing overflows and, since the largest logit is kept apart, no digits are lost in backward."""
    logits = torch.randn(4, 50) + torch.tensor([1e4, -1e4, 3e4, 0.0])[:, None]
    logits[3, :2] = torch.tensor([1e4, -1e4])
    targets, mask = torch.tensor([1, 2, 3, 1]), torch.ones(4, dtype=torch.bool)
    args = (targets, mask, torch.randn(4), torch.zeros(4), (1e-6, 2e-6))
    check_all(token_logprobs, reference.token_logprobs, [logits], *args)


def test_minus_infinity_adds_nothing_to_entropy():
    logits = torch.randn(3, 9)
    logits[0, :4], logits[1, :8], logits[2, 3] = -INF, -INF, -INF
    targets, mask = torch.tensor([5, 8, 0]), torch.ones(3, dtype=torch.bool)
    args = (targets, mask, torch.randn(3), torch.randn(3), (1e-6, 1e-6))
    _, entropy, grad = check_all(token_logprobs, reference.token_logprobs, [logits], *args)
    assert entropy[1] == 0
    assert grad.isfinite().all()
    impossible = token_logprobs(logits, torch.tensor([0, 0, 3]))
    assert (impossible == -INF).all()


def test_one_huge_logit_among_small_ones():
    logits = torch.full((1, 1000), -1e4)
    logits[0, 7] = 1e4
    logprobs, entropy = token_logprobs(leaf(logits), torch.tensor([7]), return_entropy=True)
    assert logprobs == 0
    assert entropy == 0
    (logprobs + entropy).sum().backward()


def test_trap_temperature_scales_logits_not_logprobs():
    logits, targets = torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([1])
    expected = torch.log_softmax(logits / 0.5, -1)[0, 1]
    torch.testing.assert_close(token_logprobs(logits, targets, temperature=0.5)[0], expected)
    assert abs(float(token_logprobs(logits, targets)[0]) / 0.5 - float(expected)) > 0.1


def test_trap_row_i_scores_target_i():
    """No shift inside: one row with one dominant logit each."""
    logits = torch.eye(5) * 50
    assert (token_logprobs(logits, torch.arange(5)) > -1e-6).all()
    assert (linear_token_logprobs(torch.eye(5) * 50, torch.eye(5), torch.arange(5)) > -1e-6).all()
    assert (token_logprobs(logits, torch.arange(5).roll(1)) < -49).all()


# Memory


def largest_allocation(function) -> int:
    """Bytes of the largest single allocation while function runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    return max(e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")


@pytest.mark.host
def test_linear_never_holds_more_than_a_chunk_of_logits(monkeypatch):
    """Forward and backward: a chunk of 64 rows at most, where [tokens, V] would be 30 times that."""
    monkeypatch.setattr(linear_logprob, "CPU_CHUNK", 64 * 512)
    monkeypatch.setattr(linear_logprob, "VOCAB_BLOCK", 64 * 16)
    mask, targets = torch.rand(2000) < 0.5, torch.zeros(2000, dtype=torch.long)
    h, w = leaf(torch.randn(2000, 16)), leaf(torch.randn(512, 16))

    def scores():
        logprobs, entropy = linear_token_logprobs(h, w, targets, mask, return_entropy=True)
        (logprobs + entropy).sum().backward()

    def loss():
        linear_ppo_loss(h, w, targets, torch.zeros(2000), torch.ones(2000), mask).loss.backward()

    assert largest_allocation(scores) <= 64 * 512 * 4
    assert largest_allocation(loss) <= 64 * 512 * 4


@pytest.mark.host
def test_logits_are_not_copied():
    """Not even a slice of them in low precision, forward: one chunk at a time."""
    logits, targets = torch.randn(4, 501, 512, dtype=torch.bfloat16)[:, :-1], torch.zeros(4, 500, dtype=torch.long)
    assert largest_allocation(lambda: token_logprobs(logits, targets)) <= logprob.CPU_CHUNK * 4


# What bad input gets

LOGITS, TARGETS, MASK = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3).bool()
HIDDEN, WEIGHT = torch.zeros(2, 3, 4), torch.zeros(5, 4)
BAD = [
    ("logits", LOGITS.double(), "float32 or bfloat16 or float16, got torch.float64"),
    ("logits", torch.tensor(1.0), r"shape \[..., V\]"),
    ("targets", TARGETS.float(), "int32 or int64"),
    ("targets", TARGETS[:, :2], r"shape \[2, 3\], got \[2, 2\]"),
    pytest.param("targets", TARGETS + 5, r"ids in \[0, 5\) at action tokens, got 5", marks=pytest.mark.host),
    pytest.param("targets", TARGETS - 1, "got -1", marks=pytest.mark.host),
    ("targets", TARGETS.to("meta"), "device cpu"),
    ("mask", MASK.float(), "bool or uint8"),
    ("mask", MASK[0], r"shape \[2, 3\]"),
    ("temperature", 0.0, r"finite number in \(0, inf\), got 0.0"),
    ("temperature", -1, "got -1"),
    ("temperature", 1e-40, "at least 1e-30, as arithmetic is fp32, got 1e-40"),
    ("temperature", NAN, "got nan"),
    ("temperature", INF, "got inf"),
    ("temperature", torch.tensor(1.0), "got Tensor"),
]
BAD_LINEAR = [
    ("hidden", HIDDEN.double(), "float32"),
    ("hidden", torch.tensor(1.0), r"shape \[..., H\]"),
    ("weight", WEIGHT.bfloat16(), "dtype float32, got torch.bfloat16"),
    ("weight", WEIGHT.T, r"shape \[V, 4\], got \[4, 5\]"),
    ("weight", WEIGHT[0], r"shape \[V, 4\]"),
    ("weight", WEIGHT.to("meta"), "device cpu"),
    *BAD[2:],
]


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_bad_argument(name, value, message):
    good = dict(logits=LOGITS, targets=TARGETS, mask=MASK)
    token_logprobs(**good)
    with pytest.raises(ValueError, match=rf"^{name}: expected .*{message}"):
        token_logprobs(**good | {name: value})


@pytest.mark.parametrize(("name", "value", "message"), BAD_LINEAR)
def test_bad_argument_linear(name, value, message):
    good = dict(hidden=HIDDEN, weight=WEIGHT, targets=TARGETS, mask=MASK)
    linear_token_logprobs(**good)
    with pytest.raises(ValueError, match=rf"^{name}: expected .*{message}"):
        linear_token_logprobs(**good | {name: value})


def test_targets_outside_the_vocabulary_are_fine_where_masked():
    targets = torch.tensor([0, -100, 7, 2**31])
    mask = torch.tensor([1, 0, 0, 0])
    assert token_logprobs(torch.zeros(4, 5), targets, mask)[1:].eq(0).all()


def test_reference_gradients():
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    targets, mask = torch.tensor([0, 5, 2, -100]), torch.tensor([1, 1, 1, 0])
    torch.autograd.gradcheck(lambda x: reference.token_logprobs(x, targets, mask, temperature=0.7), logits)
    h = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda h, w: reference.linear_token_logprobs(h, w, targets, mask), (h, w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_inplace_backward_overwrites_the_logits(dtype, masked):
    logits, _, _, targets, mask, g, ge = case(3, dtype=dtype, density=0.5 if masked else 1.0)
    grads, made = [], []
    for inplace in (False, True):
        x = leaf(logits)
        made.append(x * 1)
        logprobs, entropy = token_logprobs(
            made[-1], targets, mask if masked else None, return_entropy=True, inplace_backward=inplace
        )
        (logprobs * g + entropy * ge).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
    assert torch.equal(made[1], grads[1])
    torch.testing.assert_close(made[0].detach(), logits, rtol=0, atol=0, equal_nan=True)


def test_inplace_backward_runs_once():
    logits = leaf(torch.randn(3, 5)) * 1
    loss = token_logprobs(logits, torch.tensor([0, 1, 2]), inplace_backward=True).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inplace_backward_is_refused_where_it_would_do_harm():
    targets = torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match=r"^logits: expected no leaf that requires grad"):
        token_logprobs(leaf(torch.zeros(2, 5)), targets, inplace_backward=True)
    with pytest.raises(ValueError, match=r"^logits: expected a contiguous tensor"):
        token_logprobs(torch.zeros(5, 2).t(), targets, inplace_backward=True)
    assert token_logprobs(torch.zeros(2, 5), targets, inplace_backward=True).shape == (2,)


SAME_BITS = """
import hashlib, torch
from rsi_kernels import linear_token_logprobs
torch.manual_seed(0)
hidden, weight = torch.randn(37, 64, requires_grad=True), torch.randn(300, 64, requires_grad=True)
linear_token_logprobs(hidden, weight, torch.randint(0, 300, (37,))).sum().backward()
print(hashlib.sha256(hidden.grad.numpy().tobytes() + weight.grad.numpy().tobytes()).hexdigest())
"""


@pytest.mark.host
def test_the_process_that_compiles_gives_the_same_bits_as_those_that_find_it_compiled(tmp_path):
    """Or a run's first start would differ from its resume in the last bits."""
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", SAME_BITS]
    first, second = (subprocess.run(command, env=env, capture_output=True, check=True, timeout=120) for _ in range(2))
    assert list(tmp_path.rglob("*.nbc"))
    assert first.stdout == second.stdout


NO_CACHE = """
import numba.core.caching as caching
caching.CacheImpl._locator_classes = []  # as where nothing is writable that numba would keep its work in
import torch
from rsi_kernels import token_logprobs
print(float(token_logprobs(torch.zeros(1, 4), torch.tensor([1]))))
"""


@pytest.mark.host
def test_without_a_place_for_compiled_loops_they_are_compiled_anew():
    done = subprocess.run([sys.executable, "-c", NO_CACHE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(-math.log(4))


def test_numbers_of_numpy_are_numbers():
    logits, targets = torch.randn(2, 5), torch.tensor([1, 2])
    out = token_logprobs(logits, targets, temperature=np.float32(0.5))
    assert torch.equal(out, token_logprobs(logits, targets, temperature=0.5))
