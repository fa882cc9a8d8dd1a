"""What an operator sees: alarms, TensorBoard, Weights & Biases, Prometheus, the profile, and the stop at a loss that is
not a number."""

import gzip
import json
import socket
import struct
import time

import httpx
import pytest
import trainer_runs
from rich.console import Console

from rsi_fast import doctor
from rsi_fast.config import Monitor as Limits
from rsi_fast.config import load_config
from rsi_fast.errors import UserError
from rsi_fast.processes import wait_until
from rsi_fast.progress import RunProgress
from rsi_fast.trainer.alarms import alarm_texts, find_alarms
from rsi_fast.trainer.checkpoint import latest_checkpoint
from rsi_fast.trainer.metrics import Stopwatch
from rsi_fast.trainer.monitor import Monitor

GOOD = {
    "actor/entropy": 1.0,
    "actor/ratio_mean": 1.001,
    "actor/approx_kl": 0.004,
    "critic/explained_variance": 0.3,
    "rollout/attempts": 100,
    "rollout/invalid": 2,
    "rollout/truncated": 10,
}


def line(step: int, kind: str = "ppo", **changes) -> dict:
    place = {"stage": kind, "kind": kind, "round": step - 1, "step": step, "weight_version": step, "time": 1e9 + step}
    numbers = {key.replace("__", "/"): value for key, value in changes.items()}
    return place | (GOOD if kind in ("critic", "ppo") else {}) | numbers


# ---- alarms


def alarms_of(changes: list[dict], **limits) -> list[list[str]]:
    """The alarms after each of a run's rounds."""
    history: list[dict] = []
    for step, numbers in enumerate(changes, 1):
        new = line(step, **numbers)
        history.append(new | {"alarms": find_alarms(history, new, Limits(**limits))})
    return [each["alarms"] for each in history]


@pytest.mark.parametrize(
    ("key", "before", "beyond", "between", "clear", "name"),
    [
        ("actor__entropy", 1.0, 0.19, 0.22, 0.3, "entropy"),
        ("actor__ratio_mean", 1.0, 1.11, 1.09, 1.07, "ratio"),
        ("actor__ratio_mean", 1.0, 0.8, 0.91, 0.95, "ratio"),
        ("actor__approx_kl", 0.01, 0.2, 0.09, 0.01, "kl"),
        ("critic__explained_variance", 0.2, -0.01, 0.04, 0.06, "explained_variance"),
        ("rollout__invalid", 6, 11, 9, 7, "invalid"),
        ("rollout__truncated", 40, 51, 41, 39, "truncated"),
    ],
)
def test_an_alarm_stands_from_its_limit_until_it_is_clear(key, before, beyond, between, clear, name):
    values = [before] * 4 + [between, beyond, between, beyond, clear, between]
    found = alarms_of([{key: value} for value in values])
    assert found == [[]] * 5 + [[name]] * 3 + [[]] * 2


def test_a_usual_run_raises_none():
    assert alarms_of([{}] * 6) == [[]] * 6
    assert find_alarms([], line(1, "critic"), Limits()) == []


def test_the_critic_may_be_bad_while_it_warms_up():
    bad = {"critic__explained_variance": -0.5}
    assert alarms_of([bad] * 5) == [[]] * 4 + [["explained_variance"]]
    assert alarms_of([bad] * 2, critic_warmup_rounds=0) == [["explained_variance"]] * 2


@pytest.mark.parametrize(
    ("counts", "last"),
    [
        ([2, 2, 2, 9], ["invalid"]),  # far below the limit, but four times what it was
        ([2, 2, 2, 5], []),  # more than twice, but so few that it may be chance
        ([0, 0, 0, 0, 4], ["invalid"]),
        ([2, 9], []),  # nothing yet to measure a rise against
        ([6, 6, 6, 9], []),
    ],
)
def test_a_rise_is_an_alarm_below_the_limit_too(counts, last):
    assert alarms_of([{"rollout__invalid": count} for count in counts])[-1] == last


def test_a_rise_reckons_with_rounds_of_other_sizes():
    rounds = [{"rollout__truncated": 10}] * 4
    assert alarms_of([*rounds, {"rollout__truncated": 40, "rollout__attempts": 400}])[-1] == []
    assert alarms_of([*rounds, {"rollout__truncated": 10, "rollout__attempts": 25}])[-1] == ["truncated"]


def test_entropy_is_measured_from_the_round_after_the_last_fine_tuning():
    history = [line(1, actor__entropy=9.0) | {"alarms": []}, line(2, "sft")]
    assert find_alarms(history, line(3, actor__entropy=1.0), Limits()) == []
    history.append(line(3, actor__entropy=1.0) | {"alarms": []})
    assert find_alarms(history, line(4, actor__entropy=0.1), Limits()) == ["entropy"]


def test_an_alarm_is_told_once_in_the_console(tmp_path):
    values = [1.0, 0.1, 0.1, 0.9]
    lines = [line(i, actor__entropy=value, time=9e9) for i, value in enumerate(values, 1)]
    for i, each in enumerate(lines):
        each["alarms"] = find_alarms(lines[:i], each, Limits())
    lines.insert(2, line(9, "sync", time=9e9))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    console = Console(record=True, width=200)
    RunProgress(settings(tmp_path), console).update()
    told = [text for text in console.export_text().splitlines() if text.startswith("alarm")]
    assert told == [
        "alarm: entropy: the policy's entropy collapses (actor/entropy 0.1)",
        "alarm over: entropy (actor/entropy 0.9)",
    ]
    assert alarm_texts(["kl"], line(1)) == []


# ---- where the metrics go


def settings(run_dir, **monitor):
    file = run_dir / "run.toml"
    file.write_text(trainer_runs.run_file(run_dir, num_ranks=1))
    return load_config(file, [f"monitor.{key}={value}" for key, value in monitor.items()])


def log(monitor: Monitor, *lines: dict) -> None:
    for each in lines:
        monitor.log(each, Stopwatch())


def scalars(run_dir) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, round(e.value, 4)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_a_step_that_is_done_again_once(tmp_path):
    config = settings(tmp_path, tensorboard="true")
    killed = Monitor(config, 0)
    log(killed, line(1, "sft", sft__loss=2.0), *(line(step, actor__entropy=step) for step in (2, 3, 4)))
    resumed = Monitor(config, 2)  # the checkpoint was taken after step 2; the first writer was never closed
    log(resumed, line(3, actor__entropy=0.1), line(4, "eval", eval__strict=0.5, rollout__turns=3))
    resumed.close()
    shown = scalars(tmp_path)
    assert shown["actor/entropy"] == [(2, 2.0), (3, 0.1)]
    assert shown["sft/loss"] == [(1, 2.0)]
    assert shown["alarms/entropy"] == [(2, 0.0), (3, 1.0)]
    assert (shown["eval/strict"], shown["eval/rollout/turns"]) == ([(4, 0.5)], [(4, 3.0)])
    assert "rollout/turns" not in shown


def wandb_records(folder) -> list:
    """The records of an offline run's file, in LevelDB's log format: blocks of 32 KiB; a record that crosses their edge
    is in pieces (2, 3, 4: first, middle, last), others are whole (1)."""
    from wandb.proto.wandb_internal_pb2 import Record

    [path] = folder.glob("*.wandb")
    data, position, pieces, records = path.read_bytes(), 7, b"", []  # after the file's own header
    while position + 7 <= len(data):
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        if position + 7 + length > len(data):
            break  # still being written
        pieces += data[position + 7 : position + 7 + length]
        if kind in (1, 4):
            records.append(Record.FromString(pieces))
            pieces = b""
        position += 7 + length
        if (left := -position % 2**15) < 7:  # no room for another header: filled up
            position += left
    return records


def test_wandb_gets_a_step_that_is_done_again_once(tmp_path, monkeypatch):
    for place in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(place, str(tmp_path / "elsewhere"))
    log(Monitor(settings(tmp_path), 0), line(1, actor__entropy=1.0))  # W&B comes later, and gets this too
    config = settings(tmp_path, wandb_project="shells", wandb_mode="offline")
    first = Monitor(config, 1)
    log(first, line(2), line(3))
    first.close()
    time.sleep(1)  # wandb names an offline start by its second
    again = Monitor(config, 1)
    log(again, line(2, actor__entropy=7.0), line(3), line(4, actor__entropy=0.1))
    again.close()
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len({folder.name.rpartition("-")[2] for folder in folders}) == 1, "both starts are one run of W&B"
    # wandb's own process may write the file's end a moment after finish() returned.
    assert wait_until(lambda: all(any(r.HasField("exit") for r in wandb_records(f)) for f in folders), timeout_s=20)
    found = []
    for record in (record for folder in folders for record in wandb_records(folder)):
        if record.HasField("history"):
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            found.append((items["_step"], items["actor/entropy"], items["alarms/entropy"]))
        if record.HasField("run"):
            assert "server" not in {item.key for item in record.run.config.update}
    assert found == [(1, 1.0, 0), (2, 1.0, 0), (3, 1.0, 0), (4, 0.1, 1)]


def test_prometheus_has_the_last_values_and_listens_on_loopback_alone(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monitor = Monitor(settings(tmp_path, prometheus_port=port), 0)
    log(monitor, line(1), line(2, actor__entropy=0.125, rollout__invalid=30), line(3, "sync", sync__bytes=8))
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    for sample in (
        'rsi_fast_actor_entropy{kind="ppo",stage="ppo"} 0.125',
        'rsi_fast_sync_bytes{kind="sync",stage="sync"} 8.0',
        'rsi_fast_alarm{name="entropy"} 1.0',
        'rsi_fast_alarm{name="kl"} 0.0',
        'rsi_fast_orders_total{kind="ppo"} 2.0',
        'rsi_fast_trajectories_total{kind="ppo",valid="false"} 32.0',
        'rsi_fast_trajectories_total{kind="ppo",valid="true"} 168.0',
    ):
        assert sample in text.splitlines()
    # All of 127.0.0.0/8 is this machine: who listened on more than the one address would answer here too.
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.2:{port}/metrics")
    with pytest.raises(UserError, match=f"monitor.prometheus_port = {port} cannot be used .*in use"):
        Monitor(settings(tmp_path, prometheus_port=port), 0)
    monitor.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/metrics")


def test_one_that_fails_is_left_out_and_the_run_goes_on(tmp_path, capsys):
    monitor = Monitor(settings(tmp_path, tensorboard="true"), 0)
    [board] = monitor.sinks

    def full(line):
        raise OSError(28, "No space left on device")

    board.write = full
    log(monitor, line(1), line(2))
    assert capsys.readouterr().out.count("TensorBoard failed and is left out from here on: OSError") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


# ---- said before anything starts


@pytest.mark.parametrize(
    ("key", "module"),
    [("tensorboard=true", "tensorboard"), ("wandb_project=x", "wandb"), ("prometheus_port=9", "prom")],
)
def test_what_is_configured_and_not_installed(tmp_path, monkeypatch, key, module):
    config = settings(tmp_path, **dict([key.split("=")]))
    monkeypatch.setattr(doctor, "installed", lambda name: not name.startswith(module))
    with pytest.raises(UserError, match=rf"{module}.*monitor.{key.split('=')[0]} needs it: pip .*rsi-fast\[monitor\]"):
        doctor.check_can_start(config)


def test_a_port_in_use(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = settings(tmp_path, prometheus_port=(port := taken.getsockname()[1]))
        with pytest.raises(UserError, match=f"port {port}.*in use; choose another monitor.prometheus_port"):
            doctor.check_can_start(config)
        assert f"port {port}" not in {f.thing for f in doctor.run_findings(config, trains=False)}


def test_wandb_without_a_login(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match="Weights & Biases: not logged in. `wandb login`"):
        doctor.check_can_start(settings(tmp_path, wandb_project="shells"))


# ---- real ranks


@pytest.mark.e2e
def test_a_loss_that_is_not_a_number_stops_the_run_and_its_resume_is_shown_whole(tmp_path):
    """One rank's loss of the last actor step is not a number: all stop with its name, before anything of the round is
    published or saved. Then the run goes on without that; and its profile and its curves are whole."""
    overrides = ["monitor.tensorboard=true", "trainer.profile_round=0"]
    config = trainer_runs.make_run(tmp_path / "run", num_ranks=2, overrides=overrides)
    run = config.run.dir
    assert trainer_runs.start_ranks(config, {"ALTER": "nan 6"}).wait(timeout=120) != 0
    message = (run / "logs" / "trainer-0.error").read_text()
    assert "the actor's loss (nan) or the norm of its gradient (inf) is not a finite number" in message
    assert "rsi-fast export" in message
    assert [each["step"] for each in trainer_runs.metrics(config)] == [1, 2, 3, 4, 5]
    assert latest_checkpoint(run).name == "step-00000005"
    assert not [path for path in (run / "checkpoints").iterdir() if path.name > "step-00000005"]
    assert not (run / "models" / "ppo").exists()
    published = (run / "logs" / "trainer-0.log").read_text().count("weights are published")
    assert published == 2, "after sft, and after the round before"

    lines = trainer_runs.train(trainer_runs.with_ranks(config, 1))
    assert scalars(run)["actor/grad_norm"] == [(x["step"], round(x["actor/grad_norm"], 4)) for x in lines[-2:]]
    assert [each.get("alarms") is None for each in lines] == [True, True, True, False, False, False]
    assert sorted(path.name for path in (run / "profile").iterdir()) == ["critic-0000.json.gz", "ppo-0000.json.gz"]
    trace = json.loads(gzip.decompress((run / "profile" / "ppo-0000.json.gz").read_bytes()))
    assert any(event["name"] == "rsi_kernels::turn_gae" for event in trace["traceEvents"])
