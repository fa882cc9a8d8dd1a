"""Reports of runs, whole and broken off."""

import json

import pytest
from rich.console import Console

from rsi_fast.errors import UserError
from rsi_fast.report import print_report, summarise, wilson_interval

LINES = [
    {"stage": "sft", "kind": "sft", "round": 0, "step": 1, "sft/loss": 2.0, "seconds/actor": 1.0, "seconds/total": 1.0},
    {"stage": "sft", "kind": "sync", "round": 1, "step": 2, "sync/bytes": 8, "seconds/sync": 0.5, "seconds/total": 0.5},
    {
        "stage": "sft",
        "kind": "eval",
        "round": 1,
        "step": 3,
        "eval/name": "sft",
        "eval/strict": 0.25,
        "eval/progress": 0.5,
        "eval/n": 4,
        "eval/ci95": [0.05, 0.7],
        "eval/by_kind": {"copy": [1, 2], "move": [0, 2]},
        "seconds/total": 2.0,
    },
    {
        "stage": "ppo",
        "kind": "ppo",
        "round": 0,
        "step": 4,
        "rollout/success": 0.25,
        "reward/mean": 0.4,
        "critic/loss": 0.1,
        "rollout/invalid": 1,
        "alarms": ["entropy"],
        "rollout/truncated": 2,
        "rollout/logprob_abs_diff": 3e-7,
        "sync/bytes": 8,
        "seconds/collect": 4.0,
        "seconds/sync": 0.7,
        "seconds/total": 5.0,
    },
]


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return tmp_path


def test_summarise(run_dir):
    found = summarise(run_dir)
    assert found["heldout"]["sft"] == {"strict": 0.25, "progress": 0.5, "n": 4, "ci95": [0.05, 0.7]}
    assert found["stages"]["ppo"]["rounds"] == 1
    assert found["seconds"] == {"actor": 1.0, "collect": 4.0, "sync": 1.2, "eval": 2.0}
    assert found["weight_sync"]["count"] == 2
    assert (found["invalid"], found["truncated"], found["logprob_abs_diff_max"]) == (1, 2, 3e-7)
    assert found["alarms"] == {"entropy": 1}
    assert not found["finished"]


def test_a_line_cut_by_a_crash_is_left_out(run_dir):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "ppo", "kind": "pp')
    assert summarise(run_dir)["stages"]["ppo"]["rounds"] == 1


def test_print_report_shows_stages_and_before_and_after(run_dir):
    console = Console(record=True, width=120)
    print_report(run_dir, console)
    text = console.export_text()
    for words in (
        "not finished",
        "0.250",
        "0.050 to 0.700",
        "1/2",
        "collect",
        "2 weight syncs",
        "1 invalid attempts",
        "alarm: entropy",
    ):
        assert words in text


def test_a_folder_without_metrics(tmp_path):
    with pytest.raises(UserError, match="holds no metrics.jsonl"):
        summarise(tmp_path)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (0, 0, 0.0, 1.0)],
)
def test_wilson_interval(successes, n, low, high):
    """Values of the Wilson score interval as tables have them."""
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=1e-4)
