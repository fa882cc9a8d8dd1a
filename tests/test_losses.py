"""policy_loss, value_loss, linear_ppo_loss: formula and gradient against float64, the cut of a batch, hard numbers."""

import pytest
import torch
import torch.utils.checkpoint
from kernel_checks import NAN, assert_as_good_as, poisoned
from rsi_kernels import (
    linear_logprob,
    linear_ppo_loss,
    linear_token_logprobs,
    policy_loss,
    reference,
    runtime,
    value_loss,
)

pytestmark = pytest.mark.usefixtures(poisoned.__name__)
INF = float("inf")
OPTIONS = [
    {},
    dict(clip_low=0.1, clip_high=0.3),
    dict(dual_clip=1.5),
    dict(behaviour=True),
    dict(behaviour=True, is_cap=1.05, dual_clip=3.0, denominator=11),
    dict(denominator=torch.tensor(7)),
]


def leaf(x, dtype=None):
    return x.detach().to(dtype or x.dtype, copy=True).requires_grad_()


def case(seed=0, shape=(3, 9), density=0.6):
    """(logprobs, old_logprobs, advantages, behaviour_logprobs, mask), NaN where masked."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=g) < density

    def masked(x):
        return x.where(mask, torch.tensor(NAN))

    new = -torch.rand(shape, generator=g) * 3
    old = new + 0.4 * torch.randn(shape, generator=g)
    behaviour = old + 0.2 * torch.randn(shape, generator=g)
    return masked(new), masked(old), masked(torch.randn(shape, generator=g)), masked(behaviour), mask


def keywords(options, behaviour, dtype):
    options = dict(options)
    return options | (dict(behaviour_logprobs=behaviour.to(dtype)) if options.pop("behaviour", False) else {})


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", [(3, 9), (1,), (2, 5, 7), ()])
def test_policy_loss_against_float64(options, shape):
    new, old, advantages, behaviour, mask = case(1, shape, 0.6 if shape not in ((1,), ()) else 1.0)
    results = []
    for function, dtype in ((policy_loss, torch.float32), (reference.policy_loss, torch.float64)):
        x = leaf(new, dtype)
        loss, stats = function(x, old.to(dtype), advantages.to(dtype), mask, **keywords(options, behaviour, dtype))
        loss.backward()
        results.append((loss.detach(), x.grad, stats))
    (loss, grad, stats), (exact, exact_grad, fraction) = results
    assert loss.dtype == torch.float32
    assert loss.dim() == 0
    assert_as_good_as(loss, exact, exact)
    assert_as_good_as(grad, exact_grad, exact_grad)
    assert (grad[~mask] == 0).all()
    assert stats["clip_fraction"] == pytest.approx(float(fraction))
    ratio = (new - old)[mask].exp()
    assert stats["num_tokens"] == mask.sum()
    assert stats["ratio_mean"] == pytest.approx(float(ratio.mean()))
    assert stats["ratio_max"] == pytest.approx(float(ratio.max()))
    assert stats["approx_kl"] == pytest.approx(float((ratio - 1 - ratio.log()).mean()), abs=1e-6)
    assert all(x.dim() == 0 and not x.requires_grad for x in stats.values())


@pytest.mark.parametrize("denominator", [None, 13, 13.0, torch.tensor(13)])
def test_value_loss_against_float64(denominator):
    v, old, returns, _, mask = case(2)
    results = []
    for function, dtype in ((value_loss, torch.float32), (reference.value_loss, torch.float64)):
        x = leaf(v, dtype)
        loss, stats = function(x, old.to(dtype), returns.to(dtype), mask, clip=0.3, denominator=denominator)
        loss.backward()
        results.append((loss.detach(), x.grad, stats))
    (loss, grad, stats), (exact, exact_grad, fraction) = results
    assert_as_good_as(loss, exact, exact)
    assert_as_good_as(grad, exact_grad, exact_grad)
    assert (grad[~mask] == 0).all()
    assert stats["clip_fraction"] == pytest.approx(float(fraction))
    assert stats["num_tokens"] == mask.sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_input_is_computed_in_fp32(dtype):
    new, old, advantages, _, mask = case(3)
    x, y = leaf(new, dtype), leaf(new.to(dtype), torch.float32)
    low = policy_loss(x, old.to(dtype), advantages.to(dtype), mask)
    full = policy_loss(y, old.to(dtype).float(), advantages.to(dtype).float(), mask)
    assert torch.equal(low.loss, full.loss)
    low.loss.backward()
    full.loss.backward()
    assert torch.equal(x.grad, y.grad.to(dtype))


# linear_ppo_loss


def linear_case(seed, dtype, shape=(4, 13), vocabulary=37, hidden=6, density=0.5):
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=g) < density
    targets = torch.randint(0, vocabulary, shape, generator=g).where(mask, torch.tensor(-100))
    h = torch.randn(*shape, hidden, generator=g).to(dtype)
    w = torch.randn(vocabulary, hidden, generator=g).to(dtype)
    h[~mask] = NAN
    exact, _ = reference.linear_token_logprobs(h.double(), w.double(), targets, mask, temperature=0.8)
    old = (exact + 0.3 * torch.randn(shape, generator=g)).float().where(mask, torch.tensor(NAN))
    advantages = torch.randn(shape, generator=g).where(mask, torch.tensor(NAN))
    behaviour = old + 0.1 * torch.randn(shape, generator=g)
    return h, w, targets, mask, old, advantages, behaviour


def test_linear_ppo_with_a_tied_weight_under_activation_checkpointing():
    h, w, targets, mask, old, advantages, _ = linear_case(6, torch.float32)
    token_ids = torch.randint(0, len(w), h.shape[:2])

    def loss(w):
        hidden = torch.where(mask[..., None], h, 0.0) + torch.nn.functional.embedding(token_ids, w)
        return linear_ppo_loss(hidden, w, targets, old, advantages, mask).loss

    plain, checkpointed = leaf(w), leaf(w)
    loss(plain).backward()
    torch.utils.checkpoint.checkpoint(loss, checkpointed, use_reentrant=False).backward()
    torch.testing.assert_close(checkpointed.grad, plain.grad)
    x = leaf(w, torch.float64)
    hidden = torch.where(mask[..., None], h, 0.0).double() + torch.nn.functional.embedding(token_ids, x)
    scores, _ = reference.linear_token_logprobs(hidden, x, targets, mask)
    reference.policy_loss(scores, old.double(), advantages.double(), mask)[0].backward()
    torch.testing.assert_close(plain.grad, x.grad.float(), rtol=1e-4, atol=1e-6)


def test_clipped_tokens_cost_no_backward_product(monkeypatch):
    h, w, targets, mask, old, advantages, _ = linear_case(4, torch.float32)
    clipped = mask & (torch.rand(mask.shape) < 0.5)
    old, advantages = torch.where(clipped, old - 9, old), torch.where(clipped, advantages.abs() + 1, advantages)
    num_rows, head_gradient = [], linear_logprob.head_gradient

    def counted(dlogits, *rest):
        num_rows.append(len(dlogits))
        return head_gradient(dlogits, *rest)

    monkeypatch.setattr(linear_logprob, "head_gradient", counted)
    monkeypatch.setattr(linear_logprob, "CPU_CHUNK", 37 * 5)
    monkeypatch.setattr(linear_logprob, "CPU_ROWS", 1)
    x = leaf(h)
    linear_ppo_loss(x, w, targets, old, advantages, mask, temperature=0.8).loss.backward()
    pulled = (x.grad != 0).any(-1)
    assert not pulled[clipped].any()
    assert sum(num_rows) == pulled.sum() < mask.sum()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "has_bf16", "margin"),
    [
        (torch.float32, False, 1e-6),
        (torch.bfloat16, False, 8e-3),
        (torch.bfloat16, True, 1.2e-2),  # one rounding more, of the logits' gradient
        (torch.float16, False, 1e-3),
    ],
)
def test_linear_ppo_against_float64(monkeypatch, options, dtype, has_bf16, margin):
    monkeypatch.setattr(runtime, "cpu_multiplies_bf16", lambda: has_bf16)
    monkeypatch.setattr(linear_logprob, "CPU_CHUNK", 37 * 5)
    monkeypatch.setattr(linear_logprob, "CPU_ROWS", 1)
    h, w, targets, mask, old, advantages, behaviour = linear_case(4, dtype)
    h1, w1, h2, w2 = leaf(h), leaf(w), leaf(h, torch.float64), leaf(w, torch.float64)
    kwargs = keywords(options, behaviour, torch.float32)
    loss, stats = linear_ppo_loss(h1, w1, targets, old, advantages, mask, temperature=0.8, **kwargs)
    h3, w3 = leaf(h, torch.float32), leaf(w, torch.float32)

    def plain(h, w, kind):
        logprobs, _ = reference.linear_token_logprobs(h, w, targets, mask, temperature=0.8)
        kwargs = keywords(options, behaviour, kind)
        return reference.policy_loss(logprobs, old.to(kind), advantages.to(kind), mask, **kwargs)

    (exact, fraction), (fp32, _) = plain(h2, w2, torch.float64), plain(h3, w3, torch.float32)
    assert_as_good_as(loss.detach(), exact.detach(), fp32.detach(), 1e-6)
    for x in (loss, exact, fp32):
        (3 * x).backward()
    for a, e, p in ((h1.grad, h2.grad, h3.grad), (w1.grad, w2.grad, w3.grad)):
        assert_as_good_as(a, e, p, margin)
    assert (h1.grad[~mask] == 0).all()
    assert stats["clip_fraction"] == pytest.approx(float(fraction))
    logprobs = linear_token_logprobs(h, w, targets, mask, temperature=0.8)
    two_steps = policy_loss(logprobs, old, advantages, mask, **kwargs)
    for key, value in two_steps.stats.items():
        assert stats[key] == pytest.approx(float(value), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("wanted", ["hidden", "weight", "none"])
def test_linear_ppo_makes_only_the_gradients_wanted(wanted):
    h, w, targets, mask, old, advantages, _ = linear_case(5, torch.float32)
    both = leaf(h), leaf(w)
    linear_ppo_loss(*both, targets, old, advantages, mask).loss.backward()
    h1, w1 = h.requires_grad_(wanted == "hidden"), w.requires_grad_(wanted == "weight")
    loss = linear_ppo_loss(h1, w1, targets, old, advantages, mask).loss
    if wanted == "none":
        assert not loss.requires_grad
        return
    loss.backward()
    one, other = (h1, both[0]) if wanted == "hidden" else (w1, both[1])
    torch.testing.assert_close(one.grad, other.grad)


def test_linear_ppo_low_precision_survives_a_large_denominator():
    h, w, targets, mask, old, advantages, _ = linear_case(6, torch.float16)
    grads = []
    for denominator, scale in ((1, 1), (10**6, 10**6)):
        h1 = leaf(h)
        (linear_ppo_loss(h1, w, targets, old, advantages, mask, denominator=denominator).loss * scale).backward()
        grads.append(h1.grad)
    torch.testing.assert_close(*grads)


# The cut of a batch


def test_trap_gradient_does_not_depend_on_micro_batches():
    """Sums over the global token count: uneven cuts, one of them without action tokens, give the whole gradient."""
    new, old, advantages, _, mask = case(7, (6, 9))
    mask[3:5] = False
    whole, parts = leaf(new), leaf(new)
    policy_loss(whole, old, advantages, mask).loss.backward()
    v_whole, v_parts = leaf(new), leaf(new)
    value_loss(v_whole, old, advantages, mask).loss.backward()
    count = mask.sum()
    for rows in (slice(0, 1), slice(1, 3), slice(3, 5), slice(5, 6)):
        policy_loss(parts[rows], old[rows], advantages[rows], mask[rows], denominator=count).loss.backward()
        part = value_loss(v_parts[rows], old[rows], advantages[rows], mask[rows], denominator=int(count))
        part.loss.backward()
    torch.testing.assert_close(parts.grad, whole.grad)
    torch.testing.assert_close(v_parts.grad, v_whole.grad)


@pytest.mark.parametrize("denominator", [None, 5, 0, torch.tensor(0)])
@pytest.mark.parametrize("shape", [(2, 3), (0,)])
def test_trap_no_action_tokens_give_zero(denominator, shape):
    nan, mask = torch.full(shape, NAN), torch.zeros(shape).bool()
    h, w, targets = leaf(torch.full((*shape, 4), NAN)), leaf(torch.randn(5, 4)), torch.full(shape, -100)
    x, y = leaf(nan), leaf(nan)
    outputs = (
        policy_loss(x, nan, nan, mask, denominator=denominator),
        value_loss(y, nan, nan, mask, denominator=denominator),
        linear_ppo_loss(h, w, targets, nan, nan, mask, denominator=denominator),
    )
    for loss, stats in outputs:
        assert loss == 0
        loss.backward()
        assert all(value == 0 for value in stats.values())
    for leaf_ in (x, y, h, w):
        assert not leaf_.grad.any()


# Hard numbers


def test_trap_first_step_has_ratio_one_and_nothing_clipped():
    new, _, advantages, _, mask = case(8)
    x = leaf(new)
    loss, stats = policy_loss(x, new, advantages, mask)
    loss.backward()
    assert stats["ratio_mean"] == stats["ratio_max"] == 1
    assert stats["clip_fraction"] == stats["approx_kl"] == 0
    torch.testing.assert_close(x.grad[mask], -advantages[mask] / mask.sum())


def test_trap_value_clip_fraction():
    """old 0, new 1, clip 0.2, R 1: the clipped term, 0.64 / 2, rules, and gives no gradient."""
    x = torch.ones(1, requires_grad=True)
    loss, stats = value_loss(x, torch.zeros(1), torch.ones(1), torch.ones(1).bool(), clip=0.2)
    loss.backward()
    assert loss.item() == pytest.approx(0.32)
    assert stats["clip_fraction"] == 1
    assert x.grad == 0


def test_values_inside_the_clip_range_are_never_counted_as_clipped():
    """old + (v - old) is not v in fp32; the range has to be applied to v itself."""
    v, old = torch.rand(1000) * 1e-3, torch.rand(1000) * 0.4
    assert (old + (v - old) != v).any()
    out = value_loss(v, old, torch.zeros(1000), torch.ones(1000).bool(), clip=0.5)
    assert out.stats["clip_fraction"] == 0


@pytest.mark.parametrize("behaviour", [None, -1.0])
def test_trap_overflowing_ratio_where_the_clip_rules(behaviour):
    new, old = torch.tensor([0.0, 0.0, 0.0], requires_grad=True), torch.full((3,), -1000.0)
    advantages = torch.tensor([2.0, 0.0, 1.0])
    kwargs = {} if behaviour is None else dict(behaviour_logprobs=old + behaviour, is_cap=1.5)
    loss, stats = policy_loss(new, old, advantages, torch.ones(3).bool(), **kwargs)
    weight = 1 if behaviour is None else 1.5
    assert loss.item() == pytest.approx(-1.2 * weight)  # -(2 + 0 + 1) * 1.2 / 3
    loss.backward()
    assert not new.grad.any()
    assert stats["clip_fraction"] == pytest.approx(2 / 3)
    assert stats["ratio_max"] == INF


def test_dual_clip_bounds_an_overflowing_ratio_of_a_bad_action():
    new = torch.zeros(1, requires_grad=True)
    args = (torch.full((1,), -1000.0), torch.tensor([-2.0]), torch.ones(1).bool())
    assert policy_loss(new, *args).loss == INF
    loss = policy_loss(new, *args, dual_clip=3.0).loss
    loss.backward()
    assert loss == 6
    assert new.grad == 0


def test_linear_ppo_overflowing_ratio():
    h, w = torch.zeros(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    loss, _ = linear_ppo_loss(h, w, torch.tensor([0, 1]), torch.full((2,), -1000.0), torch.tensor([1.0, 0.0]))
    loss.backward()
    assert loss.item() == pytest.approx(-0.6)
    assert not h.grad.any()
    assert not w.grad.any()


def test_masked_tokens_stay_zero_under_an_overflowed_loss_scale():
    new, old, advantages, _, mask = case(9)
    x = leaf(new)
    (policy_loss(x, old, advantages, mask).loss * INF).backward()
    assert (x.grad[~mask] == 0).all()


def test_uncapped_importance_weight():
    new, old, behaviour = torch.tensor([-1.0], requires_grad=True), torch.tensor([-1.0]), torch.tensor([-3.0])
    mask = torch.ones(1).bool()
    loss = policy_loss(new, old, torch.ones(1), mask, behaviour_logprobs=behaviour).loss
    loss.backward()
    assert loss.item() == pytest.approx(-(2.718281828**2), rel=1e-6)
    assert new.grad == pytest.approx(-(2.718281828**2), rel=1e-6)
    capped = policy_loss(new, old, torch.ones(1), mask, behaviour_logprobs=behaviour, is_cap=2.0).loss
    assert capped == -2


def test_constants_get_no_gradient():
    new, old, advantages, behaviour, mask = (leaf(x) if x.is_floating_point() else x for x in case(10))
    policy_loss(new, old, advantages, mask, behaviour_logprobs=behaviour).loss.backward()
    value_loss(new, old, advantages, mask).loss.backward()
    assert old.grad is advantages.grad is behaviour.grad is None


def test_non_contiguous_input():
    new, old, advantages, _, mask = (x.t() for x in case(11))
    expected = policy_loss(new.contiguous(), old.contiguous(), advantages.contiguous(), mask.contiguous())
    x = leaf(new.t()).t()
    x.retain_grad()
    out = policy_loss(x, old, advantages, mask)
    torch.testing.assert_close(out.loss, expected.loss)
    out.loss.backward()
    assert x.grad.shape == new.shape


# What bad input gets

X, ONES = torch.zeros(2, 3), torch.ones(2, 3).bool()
POLICY = dict(logprobs=X, old_logprobs=X, advantages=X, mask=ONES)
VALUE = dict(values=X, old_values=X, returns=X, mask=ONES)
LINEAR = dict(
    hidden=torch.zeros(2, 3, 4), weight=torch.zeros(5, 4), targets=X.long(), old_logprobs=X, advantages=X, mask=ONES
)
SHARED = [
    ("mask", X, "bool"),
    ("mask", ONES[0], r"shape \[2, 3\]"),
    ("denominator", torch.ones(1), r"0-d tensor, got shape \[1\]"),
    ("denominator", -1, "got -1"),
    ("denominator", NAN, "got nan"),
    ("denominator", "3", "got str"),
]
CLIPS = [
    ("old_logprobs", X[0], r"shape \[2, 3\], got \[3\]"),
    ("old_logprobs", X.double(), "float32"),
    ("advantages", X.long(), "float32"),
    ("advantages", X[:, :2], r"shape \[2, 3\]"),
    ("behaviour_logprobs", X[:, :2], r"shape \[2, 3\]"),
    ("behaviour_logprobs", X.to("meta"), "device cpu"),
    ("clip_low", 1.5, r"\[0, 1\], got 1.5"),
    ("clip_high", -0.1, "got -0.1"),
    ("clip_high", INF, "got inf"),
    ("dual_clip", 1.0, r"\(1, inf\), got 1.0"),
    ("is_cap", 2.0, "None without behaviour_logprobs"),
]
BAD = [
    *[
        (policy_loss, POLICY, *bad)
        for bad in [*SHARED, *CLIPS, ("logprobs", X.double(), "float32"), ("mask", None, "")]
    ],
    (policy_loss, POLICY | dict(behaviour_logprobs=X), "is_cap", 0, r"\(0, inf\), got 0.0"),
    *[(value_loss, VALUE, *bad) for bad in SHARED],
    (value_loss, VALUE, "values", X.int(), "float32"),
    (value_loss, VALUE, "old_values", X[0], r"shape \[2, 3\]"),
    (value_loss, VALUE, "returns", X[0], r"shape \[2, 3\]"),
    (value_loss, VALUE, "clip", -0.2, "got -0.2"),
    (value_loss, VALUE, "clip", NAN, "got nan"),
    *[(linear_ppo_loss, LINEAR, *bad) for bad in [*SHARED, *CLIPS]],
    (linear_ppo_loss, LINEAR, "hidden", torch.zeros(2, 3, 4).double(), "float32"),
    (linear_ppo_loss, LINEAR, "weight", torch.zeros(5, 4).bfloat16(), "float32"),
    (linear_ppo_loss, LINEAR, "targets", X.long() + 5, r"ids in \[0, 5\)"),
    (linear_ppo_loss, LINEAR, "targets", X.long()[:1], r"shape \[2, 3\]"),
    (linear_ppo_loss, LINEAR, "temperature", 0, "got 0.0"),
]


@pytest.mark.parametrize(("function", "good", "name", "value", "message"), BAD)
def test_bad_argument(function, good, name, value, message):
    function(**good)
    with pytest.raises(ValueError, match=rf"^{name}: expected .*{message}"):
        function(**good | {name: value})


def test_trap_length_mismatch_raises():
    with pytest.raises(ValueError, match=r"^old_logprobs: expected shape \[2, 3\], got \[2, 2\]"):
        policy_loss(X, X[:, :2], X, ONES)


def test_reference_gradients():
    new, old, advantages, behaviour, mask = case(12)
    x = new.nan_to_num().double().requires_grad_()
    args = (old.double(), advantages.double(), mask)
    torch.autograd.gradcheck(
        lambda x: reference.policy_loss(x, *args, dual_clip=1.5, behaviour_logprobs=behaviour.double())[0], x
    )
    torch.autograd.gradcheck(lambda x: reference.value_loss(x, *args)[0], x)


def test_a_second_derivative_is_refused():
    """The gradient is kept as numbers: a hessian of it was silently zero."""
    x, mask = leaf(torch.zeros(3)), torch.ones(3, dtype=torch.bool)
    h, w = leaf(torch.randn(3, 4)), leaf(torch.randn(6, 4))
    losses = (
        value_loss(x, torch.zeros(3), torch.ones(3), mask, clip=9.0).loss,
        policy_loss(x, torch.zeros(3), torch.ones(3), mask).loss,
        linear_ppo_loss(h, w, torch.arange(3), torch.zeros(3), torch.ones(3)).loss,
    )
    for loss in losses:
        with pytest.raises(RuntimeError, match="can be differentiated once"):
            torch.autograd.grad(loss, [x] if loss is not losses[2] else [h, w], create_graph=True)


@pytest.mark.parametrize(
    ("denominator", "message"),
    [
        (torch.tensor(-1.0), "at least 0, got -1.0"),
        (torch.tensor(NAN), "at least 0, got nan"),
        (torch.tensor(1j), "expected dtype float32 or"),
    ],
)
def test_bad_denominator(denominator, message):
    x = torch.zeros(3)
    with pytest.raises(ValueError, match=f"^denominator: .*{message}"):
        policy_loss(x, x, x, torch.ones(3, dtype=torch.bool), denominator=denominator)
