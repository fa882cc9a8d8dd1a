"""`family_rewards` on the CPU, compiled by numba: one pass over the reports."""

import numpy as np
import torch

from . import checks, runtime
from .reward import highest_family
from .runtime import compiled


@compiled(nogil=True)
def _walk(passed, family, success, weights, partial_cap, reward, progress, fraction, unfit, begin, end):
    """unfit [R]: one plus the column of a check whose family is none of those weighted; or minus that, where the
    part that passed is none between 0 and 1."""
    num_families = len(weights)
    total, got = np.zeros(num_families + 1), np.zeros(num_families + 1)  # the last is for checks of no family
    for row in range(begin, end):
        total[:] = 0
        got[:] = 0
        for column in range(family.shape[1]):
            f = family[row, column]
            if f < 0 or f >= num_families:
                if f != -1 and unfit[row] == 0:
                    unfit[row] = column + 1
                f = num_families
            elif not 0 <= passed[row, column] <= 1 and unfit[row] == 0:
                unfit[row] = -column - 1
            total[f] += 1
            got[f] += passed[row, column]
        weighted, weight_sum = 0.0, 0.0
        for f in range(num_families):
            if total[f] == 0:
                fraction[row, f] = np.nan
                continue
            fraction[row, f] = got[f] / total[f]
            if weights[f] > 0:
                weighted += weights[f] * (got[f] / total[f])
                weight_sum += weights[f]
        progress[row] = weighted / weight_sum if weight_sum > 0 else 0.0
        reward[row] = 1.0 if success[row] != 0 else partial_cap * progress[row]


def family_rewards_host(passed, family, success, family_weights, partial_cap):
    """See `family_rewards`; (reward, progress, family_fraction), on the device of family."""
    device = family.device
    passed, family, success = passed.cpu(), family.cpu(), success.cpu()
    if family_weights is None:
        weights = np.ones(highest_family(family) + 1)
    else:
        weights = family_weights.cpu().double().numpy()
        if not (np.isfinite(weights) & (weights >= 0)).all():
            checks.fail("family_weights", "finite numbers of at least 0", family_weights.tolist())
    num_rows, num_checks = family.shape
    reward, progress = torch.empty(num_rows), torch.empty(num_rows)
    fraction = torch.empty(num_rows, len(weights))
    unfit = np.zeros(num_rows, np.int64)
    passed = passed.contiguous().view(torch.uint8) if passed.dtype == torch.bool else passed.float().contiguous()
    family = family.contiguous().numpy()
    outputs = reward.numpy(), progress.numpy(), fraction.numpy(), unfit
    arguments = passed.numpy(), family, (success != 0).numpy(), weights, partial_cap, *outputs
    runtime.in_threads(_walk, arguments, num_rows, num_checks)
    if unfit.any():
        row = int(unfit.nonzero()[0][0])
        column = abs(int(unfit[row])) - 1
        if unfit[row] < 0:
            part = float(passed[row, column])
            checks.fail("passed", "parts from 0 to 1", f"{part} at row {row}, check {column}")
        checks.fail("family", f"ids in [-1, {len(weights)})", f"{family[row, column]} at row {row}, check {column}")
    return reward.to(device), progress.to(device), fraction.to(device)
