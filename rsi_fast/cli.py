"""The command line. Every command ends with one JSON line on standard output."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rsi_fast.config import load_config
from rsi_fast.errors import UserError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="Run file (TOML); configs/ has examples.")]
Overrides = Annotated[
    list[str], typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Overrides a key of the run file; repeatable.")
]
Profile = Annotated[
    int | None, typer.Option(min=0, metavar="ROUND", help="Profile this round of critic and ppo stages: RUN/profile.")
]
console = Console(stderr=True)


def _finish(result: dict) -> None:
    print(json.dumps(result), flush=True)


def _profiled(round_: int | None) -> list[str]:
    return [] if round_ is None else [f"trainer.profile_round={round_}"]


@app.command()
def run(
    config: ConfigFile,
    set_: Overrides = [],
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Move aside a run.dir that is finished or has another config.")
    ] = False,
    profile: Profile = None,
) -> None:
    """Everything: servers, collector, trainer ranks. Goes on from the last checkpoint when run.dir holds one."""
    from rsi_fast.launch import run as launch
    from rsi_fast.report import print_report

    settings = load_config(config, set_ + _profiled(profile))
    summary = launch(settings, console, rotate)
    print_report(settings.run.dir, console)
    _finish({key: value for key, value in summary.items() if key != "examples"})


@app.command()
def serve(config: ConfigFile, set_: Overrides = []) -> None:
    """Only the vLLM servers, until Ctrl-C. Their URLs are printed; the key is in RUN/api_key, for you alone."""
    from rsi_fast.commands import serve as work

    work(load_config(config, set_), console)


@app.command()
def collect(
    config: ConfigFile,
    set_: Overrides = [],
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the first critic or ppo stage.")] = 1,
) -> None:
    """Only attempts at training tasks, into RUN/spool, with the model as it is; `train` can learn from them."""
    from rsi_fast.commands import collect as work

    _finish(work(load_config(config, set_), rounds, console))


@app.command()
def train(
    config: ConfigFile,
    set_: Overrides = [],
    spool: Annotated[Path | None, typer.Option(metavar="RUN", help="Learn from this run's spool.")] = None,
    profile: Profile = None,
) -> None:
    """Only the trainer, from the trajectories that a spool holds: no servers, no sandboxes."""
    from rsi_fast.commands import train as work

    _finish(work(load_config(config, set_ + _profiled(profile)), spool, console))


@app.command(name="eval")
def evaluate(
    config: ConfigFile,
    set_: Overrides = [],
    model: Annotated[Path | None, typer.Option(help="Model folder; default: model.path of the run file.")] = None,
    blank_observations: Annotated[
        bool, typer.Option("--blank-observations", help="Hide all command output from the agent.")
    ] = False,
) -> None:
    """Scores a model on the held-out tasks: strict success with its 95% interval, progress, success by kind."""
    from rsi_fast.commands import evaluate as work

    _finish(work(load_config(config, set_), model, blank_observations, console))


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run that is not at work.")],
    out: Annotated[Path, typer.Option(help="The model folder to write.")],
    checkpoint: Annotated[
        str, typer.Option(help="last, best (see trainer.keep_best), or a name: step-00000012.")
    ] = "last",
    critic: Annotated[bool, typer.Option("--critic", help="The critic, as a token classifier with one label.")] = False,
) -> None:
    """A checkpoint as a Hugging Face folder, which transformers and vLLM load. Needs no server and no GPU."""
    from rsi_fast.commands import export as work

    _finish(work(run_dir, out, checkpoint, critic))


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, finished or not.")]) -> None:
    """The stages of a run, before and after with 95% intervals, and where the time went."""
    from rsi_fast.report import print_report, summarise

    print_report(run_dir, console)
    result = summarise(run_dir)
    _finish({key: result[key] for key in ("heldout", "seconds", "weight_sync", "finished")})


@app.command()
def doctor(
    for_: Annotated[Path | None, typer.Option("--for", metavar="CONFIG", help="Can this run start here?")] = None,
    set_: Overrides = [],
) -> None:
    """What this machine has and lacks, and what each lack means."""
    from rsi_fast.doctor import run_doctor

    if not run_doctor(load_config(for_, set_) if for_ else None, console):
        raise typer.Exit(1)


def main() -> None:
    from rsi_fast.processes import Stopped

    try:
        app(standalone_mode=True)
    except UserError as error:
        console.print("[bold red]error:[/] ", end="")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except Stopped as stopped:
        console.print(
            f"stopped by {stopped}; all processes have ended and what was finished is kept: "
            "the same command goes on from the last checkpoint"
        )
        sys.exit(128 + stopped.number)
