"""Helper of the trainer's tests: real ZeRO-3 ranks under torchrun, learning from a made-up spool without servers."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rsi_fast.config import Config, load_config
from rsi_fast.spool import Check, Spool, Trajectory, Turn, write_json_atomic
from rsi_fast.trainer import rollouts

ROOT = Path(__file__).parent.parent
VOCABULARY = 64

RUN_FILE = """
[run]
dir = "{dir}"
seed = 3
[model]
path = "{model}"
dtype = "float32"
device = "cpu"
max_tokens = 32
[tasks.train]
path = "{tasks}"
[rollout]
max_turn_tokens = 8
round_timeout_s = 30
[trainer]
num_ranks = {num_ranks}
micro_batch_tokens = {micro_batch_tokens}
minibatches = 2
keep_checkpoints = 4
max_logprob_abs_diff = 100.0
[trainer.zero]
param_persistence_threshold = 0
[[stages]]
kind = "sft"
demonstrations = "{demonstrations}"
steps = 2
batch_size = 8
actor_lr = 1e-3
[[stages]]
kind = "critic"
rounds = 1
attempts = 8
critic_lr = 1e-3
[[stages]]
kind = "ppo"
rounds = 2
attempts = 8
actor_lr = 1e-3
critic_lr = 1e-3
"""


def tiny_model(folder: Path, **changes) -> Path:
    """A random Qwen3 model as a Hugging Face folder."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
    }
    Qwen3ForCausalLM(Qwen3Config(**(shape | changes))).save_pretrained(folder)
    return folder


def trajectory(name: str, rng: random.Random, task: str = "t-0", num_turns: int = 2) -> Trajectory:
    token_ids, mask, turns = [rng.randrange(VOCABULARY) for _ in range(4)], [0] * 4, [-1] * 4
    for turn in range(num_turns):
        length = rng.randint(1, 5)
        token_ids += [rng.randrange(VOCABULARY) for _ in range(length + 3)]
        mask += [1] * length + [0] * 3
        turns += [turn] * length + [-1] * 3
    passed = rng.random() < 0.5
    return Trajectory(
        id=name,
        task=task,
        token_ids=token_ids,
        action_mask=mask,
        turn_ids=turns,
        behaviour_logprobs=[-4.0 * m for m in mask],
        turns=[Turn(reply="", command="", observation="", weight_version=0) for _ in range(num_turns)],
        finish_reason="submit",
        success=passed,
        checks=[Check(name="a", family="f", passed=passed), Check(name="b", family="g", passed=rng.random() < 0.5)],
    )


def run_file(folder: Path, num_ranks: int, micro_batch_tokens: int = 64) -> str:
    """A run file for make_run's folder; what it names stands beside the folder."""
    return RUN_FILE.format(
        dir=folder,
        model=folder.parent / "model",
        tasks=folder.parent / "tasks",
        demonstrations=folder.parent / "demonstrations",
        num_ranks=num_ranks,
        micro_batch_tokens=micro_batch_tokens,
    )


def make_run(folder: Path, num_ranks: int, micro_batch_tokens: int = 64, overrides: list[str] = ()) -> Config:
    """A run directory whose spool holds all that the run file's stages ask for."""
    folder.mkdir(parents=True)
    tasks = folder.parent / "tasks"
    if not tasks.exists():
        for i in range(8):
            task = tasks / f"t-{i}"
            (task / "tests").mkdir(parents=True)
            (task / "environment").mkdir()
            (task / "task.toml").write_text('version = "1.0"\n')
            (task / "instruction.md").write_text("do it\n")
            (task / "environment" / "Dockerfile").write_text("FROM scratch\nWORKDIR /app\n")
            (task / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
        rng = random.Random(5)
        for i in range(20):
            text = trajectory(f"demo/{i}", rng).model_dump_json()
            write_json_atomic(folder.parent / "demonstrations" / f"{i:05d}.json", text)
        tiny_model(folder.parent / "model")
    file = folder.parent / f"{folder.name}.toml"
    file.write_text(run_file(folder, num_ranks, micro_batch_tokens))
    config = load_config(file, overrides)
    (folder / "logs").mkdir()
    config.save(folder / "config.toml")
    names = [f"t-{i}" for i in range(8)]
    spool = Spool(folder)
    for stage, round_, version in ((2, 0, 1), (3, 0, 1), (3, 1, 2)):
        order = rollouts.training_order(config, stage, round_, names, version)
        spool.give_order(order)
        rng = random.Random(order.name)
        for i, task in enumerate(order.tasks):
            spool.write(order, i, trajectory(f"{order.name}/{i}", rng, task, num_turns=rng.randint(1, 3)))
    return config


def start_ranks(config: Config, env: dict[str, str] | None = None) -> subprocess.Popen:
    """With ALTER in env the ranks run tests/altered_trainer.py, which says what that does."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [
        f"--nproc-per-node={config.trainer.num_ranks}",
        "-m",
        "altered_trainer" if env else "rsi_fast.trainer",
        str(config.run.dir),
        "--offline",
    ]
    settings = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    settings["PYTHONPATH"] = f"{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}"
    return subprocess.Popen(command, env=os.environ | settings | (env or {}), cwd=ROOT)


def train(config: Config, env: dict[str, str] | None = None) -> list[dict]:
    """Runs the ranks to the end; returns the lines of metrics."""
    process = start_ranks(config, env)
    code = process.wait(timeout=240)
    logs = "\n".join(p.read_text()[-3000:] for p in sorted((config.run.dir / "logs").glob("trainer-*.log")))
    assert code == 0, logs
    return metrics(config)


def metrics(config: Config) -> list[dict]:
    return [json.loads(line) for line in (config.run.dir / "metrics.jsonl").read_text().splitlines()]


def final_weights(config: Config) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(config.run.dir / "models" / "ppo" / "model.safetensors")


def train_until_killed(config: Config, point: str) -> None:
    """Runs the ranks until they reach a point of altered_trainer.py, where all of them and torchrun die by -9."""
    process = start_ranks(config, {"ALTER": f"kill {point}"})
    assert process.wait(timeout=120) == -signal.SIGKILL, f"{point} was not reached"


def with_ranks(config: Config, num_ranks: int) -> Config:
    """The same run, to go on with so many ranks."""
    trainer = config.trainer.model_copy(update={"num_ranks": num_ranks})
    other = config.model_copy(update={"trainer": trainer})
    other.save(config.run.dir / "config.toml")
    return other


def kill_tree(process: subprocess.Popen, number: int) -> None:
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in tree:
        member.send_signal(number)
    psutil.wait_procs(tree, timeout=10)
    process.wait(timeout=10)
