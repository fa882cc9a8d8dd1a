"""`family_rewards`: family dense reward (FDR) and success-prioritized reward (SPR) from verifier reports.

On a GPU see `reward_triton.py`."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import checks, runtime


class FamilyRewards(NamedTuple):
    """reward [R], progress [R] and family_fraction [R, F] (NaN where the row lacks the family), all fp32."""

    reward: Tensor
    progress: Tensor
    family_fraction: Tensor


@torch.library.custom_op("rsi_kernels::family_rewards", mutates_args=())
def _family_rewards(
    passed: Tensor, family: Tensor, success: Tensor, family_weights: Tensor | None, partial_cap: float
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, num_checks = family.shape
    if family_weights is None:
        num_families = max(int(family.max()), -1) + 1 if family.numel() else 0
    else:
        num_families = len(family_weights)
    if runtime.uses_triton(family):
        from .reward_triton import launch  # imports Triton, which a CPU-only install lacks

        with runtime.device_of(family):
            return launch(passed, family, success, family_weights, num_families, partial_cap)
    unknown = (family < -1) | (family >= num_families)
    if family.device.type == "cpu":
        if unknown.any():
            row, column = unknown.nonzero()[0].tolist()
            checks.fail(
                "family", f"ids in [-1, {num_families})", f"{int(family[row, column])} at row {row}, check {column}"
            )
        if family_weights is not None and not ((family_weights >= 0) & family_weights.isfinite()).all():
            checks.fail("family_weights", "finite numbers of at least 0", family_weights.tolist())
    # One more slot at the end of each row takes what belongs to no family.
    slot = torch.where((family < 0) | unknown, num_families, family).long()
    zeros = torch.zeros((num_rows, num_families + 1), dtype=torch.float32, device=passed.device)
    total = zeros.scatter_add(1, slot, torch.ones_like(slot, dtype=torch.float32))[:, :num_families]
    num_passed = zeros.scatter_add(1, slot, passed.float())[:, :num_families]
    fraction = torch.where(total > 0, num_passed / total, torch.nan)
    weights = torch.ones(num_families, device=passed.device) if family_weights is None else family_weights.float()
    weights = torch.where(total > 0, weights, 0.0)
    weight_sum = weights.sum(1)
    progress = torch.where(weights > 0, weights * fraction, 0.0).sum(1) / torch.where(weight_sum > 0, weight_sum, 1.0)
    progress = torch.where(unknown.any(1), torch.nan, progress)  # on a GPU, where nothing was raised
    return torch.where(success != 0, 1.0, partial_cap * progress), progress, fraction


@_family_rewards.register_fake
def _(passed, family, success, family_weights, partial_cap):
    num_families = torch.library.get_ctx().new_dynamic_size() if family_weights is None else family_weights.shape[0]
    rows = [torch.empty(family.shape[0], dtype=torch.float32, device=passed.device) for _ in range(2)]
    return *rows, torch.empty((family.shape[0], num_families), dtype=torch.float32, device=passed.device)


def family_rewards(
    passed: Tensor,
    family: Tensor,
    success: Tensor,
    *,
    family_weights: Sequence[float] | Tensor | None = None,
    partial_cap: float = 0.4,
) -> FamilyRewards:
    """progress = weighted mean, over the families present, of the part of a family's checks that passed;
    reward = 1 with strict success, else partial_cap * progress.

    Our definitions, after what is public of the recipe (arXiv 2610.22192). Checks duplicated inside a family cannot
    raise progress; any strict success beats any partial one. A row without checks has progress 0.

    Args:
        passed: [R, C] bool, integer or float (partial credit, 0 to 1); not read where family is -1.
        family: [R, C] int32 or int64, -1 where the row has no check.
        success: [R] bool or integer, the verifier's own verdict.
        family_weights: [F] of at least 0; None: 1 each, and F is the highest id plus one (on a GPU: one sync).
        partial_cap: in [0, 1).

    A family id outside [-1, F) is a ValueError on CPU; on a GPU the row's progress is NaN.
    """
    checks.tensor("family", family, checks.IDS)
    if family.dim() != 2:
        checks.fail("family", "shape [R, C]", list(family.shape))
    checks.tensor("passed", passed, checks.MASKS + checks.FLOATS, family, family.shape)
    checks.tensor("success", success, checks.MASKS, family, family.shape[:1])
    if isinstance(family_weights, list | tuple):
        family_weights = torch.tensor(family_weights, dtype=torch.float32, device=family.device)
    if family_weights is not None:
        checks.tensor("family_weights", family_weights, checks.FLOATS, family)
        if family_weights.dim() != 1:
            checks.fail("family_weights", "shape [F]", list(family_weights.shape))
        family_weights = family_weights.detach()
    partial_cap = checks.number("partial_cap", partial_cap, 0, 1, open_high=True)
    return FamilyRewards(*_family_rewards(passed.detach(), family, success, family_weights, partial_cap))
