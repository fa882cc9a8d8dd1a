"""What `bench.gpu` checks before it times anything: every operation, on new inputs, against float64.

Outputs are poisoned, a second call has to give the same bits, and sizes are those that break kernels: one past a block,
an odd vocabulary, rows in several splits, trajectories in several groups of chunks, more than 2^31 elements.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import rsi_kernels
import torch
from rsi_kernels import reference

from . import cpu, inputs
from .rivals import OURS

# gae: rows, tokens, and the observation and action tokens of a turn. The last has two groups of chunk summaries.
# logits: unsplit rows, one past a block of the gradient; many splits; fewer logits than a block.
# linear: two chunks, in the last.
SIZES = dict(
    gae=[(3, 5000, (320, 80)), (3, 1025, (40, 20)), (7, 33, (8, 4)), (2, 140_001, (3000, 40))],
    logits=[(1032, 32771), (1040, 4097), (16, 250_001), (64, 65)],
    linear=[(1024, 256, 32771), (12_288, 64, 248_320)],
    losses=[64, 100_008],
    families=[(65, 41), (300, 257)],
    every_gae_option=[1500, 0, 1025, 1],
    every_logits_option=(64, 5003),
    every_linear_option=(256, 64, 1003),
    offsets=(9000, 248_320),
)
POISONED = range(7, 25)  # powers of two: numbers in a block of memory that is filled with NaN
LIMITS = {torch.float32: 1e-4}  # largest error over the largest magnitude
LIMIT = 2e-2  # of results in a lower precision
# An operation that finds the action tokens first waits for their number, which a CUDA graph cannot.
WAITS = ("linear_token_logprobs", "linear_ppo_loss")


class Check(NamedTuple):
    """run gives a tensor or several of the inputs that make gives of a generator; exact gives the true ones."""

    name: str
    make: Callable[[torch.Generator], SimpleNamespace]
    run: Callable[[SimpleNamespace], torch.Tensor | tuple]
    exact: Callable[[SimpleNamespace], tuple]
    case: cpu.Case | None = None


def cases(sizes: dict) -> Iterator[cpu.Case]:
    for *shape, turn in sizes["gae"]:
        yield cpu.gae_case(tuple(shape), turn=turn, whole_rows=shape[0])
    yield from map(cpu.families_case, sizes["families"])
    for num_tokens in sizes["losses"]:
        yield from cpu.loss_cases(num_tokens)
    for dtype in (torch.float32, torch.bfloat16):
        for shape in sizes["logits"]:
            yield from cpu.logits_cases(shape, dtype)
    for shape in sizes["linear"]:
        # The large one in bf16 only, as the trainer has it.
        for dtype in (torch.float32, torch.bfloat16) if shape == sizes["linear"][0] else (torch.bfloat16,):
            make = partial(inputs.linear, *shape, dtype)
            yield cpu.linear_case("linear_token_logprobs", "fwd", make)
            yield cpu.linear_case("linear_token_logprobs", "fwd_bwd", make)
            yield cpu.linear_case("linear_ppo_loss", "fwd_bwd", make)


def checks(sizes: dict) -> Iterator[Check]:
    for case in cases(sizes):
        ours = OURS[case.op]
        key = ours.answer + (" and gradient" if case.mode == "fwd_bwd" else "")
        run = lambda x, load=ours.load, mode=case.mode: cpu.call(load(), x, mode)  # noqa: E731
        yield Check(" ".join(case.key.values()), case.make, run, lambda x, key=key: x.exact[key], case)
    for is_packed in (False, True):
        make = partial(trajectories_with_everything, sizes["every_gae_option"], is_packed)
        name = f"turn_gae every option, {'packed' if is_packed else 'padded'}"
        yield Check(name, make, run_gae_options, exact_gae_options)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        make = partial(logits_with_everything, *sizes["every_logits_option"], dtype)
        name = f"token_logprobs every option, {str(dtype).removeprefix('torch.')}"
        yield Check(name, make, run_logits_options, exact_logits_options)
    make = partial(inputs.logits, *sizes["every_logits_option"], torch.bfloat16, True)
    yield Check("token_logprobs backward in place", make, run_inplace, exact_inplace)
    make = partial(head_and_entropy, *sizes["every_linear_option"])
    yield Check("linear_token_logprobs every option", make, run_linear_options, exact_linear_options)
    yield Check("policy_loss every option", partial(inputs.policy, 1000), run_policy_options, exact_policy_options)
    yield Check("family_rewards every option", graded_reports, run_families_options, exact_families_options)
    make = partial(far_logits, *sizes["offsets"])
    yield Check(f"token_logprobs of {sizes['offsets'][0]} x {sizes['offsets'][1]} logits", make, run_far, exact_far)


def problems(check: Check, seed: int, device: str) -> list[str]:
    """What is wrong, nothing if nothing. Out of memory is for the caller."""
    x = check.make(torch.Generator(device).manual_seed(seed))
    exact = check.exact(x)
    first = as_tuple(check.run(x))
    errors = [wrong(a, e) for a, e in zip(first, exact, strict=True)]
    found = [f"output {i} of the first call is {error}" for i, error in enumerate(errors) if error]
    kept = [y.clone() for y in first]
    for y in first:  # what the next call allocates is most likely this very memory
        y.fill_(torch.nan if y.is_floating_point() else 1)
    del first, y
    poison(device)
    again = as_tuple(check.run(x))
    if not all(map(same_bits, again, kept)):
        found.append("a second call, into poisoned memory, gave other bits")
    return found


def wrong(actual: torch.Tensor, exact: torch.Tensor) -> str | None:
    if actual.shape != exact.shape:
        return f"of shape {list(actual.shape)}, not {list(exact.shape)}"
    limit = LIMITS.get(actual.dtype, LIMIT)
    error = cpu.relative_error(actual, exact)
    return None if error < limit else f"wrong by {error:.1e}, {limit:.0e} is allowed"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (y.contiguous().view(-1) for y in (a, b))
    return a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def as_tuple(x) -> tuple:
    return tuple(x) if isinstance(x, tuple | list) else (x,)


def poison(device: str) -> None:
    """Memory that the allocator hands out next is full of NaN, so an output that is not written shows."""
    blocks = [torch.full((2**size,), torch.nan, device=device) for size in POISONED for _ in range(2)]
    del blocks


def graph_problems(case: cpu.Case, seed: int, device: str, capture: Callable) -> list[str]:
    """A captured call, replayed on inputs that were changed since, gives the bits of a call from Python.

    capture: of a list of calls; gives what has replay() and, of each call, results.
    """
    x, other = (case.make(torch.Generator(device).manual_seed(s), exact=False) for s in (seed, seed + 1))
    run = partial(cpu.call, OURS[case.op].load(), x, case.mode)
    run()
    graph = capture([run])
    results = as_tuple(graph.results[0])
    with torch.no_grad():
        for name, tensor in vars(x).items():
            if isinstance(tensor, torch.Tensor):
                tensor.copy_(getattr(other, name))
        for y in results:
            y.fill_(torch.nan)
    graph.replay()
    again = as_tuple(run())
    return [] if all(map(same_bits, results, again)) else ["a replayed CUDA graph gave other bits than the call"]


# turn_gae


def trajectories_with_everything(lengths: list[int], is_packed: bool, g: torch.Generator) -> SimpleNamespace:
    """Rewards of all three kinds, NaN values at masked positions, rows of these lengths, two of them short or empty."""
    shape, num_turns = (len(lengths), max(lengths)), 64
    mask, turn_ids = inputs.trajectories(*shape, g, (12, 8))
    mask &= torch.arange(shape[1], device=g.device) < torch.tensor(lengths, device=g.device)[:, None]
    x = SimpleNamespace(
        values=torch.where(mask, inputs.normal(*shape, g=g), torch.nan),
        action_mask=mask,
        turn_ids=torch.where(mask, 2 * turn_ids, -7),
        token_rewards=torch.where(mask, inputs.normal(*shape, g=g, scale=0.1), 0.0),
        turn_rewards=inputs.normal(shape[0], num_turns, g=g),
        final_rewards=inputs.normal(shape[0], g=g),
        bootstrap_values=inputs.normal(shape[0], g=g),
        lam=torch.linspace(0.2, 1, shape[0], device=g.device),
    )
    if is_packed:
        for key in ("values", "action_mask", "turn_ids", "token_rewards"):
            setattr(x, key, torch.cat([row[:n] for row, n in zip(getattr(x, key), lengths, strict=True)]))
        ends = torch.tensor([0, *lengths]).cumsum(0)
        x.cu_seqlens = ends.to(g.device, torch.int32)
    return x


GAE_OPTIONS = (
    dict(gamma=0.97, token_gamma=0.99, token_lam=0.9, credit="turn"),
    dict(gamma=0.95, critic_lam=0.5),
)


def run_gae_options(x) -> tuple:
    return sum((tuple(rsi_kernels.turn_gae(**vars(x), **options)) for options in GAE_OPTIONS), ())


def exact_gae_options(x) -> tuple:
    arguments = {k: v.cpu().double() if v.is_floating_point() else v.cpu() for k, v in vars(x).items()}
    answers = sum((reference.turn_gae(**arguments, **options) for options in GAE_OPTIONS), ())
    return tuple(y.to(x.values.device) for y in answers)


# token_logprobs


def logits_with_everything(num_tokens: int, num_classes: int, dtype, g: torch.Generator) -> SimpleNamespace:
    """A slice of longer sequences with NaN at masked positions, logits of -inf and huge ones."""
    x = inputs.logits(num_tokens, num_classes, dtype, True, g, exact=False)
    x.mask[:, 1:3] = True
    x.upstream = inputs.normal(*x.mask.shape, g=g) * x.mask
    x.logits[:, 1] += 3e4
    x.logits[:, 2, ::2] = -torch.inf
    x.targets[:, 2] = 1
    x.logits[~x.mask] = torch.nan
    x.targets[~x.mask] = -100
    x.leaves = [x.logits]
    x.upstream_entropy = inputs.normal(*x.mask.shape, g=g)
    return x


def run_logits_options(x, score=rsi_kernels.token_logprobs) -> tuple:
    leaf = x.logits.detach().requires_grad_()
    part = (slice(None), slice(-1))
    options = dict(return_entropy=True) if score is rsi_kernels.token_logprobs else {}
    logprobs, entropy = score(leaf[part], x.targets[part], x.mask[part].long(), temperature=0.7, **options)
    total = (logprobs * x.upstream[part]).sum() + (entropy * x.upstream_entropy[part]).sum()
    return logprobs.detach(), entropy.detach(), *torch.autograd.grad(total, leaf)


def exact_logits_options(x) -> tuple:
    x = SimpleNamespace(**vars(x) | dict(logits=x.logits.double()))
    return run_logits_options(x, reference.token_logprobs)


def run_inplace(x) -> tuple:
    made = x.logits.detach().clone().requires_grad_() * 1
    logprobs = rsi_kernels.token_logprobs(made, x.targets, x.mask, inplace_backward=True)
    (grad,) = torch.autograd.grad(logprobs, made, x.upstream)
    if not torch.equal(grad, made):
        raise RuntimeError("the gradient is not where the logits were")
    return logprobs.detach(), grad


def exact_inplace(x) -> tuple:
    return x.exact["logprobs and gradient"]


def far_logits(num_rows: int, num_classes: int, g: torch.Generator) -> SimpleNamespace:
    """The first and last rows count, the rest is masked NaN: 2^31 elements lie between them."""
    x = SimpleNamespace(
        logits=torch.full((num_rows, num_classes), torch.nan, dtype=torch.bfloat16, device=g.device),
        targets=torch.full((num_rows,), -100, device=g.device),
        mask=torch.zeros(num_rows, dtype=torch.bool, device=g.device),
    )
    for rows in (slice(FAR_ROWS), slice(-FAR_ROWS, None)):
        x.logits[rows] = inputs.normal(FAR_ROWS, num_classes, g=g, scale=2.0, dtype=torch.bfloat16)
        x.targets[rows] = torch.randint(num_classes, (FAR_ROWS,), generator=g, device=g.device)
        x.mask[rows] = True
    x.upstream = inputs.normal(num_rows, g=g)
    return x


FAR_ROWS = 16


def run_far(x) -> tuple:
    """Log-probs, gradient of the rows that count, and whether that of the others is 0."""
    leaf = x.logits.detach().requires_grad_()
    logprobs = rsi_kernels.token_logprobs(leaf, x.targets, x.mask)
    (grad,) = torch.autograd.grad(logprobs, leaf, x.upstream)
    others = grad[FAR_ROWS:-FAR_ROWS]
    are_zero = torch.stack([(rows == 0).all() for rows in others.split(512)]).all().float()
    return logprobs.detach(), torch.cat([grad[:FAR_ROWS], grad[-FAR_ROWS:]]), are_zero


def exact_far(x) -> tuple:
    chosen = x.logits[x.mask].double().requires_grad_()
    scores, _ = reference.token_logprobs(chosen, x.targets[x.mask])
    (grad,) = torch.autograd.grad(scores, chosen, x.upstream[x.mask].double())
    logprobs = torch.zeros(x.mask.shape, dtype=torch.float64, device=chosen.device)
    logprobs[x.mask] = scores.detach()
    return logprobs, grad, torch.ones((), device=chosen.device)


# linear_token_logprobs


def head_and_entropy(num_tokens: int, width: int, num_classes: int, g: torch.Generator) -> SimpleNamespace:
    x = inputs.linear(num_tokens, width, num_classes, torch.bfloat16, g, exact=False)
    x.upstream_entropy = inputs.normal(*x.mask.shape, g=g)
    return x


def run_linear_options(x, score=rsi_kernels.linear_token_logprobs) -> tuple:
    hidden, weight = (y.detach().requires_grad_() for y in (x.hidden, x.weight))
    options = dict(return_entropy=True) if score is rsi_kernels.linear_token_logprobs else {}
    logprobs, entropy = score(hidden, weight, x.targets, x.mask, temperature=1.3, **options)
    total = (logprobs * x.upstream).sum() + (entropy * x.upstream_entropy).sum()
    return logprobs.detach(), entropy.detach(), *torch.autograd.grad(total, [hidden, weight])


def exact_linear_options(x) -> tuple:
    x = SimpleNamespace(**vars(x) | dict(hidden=x.hidden.double(), weight=x.weight.double()))
    return run_linear_options(x, reference.linear_token_logprobs)


# policy_loss and family_rewards

POLICY_OPTIONS = dict(clip_low=0.2, clip_high=0.28, dual_clip=3.0, is_cap=2.0, denominator=321.0)


def run_policy_options(x, loss=rsi_kernels.policy_loss, dtype=torch.float32) -> tuple:
    new = x.logprobs.detach().to(dtype).requires_grad_()
    old, advantages, behaviour = (y.to(dtype) for y in (x.old_logprobs, x.advantages, x.old_logprobs.roll(1, 1)))
    out = loss(new, old, advantages, x.mask, behaviour_logprobs=behaviour, **POLICY_OPTIONS)[0]
    return out.detach(), *torch.autograd.grad(out, new)


def exact_policy_options(x) -> tuple:
    return run_policy_options(x, reference.policy_loss, torch.float64)


def graded_reports(g: torch.Generator) -> SimpleNamespace:
    """Partial credit, unequal weights, a row without checks; no family absent from all rows."""
    x = inputs.families(50, 33, g, exact=False)
    x.passed = torch.rand(x.family.shape, generator=g, device=g.device)
    x.weights = 0.1 + torch.rand(x.num_families, generator=g, device=g.device)
    x.family[7] = -1
    return x


def run_families_options(x) -> tuple:
    out = rsi_kernels.family_rewards(x.passed, x.family, x.success, family_weights=x.weights, partial_cap=0.6)
    return *out, rsi_kernels.family_rewards(x.passed, x.family, x.success).reward


def exact_families_options(x) -> tuple:
    on_cpu = [y.cpu() for y in (x.passed, x.family, x.success)]
    out = reference.family_rewards(*on_cpu, family_weights=x.weights.tolist(), partial_cap=0.6)
    return tuple(y.to(x.family.device) for y in (*out, reference.family_rewards(*on_cpu)[0]))
