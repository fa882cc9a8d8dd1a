"""The wheel has both packages and the command, and imports with the base dependencies alone."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout, so it is not known which files belong to the project")
    for name in filter(None, tracked.stdout.split("\0")):  # a build leaves folders behind, so not in the checkout
        target = folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(folder / "source")], check=True, timeout=120)
    [path] = folder.glob("*.whl")
    return path


def test_it_imports_without_any_extra(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    script = """
import sys
before = set(sys.modules)
import rsi_fast
from rsi_fast import turn_gae
import torch, numpy
assert "source" not in rsi_fast.__file__ and "WHERE" in rsi_fast.__file__, rsi_fast.__file__
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(sorted(new & {"deepspeed", "vllm", "transformers", "pydantic", "typer", "httpx", "bashkit", "psutil"}))
""".replace("WHERE", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_command_and_plug_in_are_declared(wheel):
    with zipfile.ZipFile(wheel) as file:
        [name] = [name for name in file.namelist() if name.endswith("entry_points.txt")]
        text = file.read(name).decode()
        names = file.namelist()
    assert "rsi-fast = rsi_fast.__main__:main" in text
    assert "rsi_fast.rollout.weight_engine:register" in text
    assert {"rsi_fast/__init__.py", "rsi_kernels/turn_gae.py", "rsi_fast/trainer/loop.py"} <= set(names)
    assert not [name for name in names if name.startswith(("tests", "configs"))]
