"""The parts of a run on their own: `serve`, `collect`, `train`, `eval`, `export`."""

import asyncio
import fcntl
import time
import zlib
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from rsi_fast.config import Config, load_config
from rsi_fast.doctor import check_can_start
from rsi_fast.errors import UserError
from rsi_fast.launch import POLL_S, Launcher, prepare, run_directory
from rsi_fast.processes import signals_raise
from rsi_fast.progress import RunProgress
from rsi_fast.spool import Order, Spool


@contextmanager
def servers_running(config: Config, console: Console):
    """Yields (launcher, urls) with every server ready; ends them."""
    launcher = Launcher(config, console)
    try:
        with signals_raise():
            urls = launcher.start_servers()
            console.print(f"waiting for {len(urls)} vLLM server(s); logs in {config.run.dir / 'logs'}")
            launcher.wait_for_servers(urls)
            yield launcher, urls
    finally:
        launcher.stop()


def serve(config: Config, console: Console) -> None:
    check_can_start(config, trains=False)
    with run_directory(config), servers_running(config, console) as (launcher, urls):
        key_file = config.run.dir / "api_key"
        key_file.touch(mode=0o600)
        key_file.write_text(launcher.api_key)
        try:
            console.print(f"serving {config.model.path} at {' '.join(urls)}; key in {key_file}; Ctrl-C ends it")
            while True:
                launcher.check()
                time.sleep(POLL_S)
        finally:
            key_file.unlink()


def collect(config: Config, rounds: int, console: Console) -> dict:
    from rsi_fast.tasks import task_folders
    from rsi_fast.trainer.rollouts import training_order

    number = next((i for i, stage in enumerate(config.stages, 1) if stage.kind != "sft"), None)
    if number is None:
        raise UserError("the run file has no stage of kind critic or ppo, so there is nothing to collect for")
    check_can_start(config, trains=False)
    with run_directory(config) as run_dir:
        prepare(config)
        names = [folder.name for folder in task_folders(config.tasks.train, config.run.seed, run_dir)]
        orders = [training_order(config, number, round_, names, weight_version=0) for round_ in range(rounds)]
        with servers_running(config, console) as (launcher, urls):
            for order in orders:
                Spool(run_dir).give_order(order)
                _collect(config, order, urls, launcher.api_key, console)
        trajectories = [t for order in orders for t in Spool(run_dir).read(order)]
    valid = [t for t in trajectories if t.valid]
    return {
        "attempts": len(trajectories),
        "invalid": len(trajectories) - len(valid),
        "success": sum(t.success for t in valid) / max(1, len(valid)),
        "spool": str(run_dir / "spool"),
    }


def train(config: Config, spool: Path | None, console: Console) -> dict:
    check_can_start(config)
    with run_directory(config) as run_dir:
        for part in ("orders", "spool") if spool else ():
            if not (spool / part).is_dir():
                raise UserError(f"{spool} holds no {part}/ folder: expected the directory of a run")
            if not (run_dir / part).exists():
                (run_dir / part).symlink_to((spool / part).resolve())
        prepare(config)
        launcher = Launcher(config, console)
        try:
            with signals_raise(), RunProgress(config, console) as progress:
                trainer = launcher.start_trainer(offline=True)
                while trainer.exit_code() is None:
                    progress.update()
                    time.sleep(POLL_S)
                progress.update()
                launcher.check(may_end=("trainer",))
        finally:
            launcher.stop()
    return {"run": str(run_dir), "models": [str(p) for p in sorted((run_dir / "models").glob("[!.]*"))]}


def evaluate(config: Config, model: Path | None, blank_observations: bool, console: Console) -> dict:
    from rsi_fast.tasks import task_folders
    from rsi_fast.trainer.rollouts import evaluation

    if config.tasks.heldout is None:
        raise UserError("the run file has no [tasks.heldout] to score the model on")
    folder = config.run.dir / "eval" / time.strftime("%Y%m%d-%H%M%S")
    update = {"run": config.run.model_copy(update={"dir": folder})}
    if model:
        update["model"] = config.model.model_copy(update={"path": model})
    config = config.model_copy(update=update)
    check_can_start(config, trains=False)
    with run_directory(config) as run_dir:
        names = [folder.name for folder in task_folders(config.tasks.heldout, config.run.seed, run_dir)]
        order = Order(
            name="eval",
            task_set="heldout",
            tasks=[name for name in names for _ in range(config.eval.attempts_per_task)],
            weight_version=0,
            temperature=config.eval.temperature,
            seed=zlib.crc32(f"{config.run.seed}/eval".encode()),
            blank_observations=blank_observations,
        )
        Spool(run_dir).give_order(order)
        with servers_running(config, console) as (launcher, urls):
            _collect(config, order, urls, launcher.api_key, console)
        result = evaluation(Spool(run_dir).read(order))
    return {"model": str(config.model.path), "spool": str(run_dir / "spool")} | result


def export(run_dir: Path, out: Path, checkpoint: str, critic: bool) -> dict:
    """A Hugging Face folder from a checkpoint of a run that is not at work."""
    from rsi_fast.trainer.export import choose_checkpoint, export_checkpoint

    if not (run_dir / "config.toml").is_file():
        raise UserError(f"{run_dir} holds no config.toml: expected the directory of a run")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder; give --out another one")
    with (run_dir / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"a process is at work in {run_dir} and may remove checkpoints; stop it first") from None
        chosen = choose_checkpoint(run_dir, checkpoint)
        return export_checkpoint(load_config(run_dir / "config.toml"), chosen, out, critic)


def _collect(config: Config, order: Order, urls: list[str], api_key: str, console: Console) -> None:
    from rsi_fast.rollout.collector import collect_order

    with RunProgress(config, console) as progress:

        async def work() -> None:
            collection = asyncio.create_task(collect_order(config, order, urls, api_key))
            while not collection.done():
                progress.update()
                await asyncio.wait([collection], timeout=POLL_S)
            progress.update()
            await collection

        asyncio.run(work())
