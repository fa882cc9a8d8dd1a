"""A trainer rank as it is, but for what the environment variable ALTER says:

kill POINT     every process of the run dies by -9 the moment rank 0 gets there
resave FOLDER  what was loaded is saved again at once, as a checkpoint of another run directory, before training goes on
full           the disk is full when the critic's file of the checkpoint is written
nan STEP       the loss of the actor's so manieth step, from 1, is not a number on the last rank; whenever weights are
               published, the log says so
"""

import errno
import itertools
import os
import sys
from pathlib import Path

import psutil

from rsi_fast.trainer import __main__ as trainer


def kill_everything() -> None:
    """torchrun first, which would end the ranks in its own way."""
    if os.environ["RANK"] == "0":
        torchrun = psutil.Process(os.getppid())
        ranks = torchrun.children(recursive=True)
        torchrun.kill()
        for rank in sorted(ranks, key=lambda process: process.pid == os.getpid()):
            rank.kill()


def before(owner, name: str, action, wanted=lambda *arguments: True) -> None:
    """`action` is called before each call of owner.name whose arguments are wanted."""
    original = getattr(owner, name)

    def altered(*arguments, **keywords):
        if wanted(*arguments):
            action()
        return original(*arguments, **keywords)

    setattr(owner, name, altered)


def fail() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def alter(what: str, argument: str) -> None:
    from rsi_fast.trainer import checkpoint, engines, loop, tensor_files

    def in_critic(file, *arguments) -> bool:
        return "critic" in str(file._file.name)

    if what == "resave":
        resume = loop.Trainer._resume

        def resume_and_save(self) -> None:
            resume(self)
            checkpoint.save_checkpoint(Path(argument), self.state, self._engines(), 1)

        loop.Trainer._resume = resume_and_save
    elif what == "full":
        before(tensor_files.TensorFile, "add", fail, in_critic)
    elif what == "nan":
        step, steps = engines.Engine.step, itertools.count(1)

        def step_with_nan(engine, losses, *arguments):
            last_rank = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
            if engine.name == "actor" and next(steps) == int(argument) and last_rank:
                losses = (loss * float("nan") for loss in losses)
            return step(engine, losses, *arguments)

        engines.Engine.step = step_with_nan
        before(loop.Trainer, "_publish", lambda: print("weights are published", flush=True))
    elif argument == "in_round":  # the critic has made its step, the actor has not
        seen: list[str] = []

        def actor_follows(engine, *arguments) -> bool:
            seen.append(engine.name)
            return seen[-2:] == ["critic", "actor"]

        before(engines.Engine, "step", kill_everything, actor_follows)
    elif argument == "between_engines":
        before(tensor_files.TensorFile, "add", kill_everything, in_critic)
    elif argument == "before_rename":
        before(checkpoint, "_publish", kill_everything)
    elif argument == "after_rename":
        calls = itertools.count()
        before(checkpoint, "tidy", kill_everything, lambda *arguments: next(calls) > 0)  # the first is at the start
    else:
        raise ValueError(argument)


if __name__ == "__main__":
    alter(*os.environ["ALTER"].split(" ", 1))
    sys.exit(trainer.main())
