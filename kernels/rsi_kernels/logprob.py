"""Log-probs (and entropy) of given tokens, from logits or from hidden states and the head's weight.

Nothing of shape [tokens, vocabulary] is written but the gradient of logits: rows of action tokens are copied into one
small chunk at a time. Saved for backward: two numbers a row, the largest logit and the log of the sum of exponentials
(kept apart, since their sum loses digits for large logits).
"""

import torch
from torch import Tensor

from . import checks

# Elements of one chunk of logits in fp32. CPU: 1 MiB stays in the L2 cache; with a matrix product in the chunk the
# product wants more rows, 32 MiB. GPU: enough rows to fill the device, and for a vocabulary of 248,320 about 2,100
# tokens of product per pass over the fp32 gradient of the weight.
CPU_CHUNK, CPU_LINEAR_CHUNK, GPU_CHUNK, GPU_LINEAR_CHUNK = 2**18, 2**23, 2**26, 2**29
CPU_LINEAR_ROWS = 64  # at least, or reading the weight costs more than the product
VOCAB_BLOCK = 2**21  # elements of a low-precision weight that are held in fp32 at a time
LOG_ZERO = -200.0  # exp of less is 0 in fp32; keeps 0 * -inf out of entropy terms


# Rows


def action_rows(mask: Tensor | None, targets: Tensor) -> Tensor:
    """Flat positions of the action tokens (on a GPU: one sync)."""
    if mask is None:
        return torch.arange(targets.numel(), device=targets.device)
    return mask.reshape(-1).nonzero().view(-1)


def select_targets(targets: Tensor, rows: Tensor, num_classes: int) -> Tensor:
    """int64 targets of the rows. Outside the vocabulary: ValueError on CPU, on a GPU -1 (the log-prob is then NaN)."""
    picked = targets.reshape(-1).index_select(0, rows).long()
    outside = (picked < 0) | (picked >= num_classes)
    if picked.device.type == "cpu" and outside.any():
        i = int(outside.nonzero()[0])
        checks.fail(
            "targets", f"ids in [0, {num_classes}) at action tokens", f"{int(picked[i])} at flat position {rows[i]}"
        )
    return picked.masked_fill_(outside, -1)


def row_matrix(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(matrix, indices): matrix.index_select(0, indices) is x.flatten(0, -2)[rows], without copying all of x.

    A slice such as logits[:, :-1] has evenly spaced rows but no flat view; its rows are counted in the memory below it.
    """
    if x.dim() == 2:
        return x, rows
    if x.is_contiguous() or x.stride(-1) != 1 or any(s % max(x.stride(-2), 1) for s in x.stride()[:-1]):
        return x.reshape(-1, x.shape[-1]), rows
    pitch = max(x.stride(-2), 1)
    index = torch.zeros((), dtype=torch.long, device=x.device)
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        index = index[..., None] + torch.arange(size, device=x.device) * (stride // pitch)
    last = sum((size - 1) * (stride // pitch) for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True))
    return x.as_strided((last + 1, x.shape[-1]), (pitch, 1)), index.view(-1).index_select(0, rows)


def chunks(num_rows: int, elements: int, width: int, least: int = 1):
    """(begin, end) of chunks of rows with about `elements` elements."""
    step = max(elements // max(width, 1), least)
    return [(a, min(a + step, num_rows)) for a in range(0, num_rows, step)]


# One chunk


def score(x: Tensor, targets: Tensor, temperature: float, with_entropy: bool):
    """Scores fp32 logits x [n, V]. Returns (logprobs, entropy, top, log_sum), each [n].

    x is overwritten, without entropy by exp((x - top) / temperature), which `finish_gradient` goes on from.
    """
    top = x.amax(-1)
    x.sub_(top[:, None])
    if temperature != 1:
        x.div_(temperature)
    known = targets >= 0
    picked = x.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    if not with_entropy:
        log_sum, entropy = x.exp_().sum(-1).log_(), None
    else:
        p = x.exp()
        total = p.sum(-1)
        log_sum = total.log()
        entropy = log_sum - p.mul_(x.clamp_(min=LOG_ZERO)).sum(-1) / total
    return torch.where(known, picked - log_sum, torch.nan), entropy, top, log_sum


def score_gradient(x: Tensor, targets, temperature: float, top, log_sum, coefficient, entropy=None, of_entropy=None):
    """Overwrites fp32 logits x [n, V] with coefficient * d logprob/dx + of_entropy * d entropy/dx, and returns it."""
    x.sub_(top[:, None])
    if temperature != 1:
        x.div_(temperature)
    if of_entropy is None:
        return finish_gradient(x.exp_(), targets, temperature, log_sum, coefficient)
    log_p = x.sub_(log_sum[:, None]).clamp(min=LOG_ZERO)
    x.exp_().mul_(log_p.add_(entropy[:, None]).mul_(of_entropy[:, None]).add_(coefficient[:, None])).div_(-temperature)
    return x.scatter_add_(1, targets.clamp(min=0)[:, None], coefficient[:, None] / temperature)


def finish_gradient(exponentials: Tensor, targets: Tensor, temperature: float, log_sum: Tensor, coefficient: Tensor):
    """Overwrites exp((x - top) / temperature) with coefficient * d logprob/dx, and returns it."""
    coefficient = coefficient / temperature
    exponentials.mul_((-coefficient * (-log_sum).exp())[:, None])
    return exponentials.scatter_add_(1, targets.clamp(min=0)[:, None], coefficient[:, None])


def head_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """fp32 [n, V] of hidden @ weight.T, never rounded to a lower precision (that costs 8e-3 in a bf16 log-prob)."""
    if hidden.dtype == torch.float32:
        return hidden @ weight.T
    if hidden.dtype == torch.bfloat16 and hidden.is_cuda:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    out, hidden = hidden.new_empty((len(hidden), len(weight)), dtype=torch.float32), hidden.float()
    for a, b in chunks(len(weight), VOCAB_BLOCK, weight.shape[1]):
        out[:, a:b] = hidden @ weight[a:b].float().T
    return out


def head_gradient(dlogits: Tensor, hidden: Tensor, weight: Tensor, dhidden: Tensor | None, dweight: Tensor | None):
    """Writes dlogits @ weight to dhidden and adds dlogits.T @ hidden to dweight (fp32), where they are given."""
    if hidden.dtype == torch.bfloat16 and hidden.is_cuda:
        dlogits = dlogits.to(hidden.dtype)
        if dhidden is not None:
            dhidden.copy_(dlogits @ weight)
        if dweight is not None:
            torch.addmm(dweight, dlogits.T, hidden, out_dtype=torch.float32, out=dweight)
        return
    full = hidden.dtype == torch.float32
    hidden, total = hidden.float(), torch.zeros_like(hidden, dtype=torch.float32)
    for a, b in [(0, len(weight))] if full else chunks(len(weight), VOCAB_BLOCK, weight.shape[1]):
        if dhidden is not None:
            total.addmm_(dlogits[:, a:b], weight[a:b].float())
        if dweight is not None:
            dweight[a:b].addmm_(dlogits[:, a:b].T, hidden)
    if dhidden is not None:
        dhidden.copy_(total)


# From logits


@torch.library.custom_op("rsi_kernels::token_logprobs", mutates_args=())
def _token_logprobs(
    logits: Tensor, targets: Tensor, mask: Tensor | None, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = logits.new_zeros((4, targets.numel()), dtype=torch.float32)
    rows = action_rows(mask, targets)
    picked = select_targets(targets, rows, logits.shape[-1])
    matrix, index = row_matrix(logits, rows)
    for a, b in chunks(len(rows), GPU_CHUNK if logits.is_cuda else CPU_CHUNK, logits.shape[-1]):
        x = matrix.index_select(0, index[a:b]).float()
        _store(out, rows[a:b], score(x, picked[a:b], temperature, with_entropy))
    return _unpack(out, targets, with_entropy)


@_token_logprobs.register_fake
def _(logits, targets, mask, temperature, with_entropy):
    return _fake_scores(logits, targets, with_entropy)


@torch.library.custom_op("rsi_kernels::token_logprobs_backward", mutates_args=())
def _token_logprobs_backward(
    of_logprobs: Tensor | None,
    of_entropy: Tensor | None,
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    entropy: Tensor,
    top: Tensor,
    log_sum: Tensor,
    temperature: float,
) -> Tensor:
    grad = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
    rows = action_rows(mask, targets)
    picked = select_targets(targets, rows, logits.shape[-1])
    matrix, index = row_matrix(logits, rows)
    saved = _select(rows, of_logprobs, of_entropy, entropy, top, log_sum)
    for a, b in chunks(len(rows), GPU_CHUNK if logits.is_cuda else CPU_CHUNK, logits.shape[-1]):
        x = matrix.index_select(0, index[a:b]).float()
        grad.view(-1, logits.shape[-1]).index_copy_(
            0, rows[a:b], _chunk_gradient(x, picked, temperature, saved, a, b).to(logits.dtype)
        )
    return grad


@_token_logprobs_backward.register_fake
def _(of_logprobs, of_entropy, logits, *rest):
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _save_logits(ctx, inputs, output):
    logits, targets, mask, ctx.temperature, ctx.with_entropy = inputs
    _, entropy, top, log_sum = output
    ctx.save_for_backward(logits, targets, mask, entropy, top, log_sum)
    ctx.mark_non_differentiable(top, log_sum)
    ctx.set_materialize_grads(False)


def _backward_logits(ctx, of_logprobs, of_entropy, *_):
    of_entropy = of_entropy if ctx.with_entropy else None
    if of_logprobs is None and of_entropy is None:
        return None, None, None, None, None
    grad = _token_logprobs_backward(of_logprobs, of_entropy, *ctx.saved_tensors, ctx.temperature)
    return grad, None, None, None, None


_token_logprobs.register_autograd(_backward_logits, setup_context=_save_logits)


# From hidden states


@torch.library.custom_op("rsi_kernels::linear_token_logprobs", mutates_args=())
def _linear_token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor | None, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = hidden.new_zeros((4, targets.numel()), dtype=torch.float32)
    rows = action_rows(mask, targets)
    picked = select_targets(targets, rows, len(weight))
    matrix, index = row_matrix(hidden, rows)
    for a, b in linear_chunks(rows, weight):
        x = head_logits(matrix.index_select(0, index[a:b]), weight)
        _store(out, rows[a:b], score(x, picked[a:b], temperature, with_entropy))
    return _unpack(out, targets, with_entropy)


@_linear_token_logprobs.register_fake
def _(hidden, weight, targets, mask, temperature, with_entropy):
    return _fake_scores(hidden, targets, with_entropy)


@torch.library.custom_op("rsi_kernels::linear_token_logprobs_backward", mutates_args=())
def _linear_token_logprobs_backward(
    of_logprobs: Tensor | None,
    of_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    entropy: Tensor,
    top: Tensor,
    log_sum: Tensor,
    temperature: float,
    needs_hidden: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    dhidden, dweight = new_gradients(hidden, weight, needs_hidden, needs_weight)
    rows = action_rows(mask, targets)
    picked = select_targets(targets, rows, len(weight))
    matrix, index = row_matrix(hidden, rows)
    saved = _select(rows, of_logprobs, of_entropy, entropy, top, log_sum)
    for a, b in linear_chunks(rows, weight):
        h = matrix.index_select(0, index[a:b])
        x = _chunk_gradient(head_logits(h, weight), picked, temperature, saved, a, b)
        add_gradients(x, h, weight, rows[a:b], dhidden, dweight)
    return dhidden, dweight.to(weight.dtype)


@_linear_token_logprobs_backward.register_fake
def _(of_logprobs, of_entropy, hidden, weight, targets, mask, entropy, top, log_sum, temperature, h, w):
    dhidden, dweight = new_gradients(hidden, weight, h, w)
    return dhidden, dweight.to(weight.dtype)


def _save_linear(ctx, inputs, output):
    hidden, weight, targets, mask, ctx.temperature, ctx.with_entropy = inputs
    _, entropy, top, log_sum = output
    ctx.save_for_backward(hidden, weight, targets, mask, entropy, top, log_sum)
    ctx.mark_non_differentiable(top, log_sum)
    ctx.set_materialize_grads(False)


def _backward_linear(ctx, of_logprobs, of_entropy, *_):
    of_entropy = of_entropy if ctx.with_entropy else None
    if of_logprobs is None and of_entropy is None:
        return None, None, None, None, None, None
    needs_hidden, needs_weight = ctx.needs_input_grad[:2]
    dhidden, dweight = _linear_token_logprobs_backward(
        of_logprobs, of_entropy, *ctx.saved_tensors, ctx.temperature, needs_hidden, needs_weight
    )
    return dhidden if needs_hidden else None, dweight if needs_weight else None, None, None, None, None


_linear_token_logprobs.register_autograd(_backward_linear, setup_context=_save_linear)


def linear_chunks(rows: Tensor, weight: Tensor):
    if weight.is_cuda:
        return chunks(len(rows), GPU_LINEAR_CHUNK, len(weight))
    return chunks(len(rows), CPU_LINEAR_CHUNK, len(weight), CPU_LINEAR_ROWS)


def new_gradients(hidden, weight, needs_hidden: bool, needs_weight: bool) -> tuple[Tensor, Tensor]:
    """(zeros like hidden, fp32 zeros like weight), of no elements where not needed."""
    return (
        hidden.new_zeros(hidden.shape if needs_hidden else (0,)),
        weight.new_zeros(weight.shape if needs_weight else (0,), dtype=torch.float32),
    )


def add_gradients(dlogits, h, weight, rows, dhidden, dweight) -> None:
    """Adds what a chunk (its rows' hidden states h) gives to the gradients made by `new_gradients`."""
    dh = torch.empty_like(h) if dhidden.numel() else None
    head_gradient(dlogits, h, weight, dh, dweight if dweight.numel() else None)
    if dh is not None:
        dhidden.view(-1, h.shape[1]).index_copy_(0, rows, dh)


def _store(out, rows, scores) -> None:
    for line, value in zip(out, scores, strict=True):
        if value is not None:
            line.index_copy_(0, rows, value)


def _unpack(out, targets, with_entropy):
    """Four tensors of their own: outputs of a registered op may not share memory."""
    logprobs, entropy, top, log_sum = (line.clone().view(targets.shape) for line in out)
    return logprobs, entropy if with_entropy else out.new_zeros((0,)), top, log_sum


def _fake_scores(like, targets, with_entropy):
    new = [torch.empty(targets.shape, dtype=torch.float32, device=like.device) for _ in range(4)]
    return new[0], new[1] if with_entropy else like.new_empty((0,), dtype=torch.float32), new[2], new[3]


def _select(rows, of_logprobs, of_entropy, entropy, top, log_sum):
    """The saved numbers and incoming gradients of the action tokens, in fp32."""

    def pick(x):
        return x.reshape(-1).index_select(0, rows).float()

    g = torch.zeros_like(rows, dtype=torch.float32) if of_logprobs is None else pick(of_logprobs)
    if of_entropy is None:
        return pick(top), pick(log_sum), g, None, None
    return pick(top), pick(log_sum), g, pick(entropy), pick(of_entropy)


def _chunk_gradient(x, picked, temperature, saved, a, b):
    return score_gradient(x, picked[a:b], temperature, *(None if s is None else s[a:b] for s in saved))


# Public


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-prob of each target: `log_softmax(logits.float() / temperature, -1).gather(-1, targets)`, 0 where masked.

    Row i scores targets[i]; nothing is shifted. Masked rows are not read. Differentiable in logits.

    Args:
        logits: [..., V] fp32, bf16 or fp16; need not be contiguous.
        targets: [...] int32 or int64. At an action token outside [0, V): ValueError on CPU, NaN on a GPU.
        mask: [...] bool or integer, non-zero at action tokens; None: all.
        temperature: finite, above 0.
        return_entropy: return (log-probs, entropy of the tempered distribution); a logit of -inf adds 0 to it.

    Returns fp32 in the shape of targets. Raises ValueError that names the argument.
    """
    checks.tensor("logits", logits, checks.FLOATS)
    if logits.dim() < 1:
        checks.fail("logits", "shape [..., V]", list(logits.shape))
    temperature = check_scored(logits, targets, mask, temperature)
    logprobs, entropy, _, _ = _token_logprobs(logits, targets, mask, temperature, return_entropy)
    return (logprobs, entropy) if return_entropy else logprobs


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`token_logprobs(hidden @ weight.T, ...)` without the logits: masked tokens cost neither memory nor flops.

    Differentiable in hidden and weight; backward computes the logits once more, chunk by chunk. The gradient of weight
    is summed in fp32.

    Args:
        hidden: [..., H] fp32, bf16 or fp16, final hidden states; the log-prob of token t comes from position t - 1.
        weight: [V, H], dtype of hidden.
        targets, mask, temperature, return_entropy: as in `token_logprobs`.
    """
    check_head(hidden, weight)
    temperature = check_scored(hidden, targets, mask, temperature)
    logprobs, entropy, _, _ = _linear_token_logprobs(hidden, weight, targets, mask, temperature, return_entropy)
    return (logprobs, entropy) if return_entropy else logprobs


def check_head(hidden: Tensor, weight: Tensor) -> None:
    checks.tensor("hidden", hidden, checks.FLOATS)
    if hidden.dim() < 1:
        checks.fail("hidden", "shape [..., H]", list(hidden.shape))
    checks.tensor("weight", weight, (hidden.dtype,), hidden)
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        checks.fail("weight", f"shape [V, {hidden.shape[-1]}]", list(weight.shape))


def check_scored(scored: Tensor, targets, mask, temperature) -> float:
    """scored: logits or hidden."""
    checks.tensor("targets", targets, checks.IDS, scored, scored.shape[:-1])
    if mask is not None:
        checks.tensor("mask", mask, checks.MASKS, scored, targets.shape)
    return checks.number("temperature", temperature, 0, open_low=True)
