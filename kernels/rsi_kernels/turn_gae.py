"""`turn_gae`: GAE that skips observation tokens and decays at turn boundaries only. Checks, registered op, public name.

The arithmetic is in `turn_gae_host.py` (CPU) and `turn_gae_triton.py` (GPU); the definition is in `reference.py`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import checks, runtime


class GAEOutput(NamedTuple):
    """fp32 tensors in the shape of values, exactly 0 at masked positions, without gradient."""

    advantages: Tensor
    returns: Tensor


@torch.library.custom_op("rsi_kernels::turn_gae", mutates_args=())
def _turn_gae(
    values: Tensor,
    action_mask: Tensor,
    turn_ids: Tensor,
    token_rewards: Tensor | None,
    turn_rewards: Tensor | None,
    final_rewards: Tensor | None,
    bootstrap_values: Tensor | None,
    lam_rows: Tensor | None,
    critic_lam_rows: Tensor | None,
    cu_seqlens: Tensor | None,
    gamma: float,
    lam: float,
    token_gamma: float,
    token_lam: float,
    critic_lam: float | None,
    turn_credit: bool,
    validate: bool,
) -> tuple[Tensor, Tensor]:
    arguments = (
        values, action_mask, turn_ids, token_rewards, turn_rewards, final_rewards, bootstrap_values,
        gamma, lam if lam_rows is None else lam_rows, token_gamma, token_lam,
        critic_lam if critic_lam_rows is None else critic_lam_rows, turn_credit, cu_seqlens,
    )  # fmt: skip
    if not runtime.uses_triton(values) or validate:
        from .turn_gae_host import turn_gae_host  # imports numba, which a GPU does without

        on_host = turn_gae_host(*arguments, validate)  # asked for by name: checked on the host, which costs a copy
    if not runtime.uses_triton(values):
        return on_host
    from .turn_gae_triton import launch  # imports Triton, which a CPU-only install lacks

    with runtime.device_of(values):
        return launch(*arguments)


@_turn_gae.register_fake
def _(values, *arguments):
    out = torch.empty(values.shape, dtype=torch.float32, device=values.device)
    return out, torch.empty_like(out)


def turn_gae(
    values: Tensor,
    action_mask: Tensor,
    turn_ids: Tensor,
    *,
    token_rewards: Tensor | None = None,
    turn_rewards: Tensor | None = None,
    final_rewards: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
    gamma: float = 1.0,
    lam: float | Sequence[float] | Tensor = 0.95,
    token_gamma: float = 1.0,
    token_lam: float = 1.0,
    critic_lam: float | Sequence[float] | Tensor | None = None,
    credit: str = "token",
    cu_seqlens: Tensor | None = None,
    validate: bool | None = None,
) -> GAEOutput:
    """Turn-boundary skip-observation GAE. Every action token has its own baseline; decay acts at turn boundaries.

    With t' the next action token after t, and g, l = gamma, lam if t' belongs to another turn than t, else token_gamma,
    token_lam:

        delta_t = r_t + g * V[t'] - V[t]
        A_t = delta_t + g * l * A_t'
        return_t = A_t + V[t]

    For the last action token V[t'] is bootstrap_values, A_t' is 0 and g is gamma. This is our definition: the paper
    behind the recipe (arXiv 2610.22192) does not publish its own.

    Args:
        values: [B, T], or packed [N] with cu_seqlens; fp32, bf16 or fp16. V[t] is the value before token t.
        action_mask: shape of values, bool or integer; non-zero where the policy sampled the token.
        turn_ids: shape of values, int32 or int64; at action tokens never falling along a row, gaps allowed.
            Neither values nor turn_ids are read at masked positions.
        token_rewards: shape of values, float; at a masked position it goes to the last action token before it.
        turn_rewards: [B, K] float, index = turn id; goes to the last action token whose turn id is at most k.
        final_rewards: [B] float; goes to the last action token. The three forms add up.
        bootstrap_values: [B] float, value of the state after the last token; absent: terminated.
        gamma, lam, token_gamma, token_lam: in [0, 1]. lam may be one number per row.
        critic_lam: like lam; when given, the returns come from a second recursion with it at boundaries.
        credit: "token", or "turn": every token of a turn gets the advantage of the turn's first action token.
        cu_seqlens: [B + 1] int32, row b is values[cu_seqlens[b]:cu_seqlens[b + 1]].
        validate: check values too (falling turn ids, cu_seqlens, rewards that no action token precedes). None: on CPU
            only, as reading values costs a device sync. Unchecked, a reward that nothing precedes is dropped. A row
            without action tokens gives zeros, drops its rewards and never raises.

    Raises:
        ValueError: names the argument, what was expected and what came.
    """
    checks.tensor("values", values, checks.FLOATS)
    if cu_seqlens is None:
        if values.dim() != 2:
            checks.fail("values", "shape [B, T] (or [N] with cu_seqlens)", list(values.shape))
        num_rows = values.shape[0]
    else:
        if values.dim() != 1:
            checks.fail("values", "shape [N] when cu_seqlens is given", list(values.shape))
        checks.tensor("cu_seqlens", cu_seqlens, (torch.int32,), values)
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            checks.fail("cu_seqlens", "shape [B + 1]", list(cu_seqlens.shape))
        num_rows = cu_seqlens.shape[0] - 1
    checks.tensor("action_mask", action_mask, checks.MASKS, values, values.shape)
    checks.tensor("turn_ids", turn_ids, checks.IDS, values, values.shape)
    if token_rewards is not None:
        checks.tensor("token_rewards", token_rewards, checks.FLOATS, values, values.shape)
    if turn_rewards is not None:
        checks.tensor("turn_rewards", turn_rewards, checks.FLOATS, values)
        if turn_rewards.dim() != 2 or turn_rewards.shape[0] != num_rows:
            checks.fail("turn_rewards", f"shape [{num_rows}, K]", list(turn_rewards.shape))
    if final_rewards is not None:
        checks.tensor("final_rewards", final_rewards, checks.FLOATS, values, (num_rows,))
    if bootstrap_values is not None:
        checks.tensor("bootstrap_values", bootstrap_values, checks.FLOATS, values, (num_rows,))
    gamma = checks.number("gamma", gamma, 0, 1)
    token_gamma = checks.number("token_gamma", token_gamma, 0, 1)
    token_lam = checks.number("token_lam", token_lam, 0, 1)
    lam, lam_rows = _split_lam("lam", lam, values, num_rows)
    critic_lam_rows = None
    if critic_lam is not None:
        critic_lam, critic_lam_rows = _split_lam("critic_lam", critic_lam, values, num_rows)
    if credit not in ("token", "turn"):
        checks.fail("credit", '"token" or "turn"', repr(credit))

    def constant(x):
        return None if x is None else x.detach()

    return GAEOutput(
        *_turn_gae(
            values.detach(), action_mask, turn_ids, constant(token_rewards), constant(turn_rewards),
            constant(final_rewards), constant(bootstrap_values), constant(lam_rows), constant(critic_lam_rows),
            cu_seqlens, gamma, lam, token_gamma, token_lam, critic_lam, credit == "turn",
            runtime.checks_values(validate, values),
        )
    )  # fmt: skip


def _split_lam(name: str, lam, values: Tensor, num_rows: int) -> tuple[float, Tensor | None]:
    """(number, None), or (0, one number per row)."""
    if not torch.compiler.is_compiling() and isinstance(lam, np.ndarray):
        lam = lam.tolist()
    if isinstance(lam, list | tuple):
        for x in lam:
            checks.number(name, x, 0, 1)
        lam = torch.tensor(lam, dtype=torch.float32, device=values.device)
    if isinstance(lam, Tensor):
        checks.tensor(name, lam, checks.FLOATS, values, (num_rows,))
        return 0.0, lam.float()
    return checks.number(name, lam, 0, 1), None
