"""`turn_gae` on a GPU: reduce-then-scan over fixed chunks of a row, in two launches (three for credit="turn").

The scanned state X is what everything after a token is worth to it. An action token has the target G = r + X and hands
g * ((1 - l) * V + l * G) to the left; a masked token hands X + r. Both are affine maps of X, and maps compose: phase 1
reduces every chunk to one map, phase 2 applies those of all later chunks, then redoes its own chunk and writes.
Whether a token opens a turn follows from a running maximum, since turn ids never fall.

Chunks are counted from a row's first token and summaries are read in groups of fixed size: the same row gives the same
bits, padded or packed. Packed rows get chunk slots without a sync: row b begins at slot cu_seqlens[b] // BLOCK + b.
"""

import torch
import triton
import triton.language as tl

BLOCK = 1024  # tokens of a chunk; 4 warps hold 8 a thread. Frozen by register count for sm_90, not yet timed on a GPU.
GROUP = 128  # chunk summaries combined at a time
NUM_WARPS = 4
NUMBERS = ["num_rows", "length", "num_ids", "num_slots"]  # change with every batch: no compilation of their own
ROWS = tl.constexpr(1024)  # cu_seqlens entries looked at in one go


@triton.jit
def _compose(p_right, q_right, p, q):
    return p + q * p_right, q * q_right


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b)


@triton.jit
def _locate(cu_ptr, num_rows, length, PACKED: tl.constexpr, BLOCK: tl.constexpr):
    """(row, chunk, row's first position, row's length, row's first slot) of this program."""
    pid = tl.program_id(0)
    if PACKED:
        rows_before = 0
        for i in range(0, num_rows, ROWS):
            b = i + tl.arange(0, ROWS)
            slot = tl.load(cu_ptr + b, mask=b < num_rows, other=0) // BLOCK + b
            rows_before += tl.sum(((b < num_rows) & (slot <= pid)).to(tl.int32), 0)
        row = rows_before - 1
        start = tl.load(cu_ptr + row).to(tl.int64)
        length = (tl.load(cu_ptr + row + 1) - start).to(tl.int32)
        first_slot = (start // BLOCK).to(tl.int32) + row
    else:
        num_chunks = tl.cdiv(length, BLOCK)
        row = pid // num_chunks
        start = row.to(tl.int64) * length
        first_slot = row * num_chunks
    return row, pid - first_slot, start, length, first_slot


@triton.jit
def _tokens(mask_ptr, ids_ptr, values_ptr, rewards_ptr, t, inside, NONE: tl.constexpr, REWARDS: tl.constexpr):
    """(is action, turn id or NONE, value or 0, reward) at positions t; nothing masked is read but its reward."""
    m = tl.load(mask_ptr + t, mask=inside, other=0) != 0
    u = tl.load(ids_ptr + t, mask=m, other=NONE)
    v = tl.load(values_ptr + t, mask=m, other=0.0).to(tl.float32)
    r = tl.zeros(t.shape, tl.float32)
    if REWARDS:
        r = tl.load(rewards_ptr + t, mask=inside, other=0.0).to(tl.float32)
    return m, u, v, r


@triton.jit
def _between(rewards_ptr, num_ids, before, u, counts):
    """Sum of the rewards of turns before <= k < u, where counts: due to the last action token before this one."""
    low = tl.minimum(tl.maximum(before, 0), num_ids).to(tl.int32)
    high = tl.minimum(tl.maximum(u, 0), num_ids).to(tl.int32)
    gap = tl.where(counts, high - low, 0)
    total = tl.zeros(gap.shape, tl.float32)
    for i in range(0, tl.max(gap, 0)):
        total += tl.load(rewards_ptr + low + i, mask=i < gap, other=0.0).to(tl.float32)
    return total


@triton.jit
def _map(m, v, g, edge, extra, gamma, lam, token_gamma, token_lam):
    """The affine map (p, q) of an action token with target g, or of a masked token with reward g."""
    discount = tl.where(edge, gamma, token_gamma)
    trace = tl.where(edge, lam, token_lam)
    p = tl.where(m, extra + discount * ((1 - trace) * v + trace * g), g)
    return p, tl.where(m, discount * trace, 1.0)


@triton.jit
def _first(x):
    """Element 0 of a vector."""
    return tl.sum(tl.where(tl.arange(0, x.shape[0]) == 0, x, 0.0), 0)


@triton.jit
def _last_id_before(ids_ptr, chunk, NONE: tl.constexpr, GROUP: tl.constexpr):
    """Highest turn id in the row's chunks before this one; ids_ptr: their last ids."""
    highest = tl.full((GROUP,), NONE, ids_ptr.dtype.element_ty)
    for i in range(0, chunk, GROUP):
        j = i + tl.arange(0, GROUP)
        highest = tl.maximum(highest, tl.load(ids_ptr + j, mask=j < chunk, other=NONE))
    return tl.max(highest, 0)


@triton.jit(do_not_specialize=NUMBERS)
def _summarise(
    mask_ptr, ids_ptr, values_ptr, rewards_ptr, turn_rewards_ptr, lam_ptr, critic_lam_ptr, cu_ptr, sums_ptr, ends_ptr,
    num_rows, length, num_ids, num_slots, gamma, lam, token_gamma, token_lam, critic_lam,
    TOKEN_REWARDS: tl.constexpr, TURN_REWARDS: tl.constexpr, LAM: tl.constexpr, CRITIC: tl.constexpr,
    PACKED: tl.constexpr, NONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Phase 1. sums [6, slots]: p and q of the first action token's target, the same for critic_lam, its value, and the
    rewards before it; ends [2, slots]: first and last turn id (NONE: no action token)."""
    row, chunk, start, length, first_slot = _locate(cu_ptr, num_rows, length, PACKED, BLOCK)
    i = tl.arange(0, BLOCK)
    inside = chunk * BLOCK + i < length
    t = start + chunk * BLOCK + i
    m, u, v, r = _tokens(mask_ptr, ids_ptr, values_ptr, rewards_ptr, t, inside, NONE, TOKEN_REWARDS)
    first = tl.min(tl.where(m, i, BLOCK), 0)
    before_m = tl.load(mask_ptr + t - 1, mask=inside & (i > 0), other=0) != 0
    before = tl.associative_scan(tl.load(ids_ptr + t - 1, mask=before_m, other=NONE), 0, _maximum)
    edge = u != before
    extra = tl.zeros((BLOCK,), tl.float32)
    if TURN_REWARDS:
        extra = _between(turn_rewards_ptr + row.to(tl.int64) * num_ids, num_ids, before, u, m & (i > first))
    slot = (first_slot + chunk).to(tl.int64)
    first_reward = tl.sum(tl.where(i == first, r, 0.0), 0)
    for critic in tl.static_range(2 if CRITIC > 0 else 1):
        if critic == 0:
            lam_here = tl.load(lam_ptr + row) if LAM else lam
        else:
            lam_here = tl.load(critic_lam_ptr + row) if CRITIC == 2 else critic_lam
        p, q = _map(m, v, r, edge, extra, gamma, lam_here, token_gamma, token_lam)
        p = tl.where(i > first, p, 0.0)
        q = tl.where(i > first, q, 1.0)
        p, q = tl.associative_scan((p, q), 0, _compose, reverse=True)
        tl.store(sums_ptr + 2 * critic * num_slots + slot, first_reward + _first(p))
        tl.store(sums_ptr + (2 * critic + 1) * num_slots + slot, _first(q))
    tl.store(sums_ptr + 4 * num_slots + slot, tl.sum(tl.where(i == first, v, 0.0), 0))
    tl.store(sums_ptr + 5 * num_slots + slot, tl.sum(tl.where(i < first, r, 0.0), 0))
    tl.store(ends_ptr + slot, tl.max(tl.where(i == first, u, NONE), 0))
    tl.store(ends_ptr + num_slots + slot, tl.max(u, 0))


@triton.jit(do_not_specialize=NUMBERS)
def _write(
    mask_ptr, ids_ptr, values_ptr, rewards_ptr, turn_rewards_ptr, final_ptr, bootstrap_ptr, lam_ptr, critic_lam_ptr,
    cu_ptr, sums_ptr, ends_ptr, advantages_ptr, returns_ptr,
    num_rows, length, num_ids, num_slots, gamma, lam, token_gamma, token_lam, critic_lam,
    TOKEN_REWARDS: tl.constexpr, TURN_REWARDS: tl.constexpr, FINAL: tl.constexpr, BOOTSTRAP: tl.constexpr,
    LAM: tl.constexpr, CRITIC: tl.constexpr, PACKED: tl.constexpr, NONE: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Phase 2."""
    row, chunk, start, length, first_slot = _locate(cu_ptr, num_rows, length, PACKED, BLOCK)
    num_chunks = tl.cdiv(length, BLOCK)
    slot = first_slot.to(tl.int64)
    turn_rewards_ptr += row.to(tl.int64) * num_ids
    # What the end of the row is worth to its last action token.
    end = 0.0
    if BOOTSTRAP:
        end += gamma * tl.load(bootstrap_ptr + row).to(tl.float32)
    if FINAL:
        end += tl.load(final_ptr + row).to(tl.float32)
    if TURN_REWARDS:
        last_id = _last_id_before(ends_ptr + num_slots + slot, num_chunks, NONE, GROUP)
        low = tl.minimum(tl.maximum(last_id, 0), num_ids).to(tl.int32)
        total = tl.zeros((GROUP,), tl.float32)
        for k0 in range(low, num_ids, GROUP):
            k = k0 + tl.arange(0, GROUP)
            total += tl.load(turn_rewards_ptr + k, mask=k < num_ids, other=0.0).to(tl.float32)
        end += tl.sum(total, 0)
    i = tl.arange(0, BLOCK)
    inside = chunk * BLOCK + i < length
    t = start + chunk * BLOCK + i
    m, u, v, r = _tokens(mask_ptr, ids_ptr, values_ptr, rewards_ptr, t, inside, NONE, TOKEN_REWARDS)
    # The maps of the positions one to the right, as far as they are in this chunk.
    before = tl.associative_scan(u, 0, _maximum)
    has_right = (i < BLOCK - 1) & (chunk * BLOCK + i + 1 < length)
    m1, u1, v1, r1 = _tokens(mask_ptr, ids_ptr, values_ptr, rewards_ptr, t + 1, has_right, NONE, TOKEN_REWARDS)
    edge = u1 != before
    extra = tl.zeros((BLOCK,), tl.float32)
    if TURN_REWARDS:
        extra = _between(turn_rewards_ptr, num_ids, before, u1, m1 & (before != NONE))
    for critic in tl.static_range(2 if CRITIC > 0 else 1):
        if critic == 0:
            lam_here = tl.load(lam_ptr + row) if LAM else lam
        else:
            lam_here = tl.load(critic_lam_ptr + row) if CRITIC == 2 else critic_lam
        x = end
        last_group = (num_chunks - 1) // GROUP
        for back in range(0, last_group - chunk // GROUP + 1):
            j0 = (last_group - back) * GROUP
            j = j0 + tl.arange(0, GROUP)
            known = (j > chunk) & (j < num_chunks)
            chunk_p = tl.load(sums_ptr + 2 * critic * num_slots + slot + j, mask=known, other=0.0)
            chunk_q = tl.load(sums_ptr + (2 * critic + 1) * num_slots + slot + j, mask=known, other=1.0)
            first_v = tl.load(sums_ptr + 4 * num_slots + slot + j, mask=known, other=0.0)
            lead = tl.load(sums_ptr + 5 * num_slots + slot + j, mask=known, other=0.0)
            first_id = tl.load(ends_ptr + slot + j, mask=known, other=NONE)
            ids_before = tl.load(ends_ptr + num_slots + slot + j - 1, mask=(j > j0) & (j < num_chunks), other=NONE)
            ids_before = tl.associative_scan(ids_before, 0, _maximum)
            ids_before = tl.maximum(ids_before, _last_id_before(ends_ptr + num_slots + slot, j0, NONE, GROUP))
            has_action = first_id != NONE
            gained = tl.zeros((GROUP,), tl.float32)
            if TURN_REWARDS:
                gained = _between(turn_rewards_ptr, num_ids, ids_before, first_id, has_action & (ids_before != NONE))
            # The first token's target is chunk_p + chunk_q * X, and its own map comes on top.
            base, slope = _map(
                has_action, first_v, chunk_p, first_id != ids_before, gained, gamma, lam_here, token_gamma, token_lam
            )
            chunk_p = tl.where(has_action, base + lead, lead)
            chunk_q = tl.where(has_action, slope * chunk_q, 1.0)
            chunk_p, chunk_q = tl.associative_scan((chunk_p, chunk_q), 0, _compose, reverse=True)
            x = _first(chunk_p) + _first(chunk_q) * x
        p, q = _map(m1, v1, r1, edge, extra, gamma, lam_here, token_gamma, token_lam)
        p, q = tl.associative_scan((p, q), 0, _compose, reverse=True)
        target = r + (p + q * x)
        if critic == 0:
            tl.store(advantages_ptr + t, tl.where(m, target - v, 0.0), mask=inside)
        if critic == 1 or CRITIC == 0:
            tl.store(returns_ptr + t, tl.where(m, target, 0.0), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "length", "num_slots"])
def _spread(
    mask_ptr, ids_ptr, cu_ptr, ends_ptr, token_advantages_ptr, advantages_ptr, num_rows, length, num_slots,
    PACKED: tl.constexpr, NONE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Phase 3, for credit="turn": every token takes the advantage of its turn's first."""
    row, chunk, start, length, first_slot = _locate(cu_ptr, num_rows, length, PACKED, BLOCK)
    last_ids_ptr = ends_ptr + num_slots + first_slot.to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = chunk * BLOCK + i < length
    t = start + chunk * BLOCK + i
    m = tl.load(mask_ptr + t, mask=inside, other=0) != 0
    u = tl.load(ids_ptr + t, mask=m, other=NONE)
    open_id = _last_id_before(last_ids_ptr, chunk, NONE, GROUP)
    before_m = tl.load(mask_ptr + t - 1, mask=inside & (i > 0), other=0) != 0
    before = tl.associative_scan(tl.load(ids_ptr + t - 1, mask=before_m, other=NONE), 0, _maximum)
    opens = m & (u != tl.maximum(before, open_id))
    opened_at = tl.associative_scan(tl.where(opens, i, -1), 0, _maximum)
    # The turn that is open when the chunk begins: find the chunk, then the token, where it began.
    holder = tl.full((GROUP,), 2147483647, tl.int32)
    for j0 in range(0, chunk, GROUP):
        j = j0 + tl.arange(0, GROUP)
        last_id = tl.load(last_ids_ptr + j, mask=j < chunk, other=NONE)
        holder = tl.minimum(holder, tl.where((j < chunk) & (last_id == open_id), j, 2147483647))
    earlier = tl.minimum(tl.min(holder, 0), chunk)
    ts = start + earlier.to(tl.int64) * BLOCK + i
    earlier_m = tl.load(mask_ptr + ts, mask=earlier * BLOCK + i < length, other=0) != 0
    earlier_u = tl.load(ids_ptr + ts, mask=earlier_m, other=NONE)
    opened_earlier = tl.min(tl.where(earlier_m & (earlier_u == open_id), i, BLOCK), 0) + earlier * BLOCK
    source = tl.where(opened_at >= 0, opened_at + chunk * BLOCK, opened_earlier)
    tl.store(advantages_ptr + t, tl.load(token_advantages_ptr + start + source, mask=m, other=0.0), mask=inside)


def launch(
    values, action_mask, turn_ids, token_rewards, turn_rewards, final_rewards, bootstrap_values,
    gamma, lam, token_gamma, token_lam, critic_lam, turn_credit, cu_seqlens, block=BLOCK, group=GROUP,
):  # fmt: skip
    """See `turn_gae`. lam and critic_lam: a number or a tensor [B]; critic_lam may be None. Never syncs."""
    shape, packed = values.shape, cu_seqlens is not None
    num_rows = len(cu_seqlens) - 1 if packed else shape[0]
    length = 0 if packed else shape[1]
    advantages = torch.empty(shape, dtype=torch.float32, device=values.device)
    returns = torch.empty_like(advantages)
    if values.numel() == 0 or num_rows == 0:
        return advantages, returns
    num_slots = values.numel() // block + num_rows if packed else num_rows * triton.cdiv(length, block)
    mask = action_mask.contiguous()
    mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    ids, values = turn_ids.contiguous(), values.contiguous()
    sums = torch.empty((6, num_slots), dtype=torch.float32, device=values.device)
    ends = torch.empty((2, num_slots), dtype=ids.dtype, device=values.device)
    raw = torch.empty_like(advantages) if turn_credit else advantages

    def given(x):  # an argument that is not read still has to be a pointer
        return values if not isinstance(x, torch.Tensor) else x.contiguous()

    def scalar(x):
        return float(x) if isinstance(x, int | float) else 0.0

    options = dict(PACKED=packed, NONE=torch.iinfo(ids.dtype).min, BLOCK=block, num_warps=NUM_WARPS)
    forms = dict(
        TOKEN_REWARDS=token_rewards is not None,
        TURN_REWARDS=turn_rewards is not None and turn_rewards.shape[1] > 0,
        LAM=isinstance(lam, torch.Tensor),
        CRITIC=0 if critic_lam is None else 2 if isinstance(critic_lam, torch.Tensor) else 1,
    )
    cu, credit, critic = given(cu_seqlens), given(turn_rewards), given(critic_lam)
    numbers = (
        num_rows, length, 0 if turn_rewards is None else turn_rewards.shape[1], num_slots,
        float(gamma), scalar(lam), float(token_gamma), float(token_lam), scalar(critic_lam),
    )  # fmt: skip
    tokens = (mask, ids, values, given(token_rewards), credit)
    _summarise[(num_slots,)](*tokens, given(lam), critic, cu, sums, ends, *numbers, **forms, **options)
    _write[(num_slots,)](
        *tokens, given(final_rewards), given(bootstrap_values), given(lam), critic, cu, sums, ends, raw, returns,
        *numbers, FINAL=final_rewards is not None, BOOTSTRAP=bootstrap_values is not None, GROUP=group,
        **forms, **options,
    )  # fmt: skip
    if turn_credit:
        _spread[(num_slots,)](mask, ids, cu, ends, raw, advantages, num_rows, length, num_slots, GROUP=group, **options)
    return advantages, returns


def launch_configurations():
    """With every option and with none, for turn ids of both widths."""
    from .compilation import LaunchConfiguration

    fp32 = (
        "rewards_ptr", "turn_rewards_ptr", "final_ptr", "bootstrap_ptr", "lam_ptr", "critic_lam_ptr", "sums_ptr",
        "advantages_ptr", "token_advantages_ptr", "returns_ptr",
    )  # fmt: skip
    types = {"mask_ptr": "*u8:16", "cu_ptr": "*i32:16", "values_ptr": "*bf16:16"} | dict.fromkeys(fp32, "*fp32:16")
    types |= dict.fromkeys(("num_rows", "length", "num_ids", "num_slots"), "i32")
    types |= dict.fromkeys(("gamma", "lam", "token_gamma", "token_lam", "critic_lam"), "fp32")
    flags = ("TOKEN_REWARDS", "TURN_REWARDS", "FINAL", "BOOTSTRAP", "LAM", "PACKED")
    found = []
    for everything, ids in ((False, "i32"), (True, "i32"), (True, "i64")):
        types = types | {"ids_ptr": f"*{ids}:16", "ends_ptr": f"*{ids}:16"}
        constants = dict.fromkeys(flags, everything) | {"CRITIC": 2 if everything else 0}
        constants |= dict(BLOCK=BLOCK, GROUP=GROUP, NONE=-(2 ** (int(ids[1:]) - 1)))
        found += [LaunchConfiguration(kernel, constants, types, NUM_WARPS) for kernel in (_summarise, _write, _spread)]
    return found
