"""`token_logprobs`: log-probs and entropy of given tokens from logits, in one pass over the rows of action tokens.

The arithmetic is in `logprob_host.py` (CPU) and `logprob_triton.py` (GPU). Rows that neither reads as they are (on a
CPU fp16, and logits that are not dense along the vocabulary; any on a GPU without Triton) are copied into one chunk at
a time, so nothing of shape [tokens, vocabulary] is written but the gradient.
"""

import torch
from torch import Tensor

from . import checks, runtime, scoring

CPU_CHUNK = 2**17  # elements in fp32: 512 KiB stay in the L2 cache
GPU_CHUNK = 2**26  # where Triton is missing


@torch.library.custom_op("rsi_kernels::token_logprobs", mutates_args=())
@runtime.without_autocast
def _token_logprobs(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    temperature: float,
    with_entropy: bool,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if runtime.uses_triton(logits):
        from .logprob_triton import launch  # imports Triton, which a CPU-only install lacks

        with runtime.device_of(logits):
            return launch(logits, targets, mask, temperature, with_entropy)
    out = logits.new_zeros((4, targets.numel()), dtype=torch.float32)
    rows = scoring.action_rows(mask, targets)
    picked = scoring.select_targets(targets, rows, logits.shape[-1])
    matrix, index = scoring.row_matrix(logits, rows)
    if _is_read_directly(matrix):
        from .logprob_host import Scores

        scores = Scores(len(rows), temperature, with_entropy)
        scores.add(matrix, index, picked)
        scoring.store(out, rows, scores.result())
    else:
        for a, b in scoring.chunks(len(rows), GPU_CHUNK if logits.is_cuda else CPU_CHUNK, logits.shape[-1]):
            x = matrix.index_select(0, index[a:b]).float()
            scoring.store(out, rows[a:b], scoring.score(x, picked[a:b], temperature, with_entropy))
    return scoring.unpack(out, targets, with_entropy)


@_token_logprobs.register_fake
def _(logits, targets, mask, temperature, with_entropy, inplace_backward=False):
    return scoring.fake_scores(logits, targets, with_entropy)


@torch.library.custom_op("rsi_kernels::token_logprobs_backward", mutates_args=())
@runtime.without_autocast
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
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    _write_gradient(grad, of_logprobs, of_entropy, logits, targets, mask, entropy, top, log_sum, temperature)
    return grad


@_token_logprobs_backward.register_fake
def _(of_logprobs, of_entropy, logits, *rest):
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


@torch.library.custom_op("rsi_kernels::token_logprobs_backward_inplace", mutates_args=("logits",))
def _token_logprobs_backward_inplace(
    of_logprobs: Tensor | None,
    of_entropy: Tensor | None,
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    entropy: Tensor,
    top: Tensor,
    log_sum: Tensor,
    temperature: float,
) -> None:
    _write_gradient(logits, of_logprobs, of_entropy, logits, targets, mask, entropy, top, log_sum, temperature)


@_token_logprobs_backward_inplace.register_fake
def _(*arguments):
    return None


def _write_gradient(grad, of_logprobs, of_entropy, logits, targets, mask, entropy, top, log_sum, temperature) -> None:
    """Writes to grad, which is contiguous and may be the logits."""
    if runtime.uses_triton(logits):
        from .logprob_triton import launch_backward

        with runtime.device_of(logits):
            launch_backward(of_logprobs, of_entropy, logits, targets, mask, entropy, top, log_sum, temperature, grad)
        return
    rows = scoring.action_rows(mask, targets)
    picked = scoring.select_targets(targets, rows, logits.shape[-1])
    matrix, index = scoring.row_matrix(logits, rows)
    saved = scoring.select_saved(rows, of_logprobs, of_entropy, entropy, top, log_sum)
    lines = grad.view(targets.numel(), logits.shape[-1])
    if _is_read_directly(matrix):
        from .logprob_host import write_gradient

        write_gradient(matrix, index, picked, temperature, saved, lines, rows)
    else:
        for a, b in scoring.chunks(len(rows), GPU_CHUNK if logits.is_cuda else CPU_CHUNK, logits.shape[-1]):
            x = matrix.index_select(0, index[a:b]).float()
            x = scoring.score_gradient(x, picked[a:b], temperature, scoring.cut(saved, a, b))
            lines.index_copy_(0, rows[a:b], x.to(grad.dtype))
    if mask is not None:
        lines.index_fill_(0, scoring.action_rows(mask == 0, targets), 0)


def _is_read_directly(matrix: Tensor) -> bool:
    if not runtime.uses_numba(matrix) or matrix.dtype not in (torch.float32, torch.bfloat16):
        return False
    from .logprob_host import has_dense_rows

    return has_dense_rows(matrix)


def _save_logits(ctx, inputs, output):
    logits, targets, mask, ctx.temperature, ctx.with_entropy, ctx.inplace = inputs
    _, entropy, top, log_sum = output
    ctx.save_for_backward(logits, targets, mask, entropy, top, log_sum)
    ctx.mark_non_differentiable(top, log_sum)
    ctx.set_materialize_grads(False)


def _backward_logits(ctx, of_logprobs, of_entropy, *_):
    of_entropy = of_entropy if ctx.with_entropy else None
    if of_logprobs is None and of_entropy is None:
        return None, None, None, None, None, None
    logits, *saved = ctx.saved_tensors
    if ctx.inplace:
        grad = logits.detach()
        _token_logprobs_backward_inplace(of_logprobs, of_entropy, grad, *saved, ctx.temperature)
    else:
        grad = _token_logprobs_backward(of_logprobs, of_entropy, logits, *saved, ctx.temperature)
    return grad, None, None, None, None, None


_token_logprobs.register_autograd(_backward_logits, setup_context=_save_logits)


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    return_entropy: bool = False,
    inplace_backward: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-prob of each target: `log_softmax(logits.float() / temperature, -1).gather(-1, targets)`, 0 where masked.

    Row i scores targets[i]; nothing is shifted. Masked rows are not read. Differentiable in logits.

    Args:
        logits: [..., V] fp32, bf16 or fp16; need not be contiguous.
        targets: [...] int32 or int64. At an action token outside [0, V): ValueError on CPU, NaN on a GPU.
        mask: [...] bool or integer, non-zero at action tokens; None: all.
        temperature: finite, above 0.
        return_entropy: return (log-probs, entropy of the tempered distribution); a logit of -inf adds 0 to it.
        inplace_backward: backward overwrites logits with their gradient, which saves memory in their size; nothing
            else may need them then. They have to be contiguous, and no leaf that requires grad.

    Returns fp32 in the shape of targets. Raises ValueError that names the argument.
    """
    checks.tensor("logits", logits, checks.FLOATS)
    if logits.dim() < 1:
        checks.fail("logits", "shape [..., V]", list(logits.shape))
    temperature = scoring.check_scored(logits, targets, mask, temperature)
    if inplace_backward and logits.requires_grad and logits.is_leaf:
        checks.fail("logits", "no leaf that requires grad with inplace_backward, which overwrites it", "a leaf")
    if inplace_backward and not logits.is_contiguous():
        checks.fail("logits", "a contiguous tensor with inplace_backward", f"strides {list(logits.stride())}")
    logprobs, entropy, _, _ = _token_logprobs(logits, targets, mask, temperature, return_entropy, inplace_backward)
    return (logprobs, entropy) if return_entropy else logprobs
