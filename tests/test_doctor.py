"""What keeps a run from starting, said before anything starts."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from rsi_fast.config import load_config
from rsi_fast.doctor import check_can_start, num_gpus, run_doctor
from rsi_fast.errors import UserError
from rsi_fast.launch import run_directory

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "configs" / "demo.toml"


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def demo(*overrides: str):
    return load_config(DEMO, overrides)


def test_the_demo_can_start_here(capsys):
    check_can_start(demo())
    assert run_doctor(demo(), Console(quiet=True))
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["can_start"] is True


@pytest.mark.skipif(num_gpus() > 0, reason="this machine has a GPU")
def test_cuda_without_a_gpu():
    with pytest.raises(UserError, match="GPUs for this run: 0 of 3.*model.device = 'cpu'"):
        check_can_start(demo("model.device=cuda"))


def run_without(module: str, run_dir: Path) -> subprocess.CompletedProcess:
    """`rsi-fast run` in an interpreter that truly cannot find the module: its folder is left out of the path."""
    script = f"""
import importlib.machinery, sys
class Without(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == {module!r} else super().find_spec(name, path, target)
sys.meta_path[:] = [Without if f is importlib.machinery.PathFinder else f for f in sys.meta_path]
sys.argv = ["rsi-fast", "run", {str(DEMO)!r}, "--set", "run.dir={run_dir}"]
from rsi_fast.__main__ import main
main()
"""
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT)


@pytest.mark.parametrize(("module", "extra"), [("deepspeed", "train"), ("vllm", "cpu"), ("typer", "cli")])
def test_a_missing_extra_is_named_with_its_install_line(tmp_path, module, extra):
    done = run_without(module, tmp_path / "run")
    assert done.returncode in (1, 2)
    assert f"pip install 'rsi-fast[{extra}]'" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_model_folder_without_all_its_weights(tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=r"lacks \*\.safetensors"):
        check_can_start(demo(f"model.path={tmp_path}"))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").touch()
    with pytest.raises(UserError, match="lacks model-2.safetensors"):
        check_can_start(demo(f"model.path={tmp_path}"))
    with pytest.raises(UserError, match="lacks config.json, tokenizer.json"):
        check_can_start(demo(f"model.path={tmp_path / 'none'}"))


def test_a_weight_file_that_was_cut(tmp_path):
    shutil.copytree(ROOT / "models" / "demo-base", tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(UserError, match="model.safetensors is cut or damaged"):
        check_can_start(demo(f"model.path={tmp_path}"))


def test_servers_elsewhere_need_their_key(monkeypatch):
    monkeypatch.delenv("RSI_FAST_API_KEY", raising=False)
    with pytest.raises(UserError, match="RSI_FAST_API_KEY: not set"):
        check_can_start(demo("server.urls=['http://127.0.0.1:9']"))
    monkeypatch.setenv("RSI_FAST_API_KEY", "key")
    check_can_start(demo("server.urls=['http://127.0.0.1:9']"))


def test_a_run_directory_that_cannot_be_one(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match="file cannot be made or written to"),
        run_directory(demo(f"run.dir={tmp_path / 'file'}")),
    ):
        pass
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(UserError, match="not a run directory"), run_directory(demo(f"run.dir={tmp_path / 'full'}")):
        pass
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.tex"]


def test_a_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port}.*in use"):
            check_can_start(demo(f"server.port={port}"))


def test_missing_tasks_and_demonstrations(tmp_path):
    settings = [
        "tasks.heldout={path='" + str(tmp_path / "no-tasks") + "'}",
        f"stages.0.demonstrations={tmp_path / 'none'}",
    ]
    with pytest.raises(UserError) as caught:
        check_can_start(demo(*settings))
    assert "tasks.heldout" in str(caught.value)
    assert "demonstrations of sft" in str(caught.value)


def test_a_broken_task_is_named_with_its_file(tmp_path):
    (tmp_path / "task-1").mkdir()
    (tmp_path / "task-1" / "task.toml").write_text('version = "1.0"\n[verifier]\ntimeout_sec = "soon"\n')
    with pytest.raises(UserError, match=r"tasks.heldout: .*task-1/task.toml: verifier.timeout_sec"):
        check_can_start(demo("tasks.heldout={path='" + str(tmp_path) + "'}"))


def test_the_command_says_no_with_its_exit_code(tmp_path):
    command = [sys.executable, "-m", "rsi_fast", "doctor", "--for", str(DEMO), "--set", f"model.path={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=os.environ)
    assert done.returncode == 1
    assert json.loads(done.stdout.splitlines()[-1]) == {"can_start": False, "lacks": json.loads(done.stdout)["lacks"]}
