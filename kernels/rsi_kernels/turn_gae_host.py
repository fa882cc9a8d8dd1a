"""`turn_gae` on the CPU, compiled by numba: one walk back along each row, in float64.

A row is computed by itself, token after token, so its result depends neither on its neighbours, nor on padding, nor on
how rows are spread over threads.
"""

import numpy as np
import torch

from . import runtime
from .checks import fail
from .runtime import compiled

FALLING, TOKEN_REWARD, TURN_REWARD = 1, 2, 3  # what can be wrong with a row


@compiled(nogil=True)
def _walk_back(
    values, mask, ids, token_rewards, turn_rewards, ends, lams, critic_lams, starts,
    gamma, token_gamma, token_lam, turn_credit, advantages, returns, problems, begin, end,
):  # fmt: skip
    """x is what everything after a token is worth to it; a token has the target reward + x, and hands x on as
    g * ((1 - l) * value + l * target). problems [B, 2]: what is wrong with a row, and at which position or turn."""
    num_ids = turn_rewards.shape[1]
    for row in range(begin, end):
        span = slice(starts[row], starts[row + 1])
        v, is_action, turns, advantage, of_row = values[span], mask[span], ids[span], advantages[span], returns[span]
        reward = token_rewards[span] if token_rewards.size > 0 else token_rewards
        lam, critic_lam = lams[row], critic_lams[row]
        value, target, critic_target = 0.0, 0.0, 0.0  # of the action token that comes next
        pending, lost = 0.0, -1  # rewards on masked tokens before it, and where the first of them is
        next_id, opens, closes = 0, -1, -1  # its turn: id, first token (as far as known), last token
        advantage[:] = 0
        of_row[:] = 0
        has_rewards = reward.size > 0
        has_strays = has_rewards and _any_masked(reward, is_action)
        for t in range(len(v) - 1, -1, -1):
            if is_action[t] == 0:
                if has_strays and reward[t] != 0:
                    pending += reward[t]
                    lost = t
                continue
            if has_rewards:
                pending += reward[t]
            turn = turns[t]
            is_last = closes < 0
            if is_last:
                x = critic_x = ends[row]
            elif turn != next_id:
                x = gamma * ((1 - lam) * value + lam * target)
                critic_x = gamma * ((1 - critic_lam) * value + critic_lam * critic_target)
            else:
                x = token_gamma * ((1 - token_lam) * value + token_lam * target)
                critic_x = token_gamma * ((1 - token_lam) * value + token_lam * critic_target)
            if is_last or turn != next_id:
                if turn_credit and not is_last:
                    _spread(advantage, is_action, opens, closes)
                if not is_last and turn > next_id:
                    problems[row, 0], problems[row, 1] = FALLING, opens
                for k in range(max(turn, 0), num_ids if is_last else min(next_id, num_ids)):
                    pending += turn_rewards[row, k]
                next_id, closes = turn, t
            value = v[t]
            target, critic_target = pending + x, pending + critic_x
            advantage[t], of_row[t] = target - value, critic_target
            pending, lost, opens = 0.0, -1, t
        if closes < 0:  # no action token: zeros, and rewards are dropped
            continue
        if turn_credit:
            _spread(advantage, is_action, opens, closes)
        if problems[row, 0] == 0 and lost >= 0:
            problems[row, 0], problems[row, 1] = TOKEN_REWARD, lost
        if problems[row, 0] == 0:
            for k in range(min(next_id, num_ids)):
                if turn_rewards[row, k] != 0:
                    problems[row, 0], problems[row, 1] = TURN_REWARD, k
                    break


@compiled()
def _any_masked(reward, is_action):
    """Whether a reward stands on a masked token."""
    found = False
    for t in range(reward.size):
        found |= (reward[t] != 0) & (is_action[t] == 0)
    return found


@compiled()
def _spread(advantage, is_action, opens, closes):
    """The advantage of the first token of a turn to all its tokens."""
    for t in range(opens + 1, closes + 1):
        if is_action[t] != 0:
            advantage[t] = advantage[opens]


def turn_gae_host(
    values, action_mask, turn_ids, token_rewards, turn_rewards, final_rewards, bootstrap_values,
    gamma, lam, token_gamma, token_lam, critic_lam, turn_credit, cu_seqlens, validate,
):  # fmt: skip
    """See `turn_gae`. lam and critic_lam: a number or a tensor [B]; critic_lam may be None. Returns fp32 tensors."""
    starts = _row_starts(values, cu_seqlens)
    num_rows = len(starts) - 1
    lams = _per_row("lam", lam, num_rows, validate)
    critic_lams = lams if critic_lam is None else _per_row("critic_lam", critic_lam, num_rows, validate)
    ends = np.zeros(num_rows)  # what the end of a row is worth to its last action token
    if bootstrap_values is not None:
        ends += gamma * _numpy(bootstrap_values)
    if final_rewards is not None:
        ends += _numpy(final_rewards)
    rewards = np.zeros(0, np.float32) if token_rewards is None else _numpy(token_rewards)
    of_turns = np.zeros((num_rows, 0), np.float32)
    if turn_rewards is not None:
        of_turns = _numpy(turn_rewards).reshape(turn_rewards.shape)
    mask = _numpy(action_mask if action_mask.dtype in (torch.bool, torch.uint8) else action_mask != 0).view(np.uint8)
    ids = _numpy(turn_ids)
    advantages, returns = (torch.empty(values.shape, dtype=torch.float32) for _ in range(2))
    problems = np.zeros((num_rows, 2), np.int64)
    arguments = (
        _numpy(values), mask, ids, rewards, of_turns, ends, lams, critic_lams, starts,
        gamma, token_gamma, token_lam, turn_credit, advantages.view(-1).numpy(), returns.view(-1).numpy(), problems,
    )  # fmt: skip
    runtime.in_threads(_walk_back, arguments, num_rows, values.numel() // max(num_rows, 1))
    if validate and problems.any():
        _report(problems, starts, ids, mask, rewards, of_turns)
    return advantages.to(values.device), returns.to(values.device)


def _report(problems, starts, ids, mask, rewards, turn_rewards) -> None:
    row = int(np.flatnonzero(problems[:, 0])[0])
    kind, at = problems[row].tolist()
    position = starts[row] + at
    uncredited = "no reward before a row's first action token, where no action can get it"
    if kind == FALLING:
        before = starts[row] + np.flatnonzero(mask[starts[row] : position])[-1]
        fail("turn_ids", "never to fall along the action tokens of a row",
             f"{ids[before]} then {ids[position]} at row {row}, position {at}")  # fmt: skip
    elif kind == TOKEN_REWARD:
        fail("token_rewards", uncredited, f"{rewards[position]} at row {row}, position {at}")
    else:
        fail("turn_rewards", uncredited, f"{turn_rewards[row, at]} for turn {at} of row {row}")


def _row_starts(values, cu_seqlens) -> np.ndarray:
    """[B + 1] where each row begins. cu_seqlens is checked always, since the walk would leave memory without."""
    if cu_seqlens is None:
        num_rows, length = values.shape
        return np.arange(num_rows + 1) * length
    starts = _numpy(cu_seqlens).astype(np.int64)
    if starts[0] != 0 or starts[-1] != values.numel():
        fail("cu_seqlens", f"to begin with 0 and to end with {values.numel()}", f"{starts[0]} and {starts[-1]}")
    falls = np.flatnonzero(np.diff(starts) < 0)
    if len(falls):
        i = falls[0]
        fail("cu_seqlens", "never to fall", f"{starts[i]} then {starts[i + 1]} at {i + 1}")
    return starts


def _per_row(name, lam, num_rows, validate) -> np.ndarray:
    if not isinstance(lam, torch.Tensor):
        return np.full(num_rows, lam, np.float64)
    lam = _numpy(lam).astype(np.float64)
    if validate:
        bad = np.flatnonzero(~((lam >= 0) & (lam <= 1)))
        if len(bad):
            fail(name, "finite numbers in [0, 1]", f"{lam[bad[0]]} at {bad[0]}")
    return lam


def _numpy(x: torch.Tensor) -> np.ndarray:
    """Flat, on the host; low precision as fp32."""
    x = x.detach()
    return (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x).cpu().contiguous().view(-1).numpy()
