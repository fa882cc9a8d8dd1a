"""`linear_token_logprobs`: log-probs and entropy from hidden states and the head's weight, chunk of logits by chunk.

Rows of action tokens are gathered first. Backward makes each chunk's logits once more.
"""

import torch
from torch import Tensor

from . import checks, runtime, scoring

CPU_CHUNK = 2**23  # elements of logits in fp32: 32 MiB, since the matrix product wants rows
CPU_ROWS = 64  # at least, or reading the weight costs more than the product
GPU_CHUNK = 2**29  # 2,100 rows for a vocabulary of 248,320: fewer would lose to passes over the weight's fp32 gradient
# On a CPU, elements of the weight in a product: it stays in the cache (15% faster), and only so much is held in fp32.
VOCAB_BLOCK = 2**20
TILE_ROWS = 512  # with a block of the vocabulary, where nothing else needs the logits


def head_logits(hidden: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """fp32 [n, V] of hidden @ weight.T, never rounded to a lower precision (that costs 8e-3 in a bf16 log-prob)."""
    if hidden.is_cuda:
        if hidden.dtype == torch.bfloat16:
            return torch.mm(hidden, weight.T, out_dtype=torch.float32)
        return hidden.float() @ weight.float().T
    out = hidden.new_empty((len(hidden), len(weight)), dtype=torch.float32) if out is None else out[: len(hidden)]
    for a, b in vocabulary_blocks(weight):
        torch.mm(hidden.float(), weight[a:b].float().T, out=out[:, a:b])
    return out


def score_head(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, with_entropy: bool):
    """`scoring.score` of the logits hidden @ weight.T, of which a CPU makes one tile at a time."""
    if not runtime.uses_numba(hidden):
        return scoring.score(head_logits(hidden, weight), targets, temperature, with_entropy)
    from .logprob_host import Scores

    scores = Scores(len(hidden), temperature, with_entropy)
    hidden, tile = hidden.float(), None
    for a, b in vocabulary_blocks(weight):
        tile = torch.mm(hidden, weight[a:b].float().T, out=None if tile is None or b - a < tile.shape[1] else tile)
        scores.add(tile, None, targets - a)
    return scores.result()


def vocabulary_blocks(weight: Tensor):
    return scoring.chunks(len(weight), VOCAB_BLOCK, weight.shape[1])


def gradient_dtype(hidden: Tensor) -> torch.dtype:
    """In which `head_gradient` multiplies the gradient of the logits."""
    native = hidden.is_cuda or runtime.cpu_multiplies_bf16()
    return torch.bfloat16 if hidden.dtype == torch.bfloat16 and native else torch.float32


def head_gradient(dlogits: Tensor, hidden: Tensor, weight: Tensor, dhidden: Tensor, dweight: Tensor, fresh: bool):
    """Writes dlogits @ weight to dhidden and adds dlogits.T @ hidden to dweight (fp32), where they have elements.

    fresh: dweight holds nothing yet.
    """
    beta = 0 if fresh else 1
    if gradient_dtype(hidden) == torch.bfloat16:
        dlogits = dlogits.to(torch.bfloat16)
        if dhidden.numel():
            torch.mm(dlogits, weight, out=dhidden)
        if dweight.numel() and hidden.is_cuda:
            torch.addmm(dweight, dlogits.T, hidden, out_dtype=torch.float32, beta=beta, out=dweight)
        elif dweight.numel():
            for a, b in vocabulary_blocks(weight):
                product = dlogits[:, a:b].T @ hidden
                dweight[a:b].copy_(product) if fresh else dweight[a:b].add_(product)
        return
    total, hidden = torch.zeros_like(dhidden, dtype=torch.float32), hidden.float()
    for a, b in vocabulary_blocks(weight):
        if dhidden.numel():
            total.addmm_(dlogits[:, a:b], weight[a:b].float())
        if dweight.numel():
            dweight[a:b].addmm_(dlogits[:, a:b].T, hidden, beta=beta)
    dhidden.copy_(total)


@torch.library.custom_op("rsi_kernels::linear_token_logprobs", mutates_args=())
@runtime.without_autocast
def _linear_token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor | None, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = hidden.new_zeros((4, targets.numel()), dtype=torch.float32)
    rows = scoring.action_rows(mask, targets)
    picked = scoring.select_targets(targets, rows, len(weight))
    matrix, index = scoring.row_matrix(hidden, rows)
    tiles = scoring.chunks(len(rows), TILE_ROWS, 1) if runtime.uses_numba(hidden) else linear_chunks(rows, weight)
    for a, b in tiles:
        h = matrix.index_select(0, index[a:b])
        scoring.store(out, rows[a:b], score_head(h, weight, picked[a:b], temperature, with_entropy))
    return scoring.unpack(out, targets, with_entropy)


@_linear_token_logprobs.register_fake
def _(hidden, weight, targets, mask, temperature, with_entropy):
    return scoring.fake_scores(hidden, targets, with_entropy)


@torch.library.custom_op("rsi_kernels::linear_token_logprobs_backward", mutates_args=())
@runtime.without_autocast
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
    rows = scoring.action_rows(mask, targets)
    picked = scoring.select_targets(targets, rows, len(weight))
    matrix, index = scoring.row_matrix(hidden, rows)
    saved = scoring.select_saved(rows, of_logprobs, of_entropy, entropy, top, log_sum)
    chunk = logits_chunk(rows, weight)
    for a, b in linear_chunks(rows, weight):
        h = matrix.index_select(0, index[a:b])
        x = head_logits(h, weight, chunk)
        x = scoring.score_gradient(
            x, picked[a:b], temperature, scoring.cut(saved, a, b), dtype=gradient_dtype(hidden)
        )  # fmt: skip
        add_gradients(x, h, weight, rows[a:b], dhidden, dweight, fresh=a == 0)
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
        return scoring.chunks(len(rows), GPU_CHUNK, len(weight))
    return scoring.chunks(len(rows), CPU_CHUNK, len(weight), CPU_ROWS)


def logits_chunk(rows: Tensor, weight: Tensor) -> Tensor | None:
    """Memory for the logits of each of `linear_chunks`, on a CPU, where freed memory would not be there at once."""
    num_rows = max((b - a for a, b in linear_chunks(rows, weight)), default=0)
    return None if weight.is_cuda else weight.new_empty((num_rows, len(weight)), dtype=torch.float32)


def new_gradients(hidden, weight, needs_hidden: bool, needs_weight: bool) -> tuple[Tensor, Tensor]:
    """(zeros like hidden, fp32 zeros like weight), of no elements where not needed."""
    return (
        hidden.new_zeros(hidden.shape if needs_hidden else (0,)),
        weight.new_zeros(weight.shape if needs_weight else (0,), dtype=torch.float32),
    )


def add_gradients(dlogits, h, weight, rows, dhidden, dweight, fresh: bool) -> None:
    """Adds what a chunk (its rows' hidden states h) gives to the gradients made by `new_gradients`."""
    dh = torch.empty_like(h) if dhidden.numel() else h.new_empty(0)
    head_gradient(dlogits, h, weight, dh, dweight, fresh)
    if dh.numel():
        dhidden.view(-1, h.shape[1]).index_copy_(0, rows, dh)


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
    temperature = scoring.check_scored(hidden, targets, mask, temperature)
    logprobs, entropy, _, _ = _linear_token_logprobs(hidden, weight, targets, mask, temperature, return_entropy)
    return (logprobs, entropy) if return_entropy else logprobs


def check_head(hidden: Tensor, weight: Tensor) -> None:
    checks.tensor("hidden", hidden, checks.FLOATS)
    if hidden.dim() < 1:
        checks.fail("hidden", "shape [..., H]", list(hidden.shape))
    checks.tensor("weight", weight, (hidden.dtype,), hidden)
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        checks.fail("weight", f"shape [V, {hidden.shape[-1]}]", list(weight.shape))
