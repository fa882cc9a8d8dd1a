"""Checkpoint files without ranks: cutting and joining, damage, random states, which are kept, and what may change."""

import fnmatch
import json
import random
import shutil
from pathlib import Path

import numpy
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from trainer_runs import ROOT

from rsi_fast import config as config_module
from rsi_fast.config import changes, load_config
from rsi_fast.errors import UserError
from rsi_fast.launch import run_directory
from rsi_fast.trainer import checkpoint as checkpoints
from rsi_fast.trainer import model_folder
from rsi_fast.trainer.tensor_files import TensorFile, crc32_of

SMOKE = ROOT / "configs" / "smoke.toml"
SHAPES = {"a": (5, 3), "b": (1,), "c": (0,), "d": (64,)}


@pytest.fixture
def whole() -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def write_shards(folder: Path, whole: dict[str, torch.Tensor], num_ranks: int) -> None:
    """As ZeRO-3 cuts them: every rank has an equal part, the last ones what is left."""
    folder.mkdir(parents=True)
    for rank in range(num_ranks):
        parts = {}
        for name, tensor in whole.items():
            chunks = tensor.flatten().split(max(1, -(-tensor.numel() // num_ranks)))
            parts[f"fp32/{name}"] = chunks[rank] if rank < len(chunks) else torch.empty(0)
        entries = [(name, tuple(part.shape), part.dtype) for name, part in parts.items()]
        with TensorFile(folder / f"rank-{rank:05d}.safetensors", entries) as file:
            for name, part in parts.items():
                file.add(name, part)
    index = {"num_ranks": num_ranks, "optimizer_step": 0, "parameters": SHAPES}
    (folder / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 70])
def test_any_range_is_read_from_any_number_of_ranks(tmp_path, whole, num_ranks):
    write_shards(tmp_path / "actor", whole, num_ranks)
    with checkpoints.Shards(tmp_path / "actor") as shards:
        for name, tensor in whole.items():
            assert torch.equal(shards.whole("fp32", name), tensor)
            for start, stop in ((0, 1), (2, tensor.numel()), (tensor.numel(), tensor.numel()), (3, 4)):
                expected = tensor.flatten()[start:stop]
                assert torch.equal(shards.read("fp32", name, start, max(start, min(stop, tensor.numel()))), expected)


def test_a_tensor_file_is_what_safetensors_reads(tmp_path):
    tensors = {
        "x": torch.randn(3, 5),
        "y": torch.randn(7, 2).bfloat16(),
        "none": torch.empty(0),
        "turned": torch.randn(4, 6).T,
        "count": torch.tensor(3),
    }
    path = tmp_path / "f.safetensors"
    with TensorFile(path, [(name, tuple(x.shape), x.dtype) for name, x in tensors.items()]) as file:
        for name, x in tensors.items():
            file.add(name, x)
    read = load_file(path)
    assert all(torch.equal(read[name], x) for name, x in tensors.items())
    assert (file.size, file.crc32) == (path.stat().st_size, crc32_of(path))
    with safe_open(path, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_a_tensor_file_takes_only_what_was_announced(tmp_path):
    file = TensorFile(tmp_path / "f.safetensors", [("x", (2,), torch.float32), ("y", (2,), torch.float32)])
    with pytest.raises(ValueError, match="expected"):
        file.add("x", torch.zeros(3))
    with pytest.raises(ValueError, match="lacks 1 tensors, the next is y"):
        file.close()


def test_a_large_model_is_cut_into_files_with_an_index(tmp_path, monkeypatch, whole):
    monkeypatch.setattr(model_folder, "MAX_FILE_BYTES", 100)
    like = tmp_path / "like"
    like.mkdir()
    (like / "config.json").write_text('{"model_type": "x"}')
    (like / "model.safetensors").write_text("not to be copied")
    entries = [(name, shape, torch.float32) for name, shape in SHAPES.items()]
    model_folder.write_model_folder(tmp_path / "out", like, entries, whole.items(), {"num_labels": 1})
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * (15 + 1 + 64)
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], whole[name])
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "x", "num_labels": 1}
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_damage_is_found_by_size_and_by_checksum(tmp_path, whole):
    write_shards(tmp_path / "actor", whole, 2)
    names = ("actor/index.json", "actor/rank-00000.safetensors", "actor/rank-00001.safetensors")
    files = {name: [(tmp_path / name).stat().st_size, crc32_of(tmp_path / name)] for name in names}
    (tmp_path / "state.json").write_text(json.dumps({"files": files}))
    assert checkpoints.find_damage(tmp_path) == []
    path = tmp_path / names[1]
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert checkpoints.find_damage(tmp_path) == [f"{names[1]} has another checksum than when it was written"]
    path.write_bytes(data[:-8])
    assert checkpoints.find_damage(tmp_path) == [f"{names[1]} has {len(data) - 8} bytes, expected {len(data)}"]
    path.unlink()
    assert checkpoints.find_damage(tmp_path) == [f"{names[1]} is missing"]
    assert [len(checkpoints.find_damage(tmp_path, part, 2)) for part in (0, 1)] == [0, 1], "ranks share the work"


def test_random_states_come_back_whole():
    """numpy's place in its block of numbers and the second Gaussian that it and Python keep in hand, too."""
    torch.randn(3), numpy.random.standard_normal(3), random.gauss(0, 1)
    states = json.loads(json.dumps(checkpoints.random_states()))

    def draw() -> list:
        return [
            *torch.randn(3).tolist(),
            *numpy.random.standard_normal(700),
            *(random.gauss(0, 1) for _ in range(700)),
            numpy.random.randint(1000),
        ]

    expected = draw()
    draw()
    checkpoints.restore_random_states(states)
    assert draw() == expected


def make_checkpoints(run_dir: Path, successes: dict[int, float | None]) -> None:
    for step, success in successes.items():
        folder = run_dir / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
        if success is not None:
            checkpoints.note_score(run_dir, success)


def test_the_last_and_the_best_are_kept(tmp_path):
    make_checkpoints(tmp_path, {1: 0.5, 2: 0.9, 3: 0.5, 4: 0.1, 5: None})
    (tmp_path / "checkpoints" / "step-00000006").mkdir()  # a removal that was cut: no state.json
    (tmp_path / "checkpoints" / ".step-00000006.part").mkdir()
    checkpoints.tidy(tmp_path, keep_last=2, keep_best=2)
    left = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert left == [f"step-0000000{i}" for i in (2, 3, 4, 5, 6)], "of equal ones the newer"
    assert [p.name for p in checkpoints.best_checkpoints(tmp_path)][:2] == ["step-00000002", "step-00000003"]
    checkpoints.tidy(tmp_path, keep_last=1, keep_best=0)
    assert checkpoints.checkpoints(tmp_path) == [tmp_path / "checkpoints" / "step-00000005"]


def test_the_first_attempts_after_a_checkpoint_are_its_score(tmp_path):
    checkpoints.note_score(tmp_path, 0.2)  # there is none yet
    make_checkpoints(tmp_path, {1: None, 2: 0.3})
    checkpoints.note_score(tmp_path, 0.8)  # the second round: of other weights
    assert json.loads((tmp_path / "checkpoints" / "step-00000002" / "score.json").read_text()) == {"success": 0.3}
    assert not (tmp_path / "checkpoints" / "step-00000001" / "score.json").exists()


def test_a_checkpoint_moved_aside_is_not_looked_at(tmp_path):
    make_checkpoints(tmp_path, {1: None, 2: None})
    folder = tmp_path / "checkpoints" / "step-00000002"
    shutil.move(folder, folder.with_name("step-00000002.damaged"))
    assert checkpoints.latest_checkpoint(tmp_path).name == "step-00000001"


def test_a_run_goes_on_with_other_ranks_but_not_with_another_recipe(tmp_path, capsys):
    settings = [f"run.dir={tmp_path / 'run'}"]
    first = load_config(SMOKE, settings)
    with run_directory(first):
        pass
    second = load_config(SMOKE, [*settings, "trainer.num_ranks=1", "server.port=1234", "stages.2.checkpoint_every=2"])
    with run_directory(second):
        assert load_config(tmp_path / "run" / "config.toml") == second
    assert "trainer.num_ranks = 1 (was 2)" in capsys.readouterr().err
    third = load_config(SMOKE, [*settings, "run.seed=1", "stages.2.actor_lr=1.0", "trainer.num_ranks=4"])
    with pytest.raises(
        UserError, match=r"run\.seed = 1 \(was 0\), stages\.2\.actor_lr = 1\.0 \(was 0\.0003\)"
    ) as caught:
        run_directory(third).__enter__()
    assert "num_ranks" not in str(caught.value)
    assert load_config(tmp_path / "run" / "config.toml") == second


def test_every_key_that_may_change_is_one():
    config = load_config(SMOKE)
    known = config_module._flat(config.model_dump(mode="json"))
    for pattern in config_module.MAY_CHANGE:
        assert fnmatch.filter(known, pattern), pattern
    assert changes(config, config) == ([], [])
