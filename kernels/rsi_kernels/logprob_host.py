"""`token_logprobs` on the CPU, compiled by numba: one read of the logits forward, one read and one write backward.

The inner loops have no branches and add up in any order, so that LLVM turns them into vector instructions; exp2 is our
own for that reason, since a call into the C library would end them. Arithmetic is fp32, as in the Triton kernels.
"""

import math

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from . import runtime
from .runtime import compiled

BLOCK = 4096  # logits: 16 KiB in fp32, which stay in the L1 cache

FP, INT = np.float32, np.int32
LOG2_E, LN_2 = FP(1 / math.log(2)), FP(math.log(2))
LOWEST = FP(np.finfo(np.float32).min)  # a maximum of nothing; unlike -inf it can be subtracted from -inf
TINY, HUGE = FP(-126), FP(127)  # powers of 2 with an exponent of its own
FAR = INT(FP(2**8).view(np.int32))  # exponentials above this ask for a new maximum
ROUND = FP(3 * 2**22)  # added to a small number it leaves its nearest integer in the low bits
ROUND_BITS = INT(ROUND.view(np.int32))
# 2^f for |f| <= 1/2, fitted to the smallest largest relative error, which is 9e-8.
C1, C2, C3, C4, C5 = FP(0.693147004), FP(0.240222424), FP(0.0555073359), FP(0.00967151299), FP(0.00132647273)
FAST = {"reassoc", "contract", "nsz"}  # NaN and infinity keep their meaning


def _cast(instruction: str, of, to):
    @intrinsic
    def cast(context, x):
        def build(target, builder, signature, arguments):
            return getattr(builder, instruction)(arguments[0], target.get_value_type(to))

        return to(of), build

    return cast


_as_float = _cast("bitcast", types.int32, types.float32)
_as_bits = _cast("bitcast", types.float32, types.int32)
_from_int = _cast("sitofp", types.int32, types.float32)


@intrinsic
def _widen(context, x):
    """fp32 as it is; bf16, which comes as its bits, is the upper half of an fp32."""

    def build(target, builder, signature, arguments):
        if x == types.float32:
            return arguments[0]
        bits = target.get_value_type(types.int32)
        upper = builder.shl(builder.zext(arguments[0], bits), bits(16))
        return builder.bitcast(upper, target.get_value_type(types.float32))

    return types.float32(x), build


@intrinsic
def _narrow(context, x, like):
    """fp32 x as the type of like: rounded to the nearest bf16, ties to even, where that is the bits of one."""

    def build(target, builder, signature, arguments):
        if like == types.float32:
            return arguments[0]
        number, half = arguments[0], target.get_value_type(types.uint16)
        bits = builder.bitcast(number, target.get_value_type(types.int32))
        odd = builder.and_(builder.lshr(bits, bits.type(16)), bits.type(1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, bits.type(0x7FFF))), bits.type(16))
        is_nan = builder.fcmp_unordered("uno", number, number)
        return builder.select(is_nan, half(0x7FC0), builder.trunc(rounded, half))

    return like(types.float32, like), build


# forceinline: else the process that compiles calls the separate copy of a helper, which LLVM may have optimised in
# another way than the copy inside the cached caller, and its sums would differ in the last bit from later runs.
@compiled(forceinline=True)
def _at_least_tiny(y):
    return TINY if y < TINY else y  # max() would lose NaN


@compiled(forceinline=True)
def _exp2(y):
    """2^y, held within 2^-126 and 2^127; relative error at most 2e-7."""
    y = _at_least_tiny(HUGE if y > HUGE else y)
    near = _as_bits(y + ROUND)
    f = y - _from_int(near - ROUND_BITS)
    p = FP(1) + f * (C1 + f * (C2 + f * (C3 + f * (C4 + f * C5))))
    return p * _as_float((near << INT(23)) + INT(127 << 23))  # times, not added to its bits: NaN stays NaN


@compiled(forceinline=True)
def _highest(block):
    """The largest number, found among the bits as integers in the same order: of floats it would be no vector loop."""
    highest = INT(-(2**31))
    for j in range(block.size):
        bits = _as_bits(_widen(block[j]))
        highest = max(highest, INT(bits ^ ((bits >> INT(31)) & INT(0x7FFFFFFF))))
    return _as_float(highest ^ ((highest >> INT(31)) & INT(0x7FFFFFFF)))


@compiled(fastmath=FAST, forceinline=True)
def _exponentials(block, top, scale, with_entropy):
    """With y = (x - top) * scale: (sum of 2^y, sum of 2^y * y, bits of the largest 2^y)."""
    total, weighted, largest = FP(0), FP(0), INT(0)
    if with_entropy:
        for j in range(block.size):
            y = (_widen(block[j]) - top) * scale
            p = FP(0) if y < TINY else _exp2(y)
            total += p
            weighted += p * _at_least_tiny(y)
            largest = max(largest, _as_bits(p))
    else:
        for j in range(block.size):
            p = _exp2((_widen(block[j]) - top) * scale)
            total += p
            largest = max(largest, _as_bits(p))
    return total, weighted, largest


@compiled(fastmath=FAST, nogil=True)
def _accumulate(logits, starts, vocabulary, targets, temperature, with_entropy, state, begin, end):
    """state [4, n], see `Scores`. A block is read once, unless it turns out to hold a much larger logit than those
    before it; top is therefore no more than a little below the largest one."""
    scale = LOG2_E / temperature
    for i in range(begin, end):
        row = logits[starts[i] : starts[i] + vocabulary]
        top, total, weighted = state[1, i], state[2, i], state[3, i]
        for a in range(0, vocabulary, BLOCK):
            block = row[a : a + BLOCK]
            t, w, largest = FP(0), FP(0), FAR
            if top != LOWEST:
                t, w, largest = _exponentials(block, top, scale, with_entropy)
            if largest >= FAR:
                higher = max(top, _highest(block))
                shift = _at_least_tiny((top - higher) * scale)
                weighted = _exp2(shift) * (weighted + total * shift)
                total *= _exp2(shift)
                top = higher
                t, w, largest = _exponentials(block, top, scale, with_entropy)
            total += t
            weighted += w
        if 0 <= targets[i] < vocabulary:
            state[0, i] = _widen(row[targets[i]])
        state[1, i], state[2, i], state[3, i] = top, total, weighted


@compiled(fastmath=FAST, nogil=True)
def _gradient(
    logits, starts, vocabulary, targets, temperature, tops, log_sums, of_logprobs, entropy, of_entropy,
    gradient, out_starts, begin, end,
):  # fmt: skip
    """gradient may be the logits. A row whose gradient is zero, such as that of a clipped token, is not read."""
    buffer = np.empty(BLOCK, np.float32)  # what is read and written at once would not become vector instructions
    scale = LOG2_E / temperature
    for i in range(begin, end):
        row = logits[starts[i] : starts[i] + vocabulary]
        out = gradient[out_starts[i] : out_starts[i] + vocabulary]
        of_logprob, top, log2_sum = of_logprobs[i] / temperature, tops[i], log_sums[i] * LOG2_E
        slope, weight = of_logprob, FP(0)
        if of_entropy is not None:
            weight = of_entropy[i] / temperature
            slope += weight * entropy[i]
        if of_logprob == 0 and weight == 0:
            for j in range(vocabulary):
                out[j] = 0
            continue
        for a in range(0, vocabulary, BLOCK):
            block, into = row[a : a + BLOCK], out[a : a + BLOCK]
            x = buffer[: block.size]
            if of_entropy is None:
                for j in range(x.size):
                    y = (_widen(block[j]) - top) * scale - log2_sum
                    x[j] = FP(0) if y < TINY else -slope * _exp2(y)
            else:
                for j in range(x.size):
                    y = (_widen(block[j]) - top) * scale - log2_sum
                    x[j] = FP(0) if y < TINY else -(slope + weight * LN_2 * y) * _exp2(y)
            if a <= targets[i] < a + x.size:
                x[targets[i] - a] += of_logprob
            for j in range(x.size):
                into[j] = _narrow(x[j], into[j])


class Scores:
    """The log-probs of n tokens whose logits come in one piece, or piece after piece of the vocabulary.

    state [4, n]: the target's logit, and with y = (x - top) * log2(e) / temperature: top, sum of 2^y, sum of 2^y * y.
    """

    def __init__(self, num_tokens: int, temperature: float, with_entropy: bool):
        self.temperature, self.with_entropy = temperature, with_entropy
        self.state = torch.tensor([math.nan, LOWEST, 0, 0])[:, None].repeat(1, num_tokens)

    def add(self, x: Tensor, rows: Tensor | None, targets: Tensor) -> None:
        """x: [m, V] fp32 or bf16, its last dimension dense, of which rows [n] int64 (None: all) are meant. targets: [n]
        int64, counted from the first column of x; those outside are in another piece, or give NaN."""
        arguments = *_flat(x, rows), x.shape[1], targets.numpy(), FP(self.temperature), self.with_entropy
        runtime.in_threads(_accumulate, (*arguments, self.state.numpy()), len(targets), x.shape[1])

    def result(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(logprobs, entropy (without meaning if not wanted), top, log_sum), each fp32 [n]."""
        picked, top, total, weighted = self.state
        total = torch.where((top == LOWEST) & (total < 1), torch.nan, total)  # every logit is -inf
        log_sum = total.log()
        return (picked - top) / self.temperature - log_sum, log_sum - weighted / total * LN_2, top, log_sum


def write_gradient(x, rows, targets, temperature: float, saved, out: Tensor, out_rows: Tensor | None) -> None:
    """Writes the gradient of rows x[rows] (None: all) to out[out_rows] (None: the first rows).

    out has the dtype of x and may be x, where a row may go up, but not down. targets, and the tensors of saved (see
    `scoring.score_gradient`), are those of the rows.
    """
    top, log_sum, of_logprobs, entropy, of_entropy = (None if y is None else y.contiguous().numpy() for y in saved)
    if of_entropy is None:
        entropy = None
    arguments = *_flat(x, rows), x.shape[1], targets.numpy(), FP(temperature), top, log_sum, of_logprobs
    if out_rows is None:
        out_rows = torch.arange(len(targets))
    moves = rows is not None and out.data_ptr() == x.data_ptr() and not torch.equal(rows, out_rows)
    runtime.in_threads(
        _gradient, (*arguments, entropy, of_entropy, *_flat(out, out_rows)), len(targets), 0 if moves else x.shape[1]
    )


def has_dense_rows(x: Tensor) -> bool:
    return x.stride(1) == 1 or x.shape[1] <= 1


def _flat(x: Tensor, rows: Tensor | None) -> tuple[np.ndarray, np.ndarray]:
    """(memory of x, where each of the rows begins in it), so that numba compiles for one layout only."""
    num_rows, width = x.shape
    assert has_dense_rows(x)
    rows = torch.arange(num_rows) if rows is None else rows
    pitch = x.stride(0) if num_rows > 1 else max(width, 1)  # 0: one row, expanded
    flat = x.detach().as_strided(((num_rows - 1) * pitch + width if num_rows else 0,), (1,))
    return (flat.view(torch.uint16) if x.dtype == torch.bfloat16 else flat).numpy(), (rows * pitch).numpy()
