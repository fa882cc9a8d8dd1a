"""`policy_loss` and `value_loss`: clipped PPO losses over action tokens, gradient computed in the forward pass.

The ops return it undivided, as the slope, with the divisor, so that a kernel needs one pass: it knows the number of
tokens only at the end. On a GPU see `ppo_loss_triton.py`.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from . import checks, runtime


class PolicyLoss(NamedTuple):
    """loss: 0-d fp32. stats: 0-d tensors clip_fraction, approx_kl, ratio_mean, ratio_max, num_tokens."""

    loss: Tensor
    stats: Mapping[str, Tensor]


class ValueLoss(NamedTuple):
    """loss: 0-d fp32. stats: 0-d tensors clip_fraction, num_tokens."""

    loss: Tensor
    stats: Mapping[str, Tensor]


STATS = ("clip_fraction", "approx_kl", "ratio_mean", "ratio_max", "num_tokens")


def surrogate(logprobs, old_logprobs, advantages, behaviour_logprobs, clip_low, clip_high, dual_clip, is_cap):
    """(loss, d loss/d logprobs, whether the clipped term rules, log-ratio) of fp32 tokens, elementwise.

    A token with advantage 0 gives exactly 0, whatever its ratio.
    """
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    neutral = advantages == 0
    rules = (clipped > plain) & ~neutral
    loss, slope = torch.where(rules, clipped, plain), torch.where(rules, 0.0, plain)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        beyond = (advantages < 0) & (loss > bound)
        loss, slope = torch.where(beyond, bound, loss), torch.where(beyond, 0.0, slope)
    if behaviour_logprobs is not None:
        weight = (old_logprobs - behaviour_logprobs).exp()
        weight = weight if is_cap is None else weight.clamp(max=is_cap)
        loss, slope = loss * weight, torch.where(slope == 0, 0.0, slope * weight)
    return torch.where(neutral, 0.0, loss), torch.where(neutral, 0.0, slope), rules, log_ratio


def divisor(num_tokens: Tensor, denominator: Tensor | None, number: float | None) -> Tensor:
    """fp32 0-d. A denominator of 0, which only a step without action tokens has, counts as 1: the loss is then 0."""
    if number is not None:
        denominator = torch.full_like(num_tokens, number, dtype=torch.float32)
    elif denominator is None:
        denominator = num_tokens
    denominator = denominator.to(num_tokens.device, torch.float32)
    return torch.where(denominator == 0, 1.0, denominator)


def policy_stats(rules, log_ratio, keep) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """In the order of STATS, over the tokens where keep."""
    num_tokens = keep.sum()
    count = num_tokens.clamp(min=1).float()
    ratio = log_ratio.exp()
    approx_kl = torch.where(keep, torch.expm1(log_ratio) - log_ratio, 0.0).sum() / count
    ratio_max = torch.cat([ratio.new_zeros(1), torch.where(keep, ratio, 0.0).reshape(-1)]).amax()
    return (
        (rules & keep).sum() / count,
        approx_kl,
        torch.where(keep, ratio, 0.0).sum() / count,
        ratio_max,
        num_tokens,
    )


@torch.library.custom_op("rsi_kernels::policy_loss", mutates_args=())
def _policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    behaviour_logprobs: Tensor | None,
    denominator: Tensor | None,
    number: float | None,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    is_cap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    if runtime.uses_triton(logprobs) and logprobs.numel():
        from .ppo_loss_triton import launch_policy  # imports Triton, which a CPU-only install lacks

        with runtime.device_of(logprobs):
            return launch_policy(
                logprobs, old_logprobs, advantages, mask, behaviour_logprobs, denominator, number,
                clip_low, clip_high, dual_clip, is_cap,
            )  # fmt: skip
    keep = mask != 0

    def kept(x):  # 0 is neutral: ratio 1 and advantage 0
        return None if x is None else torch.where(keep, x.float(), 0.0)

    loss, slope, rules, log_ratio = surrogate(
        kept(logprobs), kept(old_logprobs), kept(advantages), kept(behaviour_logprobs),
        clip_low, clip_high, dual_clip, is_cap,
    )  # fmt: skip
    stats = policy_stats(rules, log_ratio, keep)
    scale = divisor(stats[-1], denominator, number)
    return (loss.sum() / scale, *stats, scale, slope.contiguous())


@_policy_loss.register_fake
def _(logprobs, *arguments):
    return _fake_loss(logprobs, 4)


def _fake_loss(like, num_stats):
    *scalars, scale = [torch.empty((), dtype=torch.float32, device=like.device) for _ in range(2 + num_stats)]
    num_tokens = torch.empty((), dtype=torch.int64, device=like.device)
    return (*scalars, num_tokens, scale, torch.empty(like.shape, dtype=torch.float32, device=like.device))


@torch.library.custom_op("rsi_kernels::value_loss", mutates_args=())
def _value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    denominator: Tensor | None,
    number: float | None,
    clip: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if runtime.uses_triton(values) and values.numel():
        from .ppo_loss_triton import launch_value

        with runtime.device_of(values):
            return launch_value(values, old_values, returns, mask, denominator, number, clip)
    keep = mask != 0
    v, old, target = (torch.where(keep, x.float(), 0.0) for x in (values, old_values, returns))
    plain = v - target
    clipped = torch.clamp(v, old - clip, old + clip) - target
    rules = clipped * clipped > plain * plain  # only outside the range, where the clipped term is constant in v
    loss = torch.where(rules, clipped, plain).square() * 0.5
    num_tokens = keep.sum()
    scale = divisor(num_tokens, denominator, number)
    fraction = (rules & keep).sum() / num_tokens.clamp(min=1).float()
    return loss.sum() / scale, fraction, num_tokens, scale, torch.where(rules, 0.0, plain).contiguous()


@_value_loss.register_fake
def _(values, *arguments):
    return _fake_loss(values, 1)


def _save_slope(ctx, inputs, output):
    ctx.save_for_backward(*output[-2:])
    ctx.dtype, ctx.num_inputs = inputs[0].dtype, len(inputs)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, of_loss, *_):
    none = (None,) * (ctx.num_inputs - 1)
    if of_loss is None:
        return None, *none
    refuse_second_derivative("a PPO loss")
    scale, slope = ctx.saved_tensors
    return scaled(slope, of_loss / scale).to(ctx.dtype), *none


def refuse_second_derivative(name: str) -> None:
    """The gradient is kept as numbers, so its own derivative would silently be 0."""
    if torch.is_grad_enabled():  # in a backward: with create_graph
        raise RuntimeError(f"{name} can be differentiated once: call backward without create_graph=True")


def scaled(slope: Tensor, of_loss: Tensor) -> Tensor:
    """slope * of_loss, with 0 kept 0 (masked or clipped) under a loss scale that overflowed."""
    return torch.where(slope == 0, 0.0, slope * of_loss)


_policy_loss.register_autograd(_backward, setup_context=_save_slope)
_value_loss.register_autograd(_backward, setup_context=_save_slope)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    behaviour_logprobs: Tensor | None = None,
    is_cap: float | None = None,
    denominator: float | Tensor | None = None,
) -> PolicyLoss:
    """Clipped surrogate over action tokens: sum(w * max(-A * ratio, -A * clip(ratio))) / denominator.

    ratio = exp(logprobs - old_logprobs), clipped to [1 - clip_low, 1 + clip_high]. Differentiable in logprobs alone.

    Args:
        logprobs, old_logprobs, advantages: one shape, fp32, bf16 or fp16; not read where masked.
        mask: that shape, bool or integer; non-zero at action tokens.
        dual_clip: above 1; where A < 0 a token's loss is at most -A * dual_clip.
        behaviour_logprobs: of the rollout engine; gives the constant weight w = min(exp(old - behaviour), is_cap),
            without the minimum when is_cap is None.
        denominator: number of action tokens in the whole optimizer step, over all ranks: a number or a 0-d tensor.
            None: the action tokens given here. Gradients then add up over micro-batches and ranks.

    Returns PolicyLoss(loss, stats); stats are 0-d tensors over the action tokens given here: clip_fraction (clipped
    term strictly the larger loss), approx_kl (mean of ratio - 1 - log ratio), ratio_mean, ratio_max, num_tokens.
    Without action tokens everything is 0. Raises ValueError that names the argument.
    """
    checks.tensor("logprobs", logprobs, checks.FLOATS)
    checks.tensor("mask", mask, checks.MASKS, logprobs, logprobs.shape)
    arguments = check_policy(
        logprobs, logprobs.shape, old_logprobs, advantages, behaviour_logprobs, clip_low, clip_high, dual_clip, is_cap
    )
    old_logprobs, advantages, behaviour_logprobs, *clips = arguments
    loss, *stats, _, _ = _policy_loss(
        logprobs, old_logprobs, advantages, mask, behaviour_logprobs, *check_denominator(denominator), *clips
    )
    return PolicyLoss(loss, dict(zip(STATS, stats, strict=True)))


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float = 0.2,
    denominator: float | Tensor | None = None,
) -> ValueLoss:
    """Clipped value loss over action tokens: sum(0.5 * max((v - R)^2, (clip(v, old +- clip) - R)^2)) / denominator.

    values, old_values and returns have one shape, fp32, bf16 or fp16, and are not read where masked; mask and
    denominator as in `policy_loss`. Differentiable in values alone. stats: clip_fraction, num_tokens.
    """
    checks.tensor("values", values, checks.FLOATS)
    checks.tensor("old_values", old_values, checks.FLOATS, values, values.shape)
    checks.tensor("returns", returns, checks.FLOATS, values, values.shape)
    checks.tensor("mask", mask, checks.MASKS, values, values.shape)
    clip = checks.number("clip", clip, 0)
    loss, clip_fraction, num_tokens, _, _ = _value_loss(
        values, old_values.detach(), returns.detach(), mask, *check_denominator(denominator), clip
    )
    return ValueLoss(loss, {"clip_fraction": clip_fraction, "num_tokens": num_tokens})


def check_policy(like, shape, old_logprobs, advantages, behaviour_logprobs, clip_low, clip_high, dual_clip, is_cap):
    """Checks what `policy_loss` and `linear_ppo_loss` share; returns it as constants and floats."""
    checks.tensor("old_logprobs", old_logprobs, checks.FLOATS, like, shape)
    checks.tensor("advantages", advantages, checks.FLOATS, like, shape)
    if behaviour_logprobs is not None:
        checks.tensor("behaviour_logprobs", behaviour_logprobs, checks.FLOATS, like, shape)
        behaviour_logprobs = behaviour_logprobs.detach()
    elif is_cap is not None:
        checks.fail("is_cap", "None without behaviour_logprobs, whose weight it caps", is_cap)
    return (
        old_logprobs.detach(),
        advantages.detach(),
        behaviour_logprobs,
        checks.number("clip_low", clip_low, 0, 1),
        checks.number("clip_high", clip_high, 0),
        None if dual_clip is None else checks.number("dual_clip", dual_clip, 1, open_low=True),
        None if is_cap is None else checks.number("is_cap", is_cap, 0, open_low=True),
    )


def check_denominator(denominator) -> tuple[Tensor | None, float | None]:
    """(0-d tensor, None), (None, number) or (None, None)."""
    if isinstance(denominator, Tensor):
        if denominator.dim() != 0:
            checks.fail("denominator", "a number or a 0-d tensor", f"shape {list(denominator.shape)}")
        checks.tensor("denominator", denominator, (*checks.FLOATS, torch.float64, *checks.IDS))
        if denominator.device.type == "cpu" and not torch.compiler.is_compiling() and not denominator >= 0:
            checks.fail("denominator", "a number of at least 0", float(denominator))
        return denominator.detach(), None
    return None, None if denominator is None else checks.number("denominator", denominator, 0)
