"""The Triton kernels of turn_gae without a GPU: run in Triton's interpreter, and compiled for sm_90."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rsi_kernels import runtime

pytestmark = pytest.mark.skipif(not runtime.HAS_TRITON, reason="Triton is not installed: no kernel to test")
HERE = Path(__file__).parent


@pytest.mark.timeout(300)
def test_kernels_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / "triton_interpreted.py")],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout


FLOATS = ("rewards_ptr", "turn_rewards_ptr", "final_ptr", "bootstrap_ptr", "lam_ptr", "critic_lam_ptr", "sums_ptr")
OUTPUTS = ("advantages_ptr", "token_advantages_ptr", "returns_ptr")
POINTERS = {"mask_ptr": "*u8", "cu_ptr": "*i32", **dict.fromkeys((*FLOATS, *OUTPUTS), "*fp32")}
SIZES = dict.fromkeys(("num_rows", "length", "num_ids", "num_slots"), "i32")
NUMBERS = dict.fromkeys(("gamma", "lam", "token_gamma", "token_lam", "critic_lam"), "fp32")
FLAGS = ("TOKEN_REWARDS", "TURN_REWARDS", "FINAL", "BOOTSTRAP", "LAM", "PACKED")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1: nothing can be compiled")
@pytest.mark.parametrize(("everything", "ids"), [(False, "i32"), (True, "i64")])
@pytest.mark.parametrize("name", ["_summarise", "_write", "_spread"])
def test_kernels_compile_for_sm_90(name, everything, ids, tmp_path, monkeypatch):
    """With every option and with none; the interpreter accepts types that the compiler does not."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from rsi_kernels import turn_gae_triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(turn_gae_triton, name)
    sizes = dict(BLOCK=turn_gae_triton.BLOCK, GROUP=turn_gae_triton.GROUP, NONE=-(2 ** (int(ids[1:]) - 1)))
    constants = dict.fromkeys(FLAGS, everything) | sizes | {"CRITIC": 2 if everything else 0}
    types = POINTERS | SIZES | NUMBERS | {"ids_ptr": f"*{ids}", "ends_ptr": f"*{ids}", "values_ptr": "*bf16"}
    names = [p.name for p in kernel.params]
    source = ASTSource(
        kernel,
        {n: "constexpr" if n in constants else types[n] for n in names},
        {(i,): constants[n] for i, n in enumerate(names) if n in constants},
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": turn_gae_triton.NUM_WARPS}
    )
    assert compiled.asm["cubin"]
