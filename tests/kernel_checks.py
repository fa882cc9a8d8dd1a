"""What the tests of operations share: random batches, worked examples, poisoned allocations, the accuracy rule."""

import contextlib
import json
from pathlib import Path

import pytest
import torch
from rsi_kernels import runtime

DATA = Path(__file__).parent / "data"
NAN = float("nan")


@pytest.fixture
def poisoned():
    """Every torch.empty is filled with NaN (or the largest integer), so an element that nobody wrote shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


@contextlib.contextmanager
def as_on_a_gpu(monkeypatch):
    """Operations on CPU tensors launch their Triton kernels, which the interpreter then runs."""
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "uses_triton", lambda tensor: True)
        patch.setattr(runtime, "uses_numba", lambda tensor: False)
        patch.setattr(runtime, "device_of", lambda tensor: contextlib.nullcontext())
        yield


def vectors(name: str) -> list:
    """The worked examples of tests/data/NAME.json as pytest parameters."""
    cases = json.loads((DATA / f"{name}.json").read_text())["cases"]
    return [pytest.param(case, id=case["name"]) for case in cases]


def tensors(inputs: dict, dtype=torch.float32) -> dict:
    """Lists of a worked example as tensors, numbers as they are."""
    return {
        key: value
        if not isinstance(value, list)
        else torch.tensor(value, dtype=torch.int32 if key in ("action_mask", "turn_ids") else dtype)
        for key, value in inputs.items()
    }


def as_float64(inputs: dict) -> dict:
    return {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}


def assert_as_good_as(actual, exact, plain, margin=1e-6):
    """`actual` is as near to the float64 result as plain torch in the same precision, plus a margin of the scale."""
    actual, plain = actual.double(), plain.double()
    assert actual.shape == exact.shape
    assert actual.isfinite().eq(exact.isfinite()).all()
    finite = exact.isfinite()
    if not finite.any():
        return
    scale = exact[finite].abs().max().clamp(min=1)
    error, allowed = (actual - exact)[finite].abs().max(), (plain - exact)[finite].abs().max()
    assert error <= allowed + margin * scale, f"error {error:.3g}, plain torch {allowed:.3g}, scale {scale:.3g}"


def random_trajectories(seed: int, num_rows=3, length=40, turn_tokens=5, gap_tokens=4, num_ids=8, leading=True) -> dict:
    """Arguments of turn_gae: ragged turns with gaps in their ids, NaN values and wild ids at masked positions.

    leading: rows may begin with observation tokens; rewards stand only where an action token precedes them.
    """
    g = torch.Generator().manual_seed(seed)

    def randint(high):
        return int(torch.randint(0, max(high, 1), (), generator=g))

    mask = torch.zeros(num_rows, length, dtype=torch.bool)
    ids = torch.randint(-9, 99, (num_rows, length), generator=g, dtype=torch.int32)
    token_rewards, turn_rewards = torch.zeros(num_rows, length), torch.zeros(num_rows, num_ids)
    for b in range(num_rows):
        t, turn = randint(gap_tokens) if leading else 0, 0
        first = None
        while t < length:
            turn += randint(3)
            n = 1 + randint(turn_tokens)
            mask[b, t : t + n], ids[b, t : t + n] = True, turn
            first = (t, turn) if first is None else first
            t, turn = t + n + randint(gap_tokens), turn + randint(2)
        if first is not None:
            token_rewards[b, first[0] :] = torch.randn(length - first[0], generator=g)
            turn_rewards[b, min(first[1], num_ids) :] = torch.randn(max(num_ids - first[1], 0), generator=g)
    values = torch.where(mask, torch.randn(num_rows, length, generator=g), NAN)
    return dict(
        values=values,
        action_mask=mask,
        turn_ids=ids,
        token_rewards=token_rewards,
        turn_rewards=turn_rewards,
        final_rewards=torch.randn(num_rows, generator=g),
        bootstrap_values=torch.randn(num_rows, generator=g),
    )


OPTIONS = [  # of turn_gae, beside the rewards
    dict(gamma=1.0, lam=0.95),
    dict(gamma=0.9, lam=0.8, critic_lam=1.0),
    dict(gamma=0.97, lam=0.7, token_gamma=0.99, token_lam=0.9, credit="turn"),
    dict(gamma=0.97, lam=0.7, token_gamma=0.97, token_lam=0.7, critic_lam=0.3),
    dict(gamma=0.0, lam=0.0, token_gamma=0.0, token_lam=0.5),
    dict(gamma=1.0, lam=1.0, credit="turn"),
    dict(gamma=0.95, lam="rows", critic_lam="rows"),
]


def option_arguments(options: dict, num_rows: int) -> dict:
    rows = torch.linspace(0.2, 1.0, max(num_rows, 1))[:num_rows]
    return {k: (rows if k == "lam" else 1 - rows / 2) if v == "rows" else v for k, v in options.items()}


PER_TOKEN = ("values", "action_mask", "turn_ids", "token_rewards")


def packed(inputs: dict, lengths: list[int]) -> dict:
    """The first lengths[b] tokens of each row, one row after the other, with cu_seqlens."""
    out = dict(inputs)
    for key in PER_TOKEN:
        if inputs.get(key) is not None:
            out[key] = torch.cat([inputs[key][b, :n] for b, n in enumerate(lengths)])
    out["cu_seqlens"] = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return out
