"""`turn_gae` on the CPU: numpy over the action tokens only, no Python loop over tokens or turns.

numpy, since its flatnonzero, take and scatter are about twice as fast as torch's on one thread. Sums run in float64 and
each row's arithmetic is its own (blocks are counted from the row's first action token), so a row's result depends
neither on its neighbours nor on padding.
"""

from dataclasses import dataclass

import numpy as np
import torch

from .checks import fail

BLOCK = 32  # positions scanned one after the other, in all blocks at once


@dataclass
class Actions:
    """The action tokens of all rows, one after the other (n of them)."""

    mask: np.ndarray  # [N] bool
    flat: np.ndarray  # [n] their positions in the flat input
    first: np.ndarray  # [B + 1] where each row's tokens begin among them
    starts: np.ndarray  # [B + 1] where each row begins in the flat input
    turns: np.ndarray  # [n] turn ids
    turn_first: np.ndarray  # [m] the first token of each turn
    turn_length: np.ndarray  # [m] tokens of each turn
    row_turn: np.ndarray  # [B + 1] where each row's turns begin in turn_first


def turn_gae_host(
    values, action_mask, turn_ids, token_rewards, turn_rewards, final_rewards, bootstrap_values,
    gamma, lam, token_gamma, token_lam, critic_lam, turn_credit, cu_seqlens, validate,
):  # fmt: skip
    """See `turn_gae`. lam and critic_lam: a number or a tensor [B]; critic_lam may be None. Returns fp32 tensors."""
    starts = _row_starts(values, cu_seqlens, validate)
    lam, critic_lam = _per_row("lam", lam, validate), _per_row("critic_lam", critic_lam, validate)
    actions = _find_actions(action_mask, turn_ids, starts, validate)
    end = np.zeros(len(starts) - 1)  # what the end of a row is worth to its last action token
    if bootstrap_values is not None:
        end += gamma * _float64(bootstrap_values)
    if final_rewards is not None:
        end += _float64(final_rewards)
    on_token = None if token_rewards is None else _credit_tokens(_numpy(token_rewards), actions, validate)
    on_turn = None if turn_rewards is None else _credit_turns(_float64(turn_rewards), actions, validate)
    v = _numpy(values).take(actions.flat).astype(np.float64)

    def targets(boundary_lam):
        if token_gamma == 1 and token_lam == 1:
            return _targets_by_turn(actions, v, on_token, on_turn, end, gamma, boundary_lam)
        return _targets_by_token(actions, v, on_token, on_turn, end, gamma, boundary_lam, token_gamma, token_lam)

    target = targets(lam)
    advantage = target - v
    if turn_credit:
        advantage = np.repeat(advantage[actions.turn_first], actions.turn_length)

    def scatter(x):
        out = np.zeros(values.numel(), np.float32)
        out[actions.flat] = x.astype(np.float32)
        return torch.from_numpy(out).view(values.shape).to(values.device)

    return scatter(advantage), scatter(target if critic_lam is None else targets(critic_lam))


def _targets_by_turn(actions, v, on_token, on_turn, end, gamma, lam) -> np.ndarray:
    """Closed form without token decay: one target a turn; its tokens lack the rewards that came before them."""
    reward, earlier = np.zeros(len(actions.turn_first)) if on_turn is None else on_turn, None
    if on_token is not None:
        rest = _scan_back(on_token, None, actions.first)  # of the row's token rewards, from each token on
        after_turn = np.append(rest, 0.0)[actions.turn_first + actions.turn_length]
        after_turn[_last(actions.row_turn)] = 0.0
        reward = reward + rest[actions.turn_first] - after_turn
        earlier = np.repeat(rest[actions.turn_first], actions.turn_length) - rest
    target = _recursion(v[actions.turn_first], reward, end, gamma, _to_units(lam, actions.row_turn), actions.row_turn)
    target = np.repeat(target, actions.turn_length)
    return target if earlier is None else target - earlier


def _targets_by_token(actions, v, on_token, on_turn, end, gamma, lam, token_gamma, token_lam) -> np.ndarray:
    reward = np.zeros(len(v)) if on_token is None else on_token.copy()
    if on_turn is not None:
        reward[actions.turn_first + actions.turn_length - 1] += on_turn
    boundary = np.zeros(len(v), bool)  # the next action token belongs to another turn
    boundary[actions.turn_first[1:] - 1] = True
    discount = np.where(boundary, gamma, token_gamma)
    trace = np.where(boundary, _to_units(lam, actions.first), token_lam)
    return _recursion(v, reward, end, discount, trace, actions.first)


def _recursion(v, reward, end, discount, lam, first) -> np.ndarray:
    """G[i] = reward[i] + discount[i] * ((1 - lam[i]) * v[i + 1] + lam[i] * G[i + 1]); after a row's last unit: end."""
    follows = np.zeros_like(v)
    follows[:-1] = v[1:]
    follows *= discount * (1 - lam)
    follows[_last(first)] = end[np.diff(first) > 0]
    return _scan_back(reward + follows, np.broadcast_to(discount * lam, v.shape), first)


def _to_units(lam, first: np.ndarray):
    """One number per row spread over the row's units (tokens or turns)."""
    return np.repeat(lam, np.diff(first)) if isinstance(lam, np.ndarray) else lam


def _last(first: np.ndarray) -> np.ndarray:
    """The last unit of each row that has one; first: [B + 1] where the rows begin."""
    return first[1:][np.diff(first) > 0] - 1


def _scan_back(p: np.ndarray, q: np.ndarray | None, first: np.ndarray) -> np.ndarray:
    """y[i] = p[i] + q[i] * y[i + 1] within each row, 0 past its end. q None: all ones.

    Rows are cut into blocks of 32. All blocks are scanned side by side in 32 steps, then the same is done with the
    blocks' totals, so the steps number 32 a level, and no quantity is ever divided by a decay.
    """
    length = np.diff(first)
    width = min(BLOCK, length.max(initial=0))  # short rows need fewer steps, and get the same bits
    if width == 0:
        return np.zeros(0)
    num_blocks = -(-length // width)
    block_first = np.concatenate([[0], np.cumsum(num_blocks)])
    place = np.arange(len(p)) + np.repeat(block_first[:-1] * width - first[:-1], length)
    y = np.zeros(block_first[-1] * width)
    y[place] = p
    y = np.ascontiguousarray(y.reshape(-1, width).T)  # [width, blocks]: a step reads whole lines
    if q is None:
        y = y[::-1].cumsum(axis=0)[::-1]
    else:
        factor = np.ones(block_first[-1] * width)
        factor[place] = q
        factor = np.ascontiguousarray(factor.reshape(-1, width).T)
        for i in range(width - 2, -1, -1):
            y[i] += factor[i] * y[i + 1]
            factor[i] *= factor[i + 1]
    if num_blocks.max() > 1:
        total = _scan_back(y[0].copy(), None if q is None else factor[0].copy(), block_first)
        carry = np.append(total[1:], 0.0)
        carry[_last(block_first)] = 0.0
        y = y + (carry if q is None else factor * carry)
    return y.T.reshape(-1)[place]


def _row_starts(values, cu_seqlens, validate) -> np.ndarray:
    if cu_seqlens is None:
        num_rows, length = values.shape
        return np.arange(num_rows + 1) * length
    starts = _numpy(cu_seqlens).astype(np.int64)
    if validate:
        if starts[0] != 0 or starts[-1] != values.numel():
            fail("cu_seqlens", f"to begin with 0 and to end with {values.numel()}", f"{starts[0]} and {starts[-1]}")
        falls = np.flatnonzero(np.diff(starts) < 0)
        if len(falls):
            i = falls[0]
            fail("cu_seqlens", "never to fall", f"{starts[i]} then {starts[i + 1]} at {i + 1}")
    return starts


def _per_row(name, lam, validate):
    if not isinstance(lam, torch.Tensor):
        return lam
    lam = _float64(lam)
    if validate:
        bad = np.flatnonzero(~((lam >= 0) & (lam <= 1)))
        if len(bad):
            fail(name, "finite numbers in [0, 1]", f"{lam[bad[0]]} at {bad[0]}")
    return lam


def _find_actions(action_mask, turn_ids, starts, validate) -> Actions:
    mask = _numpy(action_mask)
    mask = mask if mask.dtype == bool else mask != 0
    flat = np.flatnonzero(mask)
    first = np.searchsorted(flat, starts)
    turns = _numpy(turn_ids).take(flat)
    opens = np.ones(len(flat), bool)
    np.not_equal(turns[1:], turns[:-1], out=opens[1:])
    row_first = first[:-1][first[:-1] < len(flat)]
    if validate:
        falls = np.flatnonzero(turns[1:] < turns[:-1]) + 1
        falls = falls[~np.isin(falls, row_first)]
        if len(falls):
            i = falls[0]
            row = np.searchsorted(starts, flat[i], "right") - 1
            fail("turn_ids", "never to fall along the action tokens of a row",
                 f"{turns[i - 1]} then {turns[i]} at row {row}, position {flat[i] - starts[row]}")  # fmt: skip
    opens[row_first] = True
    turn_first = np.flatnonzero(opens)
    turn_length = np.diff(turn_first, append=len(flat))
    return Actions(mask, flat, first, starts, turns, turn_first, turn_length, np.searchsorted(turn_first, first))


def _credit_tokens(rewards: np.ndarray, actions: Actions, validate) -> np.ndarray | None:
    """Rewards [N] moved to the action tokens [n]; None when all are zero."""
    stray = (rewards != 0) & ~actions.mask
    if not stray.any():
        credit = rewards.take(actions.flat).astype(np.float64)
        return credit if credit.any() else None
    if validate:
        # In rows without an action token rewards are dropped in silence.
        has = np.diff(actions.first) > 0
        lead_end = actions.starts[:-1].copy()
        lead_end[has] = actions.flat[actions.first[:-1][has]]
        at = np.flatnonzero(stray)
        lost = at[at < np.repeat(lead_end, np.diff(np.searchsorted(at, actions.starts)))]
        if len(lost):
            row = np.searchsorted(actions.starts, lost[0], "right") - 1
            fail("token_rewards", "no reward before a row's first action token, where no action can get it",
                 f"{rewards[lost[0]]} at row {row}, position {lost[0] - actions.starts[row]}")  # fmt: skip
    # One sum from each action token to the next; a row's begin is a cut too, and what stands before its first action
    # token is left out. The zero at the end takes the cuts of empty rows.
    n, num_rows = len(actions.flat), len(actions.starts) - 1
    cuts = np.insert(actions.flat, actions.first[:-1], actions.starts[:-1])
    sums = np.add.reduceat(np.append(rewards, np.float32(0)), cuts, dtype=np.float64)
    return sums[np.arange(n) + np.repeat(np.arange(1, num_rows + 1), np.diff(actions.first))]


def _credit_turns(rewards: np.ndarray, actions: Actions, validate) -> np.ndarray | None:
    """Rewards [B, K] summed for each turn [m]: those of its id and of the ids up to the row's next turn."""
    num_rows, num_ids = rewards.shape
    num_turns = np.diff(actions.row_turn)
    ids = np.clip(actions.turns[actions.turn_first], 0, num_ids).astype(np.int64)
    has = num_turns > 0
    if validate:
        lowest = np.zeros(num_rows, np.int64)
        lowest[has] = ids[actions.row_turn[:-1][has]]
        lost = (rewards != 0) & (np.arange(num_ids) < lowest[:, None])
        if lost.any():
            row, k = np.argwhere(lost)[0]
            fail("turn_rewards", "no reward of a turn before a row's first action token, where no action can get it",
                 f"{rewards[row, k]} for turn {k} of row {row}")  # fmt: skip
    begin = ids + np.repeat(np.arange(num_rows) * num_ids, num_turns)
    end = np.append(begin[1:], 0)
    end[_last(actions.row_turn)] = (np.flatnonzero(has) + 1) * num_ids
    if not len(begin):
        return None
    sums = np.add.reduceat(np.append(rewards.reshape(-1), 0.0), np.stack([begin, end], 1).reshape(-1))[::2]
    return np.where(begin < end, sums, 0.0)


def _numpy(x: torch.Tensor) -> np.ndarray:
    x = x.detach()
    return (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x).cpu().contiguous().view(-1).numpy()


def _float64(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().cpu().contiguous().numpy()
