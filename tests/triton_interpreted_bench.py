"""The checks of `bench.gpu` on the Triton kernels in Triton's interpreter, run by test_bench_gpu.py."""

import functools

import pytest
import rsi_kernels
import torch
from kernel_checks import as_on_a_gpu, poisoned
from rsi_kernels import runtime, turn_gae_triton

from bench import gpu_checks

assert runtime.interpreting(), "run with TRITON_INTERPRET=1"
SIZES = dict(
    gae=[(1, 30, (8, 4))],
    logits=[(16, 70)],
    linear=[(16, 8, 33)],
    losses=[64],
    families=[(5, 7)],
    every_gae_option=[14, 0],
    every_logits_option=(32, 17),
    every_linear_option=(16, 8, 33),
    offsets=(36, 33),
)
# Each form of each kernel once: what differs in nothing else but dtype is left out.
LEFT_OUT = ("bfloat16 fwd", "float32 fwd_bwd", "option, bfloat16", "option, float16")
CHECKS = {
    check.name: check
    for check in gpu_checks.checks(SIZES)
    if not check.name.endswith(LEFT_OUT) or check.name.startswith(("policy_loss", "value_loss"))
}
pytestmark = pytest.mark.usefixtures(poisoned.__name__)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Interpreted on CPU tensors; those of turn_gae in small chunks, since scans are slow there."""
    monkeypatch.setattr(turn_gae_triton, "launch", functools.partial(turn_gae_triton.launch, block=16, group=2))
    monkeypatch.setattr(gpu_checks, "FAR_ROWS", 2)
    monkeypatch.setattr(gpu_checks, "POISONED", range(7, 12))
    with as_on_a_gpu(monkeypatch):
        yield


@pytest.mark.parametrize("name", CHECKS)
def test_check_passes(name):
    assert gpu_checks.problems(CHECKS[name], 1, "cpu") == []


def test_every_operation_is_checked():
    assert {name.split()[0] for name in CHECKS} >= set(rsi_kernels.__all__) & set(vars(gpu_checks.reference))


def spoiled(spoil):
    """family_rewards whose rewards spoil changes, call after call."""
    calls = iter(range(9))
    right = rsi_kernels.family_rewards

    def wrong(*arguments, **options):
        out = right(*arguments, **options)
        return out._replace(reward=spoil(out.reward, next(calls)))

    return wrong


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x, call: x * 1.001, "wrong by"),
        (lambda x, call: x[1:], "of shape"),
        (lambda x, call: torch.where(torch.arange(len(x)) == 3, torch.nan, x), "wrong by"),
        (lambda x, call: x + 1e-6 * call, "other bits"),
    ],
    ids=["wrong", "shape", "unwritten", "second call"],
)
def test_a_wrong_answer_is_found(monkeypatch, spoil, message):
    monkeypatch.setattr(rsi_kernels, "family_rewards", spoiled(spoil))
    found = gpu_checks.problems(CHECKS["family_rewards 5x7 float32 fwd"], 1, "cpu")
    assert any(message in problem for problem in found), found
