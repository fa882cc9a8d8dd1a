"""`policy_loss` and `value_loss` on a GPU: one launch each that reads the tokens once and writes loss, stats and slope.

Programs keep sums of their own tokens, write them down and add 1 to a counter; the one that comes last adds up all of
them, always in the same order. So there are no float atomics, and the same input gives the same bits. Masked tokens
are read too: a load that depends on a mask would take 1 token at a time, not 16 bytes.
"""

import math

import torch
import triton
import triton.language as tl

# Frozen by register count for sm_90 (see launch_configurations), not yet timed on a GPU.
BLOCK = 1024  # tokens at a time, 8 a thread
NUM_WARPS = 4
PROGRAMS = 512  # at most, a power of two: about 4 for each of an H200's 132 multiprocessors


@triton.jit
def _read(ptr, offsets, num_tokens, keep, WHOLE: tl.constexpr):
    """What is not kept may be NaN and becomes 0, which is neutral: ratio 1 and advantage 0."""
    x = tl.load(ptr + offsets) if WHOLE else tl.load(ptr + offsets, mask=offsets < num_tokens, other=0.0)
    return tl.where(keep, x.to(tl.float32), 0.0)


@triton.jit
def _keep(mask_ptr, offsets, num_tokens, WHOLE: tl.constexpr):
    m = tl.load(mask_ptr + offsets) if WHOLE else tl.load(mask_ptr + offsets, mask=offsets < num_tokens, other=0)
    return m != 0


@triton.jit
def _write(ptr, offsets, num_tokens, x, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(ptr + offsets, x)
    else:
        tl.store(ptr + offsets, x, mask=offsets < num_tokens)


@triton.jit
def _comes_last(counter_ptr):
    """Whether all other programs have written their sums. A scalar's store and this are done by the same thread."""
    return tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1


@triton.jit
def _sums(ptr, PROGRAMS: tl.constexpr):
    """One number of each program; .cg: not from an L1 cache, which may be older than the write."""
    i = tl.arange(0, PROGRAMS)
    return tl.load(ptr + i, mask=i < tl.num_programs(0), other=0, cache_modifier=".cg")


@triton.jit
def _divisor(num_kept, denominator_ptr, number, GIVEN: tl.constexpr):
    """As `ppo_loss.divisor`; number: -1 if there is none."""
    scale = tl.where(number < 0, num_kept.to(tl.float32), number)
    if GIVEN:
        scale = tl.load(denominator_ptr).to(tl.float32)
    return tl.where(scale == 0, 1.0, scale)


@triton.jit
def _kl(log_ratio, ratio):
    """exp(x) - 1 - x; near 0, where that would cancel, by its series."""
    x = log_ratio
    series = 1 / 720 + x * (1 / 5040 + x * (1 / 40320))
    series = 1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * series)))
    return tl.where(tl.abs(x) < 0.5, x * x * series, ratio - 1 - x)


@triton.jit
def _policy_block(
    block, logprobs_ptr, old_ptr, advantages_ptr, behaviour_ptr, mask_ptr, slope_ptr, num_tokens,
    low, high, dual_clip, is_cap, loss_sum, kl_sum, ratio_sum, ratio_max, num_clipped, num_kept,
    BEHAVIOUR: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Writes the slope of a block and returns the sums with it; as `ppo_loss.surrogate`."""
    offsets = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = _keep(mask_ptr, offsets, num_tokens, WHOLE)
    old = _read(old_ptr, offsets, num_tokens, keep, WHOLE)
    a = _read(advantages_ptr, offsets, num_tokens, keep, WHOLE)
    log_ratio = _read(logprobs_ptr, offsets, num_tokens, keep, WHOLE) - old
    ratio = tl.exp(log_ratio)
    # Bounds by where: minimum and maximum would hide NaN.
    bounded = tl.where(ratio < low, low, tl.where(ratio > high, high, ratio))
    plain, clipped = -a * ratio, -a * bounded
    rules = (clipped > plain) & (a != 0)
    loss, slope = tl.where(rules, clipped, plain), tl.where(rules, 0.0, plain)
    beyond = (a < 0) & (loss > -a * dual_clip)
    loss, slope = tl.where(beyond, -a * dual_clip, loss), tl.where(beyond, 0.0, slope)
    if BEHAVIOUR:
        weight = tl.exp(old - _read(behaviour_ptr, offsets, num_tokens, keep, WHOLE))
        weight = tl.where(weight > is_cap, is_cap, weight)
        loss, slope = loss * weight, tl.where(slope == 0, 0.0, slope * weight)
    _write(slope_ptr, offsets, num_tokens, tl.where(a == 0, 0.0, slope), WHOLE)
    ratio = tl.where(keep, ratio, 0.0)
    loss_sum += tl.where(a == 0, 0.0, loss)
    kl_sum += tl.where(keep, _kl(log_ratio, ratio), 0.0)
    return (
        loss_sum, kl_sum, ratio_sum + ratio, tl.maximum(ratio_max, ratio),
        num_clipped + rules.to(tl.int32), num_kept + keep.to(tl.int32),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _policy(
    logprobs_ptr, old_ptr, advantages_ptr, behaviour_ptr, mask_ptr, denominator_ptr, slope_ptr,
    loss_ptr, clip_fraction_ptr, kl_ptr, ratio_mean_ptr, ratio_max_ptr, num_kept_ptr, scale_ptr,
    sums_ptr, counts_ptr, counter_ptr, num_tokens, number, low, high, dual_clip, is_cap,
    BEHAVIOUR: tl.constexpr, GIVEN: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """sums [4, programs] of loss, kl and ratio, and the largest ratio; counts [2, programs] of clipped and kept."""
    pid, num_programs = tl.program_id(0), tl.num_programs(0)
    zeros, none = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.int32)
    loss, kl, ratio, ratio_max, clipped, kept = zeros, zeros, zeros, zeros, none, none
    num_whole = num_tokens // BLOCK
    for block in range(pid, num_whole, num_programs):
        loss, kl, ratio, ratio_max, clipped, kept = _policy_block(
            block, logprobs_ptr, old_ptr, advantages_ptr, behaviour_ptr, mask_ptr, slope_ptr, num_tokens,
            low, high, dual_clip, is_cap, loss, kl, ratio, ratio_max, clipped, kept, BEHAVIOUR, BLOCK, True,
        )  # fmt: skip
    if pid == num_whole % num_programs:  # what is left, if anything
        loss, kl, ratio, ratio_max, clipped, kept = _policy_block(
            num_whole, logprobs_ptr, old_ptr, advantages_ptr, behaviour_ptr, mask_ptr, slope_ptr, num_tokens,
            low, high, dual_clip, is_cap, loss, kl, ratio, ratio_max, clipped, kept, BEHAVIOUR, BLOCK, False,
        )  # fmt: skip
    tl.store(sums_ptr + pid, tl.sum(loss, 0))
    tl.store(sums_ptr + num_programs + pid, tl.sum(kl, 0))
    tl.store(sums_ptr + 2 * num_programs + pid, tl.sum(ratio, 0))
    tl.store(sums_ptr + 3 * num_programs + pid, tl.max(ratio_max, 0))
    tl.store(counts_ptr + pid, tl.sum(clipped, 0))
    tl.store(counts_ptr + num_programs + pid, tl.sum(kept, 0))
    if _comes_last(counter_ptr):
        num_kept = tl.sum(_sums(counts_ptr + num_programs, PROGRAMS).to(tl.int64), 0)
        num_clipped = tl.sum(_sums(counts_ptr, PROGRAMS).to(tl.int64), 0)
        count = tl.maximum(num_kept, 1).to(tl.float32)
        scale = _divisor(num_kept, denominator_ptr, number, GIVEN)
        ratio_sum = tl.sum(_sums(sums_ptr + 2 * num_programs, PROGRAMS), 0)
        highest = tl.max(_sums(sums_ptr + 3 * num_programs, PROGRAMS), 0)  # a maximum drops NaN, a sum does not
        tl.store(loss_ptr, tl.div_rn(tl.sum(_sums(sums_ptr, PROGRAMS), 0), scale))
        tl.store(clip_fraction_ptr, tl.div_rn(num_clipped.to(tl.float32), count))
        tl.store(kl_ptr, tl.div_rn(tl.sum(_sums(sums_ptr + num_programs, PROGRAMS), 0), count))
        tl.store(ratio_mean_ptr, tl.div_rn(ratio_sum, count))
        tl.store(ratio_max_ptr, tl.where(ratio_sum != ratio_sum, ratio_sum, highest))  # NaN if there is one
        tl.store(num_kept_ptr, num_kept)
        tl.store(scale_ptr, scale)


@triton.jit
def _value_block(
    block, values_ptr, old_ptr, returns_ptr, mask_ptr, slope_ptr, num_tokens, clip, loss_sum, num_clipped, num_kept,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Writes the slope of a block and returns the sums with it."""
    offsets = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = _keep(mask_ptr, offsets, num_tokens, WHOLE)
    v = _read(values_ptr, offsets, num_tokens, keep, WHOLE)
    old = _read(old_ptr, offsets, num_tokens, keep, WHOLE)
    target = _read(returns_ptr, offsets, num_tokens, keep, WHOLE)
    plain = v - target
    clipped = tl.where(v < old - clip, old - clip, tl.where(v > old + clip, old + clip, v)) - target
    rules = clipped * clipped > plain * plain
    _write(slope_ptr, offsets, num_tokens, tl.where(rules, 0.0, plain), WHOLE)
    loss = tl.where(rules, clipped, plain)
    return loss_sum + 0.5 * loss * loss, num_clipped + rules.to(tl.int32), num_kept + keep.to(tl.int32)


@triton.jit(do_not_specialize=["num_tokens"])
def _value(
    values_ptr, old_ptr, returns_ptr, mask_ptr, denominator_ptr, slope_ptr,
    loss_ptr, clip_fraction_ptr, num_kept_ptr, scale_ptr, sums_ptr, counts_ptr, counter_ptr, num_tokens, number, clip,
    GIVEN: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """sums [programs] of the loss; counts [2, programs] of clipped and kept."""
    pid, num_programs = tl.program_id(0), tl.num_programs(0)
    loss, none = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.int32)
    clipped, kept = none, none
    num_whole = num_tokens // BLOCK
    for block in range(pid, num_whole, num_programs):
        loss, clipped, kept = _value_block(
            block, values_ptr, old_ptr, returns_ptr, mask_ptr, slope_ptr, num_tokens, clip, loss, clipped, kept,
            BLOCK, True,
        )  # fmt: skip
    if pid == num_whole % num_programs:
        loss, clipped, kept = _value_block(
            num_whole, values_ptr, old_ptr, returns_ptr, mask_ptr, slope_ptr, num_tokens, clip, loss, clipped, kept,
            BLOCK, False,
        )  # fmt: skip
    tl.store(sums_ptr + pid, tl.sum(loss, 0))
    tl.store(counts_ptr + pid, tl.sum(clipped, 0))
    tl.store(counts_ptr + num_programs + pid, tl.sum(kept, 0))
    if _comes_last(counter_ptr):
        num_kept = tl.sum(_sums(counts_ptr + num_programs, PROGRAMS).to(tl.int64), 0)
        num_clipped = tl.sum(_sums(counts_ptr, PROGRAMS).to(tl.int64), 0)
        scale = _divisor(num_kept, denominator_ptr, number, GIVEN)
        tl.store(loss_ptr, tl.div_rn(tl.sum(_sums(sums_ptr, PROGRAMS), 0), scale))
        tl.store(clip_fraction_ptr, tl.div_rn(num_clipped.to(tl.float32), tl.maximum(num_kept, 1).to(tl.float32)))
        tl.store(num_kept_ptr, num_kept)
        tl.store(scale_ptr, scale)


def launch_policy(
    logprobs, old_logprobs, advantages, mask, behaviour_logprobs, denominator, number, clip_low, clip_high, dual_clip,
    is_cap, block=BLOCK, programs=PROGRAMS,
):  # fmt: skip
    """What the op `policy_loss` returns, for at least one token. Never syncs, unless the denominator is on a CPU."""
    behaviour = logprobs if behaviour_logprobs is None else behaviour_logprobs
    slope, stats, scratch, grid = _new(logprobs, 4, 4, block, programs)
    loss, *_, num_tokens, scale = stats
    _policy[grid](
        *(_bytes(x) for x in (logprobs, old_logprobs, advantages, behaviour, mask)),
        _pointer(denominator, scale), slope, *stats, *scratch, slope.numel(), -1.0 if number is None else number,
        1 - clip_low, 1 + clip_high, _or_inf(dual_clip), _or_inf(is_cap),
        BEHAVIOUR=behaviour_logprobs is not None, GIVEN=denominator is not None, BLOCK=block, PROGRAMS=programs,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return *stats, slope


def launch_value(values, old_values, returns, mask, denominator, number, clip, block=BLOCK, programs=PROGRAMS):
    """What the op `value_loss` returns, for at least one token. Never syncs, unless the denominator is on a CPU."""
    slope, stats, scratch, grid = _new(values, 1, 1, block, programs)
    _value[grid](
        *(_bytes(x) for x in (values, old_values, returns, mask)), _pointer(denominator, stats[-1]), slope, *stats,
        *scratch, slope.numel(), -1.0 if number is None else number, clip,
        GIVEN=denominator is not None, BLOCK=block, PROGRAMS=programs, num_warps=NUM_WARPS,
    )  # fmt: skip
    return *stats, slope


def _new(like, num_stats, num_sums, block, programs):
    """(slope, [loss, stats, num_tokens, scale], [sums, counts, counter], grid), which depends on nothing but sizes."""

    def empty(shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device=like.device)

    num_programs = min(triton.cdiv(like.numel(), block), programs)
    stats = [*(empty(()) for _ in range(1 + num_stats)), empty((), torch.int64), empty(())]
    scratch = empty((num_sums, num_programs)), empty((2, num_programs), torch.int32)
    counter = torch.zeros(1, dtype=torch.int32, device=like.device)
    return empty(like.shape), stats, (*scratch, counter), (num_programs,)


def _bytes(x):
    x = x.contiguous()
    return x.view(torch.uint8) if x.dtype == torch.bool else x


def _pointer(denominator, otherwise):
    return otherwise if denominator is None else _bytes(denominator.to(otherwise.device))


def _or_inf(x):
    return math.inf if x is None else x


def launch_configurations():
    """With all optional inputs and without, in every dtype; the number of tokens changes nothing."""
    from .compilation import LaunchConfiguration

    inputs = "logprobs old advantages behaviour values returns".split()
    outputs = "slope loss clip_fraction kl ratio_mean ratio_max scale sums".split()
    types = dict.fromkeys((f"{name}_ptr" for name in outputs), "*fp32:16")
    types |= dict(mask_ptr="*u8:16", denominator_ptr="*i64:16", num_kept_ptr="*i64:16", num_tokens="i32")
    types |= dict(counts_ptr="*i32:16", counter_ptr="*i32:16")
    types |= dict.fromkeys("number low high dual_clip is_cap clip".split(), "fp32")
    found = []
    for dtype in ("fp32", "bf16", "fp16"):
        of_dtype = types | dict.fromkeys((f"{name}_ptr" for name in inputs), f"*{dtype}:16")
        for given in (False, True):
            constants = dict(GIVEN=given, BLOCK=BLOCK, PROGRAMS=PROGRAMS)
            policy = dict(BEHAVIOUR=given) | constants
            found.append(LaunchConfiguration(_policy, policy, of_dtype, NUM_WARPS))
            found.append(LaunchConfiguration(_value, constants, of_dtype, NUM_WARPS))
    return found
