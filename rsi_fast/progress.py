"""What a run is doing, for a person: bars on a terminal, plain lines elsewhere."""

import json
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rsi_fast.config import Config
from rsi_fast.spool import read_json
from rsi_fast.trainer.alarms import alarm_texts

SHOWN = (
    ("sft/loss", "loss {:.3f}"),
    ("rollout/success", "success {:.3f}"),
    ("reward/mean", "reward {:.3f}"),
    ("critic/loss", "value loss {:.4f}"),
    ("critic/explained_variance", "explained variance {:.2f}"),
    ("actor/approx_kl", "kl {:.4f}"),
    ("actor/clip_fraction", "clip {:.3f}"),
    ("rollout/logprob_abs_diff", "logprob diff {:.1e}"),
    ("eval/strict", "strict success {:.3f}"),
    ("eval/progress", "progress {:.3f}"),
    ("sync/bytes", "sent {:.3g} B"),
    ("seconds/total", "{:.1f} s"),
)


def waiting(console: Console, text: str) -> Progress:
    """A context that shows how long something without a known end has taken; nothing where there is no terminal."""
    bar = Progress(
        TextColumn(text), TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
    )
    bar.add_task(text, total=None)
    return bar


class RunProgress:
    """Follows metrics.jsonl and collect.json of a run."""

    def __init__(self, config: Config, console: Console):
        self.config, self.console = config, console
        self.run_dir = config.run.dir
        self.started = time.time()
        self.offset = 0
        self.bars = Progress(
            TextColumn("{task.description:<22}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.total = sum(stage.steps or stage.rounds for stage in config.stages)
        self.plan = self.bars.add_task("steps and rounds", total=self.total, rate="")
        self.collection = self.bars.add_task("attempts", total=None, rate="")
        self.order = ""
        self.alarms: list[str] = []

    def __enter__(self) -> "RunProgress":
        self.bars.start()
        return self

    def __exit__(self, *exception) -> None:
        self.bars.stop()

    def update(self) -> None:
        for line in self._new_lines():
            new = line["time"] >= self.started  # a resumed run has lines of earlier starts
            if new and (line["kind"] != "sft" or line["round"] % 20 == 0):
                self.console.print(describe(line), highlight=False, markup=False, soft_wrap=True)
            for text in alarm_texts(self.alarms, line) if new else ():
                self.console.print(text, style="bold red", highlight=False, markup=False, soft_wrap=True)
            self.alarms = line.get("alarms", self.alarms)
            self.bars.update(self.plan, completed=self._done(line))
        state = read_json(self.run_dir / "collect.json")
        if state:
            if state["order"] != self.order:
                self.order = state["order"]
                self.bars.reset(self.collection, total=state["total"], description=self.order)
            rate = f"{state.get('rate', 0):.1f}/s"
            self.bars.update(self.collection, completed=state["done"], total=state["total"], rate=rate)

    def _done(self, line: dict) -> int:
        before = 0
        for stage in self.config.stages:
            if stage.label == line["stage"]:
                return before + (line["round"] + 1 if line["kind"] == stage.kind else stage.steps or stage.rounds)
            before += stage.steps or stage.rounds
        return 0

    def _new_lines(self) -> list[dict]:
        path = self.run_dir / "metrics.jsonl"
        if not path.exists():
            return []
        if path.stat().st_size < self.offset:  # the trainer dropped lines that it does again
            self.offset = 0
        with path.open("rb") as file:
            file.seek(self.offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def describe(line: dict) -> str:
    """One metrics line, short."""
    parts = [form.format(line[key]) for key, form in SHOWN if key in line]
    return f"{line['stage']:>8} {line['kind']:<6} {line['round']:>4}  " + "  ".join(parts)
