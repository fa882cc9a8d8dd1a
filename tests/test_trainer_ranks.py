"""The trainer on real ZeRO-3 ranks, without servers: the same run on one rank and on two, after kills, and with
other ranks than before."""

import shutil
from pathlib import Path

import pytest
import torch
import trainer_runs
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from rsi_fast.commands import export
from rsi_fast.config import Config
from rsi_fast.errors import UserError
from rsi_fast.trainer.checkpoint import Shards, checkpoints, find_damage, latest_checkpoint
from rsi_fast.trainer.ledger import Ledger, find_problems
from rsi_fast.trainer.models import load_critic

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


def assert_close(lines: list[dict], expected: list[dict]) -> None:
    for mine, theirs in zip(numbers(expected), numbers(lines), strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            if key.startswith("batch/"):  # the cut itself
                continue
            if isinstance(value, float):
                assert theirs[key] == pytest.approx(value, rel=2e-3, abs=2e-5), key
            else:
                assert theirs[key] == value, key


def test_one_rank_with_other_micro_batches_learns_the_same(two_ranks):
    """Traps 8 and 9: neither ranks nor the cut into micro-batches change losses, gradient norms or weights."""
    folder, config, lines = two_ranks
    other = trainer_runs.make_run(folder / "one", num_ranks=1, micro_batch_tokens=300)
    assert_close(trainer_runs.train(other), lines)
    one, two = trainer_runs.final_weights(other), trainer_runs.final_weights(config)
    for name in two:
        # Adam's first steps are near the sign of the gradient, which rounding turns where it is about 0.
        assert (one[name] - two[name]).abs().mean() < 2e-5, name


POINTS = {  # of altered_trainer.py -> the newest checkpoint then: the step of metrics after which it was taken
    "between_engines": 3,
    "before_rename": 3,
    "in_round": 4,
    "after_rename": 5,
}


def test_a_run_killed_at_the_worst_moments_goes_on_as_if_it_had_not_been(two_ranks):
    """Trap 19: everything killed with -9, in mid-round and in every part of a checkpoint; each time started again. The
    same metrics, and bit-equal weights of both engines."""
    folder, config, lines = two_ranks
    other = trainer_runs.make_run(folder / "killed", num_ranks=2)
    for point, step in POINTS.items():
        trainer_runs.train_until_killed(other, point)
        newest = latest_checkpoint(other.run.dir)
        assert newest == (other.run.dir / "checkpoints" / f"step-{step:08d}"), point
        assert not find_damage(newest)
    assert numbers(trainer_runs.train(other)) == numbers(lines)
    killed, whole = trainer_runs.final_weights(other), trainer_runs.final_weights(config)
    assert all(torch.equal(killed[name], whole[name]) for name in whole)
    assert_same_states(latest_checkpoint(other.run.dir), latest_checkpoint(config.run.dir))
    left = sorted(path.name for path in (other.run.dir / "checkpoints").iterdir())
    assert left == [f"step-0000000{i}" for i in (3, 4, 5, 6)], "what the kills left half done is gone"
    assert find_problems(other.run.dir) == []
    consumed = [len(entry["consumed"]) for entry in Ledger(other.run.dir).entries().values()]
    assert consumed == [8, 8, 8], "each round's, once"


def assert_same_states(one: Path, two: Path) -> None:
    """Weights and both moments of both engines, bit for bit, whatever the number of ranks."""
    for name in ("actor", "critic"):
        with Shards(one / name) as a, Shards(two / name) as b:
            assert a.shapes == b.shapes
            assert a.optimizer_step == b.optimizer_step > 0
            for kind in ("fp32", "exp_avg", "exp_avg_sq"):
                for parameter in a.shapes:
                    assert torch.equal(a.whole(kind, parameter), b.whole(kind, parameter)), (name, kind, parameter)


def copy_of_run(config: Config, folder: Path, until: int) -> Config:
    """A run that has come as far as the checkpoint of a step, and was stopped."""
    other = config.model_copy(update={"run": config.run.model_copy(update={"dir": folder})})
    shutil.copytree(config.run.dir, folder)
    other.save(folder / "config.toml")
    (folder / "done.json").unlink()
    for path in checkpoints(folder):
        if path.name > f"step-{until:08d}":
            shutil.rmtree(path)
    return other


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_checkpoint_of_two_ranks_goes_on_with_another_number(two_ranks, num_ranks):
    """The states go over bit for bit, and the metrics are those of the run that kept two ranks, but for rounding."""
    folder, config, lines = two_ranks
    other = copy_of_run(config, folder / f"on-{num_ranks}", until=4)
    resaved = folder / f"resaved-{num_ranks}"
    resaved.mkdir()
    again = trainer_runs.train(trainer_runs.with_ranks(other, num_ranks), {"ALTER": f"resave {resaved}"})
    assert [path.name for path in checkpoints(resaved)] == ["step-00000004"]
    assert_same_states(latest_checkpoint(resaved), config.run.dir / "checkpoints" / "step-00000004")
    assert_close(again, lines)


def test_export_of_a_checkpoint_is_the_models_folder(two_ranks, tmp_path):
    """Two ranks' files make the very weights that all ranks gathered at the end of the stage, for transformers too."""
    _, config, _ = two_ranks
    run = config.run.dir
    export(run, tmp_path / "actor", "last", critic=False)
    ours, theirs = load_file(tmp_path / "actor" / "model.safetensors"), trainer_runs.final_weights(config)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    greedy = [
        AutoModelForCausalLM.from_pretrained(folder).generate(
            torch.tensor([[3, 1, 4, 1, 5]]), attention_mask=torch.ones(1, 5), max_new_tokens=20, do_sample=False
        )
        for folder in (tmp_path / "actor", run / "models" / "ppo")
    ]
    assert torch.equal(*greedy)
    with pytest.raises(UserError, match="is not an empty folder"):
        export(run, tmp_path / "actor", "last", critic=False)
    with pytest.raises(UserError, match="no checkpoint step-00000099; there: step-00000003, step-00000004"):
        export(run, tmp_path / "other", "step-00000099", critic=False)


def test_an_exported_critic_gives_the_critics_values(two_ranks, tmp_path):
    """As a token classifier: its logit at a token is the value that the critic gives the next one."""
    _, config, _ = two_ranks
    export(config.run.dir, tmp_path / "critic", "last", critic=True)
    critic = load_critic(config.model.path, torch.float32, seed=0)
    with Shards(latest_checkpoint(config.run.dir) / "critic") as shards:
        state = {name: shards.whole("fp32", critic.folder_name(name)) for name, _ in critic.named_parameters()}
    critic.load_state_dict(state)
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9]])
    with torch.no_grad():
        values = critic.eval()(tokens, {})
        logits = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic").eval()(tokens).logits
    assert logits.shape == (1, 6, 1)
    assert values.abs().max() > 1e-3
    torch.testing.assert_close(logits[:, :-1, 0], values[:, 1:])


def test_a_damaged_checkpoint_stops_the_run_with_its_name(two_ranks):
    folder, config, _ = two_ranks
    other = copy_of_run(config, folder / "damaged", until=5)
    newest = latest_checkpoint(other.run.dir)
    with (newest / "critic" / "rank-00001.safetensors").open("r+b") as file:
        file.truncate(1000)
    process = trainer_runs.start_ranks(other)
    assert process.wait(timeout=120) == 1
    message = (other.run.dir / "logs" / "trainer-0.error").read_text()
    assert f"the checkpoint {newest} could not be loaded (critic/rank-00001.safetensors has 1000 bytes" in message
    assert f"move it out of {newest.parent}: the run then goes on from the one before" in message


def test_a_full_disk_leaves_the_checkpoint_before(two_ranks):
    folder, _, _ = two_ranks
    config = trainer_runs.make_run(folder / "full", num_ranks=2)
    process = trainer_runs.start_ranks(config, {"ALTER": "full "})
    assert process.wait(timeout=120) == 1
    message = (config.run.dir / "logs" / "trainer-1.error").read_text()
    assert "step-00000004 could not be written (rank 0: No space left on device; rank 1: No space left" in message
    assert f"{latest_checkpoint(config.run.dir)} is whole and stays. Make room" in message
    left = sorted(p.name for p in (config.run.dir / "checkpoints").iterdir())
    assert left == [f"step-0000000{i}" for i in (1, 2, 3)]


def test_missing_weights_stop_the_run(tmp_path):
    """Trap 25: a model folder that lacks a parameter ends the run with its name."""
    from safetensors.torch import save_file

    config = trainer_runs.make_run(tmp_path / "run", num_ranks=1)
    file = config.model.path / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    process = trainer_runs.start_ranks(config)
    assert process.wait(timeout=120) != 0
    message = (config.run.dir / "logs" / "trainer-0.error").read_text()
    assert "missing: model.layers.1.mlp.up_proj.weight" in message
