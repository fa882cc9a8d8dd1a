"""`bench.gpu` without a GPU: its checks on interpreted kernels, and the whole of it where a CPU stands in for one."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import rsi_kernels
import torch
from rsi_kernels import runtime

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(not runtime.HAS_TRITON, reason="Triton is not installed: nothing to time on a GPU")
SIZES = dict(
    gae=[(2, 300), (1, 500)], families=(16, 9), losses=1024, logits=(1024, 33), linear=(1024, 8, 33),
    filler=2**10, product=16,
)  # fmt: skip
CHECKED = dict(
    gae=[(1, 90, (40, 20))], families=[(5, 9)], losses=[64], logits=[(32, 33)], linear=[(32, 8, 33)],
    every_gae_option=[60, 0, 31], every_logits_option=(32, 17), every_linear_option=(16, 8, 33), offsets=(40, 33),
)  # fmt: skip


def test_checks_on_interpreted_kernels():
    file = str(HERE / "triton_interpreted_bench.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path()},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout


def path() -> str:
    return os.pathsep.join([str(HERE.parent), str(HERE.parent / "kernels"), os.environ.get("PYTHONPATH", "")])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line():
    command = ["make", "-s", "bench-gpu", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert done.stdout == ""
    said = [line for line in done.stderr.splitlines() if not line.startswith(("make:", "make["))]
    assert len(said) == 1
    assert said[0].startswith("error: no CUDA GPU")


class Replayed:
    """Stands in for a CUDA graph: the calls once more, into the same results."""

    def __init__(self, calls):
        self.calls, self.results = calls, [run() for run in calls]

    def replay(self):
        for run, kept in zip(self.calls, self.results, strict=True):
            new = run()
            for a, b in zip(*([x] if isinstance(x, torch.Tensor) else x for x in (kept, new)), strict=True):
                a.copy_(b)


def timed_on_the_host(run) -> float:
    begin = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - begin)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """bench.gpu with small sizes, and the CPU as its device."""
    monkeypatch.syspath_prepend(str(HERE.parent))
    from bench import gpu

    stand_in = dict(
        is_available=lambda: True,
        synchronize=lambda: None,
        reset_peak_memory_stats=lambda: None,
        memory_allocated=lambda: 0,
        max_memory_allocated=lambda: 2**20,
        get_device_name=lambda: "NVIDIA H200 (stand-in)",
        get_device_capability=lambda: (9, 0),
        get_device_properties=lambda index: SimpleNamespace(total_memory=139 * 2**30),
    )
    for name, value in stand_in.items():
        monkeypatch.setattr(torch.cuda, name, value)
    settings = dict(
        DEVICE="cpu",
        SIZES=SIZES,
        REPLAYS=1,
        CALLS=1,
        ROUNDS=1,
        MOST_SETS=1,
        capture=Replayed,
        event_ms=timed_on_the_host,
        RIVALS={op: [r for r in rivals if r.name.startswith("PyTorch")] for op, rivals in gpu.RIVALS.items()},
        BARS={
            ("turn_gae", "2x300", "fwd"): dict(device_us=("<=", 0), full_call_us=("<=", 1e9)),
            ("token_logprobs_entropy", "1024x33", "fwd"): dict(over_without_entropy=(">=", 0)),
        },
    )
    for name, value in settings.items():
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setattr(gpu.gpu_checks, "SIZES", CHECKED)
    monkeypatch.setattr(gpu.gpu_checks, "FAR_ROWS", 2)
    monkeypatch.setattr(gpu.gpu_checks, "POISONED", range(7, 12))
    gpu.rival_problem.cache_clear()
    out = tmp_path / "gpu.json"

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["bench.gpu", "--out", str(out), *arguments])
        gpu.main()
        return json.loads(out.read_text())

    return SimpleNamespace(module=gpu, out=out, run=run)


def test_the_whole_run(gpu, capsys):
    report = gpu.run("--seed", "3")
    printed = capsys.readouterr().out
    assert report["seed"] == 3
    assert report["gpu"] == "NVIDIA H200 (stand-in)"
    assert report["versions"].keys() >= {"torch", "triton", "cuda", "driver", "numpy"}
    assert report["ceilings"].keys() == {"copy_gb_s", "matmul_gflop_s"}
    ours = [r for r in report["results"] if r["rival"] is None]
    assert [(r["op"], r["shape"], r["mode"]) for r in ours] == [
        (c.op, c.key["shape"], c.mode) for c in gpu.module.cases(SIZES)
    ]
    for record in ours:
        assert record["reason"] is None
        assert record["device_ms"] > 0
        assert record["full_call_ms"] > 0
        assert record["peak_mib"] == 1
        assert ("gb_s" in record) != ("gflop_s" in record)
    assert [bar["met"] for bar in ours[0]["bars"]] == [False, True]
    [entropy] = [r for r in ours if r["op"] == "token_logprobs_entropy"]
    assert entropy["bars"][0]["measured"] == pytest.approx(entropy["over_without_entropy"])
    plain = [r for r in report["results"] if (r["rival"] or "").startswith("PyTorch")]
    assert {r["op"] for r in plain} == {r["op"] for r in ours}
    for record in plain:
        assert record["reason"] is None, record
        assert record["ratio"] > 0
    assert "2 of 3 bars met" in printed
    assert all(printed.count(r["op"]) > 1 for r in ours)


def test_no_time_left(gpu):
    report = gpu.run("--minutes", "0", "--only", "family_rewards")
    assert [r["reason"] for r in report["results"]] == ["out of time"]


def test_a_failed_check_names_the_operation_and_nothing_is_timed(gpu, monkeypatch):
    right = rsi_kernels.policy_loss

    def wrong(*arguments, **options):
        out = right(*arguments, **options)
        return out._replace(loss=out.loss * 1.01)

    monkeypatch.setattr(rsi_kernels, "policy_loss", wrong)
    with pytest.raises(SystemExit, match="nothing is timed, since 1 checks failed .*policy_loss 64"):
        gpu.run("--only", "policy_loss")
    assert not gpu.out.exists()


def test_what_has_no_room_is_left_out_by_name(gpu, monkeypatch, capsys):
    right = rsi_kernels.value_loss

    def full(values, *arguments):
        if values.numel() == 1024:
            try:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has ...")
            except torch.OutOfMemoryError:
                raise RuntimeError("the capture ended badly")  # noqa: B904
        return right(values, *arguments)

    monkeypatch.setattr(rsi_kernels, "value_loss", full)
    report = gpu.run("--only", "value_loss")
    assert [r["reason"] for r in report["results"]] == ["left out: no room on this GPU of 139 GiB, for 8.00 GiB more"]
    assert "left out: no room" in capsys.readouterr().out
