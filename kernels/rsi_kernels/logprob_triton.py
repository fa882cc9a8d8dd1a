"""`token_logprobs` on a GPU: one read of the logits forward; one read and one write of them backward.

Forward, a program takes a row, or part of one where rows are few. Every thread keeps its own running maximum and sum,
so that threads meet once, at the end of the row, and not at every block. Masked rows are not read.
Arithmetic is fp32. Differences to the largest logit come before the temperature: exact for logits of any size.
"""

import torch
import triton
import triton.language as tl

# Frozen by register count for sm_90 (see launch_configurations), not yet timed on a GPU.
LANES = 512  # of a forward block, 4 a thread; each takes 16 bytes of logits
BLOCK = 4096  # logits of a backward program
NUM_WARPS = 4
PROGRAMS = 1024  # below this many rows they are split: an H200 has 132 multiprocessors, each holds about 8 programs
MAX_SPLITS = 32

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # a maximum of nothing; unlike -inf it can be subtracted from -inf
ZERO = tl.constexpr(-300.0)  # exp2 of less is 0; keeps 0 * -inf out of entropy terms


@triton.jit
def _row_offset(row, inner, outer_stride, inner_stride):
    return (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride


@triton.jit
def _store_scores(
    logprobs_ptr, entropy_ptr, top_ptr, log_sum_ptr, logits_ptr, row, target, vocabulary, temperature,
    top, total, weighted, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Of a row whose logits x begin at logits_ptr. With y = (x - top) * log2(e) / temperature: total = sum of exp2(y),
    weighted = sum of exp2(y) * y."""
    known = (target >= 0) & (target < vocabulary)
    picked = tl.load(logits_ptr + target, mask=known, other=0.0).to(tl.float32)
    log_sum = tl.log(total)
    tl.store(logprobs_ptr + row, tl.where(known, (picked - top) / temperature - log_sum, float("nan")))
    if ENTROPY:
        tl.store(entropy_ptr + row, log_sum - weighted / total * LN_2)
    tl.store(top_ptr + row, top)
    tl.store(log_sum_ptr + row, log_sum)


@triton.jit
def _store_zeros(logprobs_ptr, entropy_ptr, top_ptr, log_sum_ptr, row, ENTROPY: tl.constexpr):
    tl.store(logprobs_ptr + row, 0.0)
    if ENTROPY:
        tl.store(entropy_ptr + row, 0.0)
    tl.store(top_ptr + row, 0.0)
    tl.store(log_sum_ptr + row, 0.0)


@triton.jit
def _merge(top, total, weighted, scale, ENTROPY: tl.constexpr):
    """The running numbers of all lanes as those of one."""
    highest = tl.max(top, 0)
    shift = (top - highest) * scale
    factor = tl.exp2(shift)
    weighted = tl.sum(factor * (weighted + total * tl.maximum(shift, ZERO)), 0) if ENTROPY else 0.0
    return highest, tl.sum(factor * total, 0), weighted


@triton.jit(do_not_specialize=["num_rows", "inner"])
def _score(
    logits_ptr, targets_ptr, mask_ptr, logprobs_ptr, entropy_ptr, top_ptr, log_sum_ptr, parts_ptr,
    num_rows, inner, outer_stride, inner_stride, vocabulary, temperature,
    MASK: tl.constexpr, ENTROPY: tl.constexpr, SPLITS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """parts [3, rows, SPLITS]: maximum, total and weighted of each split, for `_combine`."""
    pid = tl.program_id(0)
    row = pid // SPLITS
    if MASK and tl.load(mask_ptr + row) == 0:
        if SPLITS == 1:
            _store_zeros(logprobs_ptr, entropy_ptr, top_ptr, log_sum_ptr, row, ENTROPY)
        return
    logits_ptr += _row_offset(row, inner, outer_stride, inner_stride)
    scale = LOG2_E / temperature
    # [LANES, VECTOR]: a thread holds whole lanes, so that reducing a lane asks no other thread.
    offsets = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    top = tl.full((LANES,), LOWEST, tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    weighted = tl.zeros((LANES,), tl.float32)
    width = tl.cdiv(tl.cdiv(vocabulary, LANES * VECTOR), SPLITS) * (LANES * VECTOR)
    first = (pid % SPLITS) * width
    for start in range(first, tl.minimum(first + width, vocabulary), LANES * VECTOR):
        columns = start + offsets
        x = tl.load(logits_ptr + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 1))
        shift = (top - higher) * scale
        factor = tl.exp2(shift)
        y = (x - higher[:, None]) * scale
        p = tl.exp2(y)
        if ENTROPY:
            weighted = factor * (weighted + total * tl.maximum(shift, ZERO)) + tl.sum(p * tl.maximum(y, ZERO), 1)
        total = factor * total + tl.sum(p, 1)
        top = higher
    row_top, row_total, row_weighted = _merge(top, total, weighted, scale, ENTROPY)
    if SPLITS == 1:
        target = tl.load(targets_ptr + row).to(tl.int64)
        _store_scores(
            logprobs_ptr, entropy_ptr, top_ptr, log_sum_ptr, logits_ptr, row, target, vocabulary, temperature,
            row_top, row_total, row_weighted, ENTROPY,
        )  # fmt: skip
    else:
        parts_ptr += pid
        tl.store(parts_ptr, row_top)
        tl.store(parts_ptr + num_rows * SPLITS, row_total)
        if ENTROPY:
            tl.store(parts_ptr + 2 * num_rows * SPLITS, row_weighted)


@triton.jit(do_not_specialize=["num_rows", "inner"])
def _combine(
    logits_ptr, targets_ptr, mask_ptr, logprobs_ptr, entropy_ptr, top_ptr, log_sum_ptr, parts_ptr,
    num_rows, inner, outer_stride, inner_stride, vocabulary, temperature,
    MASK: tl.constexpr, ENTROPY: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if MASK and tl.load(mask_ptr + row) == 0:
        _store_zeros(logprobs_ptr, entropy_ptr, top_ptr, log_sum_ptr, row, ENTROPY)
        return
    parts_ptr += row * SPLITS + tl.arange(0, SPLITS)
    top, total = tl.load(parts_ptr), tl.load(parts_ptr + num_rows * SPLITS)
    weighted = tl.zeros((SPLITS,), tl.float32)
    if ENTROPY:
        weighted = tl.load(parts_ptr + 2 * num_rows * SPLITS)
    top, total, weighted = _merge(top, total, weighted, LOG2_E / temperature, ENTROPY)
    logits_ptr += _row_offset(row, inner, outer_stride, inner_stride)
    _store_scores(
        logprobs_ptr, entropy_ptr, top_ptr, log_sum_ptr, logits_ptr, row, tl.load(targets_ptr + row).to(tl.int64),
        vocabulary, temperature, top, total, weighted, ENTROPY,
    )  # fmt: skip


@triton.jit(do_not_specialize=["inner"])
def _gradient(
    of_logprobs_ptr, of_entropy_ptr, logits_ptr, targets_ptr, mask_ptr, entropy_ptr, top_ptr, log_sum_ptr, out_ptr,
    rows_ptr, inner, outer_stride, inner_stride, vocabulary, temperature,
    MASK: tl.constexpr, ROWS: tl.constexpr, OF_LOGPROBS: tl.constexpr, OF_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [rows, vocabulary], which may be the logits. A row without gradient (masked, or clipped) is not read.

    ROWS: of these rows of the logits, to which all else belongs; out is then no logits.
    """
    num_blocks = tl.cdiv(vocabulary, BLOCK)
    row = tl.program_id(0) // num_blocks
    columns = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    out_ptr += row.to(tl.int64) * vocabulary + columns
    needed = True
    if MASK:
        needed = tl.load(mask_ptr + row) != 0
    of_logprob, of_entropy = 0.0, 0.0
    if OF_LOGPROBS:
        of_logprob = tl.load(of_logprobs_ptr + row) / temperature
    if OF_ENTROPY:
        of_entropy = tl.load(of_entropy_ptr + row) / temperature
    if needed & ((of_logprob != 0) | (of_entropy != 0)):
        target = tl.load(targets_ptr + row).to(tl.int64)
        top, log_sum = tl.load(top_ptr + row), tl.load(log_sum_ptr + row)
        of_row = row
        if ROWS:
            of_row = tl.load(rows_ptr + row)
        logits_ptr += _row_offset(of_row, inner, outer_stride, inner_stride)
        x = tl.load(logits_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        y = (x - top) * (LOG2_E / temperature) - log_sum * LOG2_E  # log2 of the probability
        slope = tl.zeros((BLOCK,), tl.float32) + of_logprob
        if OF_ENTROPY:
            slope += of_entropy * (tl.load(entropy_ptr + row) + tl.maximum(y, ZERO) * LN_2)
        gradient = tl.where(columns == target, of_logprob, 0.0) - slope * tl.exp2(y)
        tl.store(out_ptr, gradient.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(out_ptr, tl.zeros((BLOCK,), out_ptr.dtype.element_ty), mask=inside)


def launch(logits, targets, mask, temperature, with_entropy, lanes=LANES, splits=None):
    """(logprobs, entropy, top, log_sum) in the shape of targets; entropy without elements if not wanted. Never syncs.

    top and log_sum, for backward: the largest logit, and the log of sum(exp((logits - top) / temperature)).
    """
    outputs = [torch.empty(targets.shape, dtype=torch.float32, device=logits.device) for _ in range(4)]
    if not with_entropy:
        outputs[1] = outputs[1].new_empty((0,))
    num_rows, vocabulary = targets.numel(), logits.shape[-1]
    if num_rows == 0:
        return tuple(outputs)
    vector = 16 // logits.element_size()
    if splits is None:
        splits = 1
        while num_rows * splits < PROGRAMS and 2 * splits <= min(MAX_SPLITS, vocabulary // (lanes * vector)):
            splits *= 2
    parts = outputs[0] if splits == 1 else outputs[0].new_empty((3, num_rows, splits))
    logits, *layout = _rows(logits)
    arguments = (
        logits, targets.contiguous(), _bytes(mask, targets), *outputs, parts, num_rows, *layout, vocabulary, temperature
    )  # fmt: skip
    options = dict(MASK=mask is not None, ENTROPY=with_entropy, SPLITS=splits)
    _score[(num_rows * splits,)](*arguments, **options, LANES=lanes, VECTOR=vector, num_warps=NUM_WARPS)
    if splits > 1:
        _combine[(num_rows,)](*arguments, **options, num_warps=1)
    return tuple(outputs)


def launch_backward(
    of_logprobs, of_entropy, logits, targets, mask, entropy, top, log_sum, temperature, out, rows=None, block=BLOCK
):  # fmt: skip
    """Writes the gradient of the logits to out (contiguous, in their shape; may be the logits) and returns it.

    rows [n] int64: out [n, V] gets that of logits[rows], to which the other arguments belong, and is no logits.
    """
    if out.numel() == 0:
        return out
    logits, *layout = _rows(logits)

    def given(x):  # an argument that is not read still has to be a pointer
        return top if x is None else x.float().contiguous()

    _gradient[(targets.numel() * triton.cdiv(logits.shape[-1], block),)](
        given(of_logprobs), given(of_entropy), logits, targets.contiguous(), _bytes(mask, targets),
        entropy, top, log_sum, out, targets if rows is None else rows, *layout, logits.shape[-1], temperature,
        MASK=mask is not None, ROWS=rows is not None, OF_LOGPROBS=of_logprobs is not None,
        OF_ENTROPY=of_entropy is not None, BLOCK=block, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


def _rows(x):
    """(x, inner, outer_stride, inner_stride): row i begins at i // inner * outer_stride + i % inner * inner_stride.

    Slices such as logits[:, :-1] have such rows; what has not is copied.
    """
    lead = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if lead and lead[-1][1] == size * stride:
            lead[-1] = (lead[-1][0] * size, stride)
        elif size != 1:
            lead.append((size, stride))
    if len(lead) > 2 or (x.stride(-1) != 1 and x.shape[-1] > 1):
        return _rows(x.contiguous())
    (_, outer_stride), (inner, inner_stride) = ([(1, 0), (1, 0)] + lead)[-2:]
    return x, inner, outer_stride, inner_stride


def _bytes(mask, otherwise):
    if mask is None:
        return otherwise
    mask = mask.contiguous()
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def launch_configurations():
    """Rows whose vocabulary 16 divides, in every dtype; and, as the worst case, bf16 rows where it does not."""
    from .compilation import LaunchConfiguration

    fp32 = ("logprobs_ptr", "entropy_ptr", "top_ptr", "log_sum_ptr", "parts_ptr", "of_logprobs_ptr", "of_entropy_ptr")
    rows = {"targets_ptr": "*i64:16", "mask_ptr": "*u8:16", "rows_ptr": "*i64:16"}
    rows |= {"num_rows": "i32", "inner": "i32", "temperature": "fp32"}
    found = []
    for logits, out, even in (
        ("bf16", "bf16", True), ("fp16", "fp16", True), ("fp32", "fp32", True), ("fp32", "bf16", True),
        ("bf16", "bf16", False),
    ):  # fmt: skip
        types = rows | dict.fromkeys(fp32, "*fp32:16") | {"out_ptr": f"*{out}:16"}
        types |= dict.fromkeys(("outer_stride", "inner_stride", "vocabulary"), "i32:16" if even else "i32")
        types["logits_ptr"] = f"*{logits}:16" if even else f"*{logits}"
        for entropy in (False, True):
            for picked in (False, True):
                constants = dict(MASK=not picked, ROWS=picked, OF_LOGPROBS=True, OF_ENTROPY=entropy, BLOCK=BLOCK)
                found.append(LaunchConfiguration(_gradient, constants, types, NUM_WARPS))
            if logits != out:  # a gradient in another dtype is all that the linear operations ask for more
                continue
            for splits in (1, MAX_SPLITS):
                constants = dict(
                    MASK=True, ENTROPY=entropy, SPLITS=splits, LANES=LANES, VECTOR=4 if logits == "fp32" else 8
                )
                found.append(LaunchConfiguration(_score, constants, types, NUM_WARPS))
        if even and logits == out:
            found.append(LaunchConfiguration(_combine, dict(MASK=True, ENTROPY=True, SPLITS=MAX_SPLITS), types, 1))
    return found
