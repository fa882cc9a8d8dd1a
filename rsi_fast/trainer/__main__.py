"""One trainer rank: `torchrun ... -m rsi_fast.trainer RUN [--offline]`. Reads RUN/config.toml; writes RUN/logs/."""

import fcntl
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

LOCK_WAIT_S = 60.0


def main() -> int:
    run_dir, offline = Path(sys.argv[1]), "--offline" in sys.argv[2:]
    rank = int(os.environ["RANK"])
    from rsi_fast.processes import die_with_parent

    die_with_parent()  # torchrun, when it is killed with -9, leaves its ranks at work
    log = os.open(run_dir / "logs" / f"trainer-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from rsi_fast.errors import UserError, leave_error

    try:
        lock = (run_dir / ".trainer.lock").open("w")
        if rank == 0:
            _take(lock, run_dir)
        _train(run_dir, offline)
    except UserError as error:
        print(f"error: {error}", flush=True)
        leave_error(run_dir, f"trainer-{rank}", str(error))
        return 2
    except Exception as error:
        traceback.print_exc()
        leave_error(run_dir, f"trainer-{rank}", f"{type(error).__name__}: {error}")
        return 1
    return 0


def _take(lock, run_dir: Path) -> None:
    """Two trainers in one directory would mix their checkpoints: the ranks of a launcher that was killed go first."""
    from rsi_fast.errors import UserError

    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UserError(
                    f"another trainer has been at work in {run_dir} for {LOCK_WAIT_S:g} s; end its processes "
                    "(python -m rsi_fast.trainer), then start again"
                ) from None
        time.sleep(0.2)


def _train(run_dir: Path, offline: bool) -> None:
    import warnings

    import torch

    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    from rsi_fast.config import load_config

    config = load_config(run_dir / "config.toml")
    if config.model.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // (2 * config.trainer.num_ranks)))
    import deepspeed

    # DeepSpeed would compile this at every fresh start, with a compiler that may not be there; only inference uses it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    from rsi_fast.tasks import task_folders
    from rsi_fast.trainer.loop import Trainer

    # Ranks wait for each other at most this long; a dead one is noticed by torchrun at once.
    deepspeed.init_distributed(
        "nccl" if config.model.device == "cuda" else "gloo",
        timeout=timedelta(seconds=config.rollout.round_timeout_s + config.server.start_timeout_s),
        verbose=False,
    )
    torch.manual_seed(config.run.seed)
    publisher = None
    if not offline:
        from rsi_fast.trainer.sync import Publisher

        publisher = Publisher(config, api_key=os.environ["RSI_FAST_API_KEY"])
    names = {
        which: [folder.name for folder in task_folders(tasks, config.run.seed, run_dir)]
        for which in ("train", "heldout")
        if (tasks := getattr(config.tasks, which))
    }
    Trainer(config, names, publisher).train()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
