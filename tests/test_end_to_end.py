"""One short whole run: vLLM, two ZeRO-3 ranks, weight sync, bashkit."""

import json
import random
import subprocess
import sys
import time

import pytest
from live_runs import ROOT, LiveRun

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(280)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = LiveRun(tmp_path_factory.mktemp("e2e"))
    run.start()
    run.wait_for(lambda: (run.run_dir / "servers.json").exists())
    run.key = run.find("vllm.entrypoints").environ()["VLLM_API_KEY"]
    code, output = run.finish(200)
    assert code == 0, output[-4000:]
    return run, output


def test_the_run_directory_is_complete(finished):
    run, _ = finished
    for name in ("config.toml", "versions.json", "metrics.jsonl", "spool", "checkpoints", "logs", "summary.json"):
        assert (run.run_dir / name).exists(), name
    logs = {path.name for path in (run.run_dir / "logs").iterdir()}
    assert {"vllm-0.log", "collector.log", "trainer-0.log", "trainer-1.log"} <= logs


def test_every_stage_ran_and_weights_went_to_vllm(finished):
    run, _ = finished
    lines = run.lines()
    assert [line["kind"] for line in lines] == ["eval"] + ["sft"] * 4 + ["sync", "critic", "ppo", "ppo", "eval"]
    versions = {
        turn["weight_version"]
        for path in (run.run_dir / "spool").glob("03-ppo-eval/*.json")
        for turn in json.loads(path.read_text())["turns"]
    }
    assert versions == {3}, "sft and two rounds of ppo make three syncs, and the evaluation comes after the last"


def test_vllm_and_trainer_agree_on_log_probs(finished):
    run, _ = finished
    differences = [line["rollout/logprob_abs_diff"] for line in run.lines() if line["kind"] in ("critic", "ppo")]
    assert len(differences) == 3
    assert all(0 < difference < 1e-4 for difference in differences), differences


def test_the_summary_says_what_happened(finished):
    run, output = finished
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["weight_sync"]["count"] == 3
    assert summary["heldout"]["ppo"]["n"] == 16
    assert summary["seconds"]["total"] > summary["seconds"]["collect"] > 0
    assert json.loads(output.strip().splitlines()[-1])["seed"] == 0


def test_nothing_is_left_behind_and_the_key_is_in_no_file(finished):
    run, output = finished
    assert run.processes() == []
    assert len(run.key) > 30
    files = [path for path in run.run_dir.rglob("*") if path.is_file() and "checkpoints" not in path.parts]
    assert len(files) > 100
    assert not [path for path in files if run.key.encode() in path.read_bytes()]
    assert run.key not in output


def test_a_second_call_finds_the_finished_run(finished):
    run, _ = finished
    run.start()
    code, output = run.finish(60)
    assert code == 0
    assert "holds a finished run" in output


def test_the_trainer_alone_learns_the_same_from_the_spool(finished, tmp_path):
    """`rsi-fast train --spool` repeats the run's training: the same metrics, no servers."""
    run, _ = finished
    command = [sys.executable, "-m", "rsi_fast", "train", str(run.file), "--spool", str(run.run_dir)]
    command += ["--set", f"run.dir={tmp_path / 'again'}"]
    subprocess.run(command, check=True, cwd=ROOT, timeout=150)
    again = [json.loads(line) for line in (tmp_path / "again" / "metrics.jsonl").read_text().splitlines()]
    keys = ("sft/loss", "reward/mean", "actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm")
    for mine, theirs in zip(run.lines(), again, strict=True):
        assert {k: mine[k] for k in keys if k in mine} == {k: theirs[k] for k in keys if k in theirs}


def test_a_run_killed_twice_goes_on_as_if_it_had_not_been(finished, tmp_path):
    """Killed with -9, in the middle of a collection and in the middle of training, and started again: the same orders,
    the same tokens with the same log-probs, the same metrics, the same weights. The first time only those processes
    are killed that others descend from, and these end by themselves; the second time all are."""
    run, _ = finished
    killed = LiveRun(tmp_path)
    killed.start()
    killed.wait_for(lambda: 5 <= killed.attempts("02-critic-0000") < 30)
    killed.kill_parents()
    killed.start()
    killed.wait_for(lambda: killed.rounds() == 1 and killed.attempts("03-ppo-0001") == 32)
    time.sleep(random.uniform(0, 0.5))  # the round takes longer than that
    assert killed.rounds() == 1
    killed.kill_all()
    killed.start()
    code, output = killed.finish(200)
    assert code == 0, output[-4000:]
    assert orders(killed) == orders(run)
    assert samples(killed) == samples(run)
    assert [numbers(line) for line in killed.lines()] == [numbers(line) for line in run.lines()]
    weights = [r.run_dir / "models" / "ppo" / "model.safetensors" for r in (killed, run)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def orders(run: LiveRun) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run.run_dir / "orders").iterdir()}


def samples(run: LiveRun) -> dict[str, dict]:
    """All of the trajectories but the seconds."""
    found = {}
    for name in run.trajectories():
        trajectory = json.loads((run.run_dir / name).read_text())
        del trajectory["timing"]
        for turn in trajectory["turns"]:
            del turn["generate_s"], turn["sandbox_s"]
        found[name] = trajectory
    return found


def numbers(line: dict) -> dict:
    return {key: value for key, value in line.items() if not key.startswith(("seconds/", "throughput/", "time"))}


def test_eval_scores_the_exported_model(finished, tmp_path):
    """A folder that `rsi-fast export` made of the last checkpoint is the one that the run left; vLLM loads it. And with
    observations blanked, no kind of task that needs an output is solved."""
    run, _ = finished
    out = tmp_path / "exported"
    command = [sys.executable, "-m", "rsi_fast", "export", str(run.run_dir), "--out", str(out)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=60)
    for path in (run.run_dir / "models" / "ppo").iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    command = [sys.executable, "-m", "rsi_fast", "eval", str(run.file), "--blank-observations", "--model", str(out)]
    done = subprocess.run(command, check=True, cwd=ROOT, timeout=150, capture_output=True, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["eval/n"] == 16
    solved = {kind: successes for kind, (successes, _) in result["eval/by_kind"].items() if kind.startswith("look_")}
    assert solved
    assert not any(solved.values())
