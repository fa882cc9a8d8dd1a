"""Every operation is a registered torch op: opcheck is clean, and torch.compile takes it whole (fullgraph)."""

import subprocess
import sys

import pytest
import torch
from kernel_checks import option_arguments, packed, random_trajectories
from rsi_kernels import (
    family_rewards,
    linear_ppo_loss,
    linear_token_logprobs,
    policy_loss,
    token_logprobs,
    turn_gae,
    value_loss,
)

import rsi_fast

OPS = torch.ops.rsi_kernels
INPUTS = random_trajectories(1, num_rows=4, length=12)
MASK = torch.tensor([[1, 1, 0], [0, 1, 1]]).bool()
TARGETS = torch.tensor([[0, 4, -100], [9, 2, 1]])
ROWS = torch.rand(2, 3)


def floats(*shape):
    return torch.randn(*shape, requires_grad=True)


def gae_arguments(cu_seqlens=None, **changes):
    inputs = INPUTS if cu_seqlens is None else packed(INPUTS, [12, 0, 7, 5])
    tensors = [inputs[k] for k in ("values", "action_mask", "turn_ids", "token_rewards")]
    rows = [INPUTS[k] for k in ("turn_rewards", "final_rewards", "bootstrap_values")]
    lam = torch.rand(4) if changes.get("lam") else None
    return *tensors, *rows, lam, None, inputs.get("cu_seqlens"), 0.9, 0.8, 1.0, 1.0, changes.get("critic"), True, False


SCORES = [torch.rand(2, 3) for _ in range(5)]
FAMILY = torch.tensor([[0, 1, 2], [2, 1, 0]])  # opcheck takes NaN for a difference, so all families are present
OP_CASES = {
    "turn_gae": (OPS.turn_gae, gae_arguments()),
    "turn_gae_packed": (OPS.turn_gae, gae_arguments(cu_seqlens=True, lam=True, critic=0.5)),
    "token_logprobs": (OPS.token_logprobs, (floats(2, 3, 5), TARGETS, MASK, 0.7, False)),
    "token_logprobs_entropy": (OPS.token_logprobs, (floats(2, 4, 5)[:, :-1], TARGETS.clamp(0, 4), None, 1.0, True)),
    "token_logprobs_backward": (
        OPS.token_logprobs_backward,
        (SCORES[0], None, torch.randn(2, 3, 5), TARGETS, MASK, torch.zeros(0), *SCORES[1:3], 1.0),
    ),
    "token_logprobs_backward_inplace": (
        OPS.token_logprobs_backward_inplace,
        (SCORES[0], None, torch.randn(2, 3, 5), TARGETS, MASK, torch.zeros(0), *SCORES[1:3], 1.0),
    ),
    "linear_token_logprobs": (OPS.linear_token_logprobs, (floats(2, 3, 4), floats(5, 4), TARGETS, MASK, 0.7, True)),
    "linear_token_logprobs_backward": (
        OPS.linear_token_logprobs_backward,
        (*SCORES[:2], torch.randn(2, 3, 4), torch.randn(5, 4), TARGETS, MASK, *SCORES[2:], 1.0, True, False),
    ),
    "policy_loss": (
        OPS.policy_loss,
        (floats(2, 3), SCORES[0], SCORES[1], MASK, SCORES[2], torch.tensor(4), None, 0.2, 0.3, 3.0, 1.5),
    ),
    "value_loss": (OPS.value_loss, (floats(2, 3), SCORES[0], SCORES[1], MASK, None, 7.0, 0.2)),
    "linear_ppo_loss": (
        OPS.linear_ppo_loss,
        (
            floats(2, 3, 4),
            floats(5, 4),
            TARGETS,
            SCORES[0],
            SCORES[1],
            MASK,
            None,
            None,
            None,
            1.0,
            0.2,
            0.2,
            None,
            None,
        )
        + (True, True),
    ),
    "family_rewards": (OPS.family_rewards, (ROWS, FAMILY, MASK[:, 0], None, 0.4)),
    "family_rewards_weighted": (
        OPS.family_rewards,
        (ROWS, FAMILY, MASK[:, 0], torch.rand(3), 0.4),
    ),
}
TARGETS[1, 0] = -100  # masked


@pytest.mark.parametrize("name", OP_CASES)
def test_opcheck(name):
    op, arguments = OP_CASES[name]
    torch.library.opcheck(op, arguments)


def losses(x, w, old, advantages):
    """Every differentiable op once, as a trainer would chain them."""
    logits = x @ w.T
    a = token_logprobs(logits, TARGETS, MASK, temperature=0.7)
    a = a + token_logprobs(logits * 2, TARGETS, MASK, inplace_backward=True)
    b, entropy = linear_token_logprobs(x, w, TARGETS, MASK, return_entropy=True)
    policy = policy_loss(a + b, old, advantages, MASK, dual_clip=3.0)
    value = value_loss(b, old, advantages, MASK, denominator=MASK.sum())
    linear = linear_ppo_loss(x, w, TARGETS, old, advantages, MASK, behaviour_logprobs=old + 0.1, is_cap=2.0)
    return policy.loss + value.loss + linear.loss + 0.1 * entropy.sum(), policy.stats, linear.stats


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_losses_compile_whole(backend):
    x, w = torch.randn(2, 3, 4), torch.randn(5, 4)
    results = []
    for function in (losses, torch.compile(losses, fullgraph=True, backend=backend)):
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        loss, *stats = function(*leaves, SCORES[0], SCORES[1])
        loss.backward()
        results.append([loss.detach(), *[y.grad for y in leaves], *[v for s in stats for v in s.values()]])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("form", ["padded", "packed"])
def test_turn_gae_compiles_whole(backend, form):
    inputs = INPUTS if form == "padded" else packed(INPUTS, [12, 3, 0, 5])
    options = option_arguments(dict(gamma=0.9, lam="rows", critic_lam=0.5, credit="turn"), 4)

    def function(inputs):
        out = turn_gae(**inputs, **options, validate=False)
        return out.advantages * 2, out.returns

    torch.testing.assert_close(torch.compile(function, fullgraph=True, backend=backend)(inputs), function(inputs))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("weights", [None, torch.rand(3)])
def test_family_rewards_compile_whole(backend, weights):
    def function(passed, family, success):
        out = family_rewards(passed, family, success, family_weights=weights)
        return out.reward + out.progress, out.family_fraction

    arguments = (ROWS, torch.tensor([[0, 1, 1], [2, -1, 0]]), MASK[:, 0])
    compiled = torch.compile(function, fullgraph=True, backend=backend)(*arguments)
    torch.testing.assert_close(compiled, function(*arguments), equal_nan=True)


def test_public_names():
    import rsi_kernels

    assert set(rsi_fast.__all__) == set(rsi_kernels.__all__)
    assert all(getattr(rsi_fast, name) is getattr(rsi_kernels, name) for name in rsi_kernels.__all__)


HEAVY = ["deepspeed", "vllm", "transformers", "pydantic", "httpx", "typer"]
WITHOUT_TRITON = """
import sys
for name in {hidden!r}:
    sys.modules[name] = None
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)
import torch
from rsi_fast import turn_gae
ones = torch.ones(1, 3)
print(turn_gae(ones * 0, ones.int(), ones.int(), final_rewards=torch.ones(1)).returns.tolist())
"""


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_pulls_in_nothing_heavy():
    out = run_python(f"import sys, rsi_fast; print([m for m in {HEAVY + ['triton']!r} if m in sys.modules])")
    assert out.strip() == "[]"


def test_works_without_triton():
    assert run_python(WITHOUT_TRITON.format(hidden=[*HEAVY, "triton"])).strip() == "[[1.0, 1.0, 1.0]]"


def test_numbers_may_change_between_calls_of_a_compiled_whole():
    """A denominator does at every step; torch.compile then takes it for a symbol."""
    x, mask = torch.randn(4), torch.ones(4, dtype=torch.bool)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(denominator, temperature):
        logprobs = token_logprobs(x[:, None].expand(4, 3), torch.zeros(4, dtype=torch.int64), temperature=temperature)
        return policy_loss(logprobs, logprobs, x, mask, denominator=denominator).loss

    for number in (5, 6, 7.5, 9):
        loss = policy_loss(torch.zeros(4), torch.zeros(4), x, mask, denominator=number).loss
        torch.testing.assert_close(compiled(number, number / 10), loss)
