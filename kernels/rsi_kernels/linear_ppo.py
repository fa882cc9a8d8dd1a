"""`linear_ppo_loss`: hidden states to policy loss in one sweep that also computes the gradients.

Each chunk's logits are made once: scored, turned into their own gradient in place, multiplied into the gradients of
hidden and weight, and dropped. The gradient of hidden is kept undivided until backward, so that in low precision it
does not underflow under a large denominator.
"""

import torch
from torch import Tensor

from . import linear_logprob, ppo_loss, runtime, scoring


@torch.library.custom_op("rsi_kernels::linear_ppo_loss", mutates_args=())
@runtime.without_autocast
def _linear_ppo_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    behaviour_logprobs: Tensor | None,
    denominator: Tensor | None,
    number: float | None,
    temperature: float,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    is_cap: float | None,
    needs_hidden: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dhidden, dweight = linear_logprob.new_gradients(hidden, weight, needs_hidden, needs_weight)
    rows = scoring.action_rows(mask, targets)
    picked = scoring.select_targets(targets, rows, len(weight))
    matrix, index = scoring.row_matrix(hidden, rows)

    def select(x):
        return None if x is None else x.reshape(-1).index_select(0, rows).float()

    old, advantage, behaviour = select(old_logprobs), select(advantages), select(behaviour_logprobs)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    rules, log_ratio = torch.zeros_like(rows, dtype=torch.bool), torch.zeros_like(rows, dtype=torch.float32)
    chunk = linear_logprob.logits_chunk(rows, weight)
    for a, b in linear_logprob.linear_chunks(rows, weight):
        h = matrix.index_select(0, index[a:b])
        x = linear_logprob.head_logits(h, weight, chunk)
        logprobs, _, top, log_sum = scoring.score(x, picked[a:b], temperature, False)
        loss, slope, rules[a:b], log_ratio[a:b] = ppo_loss.surrogate(
            logprobs, old[a:b], advantage[a:b], None if behaviour is None else behaviour[a:b],
            clip_low, clip_high, dual_clip, is_cap,
        )  # fmt: skip
        total += loss.sum()
        if needs_hidden or needs_weight:
            pulled = slope.nonzero().view(-1)  # not: clipped tokens, which cost no product (on a GPU: one sync)
            saved = [x_.index_select(0, pulled) for x_ in (top, log_sum, slope)]
            dlogits = scoring.score_gradient(
                x, picked[a:b].index_select(0, pulled), temperature, (*saved, None, None), pulled,
                linear_logprob.gradient_dtype(hidden),
            )  # fmt: skip
            h, at = h.index_select(0, pulled), rows[a:b].index_select(0, pulled)
            linear_logprob.add_gradients(dlogits, h, weight, at, dhidden, dweight, fresh=a == 0)
    stats = ppo_loss.policy_stats(rules, log_ratio, torch.ones_like(rules))
    scale = ppo_loss.divisor(stats[-1], denominator, number)
    return total / scale, *stats, scale, dhidden, dweight.div_(scale)


@_linear_ppo_loss.register_fake
def _(hidden, weight, targets, old, advantages, mask, behaviour, denominator, number, t, low, high, dual, cap, h, w):
    scalars = [torch.empty((), dtype=torch.float32, device=hidden.device) for _ in range(5)]
    num_tokens = torch.empty((), dtype=torch.int64, device=hidden.device)
    scale = torch.empty((), dtype=torch.float32, device=hidden.device)
    return *scalars, num_tokens, scale, *linear_logprob.new_gradients(hidden, weight, h, w)


def _save(ctx, inputs, output):
    ctx.weight_dtype, ctx.num_inputs = inputs[1].dtype, len(inputs)
    ctx.save_for_backward(*output[-3:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, of_loss, *_):
    none = (None,) * (ctx.num_inputs - 2)
    if of_loss is None:
        return None, None, *none
    ppo_loss.refuse_second_derivative("linear_ppo_loss")
    scale, dhidden, dweight = ctx.saved_tensors
    needs_hidden, needs_weight = ctx.needs_input_grad[:2]
    return (
        ppo_loss.scaled(dhidden, of_loss / scale).to(dhidden.dtype) if needs_hidden else None,
        _scaled_weight(dweight, of_loss, ctx.weight_dtype) if needs_weight else None,
        *none,
    )


def _scaled_weight(dweight: Tensor, of_loss: Tensor, dtype: torch.dtype) -> Tensor:
    """dweight * of_loss, without a copy where none is needed: it is as large as the weight."""
    if type(dweight) is Tensor and not dweight.is_cuda and dweight.dtype == dtype and of_loss == 1:  # reads no GPU
        return dweight
    out = torch.empty_like(dweight, dtype=dtype)
    # At once, a CPU would hold all of the product in fp32 as well.
    for a, b in [(0, len(out))] if dweight.is_cuda else linear_logprob.vocabulary_blocks(dweight):
        torch.mul(dweight[a:b], of_loss, out=out[a:b])
    return out


_linear_ppo_loss.register_autograd(_backward, setup_context=_save)


def linear_ppo_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    behaviour_logprobs: Tensor | None = None,
    is_cap: float | None = None,
    denominator: float | Tensor | None = None,
) -> ppo_loss.PolicyLoss:
    """`policy_loss(linear_token_logprobs(hidden, weight, targets, mask), ...)`, with the logits computed only once.

    Differentiable in hidden and weight; their gradients are made in the forward sweep and kept for backward (weight's
    in fp32). Without gradients wanted, none are made. old_logprobs, advantages and behaviour_logprobs have the shape of
    targets; mask None: all are action tokens. The other arguments, stats and errors are those of the two functions.
    """
    linear_logprob.check_head(hidden, weight)
    temperature = scoring.check_scored(hidden, targets, mask, temperature)
    arguments = ppo_loss.check_policy(
        hidden, targets.shape, old_logprobs, advantages, behaviour_logprobs, clip_low, clip_high, dual_clip, is_cap
    )
    old_logprobs, advantages, behaviour_logprobs, *clips = arguments
    needs = [torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight)]
    loss, *stats = _linear_ppo_loss(
        hidden, weight, targets, old_logprobs, advantages, mask, behaviour_logprobs,
        *ppo_loss.check_denominator(denominator), temperature, *clips, *needs,
    )[:6]  # fmt: skip
    return ppo_loss.PolicyLoss(loss, dict(zip(ppo_loss.STATS, stats, strict=True)))
