"""The run file: what is refused, and with which words."""

import pytest

from rsi_fast.config import changes, load_config
from rsi_fast.errors import UserError

GOOD = """
[run]
dir = "runs/x"
[model]
path = "models/x"
max_tokens = 1000
[tasks.train]
path = "tasks"
[rollout]
max_turn_tokens = 100
[[stages]]
kind = "critic"
rounds = 2
attempts = 4
critic_lr = 1e-3
[[stages]]
kind = "ppo"
rounds = 3
attempts = 4
actor_lr = 1e-4
critic_lr = 1e-3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(GOOD)
    return path


def refused(file, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(file, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.num_rank=2", ["trainer.num_rank: unknown key", "did you mean num_ranks?"]),
        ("trainer.zero.offload_params=cpu", ["unknown key", "did you mean offload_param?"]),
        ("stages.1.roundz=2", ["stages.1.roundz", "did you mean rounds?"]),
        ("treiner.num_ranks=2", ["treiner: unknown key", "did you mean trainer?"]),
        ("trainer.num_ranks=two", ["trainer.num_ranks", "integer", "'two'"]),
        ("credit.gamma=1.5", ["credit.gamma", "less than or equal to 1"]),
        ("credit.lam=nan", ["credit.lam"]),
        ("model.dtype=float16", ["model.dtype", "'bfloat16'", "'float16'"]),
        ("rollout.max_turn_tokens=1000", ["rollout.max_turn_tokens (1000) must be below model.max_tokens (1000)"]),
        ("trainer.micro_batch_tokens=999", ["must hold one whole trajectory"]),
        ("eval.at_start=true", ["eval_after need [tasks.heldout]"]),
        ("tasks.train.generator=demo", ["either path", "or generator"]),
        ("stages.0.actor_lr=0.1", ["actor_lr means nothing in a stage of kind critic"]),
        ("stages.1.kind=sft", ["stage of kind sft needs steps"]),
        ("stages.1.critic_lr=0", ["stage of kind ppo needs critic_lr"]),
        ("stages.0.name=ppo", ["two stages share a name"]),
        ("stages=[]", ["stages", "at least 1 item"]),
        ("run.seed=-1", ["run.seed"]),
        ("sandbox.kind=docker", ["sandbox.kind", "'bashkit'"]),
        ("trainer.clip_low=1", ["trainer.clip_low", "less than 1"]),
    ],
)
def test_what_is_wrong_is_named(file, override, words):
    message = refused(file, override)
    for word in words:
        assert word in message


def test_server_port_does_not_go_with_urls(file):
    assert "leave it out" in refused(file, 'server.urls=["http://127.0.0.1:1"]', "server.port=8000")


def test_the_port_for_prometheus_is_no_servers(file):
    ports = ["server.port=9463", "server.num_servers=2"]
    assert "monitor.prometheus_port (9464) is a server's" in refused(file, *ports, "monitor.prometheus_port=9464")
    load_config(file, [*ports, "monitor.prometheus_port=9465"])
    load_config(file, ["monitor.prometheus_port=1"])


def test_what_is_watched_may_change_in_a_run(file):
    old, new = (load_config(file, overrides) for overrides in ([], ["monitor.tensorboard=true", "run.seed=1"]))
    assert changes(old, new) == (["monitor.tensorboard = True (was False)"], ["run.seed = 1 (was 0)"])


def test_every_problem_is_listed_at_once(file):
    message = refused(file, "run.seed=-1", "credit.gamma=7")
    assert "run.seed" in message
    assert "credit.gamma" in message


def test_missing_and_broken_files(tmp_path):
    assert "does not exist" in refused(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[run\n")
    assert "cannot be read" in refused(tmp_path / "bad.toml")
    assert "cannot be read" in refused(tmp_path)


def test_missing_sections_are_named(tmp_path):
    (tmp_path / "empty.toml").write_text("")
    message = refused(tmp_path / "empty.toml")
    for section in ("run", "model", "stages"):
        assert f"{section}: Field required" in message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.seed", "expected section.key=value"),
        ("=3", "expected section.key=value"),
        ("stages.9.rounds=1", "9 is not one of the 2 entries"),
        ("run.dir.deeper=1", "dir is a value, not a section"),
        ("stages.0=1", "name a key of an entry"),
    ],
)
def test_overrides_that_make_no_sense(file, override, words):
    assert words in refused(file, override)


def test_overrides_take_toml_values_and_plain_words(file):
    config = load_config(file, ["run.seed=7", "run.dir=else/where", "stages.1.rounds=9", 'server.extra_args=["--x"]'])
    assert config.run.seed == 7
    assert str(config.run.dir) == "else/where"
    assert config.stages[1].rounds == 9
    assert config.server.extra_args == ["--x"]


def test_the_saved_config_loads_to_the_same(file, tmp_path):
    config = load_config(file, ["credit.family_weights={a=2.0}", "trainer.dual_clip=3.0"])
    config.save(tmp_path / "saved.toml")
    assert load_config(tmp_path / "saved.toml") == config


def test_the_run_files_of_the_repository_are_valid():
    from pathlib import Path

    files = sorted((Path(__file__).parent.parent / "configs").glob("*.toml"))
    assert files
    for path in files:
        load_config(path)
