"""The Triton kernels without a GPU: run in Triton's interpreter, and compiled for sm_90."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rsi_kernels import runtime

pytestmark = pytest.mark.skipif(not runtime.HAS_TRITON, reason="Triton is not installed: no kernel to test")
HERE = Path(__file__).parent
FILES = [f"triton_interpreted{part}.py" for part in ("", "_logprob", "_losses", "_rewards")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("file", FILES)
def test_kernels_in_the_interpreter(file):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / file)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1: nothing can be compiled")
def test_every_kernel_compiles_for_sm_90_without_spills(tmp_path, monkeypatch):
    """The interpreter accepts types that the compiler does not."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.syspath_prepend(str(HERE.parent))
    from rsi_kernels.compilation import launch_configurations

    from bench.compile_report import report

    records = [report(configuration, 90) for configuration in launch_configurations()]
    kernels = {"_summarise", "_write", "_spread", "_score", "_combine", "_gradient", "_policy", "_value", "_reward"}
    assert {record["kernel"] for record in records} == kernels
    assert [record for record in records if record["spills"]] == []
    assert all(0 < record["registers"] <= 255 for record in records)
    for kernel in ("_score", "_policy", "_value", "_reward"):
        assert max(record["widest_load_bits"] for record in records if record["kernel"] == kernel) == 128
