"""Inputs of every case, and the float64 answers of `rsi_kernels.reference` that all contestants are held against.

Tensors are made where the generator is. exact=False leaves the answers out, for inputs too large to have them.
Trajectories are turns of about 320 observation and 80 action tokens. Rewards stand on action tokens only, and no
probability ratio lies near a clip bound, so that rounding cannot change what a right answer is.
"""

import math
from types import SimpleNamespace

import rsi_kernels
import torch
from rsi_kernels import reference

GAMMA, LAM = 1.0, 0.95
CHECKED_ROWS, CHECKED_TAIL = 4, 800  # GAE runs from the end, so the end of a row has the same answer as the whole row
ROWS_AT_A_TIME = 128  # of the float64 logits
NORMAL_AT_A_TIME = 2**26


def trajectories(num_rows: int, length: int, g: torch.Generator, turn=(320, 80)):
    """(action_mask [B, T] bool, turn_ids [B, T] int64). turn: observation and action tokens of one, give or take."""
    (low_o, high_o), (low_a, high_a) = ((3 * n // 4, 5 * n // 4) for n in turn)
    shape = (num_rows, length // (low_o + low_a) + 1)
    num_observed = torch.randint(low_o, high_o, shape, generator=g, device=g.device)
    num_sampled = torch.randint(low_a, high_a, shape, generator=g, device=g.device)
    ends = (num_observed + num_sampled).cumsum(1)
    t = torch.arange(length, device=g.device).expand(num_rows, -1).contiguous()
    ids = torch.searchsorted(ends, t, right=True)
    mask = t >= (ends - num_sampled).gather(1, ids)
    return mask, torch.where(mask, ids, 0)


def normal(*shape: int, g: torch.Generator, scale=1.0, dtype=torch.float32) -> torch.Tensor:
    """In pieces, since torch draws in fp32."""
    out = torch.empty(shape, dtype=dtype, device=g.device)
    for piece in out.view(-1).split(NORMAL_AT_A_TIME):
        piece.copy_(torch.randn(len(piece), generator=g, device=g.device).mul_(scale))
    return out


def gae(num_rows: int, length: int, g: torch.Generator, exact=True, turn=(320, 80), whole_rows=1) -> SimpleNamespace:
    """whole_rows: are compared with the exact answer over their whole length, the others in their tails."""
    mask, ids = trajectories(num_rows, length, g, turn)
    values = normal(num_rows, length, g=g)
    rewards = torch.where(mask, normal(num_rows, length, g=g, scale=0.1), 0.0)
    x = SimpleNamespace(values=values, mask=mask, turn_ids=ids, rewards=rewards, leaves=[])
    if exact:
        values, mask, ids, rewards = (y.cpu() for y in (values, mask, ids, rewards))
        every, steps = torch.ones_like(mask), torch.arange(length).expand(num_rows, length)
        # What the contestants mean by GAE. The rivals that know no observation tokens take each as a step of its own.
        answers = {
            "turns": _gae_answer(rewards, values, mask, ids, whole_rows),
            "tokens": _gae_answer(rewards, values, mask, ids, token_gamma=GAMMA, token_lam=LAM),
            "masked steps": _gae_answer(rewards, values * mask, every, steps),
            "steps": _gae_answer(rewards, values, every, steps),
        }
        x.exact = {reading: tuple(y.to(g.device) for y in answer) for reading, answer in answers.items()}
    return x


def _gae_answer(rewards, values, mask, ids, whole_rows=0, **options):
    """(advantages, returns) in float64, NaN where they are not compared."""
    options = dict(gamma=GAMMA, lam=LAM, **options)
    part = (slice(CHECKED_ROWS), slice(-CHECKED_TAIL, None))
    out = [torch.full(values.shape, torch.nan, dtype=torch.float64) for _ in range(2)]
    tail = reference.turn_gae(
        values[part].double(), mask[part], ids[part], token_rewards=rewards[part].double(), **options
    )
    for answer, of_tail in zip(out, tail, strict=True):
        answer[part] = torch.where(mask[part], of_tail, torch.nan)
    if whole_rows:
        out[0][~mask] = out[1][~mask] = 0.0
    for b in range(whole_rows):
        row = mask[b]
        of_actions = (y[b : b + 1, row] for y in (values.double(), mask, ids))
        whole = reference.turn_gae(*of_actions, token_rewards=rewards[b : b + 1, row].double(), **options)
        for answer, of_row in zip(out, whole, strict=True):
            answer[b, row] = of_row[0]
    return tuple(out)


def logits(
    num_tokens: int, num_classes: int, dtype, masked: bool, g: torch.Generator, exact=True, num_checked=None
) -> SimpleNamespace:
    """num_checked: have exact answers only for so many tokens, which x.checked names; in float64 they take long."""
    shape = _rows_of(num_tokens)
    x = SimpleNamespace(
        logits=normal(*shape, num_classes, g=g, scale=2.0, dtype=dtype),
        targets=torch.randint(num_classes, shape, generator=g, device=g.device),
        mask=_mask(num_tokens, g).view(shape) if masked else torch.ones(shape, dtype=torch.bool, device=g.device),
        upstream=normal(*shape, g=g),
    )
    x.row_mask = x.mask if masked else None
    x.upstream *= x.mask
    x.leaves = [x.logits]
    if not exact:
        return x
    checked = torch.arange(num_tokens, device=g.device)
    if num_checked is not None:
        checked = x.checked = torch.randperm(num_tokens, generator=g, device=g.device)[:num_checked]
    out = torch.zeros(2, len(checked), dtype=torch.float64, device=g.device)
    grad = torch.zeros(len(checked), num_classes, device=g.device)
    for at in x.mask.view(-1)[checked].nonzero().view(-1).split(ROWS_AT_A_TIME):
        rows = checked[at]
        chunk = x.logits.view(num_tokens, -1)[rows].double().requires_grad_()
        scores = reference.token_logprobs(chunk, x.targets.view(-1)[rows])
        out[:, at] = torch.stack(scores).detach()
        grad[at] = torch.autograd.grad(scores[0] @ x.upstream.view(-1)[rows].double(), chunk)[0].float()
    if num_checked is None:
        out, grad = out.view(2, *shape), grad.view(*shape, -1)
    logprobs, entropy = out
    x.exact = {
        "logprobs": (logprobs,),
        "logprobs and entropy": (logprobs, entropy),
        "logprobs and gradient": (logprobs, grad),
    }
    return x


def linear(num_tokens: int, width: int, num_classes: int, dtype, g: torch.Generator, exact=True) -> SimpleNamespace:
    """20% action tokens, one in ten of them beyond a clip bound. One advantage a row: Liger's loss knows no other."""
    shape = _rows_of(num_tokens)
    x = SimpleNamespace(
        hidden=normal(*shape, width, g=g, dtype=dtype),
        weight=normal(num_classes, width, g=g, scale=2 / math.sqrt(width), dtype=dtype),
        targets=torch.randint(num_classes, shape, generator=g, device=g.device),
        mask=_mask(num_tokens, g).view(shape),
        row_advantages=normal(shape[0], g=g),
        upstream=normal(*shape, g=g),
    )
    x.upstream *= x.mask
    x.leaves = [x.hidden, x.weight]
    x.advantages = x.row_advantages[:, None].expand(shape).contiguous()
    log_ratio = _log_ratio(shape, g)
    if not exact:
        with torch.no_grad():
            x.old_logprobs = rsi_kernels.linear_token_logprobs(x.hidden, x.weight, x.targets, x.mask) - log_ratio
        return x
    hidden, weight = x.hidden[x.mask].double().requires_grad_(), x.weight.double().requires_grad_()
    scores = reference.linear_token_logprobs(hidden, weight, x.targets[x.mask])[0]
    old = scores.detach() - log_ratio[x.mask]
    loss, _ = reference.policy_loss(scores, old, x.advantages[x.mask].double(), x.mask[x.mask])
    of_loss = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    of_logprobs = torch.autograd.grad(scores, [hidden, weight], x.upstream[x.mask].double())

    def everywhere(y, dtype=torch.float64):
        full = torch.zeros(*shape, *y.shape[1:], dtype=dtype, device=g.device)
        full[x.mask] = y.detach().to(dtype)
        return full

    logprobs, x.old_logprobs = everywhere(scores), everywhere(old, torch.float32)
    x.exact = {
        "logprobs": (logprobs,),
        "logprobs and gradient": (logprobs, everywhere(of_logprobs[0]), of_logprobs[1]),
        "loss and gradient": (loss.detach(), everywhere(of_loss[0]), of_loss[1]),
    }
    return x


def policy(num_tokens: int, g: torch.Generator, exact=True) -> SimpleNamespace:
    """One action token in ten lies beyond a clip bound."""
    shape = _rows_of(num_tokens)
    logprobs = normal(*shape, g=g) - 2
    x = SimpleNamespace(
        logprobs=logprobs,
        old_logprobs=logprobs - _log_ratio(shape, g),
        advantages=normal(*shape, g=g),
        mask=_mask(num_tokens, g).view(shape),
        of_loss=torch.ones((), device=g.device),
        leaves=[logprobs],
    )
    if exact:
        new = x.logprobs.double().requires_grad_()
        loss, _ = reference.policy_loss(new, x.old_logprobs.double(), x.advantages.double(), x.mask)
        x.exact = {"loss and gradient": (loss.detach(), *torch.autograd.grad(loss, new))}
    return x


def value(num_tokens: int, g: torch.Generator, exact=True) -> SimpleNamespace:
    """Returns at least 1 from the old value: where the clipped loss takes over is then no matter of rounding."""
    shape = _rows_of(num_tokens)
    old_values, distance = normal(*shape, g=g), normal(*shape, g=g)
    x = SimpleNamespace(
        values=old_values + _log_ratio(shape, g),
        old_values=old_values,
        returns=old_values + distance + distance.sign(),
        mask=_mask(num_tokens, g).view(shape),
        of_loss=torch.ones((), device=g.device),
    )
    x.leaves = [x.values]
    if exact:
        new = x.values.double().requires_grad_()
        loss, _ = reference.value_loss(new, x.old_values.double(), x.returns.double(), x.mask)
        x.exact = {"loss and gradient": (loss.detach(), *torch.autograd.grad(loss, new))}
    return x


def families(num_rows: int, num_checks: int, g: torch.Generator, exact=True) -> SimpleNamespace:
    """Eight families; one check in ten is absent."""
    shape, num_families = (num_rows, num_checks), 8

    def chance(*shape, of):
        return torch.rand(*shape, generator=g, device=g.device) < of

    family = torch.randint(num_families, shape, generator=g, device=g.device, dtype=torch.int32)
    family[chance(*shape, of=0.1)] = -1
    x = SimpleNamespace(
        passed=chance(*shape, of=0.5),
        family=family,
        success=chance(num_rows, of=0.1),
        weights=torch.ones(num_families, device=g.device),
        num_families=num_families,
        leaves=[],
    )
    # The same as verifier reports are held in Python: a list of (family, passed) for each attempt.
    x.reports = [
        [(f, p) for f, p in zip(fs, ps, strict=True) if f >= 0]
        for fs, ps in zip(x.family.tolist(), x.passed.tolist(), strict=True)
    ]
    if exact:
        on_cpu = (y.cpu() for y in (x.passed, x.family, x.success))
        reward = reference.family_rewards(*on_cpu, family_weights=[1.0] * num_families)[0]
        x.exact = {"reward": (reward.to(g.device),)}
    return x


def _rows_of(num_tokens: int) -> tuple[int, int]:
    """Eight sequences, as the rivals take them."""
    return 8, num_tokens // 8


def _mask(num_tokens: int, g: torch.Generator) -> torch.Tensor:
    return trajectories(1, num_tokens, g, (320, 80) if num_tokens >= 512 else (8, 4))[0]


def _log_ratio(shape, g: torch.Generator) -> torch.Tensor:
    """In [-0.1, 0.1], and one in ten at 0.5 or -0.5, beyond any clip bound."""
    log_ratio = 0.2 * torch.rand(shape, generator=g, device=g.device) - 0.1
    beyond = torch.rand(shape, generator=g, device=g.device)
    return torch.where(beyond < 0.05, -0.5, torch.where(beyond > 0.95, 0.5, log_ratio))
