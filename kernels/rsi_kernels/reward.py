"""`family_rewards`: family dense reward (FDR) and success-prioritized reward (SPR) from verifier reports.

The arithmetic is in `reward_host.py` (CPU) and `reward_triton.py` (GPU)."""

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
    if runtime.uses_triton(family):
        from .reward_triton import launch  # imports Triton, which a CPU-only install lacks

        num_families = len(family_weights) if family_weights is not None else highest_family(family) + 1
        with runtime.device_of(family):
            return launch(passed, family, success, family_weights, num_families, partial_cap)
    from .reward_host import family_rewards_host  # imports numba, which a GPU does without

    return family_rewards_host(passed, family, success, family_weights, partial_cap)


def highest_family(family: Tensor) -> int:
    """-1 if there is none (on a GPU: one sync)."""
    return max(int(family.max()), -1) if family.numel() else -1


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

    A family id outside [-1, F), or a part that passed outside [0, 1], is a ValueError on CPU; on a GPU the row's
    progress is NaN.
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
