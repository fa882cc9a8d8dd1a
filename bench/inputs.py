"""Inputs of every case, and the float64 answers of `rsi_kernels.reference` that all contestants are held against.

Trajectories are turns of about 320 observation and 80 action tokens. Rewards stand on action tokens only, and no
probability ratio lies near a clip bound, so that rounding cannot change what a right answer is.
"""

import math
from types import SimpleNamespace

import torch
from rsi_kernels import reference

GAMMA, LAM = 1.0, 0.95
CHECKED_ROWS, CHECKED_TAIL = 4, 800  # GAE runs from the end, so the end of a row has the same answer as the whole row
ROWS_AT_A_TIME = 128  # of the float64 logits


def trajectories(num_rows: int, length: int, g: torch.Generator):
    """(action_mask [B, T] bool, turn_ids [B, T] int64)."""
    mask, ids = torch.zeros(num_rows, length, dtype=torch.bool), torch.zeros(num_rows, length, dtype=torch.long)
    for b in range(num_rows):
        t, turn = 0, 0
        while t < length:
            num_observed, num_sampled = (int(torch.randint(3 * n // 4, 5 * n // 4, (), generator=g)) for n in (320, 80))
            begin, t = t + num_observed, t + num_observed + num_sampled
            mask[b, begin:t], ids[b, begin:t] = True, turn
            turn += 1
    return mask, ids


def gae(num_rows: int, length: int, g: torch.Generator) -> SimpleNamespace:
    mask, ids = trajectories(num_rows, length, g)
    values = torch.randn(num_rows, length, generator=g)
    rewards = torch.where(mask, 0.1 * torch.randn(num_rows, length, generator=g), 0.0)
    x = SimpleNamespace(values=values, mask=mask, turn_ids=ids, rewards=rewards, leaves=[])
    every = torch.ones_like(mask)
    steps = torch.arange(length).expand(num_rows, length)
    # What the contestants mean by GAE. The rivals that know no observation tokens take each as a step of its own.
    x.exact = {
        "turns": _gae_answer(x, x.values, mask, ids, whole_row=True),
        "tokens": _gae_answer(x, x.values, mask, ids, token_gamma=GAMMA, token_lam=LAM),
        "masked steps": _gae_answer(x, x.values * mask, every, steps),
        "steps": _gae_answer(x, x.values, every, steps),
    }
    return x


def _gae_answer(x, values, mask, ids, whole_row=False, **options):
    """(advantages, returns) in float64, NaN where they are not compared."""
    options = dict(gamma=GAMMA, lam=LAM, **options)
    part = (slice(CHECKED_ROWS), slice(-CHECKED_TAIL, None))
    out = [torch.full(values.shape, torch.nan, dtype=torch.float64) for _ in range(2)]
    tail = reference.turn_gae(
        values[part].double(), mask[part], ids[part], token_rewards=x.rewards[part].double(), **options
    )
    for answer, of_tail in zip(out, tail, strict=True):
        answer[part] = torch.where(mask[part], of_tail, torch.nan)
    if whole_row:
        out[0][~mask] = out[1][~mask] = 0.0
        row = mask[0]
        rewards = x.rewards[:1, row].double()
        whole = reference.turn_gae(
            values[:1, row].double(), mask[:1, row], ids[:1, row], token_rewards=rewards, **options
        )
        for answer, of_row in zip(out, whole, strict=True):
            answer[0, row] = of_row[0]
    return tuple(out)


def logits(num_tokens: int, num_classes: int, dtype, masked: bool, g: torch.Generator) -> SimpleNamespace:
    shape = _rows_of(num_tokens)
    x = SimpleNamespace(
        logits=(2 * torch.randn(*shape, num_classes, generator=g)).to(dtype),
        targets=torch.randint(num_classes, shape, generator=g),
        mask=trajectories(1, num_tokens, g)[0].view(shape) if masked else torch.ones(shape, dtype=torch.bool),
        upstream=torch.randn(shape, generator=g),
    )
    x.upstream *= x.mask
    x.leaves = [x.logits]
    out = torch.zeros(2, num_tokens, dtype=torch.float64)
    grad = torch.zeros(num_tokens, num_classes)
    for rows in x.mask.view(-1).nonzero().view(-1).split(ROWS_AT_A_TIME):
        chunk = x.logits.view(num_tokens, -1)[rows].double().requires_grad_()
        scores = reference.token_logprobs(chunk, x.targets.view(-1)[rows])
        out[:, rows] = torch.stack(scores).detach()
        grad[rows] = torch.autograd.grad(scores[0] @ x.upstream.view(-1)[rows].double(), chunk)[0].float()
    logprobs, entropy = out.view(2, *shape)
    x.exact = {
        "logprobs": (logprobs,),
        "logprobs and entropy": (logprobs, entropy),
        "logprobs and gradient": (logprobs, grad.view(*shape, -1)),
    }
    return x


def linear(num_tokens: int, width: int, num_classes: int, dtype, g: torch.Generator) -> SimpleNamespace:
    """20% action tokens, one in ten of them beyond a clip bound. One advantage a row: Liger's loss knows no other."""
    shape = _rows_of(num_tokens)
    x = SimpleNamespace(
        hidden=torch.randn(*shape, width, generator=g).to(dtype),
        weight=(2 / math.sqrt(width) * torch.randn(num_classes, width, generator=g)).to(dtype),
        targets=torch.randint(num_classes, shape, generator=g),
        mask=trajectories(1, num_tokens, g)[0].view(shape),
        row_advantages=torch.randn(shape[0], generator=g),
    )
    x.leaves = [x.hidden, x.weight]
    x.advantages = x.row_advantages[:, None].expand(shape).contiguous()
    log_ratio = 0.2 * torch.rand(shape, generator=g) - 0.1
    beyond = torch.rand(shape, generator=g)
    log_ratio = torch.where(beyond < 0.05, -0.5, torch.where(beyond > 0.95, 0.5, log_ratio))
    hidden, weight = x.hidden[x.mask].double().requires_grad_(), x.weight.double().requires_grad_()
    scores = reference.linear_token_logprobs(hidden, weight, x.targets[x.mask])[0]
    old = scores.detach() - log_ratio[x.mask]
    loss, _ = reference.policy_loss(scores, old, x.advantages[x.mask].double(), x.mask[x.mask])
    of_hidden, of_weight = torch.autograd.grad(loss, [hidden, weight])
    logprobs, x.old_logprobs = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape)
    logprobs[x.mask], x.old_logprobs[x.mask] = scores.detach(), old.float()
    dhidden = torch.zeros(x.hidden.shape, dtype=torch.float64)
    dhidden[x.mask] = of_hidden
    x.exact = {"logprobs": (logprobs,), "loss and gradient": (loss.detach(), dhidden, of_weight)}
    return x


def families(num_rows: int, num_checks: int, g: torch.Generator) -> SimpleNamespace:
    """Eight families; one check in ten is absent."""
    family = torch.randint(8, (num_rows, num_checks), generator=g, dtype=torch.int32)
    family[torch.rand(num_rows, num_checks, generator=g) < 0.1] = -1
    x = SimpleNamespace(
        passed=torch.rand(num_rows, num_checks, generator=g) < 0.5,
        family=family,
        success=torch.rand(num_rows, generator=g) < 0.1,
        num_families=8,
        leaves=[],
    )
    # The same as verifier reports are held in Python: a list of (family, passed) for each attempt.
    x.reports = [
        [(f, p) for f, p in zip(fs, ps, strict=True) if f >= 0]
        for fs, ps in zip(x.family.tolist(), x.passed.tolist(), strict=True)
    ]
    x.exact = {"reward": reference.family_rewards(x.passed, x.family, x.success, family_weights=[1.0] * 8)[:1]}
    return x


def _rows_of(num_tokens: int) -> tuple[int, int]:
    """Eight sequences, as the rivals take them."""
    return 8, num_tokens // 8
