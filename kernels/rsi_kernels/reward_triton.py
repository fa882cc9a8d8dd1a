"""`family_rewards` on a GPU, in one launch: a program is one warp and takes one row, every thread 4 checks at a time.

A thread compares them with 8 family ids and keeps the counts of each in registers, so that threads meet once, after
the row's last check. More families cost another walk over the row. No atomics: the same input gives the same bits.
"""

import torch
import triton
import triton.language as tl

# Frozen by register count for sm_90 (see launch_configurations), not yet timed on a GPU.
BLOCK = 128  # checks at a time: 4 a thread, 16 bytes of int32 ids
FAMILIES = 8  # counted at a time: 95 registers; 16 would need 168, and fewer rows would fit a multiprocessor
NUM_WARPS = 1


@triton.jit(do_not_specialize=["num_families"])
def _reward(
    passed_ptr, family_ptr, success_ptr, weights_ptr, reward_ptr, progress_ptr, fraction_ptr,
    num_checks, num_families, partial_cap, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr, FAMILIES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    passed_ptr += row * num_checks
    family_ptr += row * num_checks
    weighted, weight_sum = 0.0, 0.0
    unfit = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, tl.maximum(num_families, 1), FAMILIES):  # without families, too, ids are looked at
        f = first + tl.arange(0, FAMILIES)
        total = tl.zeros((FAMILIES, BLOCK), tl.float32)
        num_passed = tl.zeros((FAMILIES, BLOCK), tl.float32)
        for start in range(0, num_checks, BLOCK):
            column = start + tl.arange(0, BLOCK)
            family = tl.load(family_ptr + column, mask=column < num_checks, other=-1)
            credit = tl.load(passed_ptr + column, mask=column < num_checks, other=0).to(tl.float32)
            unfit |= ((family < -1) | (family >= num_families)).to(tl.int32)
            unfit |= ((family >= 0) & ~((credit >= 0) & (credit <= 1))).to(tl.int32)
            same = family[None, :] == f[:, None]
            total += tl.where(same, 1.0, 0.0)
            num_passed += tl.where(same, credit[None, :], 0.0)  # what belongs to no family may be NaN
        total, num_passed = tl.sum(total, 1), tl.sum(num_passed, 1)
        present = (f < num_families) & (total > 0)
        fraction = tl.where(present, num_passed / total, float("nan"))
        tl.store(fraction_ptr + row * num_families + f, fraction, mask=f < num_families)
        weight = tl.where(present, 1.0, 0.0)
        if WEIGHTS:
            weight = tl.load(weights_ptr + f, mask=f < num_families, other=0.0).to(tl.float32)
            weight = tl.where(present, weight, 0.0)
        weight_sum += tl.sum(weight, 0)
        weighted += tl.sum(tl.where(weight > 0, weight * fraction, 0.0), 0)
    progress = weighted / tl.where(weight_sum > 0, weight_sum, 1.0)
    progress = tl.where(tl.max(unfit, 0) > 0, float("nan"), progress)
    tl.store(progress_ptr + row, progress)
    tl.store(reward_ptr + row, tl.where(tl.load(success_ptr + row) != 0, 1.0, partial_cap * progress))


def launch(passed, family, success, family_weights, num_families, partial_cap, block=BLOCK, families=FAMILIES):
    """(reward [R], progress [R], family_fraction [R, F]). Never syncs."""
    num_rows, num_checks = family.shape
    outputs = [
        torch.empty(shape, dtype=torch.float32, device=family.device)
        for shape in ((num_rows,), (num_rows,), (num_rows, num_families))
    ]
    if num_rows:
        _reward[(num_rows,)](
            _bytes(passed), family.contiguous(), _bytes(success),
            outputs[0] if family_weights is None else family_weights.contiguous(), *outputs,
            num_checks, num_families, partial_cap,
            WEIGHTS=family_weights is not None, BLOCK=block, FAMILIES=families, num_warps=NUM_WARPS,
        )  # fmt: skip
    return tuple(outputs)


def _bytes(x):
    x = x.contiguous()
    return x.view(torch.uint8) if x.dtype == torch.bool else x


def launch_configurations():
    """Rows whose number of checks 16 divides, in the common dtypes; and, as the worst case, where it does not."""
    from .compilation import LaunchConfiguration

    found = []
    for passed, family, num_checks, weights in (
        ("u8", "i32", "i32:16", False), ("u8", "i32", "i32:16", True), ("u8", "i64", "i32:16", True),
        ("fp32", "i32", "i32:16", True), ("bf16", "i32", "i32:16", True), ("u8", "i64", "i32", True),
    ):  # fmt: skip
        types = dict.fromkeys(("weights_ptr", "reward_ptr", "progress_ptr", "fraction_ptr"), "*fp32:16")
        types |= dict(passed_ptr=f"*{passed}:16", family_ptr=f"*{family}:16", success_ptr="*u8:16")
        types |= dict(num_checks=num_checks, num_families="i32", partial_cap="fp32")
        constants = dict(WEIGHTS=weights, BLOCK=BLOCK, FAMILIES=FAMILIES)
        found.append(LaunchConfiguration(_reward, constants, types, NUM_WARPS))
    return found
