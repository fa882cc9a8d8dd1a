"""Every operation as the plainest torch one can write: the truth that kernels and CPU paths are tested against.

Slow on purpose: loops over tokens, no tricks, no checks. Computes in the dtype of its input, so float64 gives the exact
answer. Arguments and formulas are those of the public functions of the same names.
"""

import torch


def turn_gae(
    values,
    action_mask,
    turn_ids,
    *,
    token_rewards=None,
    turn_rewards=None,
    final_rewards=None,
    bootstrap_values=None,
    gamma=1.0,
    lam=0.95,
    token_gamma=1.0,
    token_lam=1.0,
    critic_lam=None,
    credit="token",
    cu_seqlens=None,
):
    """Turn-boundary GAE, one action token after the other. Returns (advantages, returns) in the dtype of values."""
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    num_rows = values.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    for b in range(num_rows):
        row = b if cu_seqlens is None else slice(int(cu_seqlens[b]), int(cu_seqlens[b + 1]))
        actions = [t for t, is_action in enumerate(action_mask[row].tolist()) if is_action]
        if not actions:
            continue
        v, u = values[row][actions], turn_ids[row][actions].tolist()
        r = torch.zeros_like(v)
        if token_rewards is not None:  # at a masked position: to the last action token before it
            for t, reward in enumerate(token_rewards[row]):
                before = [i for i, a in enumerate(actions) if a <= t]
                if before:
                    r[before[-1]] += reward
        if turn_rewards is not None:  # of turn k: to the last action token of turn k or an earlier one
            for k, reward in enumerate(turn_rewards[b]):
                before = [i for i, turn in enumerate(u) if turn <= k]
                if before:
                    r[before[-1]] += reward
        if final_rewards is not None:
            r[-1] += final_rewards[b]
        bootstrap = values.new_zeros(()) if bootstrap_values is None else bootstrap_values[b].to(values.dtype)

        def recursion(boundary_lam, v=v, u=u, r=r, bootstrap=bootstrap):
            a = torch.zeros_like(v)
            a[-1] = r[-1] + gamma * bootstrap - v[-1]
            for i in range(len(a) - 2, -1, -1):
                g, lmb = (gamma, boundary_lam) if u[i + 1] != u[i] else (token_gamma, token_lam)
                a[i] = r[i] + g * v[i + 1] - v[i] + g * lmb * a[i + 1]
            return a

        def of_row(x, b=b):
            return x if isinstance(x, int | float) else float(x[b])

        a = recursion(of_row(lam))
        target = (a if critic_lam is None else recursion(of_row(critic_lam))) + v
        if credit == "turn":
            a = torch.stack([a[u.index(turn)] for turn in u])
        advantages[row].index_copy_(0, torch.tensor(actions), a)
        returns[row].index_copy_(0, torch.tensor(actions), target)
    return advantages, returns


def token_logprobs(logits, targets, mask=None, *, temperature=1.0):
    """(log-probs, entropy) of log_softmax(logits / temperature); 0 where masked. Differentiable."""
    keep = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask.bool()
    logprobs, entropy = logits.new_zeros(targets.shape), logits.new_zeros(targets.shape)
    log_p = torch.log_softmax(logits[keep] / temperature, -1)
    p = log_p.exp()
    terms = torch.where(p > 0, p * torch.where(p > 0, log_p, 0.0), 0.0)
    index = (keep,)
    logprobs = logprobs.index_put(index, log_p.gather(-1, targets[keep].long()[:, None])[:, 0])
    return logprobs, entropy.index_put(index, -terms.sum(-1))


def linear_token_logprobs(hidden, weight, targets, mask=None, *, temperature=1.0):
    """`token_logprobs` of the logits hidden @ weight.T."""
    keep = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask.bool()
    logits = torch.where(keep[..., None], hidden, 0.0) @ weight.T
    return token_logprobs(logits, targets, keep, temperature=temperature)


def family_rewards(passed, family, success, *, family_weights=None, partial_cap=0.4):
    """(reward, progress, family_fraction), row by row and family by family, in float64."""
    num_families = len(family_weights) if family_weights is not None else max([-1, *family.flatten().tolist()]) + 1
    weights = [1.0] * num_families if family_weights is None else [float(w) for w in family_weights]
    fraction = torch.full((len(family), num_families), float("nan"), dtype=torch.float64)
    progress = torch.zeros(len(family), dtype=torch.float64)
    for i in range(len(family)):
        for f in range(num_families):
            checks = passed[i][family[i] == f].double()
            if len(checks):
                fraction[i, f] = checks.mean()
        present = [f for f in range(num_families) if not fraction[i, f].isnan()]
        total = sum(weights[f] for f in present)
        if total > 0:
            progress[i] = sum(weights[f] * fraction[i, f] for f in present) / total
    reward = torch.where(success.bool(), 1.0, partial_cap * progress)
    return reward, progress, fraction


def policy_loss(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    *,
    clip_low=0.2,
    clip_high=0.2,
    dual_clip=None,
    behaviour_logprobs=None,
    is_cap=None,
    denominator=None,
):
    """(loss, clip_fraction) of the clipped surrogate; the gradient comes from autograd."""
    keep = mask.bool()
    new, old, a = logprobs[keep], old_logprobs[keep], advantages[keep]
    if not len(new):
        return logprobs[keep].sum(), logprobs.new_zeros(())
    ratio = (new - old).exp()
    plain, clipped = -a * ratio, -a * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, clipped)
    if dual_clip is not None:
        loss = torch.where(a < 0, torch.minimum(loss, -a * dual_clip), loss)
    if behaviour_logprobs is not None:
        weight = (old - behaviour_logprobs[keep]).exp()
        loss = loss * (weight if is_cap is None else weight.clamp(max=is_cap))
    return loss.sum() / (len(new) if denominator is None else denominator), (clipped > plain).to(new.dtype).mean()


def value_loss(values, old_values, returns, mask, *, clip=0.2, denominator=None):
    """(loss, clip_fraction) of the clipped squared error; the gradient comes from autograd."""
    keep = mask.bool()
    v, old, target = values[keep], old_values[keep], returns[keep]
    if not len(v):
        return values[keep].sum(), values.new_zeros(())
    plain = (v - target) ** 2
    clipped = (torch.clamp(v, old - clip, old + clip) - target) ** 2
    loss = 0.5 * torch.maximum(plain, clipped)
    return loss.sum() / (len(v) if denominator is None else denominator), (clipped > plain).to(v.dtype).mean()
