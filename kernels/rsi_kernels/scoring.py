"""What the log-prob operations share: finding action rows, and scoring one chunk of logits.

Nothing of shape [tokens, vocabulary] is made here. Kept for backward are two numbers a row, the largest logit and the
log of the sum of exponentials (apart, since their sum loses digits for large logits).
"""

import torch
from torch import Tensor

from . import checks, runtime

LEAST_TEMPERATURE = 1e-30
LOG_ZERO = -200.0  # exp of less is 0 in fp32; keeps 0 * -inf out of entropy terms


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
        return x.reshape(x.shape[:-1].numel(), x.shape[-1]), rows
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


def score(x: Tensor, targets: Tensor, temperature: float, with_entropy: bool):
    """(logprobs, entropy or None, top, log_sum), each [n], of fp32 logits x [n, V], which are left as they are."""
    if runtime.uses_triton(x):
        from .logprob_triton import launch

        with runtime.device_of(x):
            logprobs, entropy, top, log_sum = launch(x, targets, None, temperature, with_entropy)
    elif runtime.uses_numba(x):
        from .logprob_host import Scores

        scores = Scores(len(targets), temperature, with_entropy)
        scores.add(x, None, targets)
        logprobs, entropy, top, log_sum = scores.result()
    else:
        top = x.amax(-1)
        y = (x - top[:, None]) / temperature
        log_sum = y.logsumexp(-1)
        log_p = y - log_sum[:, None]
        picked = log_p.gather(1, targets.clamp(min=0)[:, None])[:, 0]
        logprobs = torch.where(targets >= 0, picked, torch.nan)
        entropy = -(log_p.exp() * log_p.clamp(min=LOG_ZERO)).sum(-1)
    return logprobs, entropy if with_entropy else None, top, log_sum


def score_gradient(x, targets, temperature, saved, rows=None, dtype=None) -> Tensor:
    """Gradient [n, V] of fp32 logits x [m, V] with respect to what `score` gives of them; x is overwritten.

    saved: top, log_sum, gradient of the log-probs, entropy, gradient of the entropy (see `select_saved`), each [n].
    rows [n]: x[rows] are meant, in rising order; None: all of x. dtype: of the result, on a GPU; other than fp32 it
    goes to memory of its own, which saves a pass to convert it.
    """
    top, log_sum, of_logprobs, entropy, of_entropy = saved
    if runtime.uses_triton(x):
        from .logprob_triton import launch_backward

        in_place = rows is None and dtype in (None, x.dtype)
        out = x if in_place else x.new_empty((len(targets), x.shape[1]), dtype=dtype)
        with runtime.device_of(x):
            return launch_backward(
                of_logprobs, of_entropy, x, targets, None, entropy, top, log_sum, temperature, out, rows
            )
    if runtime.uses_numba(x):
        from .logprob_host import write_gradient

        write_gradient(x, rows, targets, temperature, saved, x, None)
        return x[: len(targets)]
    x = x if rows is None else x.index_select(0, rows)
    log_p = (x - top[:, None]) / temperature - log_sum[:, None]
    slope = of_logprobs[:, None]
    if of_entropy is not None:
        slope = slope + of_entropy[:, None] * (log_p.clamp(min=LOG_ZERO) + entropy[:, None])
    gradient = (log_p.exp() * slope).div_(-temperature)
    return gradient.scatter_add_(1, targets.clamp(min=0)[:, None], of_logprobs[:, None] / temperature)


def store(out, rows, scores) -> None:
    for line, value in zip(out, scores, strict=True):
        if value is not None:
            line.index_copy_(0, rows, value)


def unpack(out, targets, with_entropy):
    """Four tensors of their own: outputs of a registered op may not share memory."""
    logprobs, entropy, top, log_sum = (line.clone().view(targets.shape) for line in out)
    return logprobs, entropy if with_entropy else out.new_zeros((0,)), top, log_sum


def fake_scores(like, targets, with_entropy):
    new = [torch.empty(targets.shape, dtype=torch.float32, device=like.device) for _ in range(4)]
    return new[0], new[1] if with_entropy else like.new_empty((0,), dtype=torch.float32), new[2], new[3]


def select_saved(rows, of_logprobs, of_entropy, entropy, top, log_sum):
    """The saved numbers and incoming gradients of the action tokens, in fp32."""

    def pick(x):
        return x.reshape(-1).index_select(0, rows).float()

    g = torch.zeros_like(rows, dtype=torch.float32) if of_logprobs is None else pick(of_logprobs)
    if of_entropy is None:
        return pick(top), pick(log_sum), g, None, None
    return pick(top), pick(log_sum), g, pick(entropy), pick(of_entropy)


def cut(saved, a: int, b: int):
    return tuple(None if x is None else x[a:b] for x in saved)


def check_scored(scored: Tensor, targets, mask, temperature) -> float:
    """scored: logits or hidden."""
    checks.tensor("targets", targets, checks.IDS, scored, scored.shape[:-1])
    if mask is not None:
        checks.tensor("mask", mask, checks.MASKS, scored, targets.shape)
    temperature = checks.number("temperature", temperature, 0, open_low=True)
    if temperature < LEAST_TEMPERATURE:
        checks.fail("temperature", f"at least {LEAST_TEMPERATURE}, as arithmetic is fp32", temperature)
    return temperature
