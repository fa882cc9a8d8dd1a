"""The trainer on real ZeRO-3 ranks, without servers: the same run on one rank and on two, and after a kill."""

import signal
import time

import pytest
import torch
import trainer_runs

from rsi_fast.trainer.checkpoint import latest_checkpoint

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """A finished run on two ranks: (folder, config, metrics)."""
    folder = tmp_path_factory.mktemp("runs")
    config = trainer_runs.make_run(folder / "two", num_ranks=2)
    return folder, config, trainer_runs.train(config)


def numbers(lines: list[dict]) -> list[dict]:
    """Metrics without what time and place decide."""
    return [{k: v for k, v in line.items() if not k.startswith(("seconds/", "throughput/", "time"))} for line in lines]


def test_every_stage_leaves_its_lines_and_models(two_ranks):
    folder, config, lines = two_ranks
    assert [line["kind"] for line in lines] == ["sft", "sft", "sync", "critic", "ppo", "ppo"]
    assert (config.run.dir / "done.json").exists()
    assert {p.name for p in (config.run.dir / "models").iterdir()} == {"sft", "ppo"}
    assert lines[-1]["actor/ratio_mean"] == pytest.approx(1, abs=0.1)


def test_one_rank_with_other_micro_batches_learns_the_same(two_ranks):
    """Traps 8 and 9: neither ranks nor the cut into micro-batches change losses, gradient norms or weights."""
    folder, config, lines = two_ranks
    other = trainer_runs.make_run(folder / "one", num_ranks=1, micro_batch_tokens=300)
    for mine, theirs in zip(numbers(lines), numbers(trainer_runs.train(other)), strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            if isinstance(value, float):
                assert theirs[key] == pytest.approx(value, rel=2e-3, abs=2e-5), key
            else:
                assert theirs[key] == value, key
    one, two = trainer_runs.final_weights(other), trainer_runs.final_weights(config)
    for name in two:
        # Adam's first steps are near the sign of the gradient, which rounding turns where it is about 0.
        assert (one[name] - two[name]).abs().mean() < 2e-5, name


def test_a_killed_run_goes_on_as_if_it_had_not_been(two_ranks):
    """Trap 19: killed with -9 after a checkpoint, resumed: the same metrics and bit-equal weights."""
    folder, config, lines = two_ranks
    other = trainer_runs.make_run(folder / "killed", num_ranks=2)
    process = trainer_runs.start_ranks(other)
    deadline = time.monotonic() + 120
    while not any((other.run.dir / "checkpoints").glob("step-00000003")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    trainer_runs.kill_tree(process, signal.SIGKILL)
    assert not (other.run.dir / "done.json").exists(), "the run was over before it could be killed"
    assert latest_checkpoint(other.run.dir) is not None
    assert numbers(trainer_runs.train(other)) == numbers(lines)
    killed, whole = trainer_runs.final_weights(other), trainer_runs.final_weights(config)
    assert all(torch.equal(killed[name], whole[name]) for name in whole)


def test_missing_weights_stop_the_run(tmp_path):
    """Trap 25: a model folder that lacks a parameter ends the run with its name."""
    from safetensors.torch import load_file, save_file

    config = trainer_runs.make_run(tmp_path / "run", num_ranks=1)
    file = config.model.path / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    process = trainer_runs.start_ranks(config)
    assert process.wait(timeout=120) != 0
    message = (config.run.dir / "logs" / "trainer-0.error").read_text()
    assert "missing: model.layers.1.mlp.up_proj.weight" in message
