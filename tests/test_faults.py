"""Faults in real runs: each ends in one message, a non-zero exit, no process left, nothing finished lost."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from live_runs import ROOT, LiveRun

pytestmark = [pytest.mark.faults, pytest.mark.timeout(280)]

END_S = 60  # from the fault to the end of the command
OVERRIDES = [
    "eval.at_start=false",
    "server.max_num_seqs=64",
    "server.extra_args=[]",
    "rollout.max_concurrency=6",
    "rollout.request_timeout_s=40",
    "rollout.stall_timeout_s=12",
    "trainer.sync_timeout_s=20",
    "stages.2.rounds=12",
    "stages.2.attempts=48",
]


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """One run that the tests below break again and again, in order; each start resumes it. For root, who may mount,
    the run lies on a file system of its own, which can be full."""
    folder = tmp_path_factory.mktemp("faults")
    if os.geteuid() == 0:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4g", "tmpfs", str(folder)], check=True)
    run = LiveRun(folder, *OVERRIDES)
    yield run
    for process in run.processes():
        process.kill()
    if os.geteuid() == 0:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def next_order(run: LiveRun) -> str:
    return f"03-ppo-{run.rounds():04d}"


def in_mid_round(run: LiveRun, started_at: int):
    """A new ppo round was finished since the start, and the next one has some of its attempts."""

    def condition() -> bool:
        return run.rounds() > started_at and 3 <= run.attempts(next_order(run)) < 40

    return condition


def check_end(run: LiveRun, before: set[str], expected: str, code: int | None = None) -> str:
    """The command ends in time with a message, leaves no process, and keeps every finished trajectory."""
    got, output = run.finish(END_S)
    assert got != 0 if code is None else got == code, output[-3000:]
    assert expected in output, output[-3000:]
    assert "Traceback" not in output.split("last lines of")[0], output[-3000:]
    assert run.processes() == []
    assert before <= run.trajectories()
    return output


def test_a_trainer_rank_killed_in_mid_step(live):
    live.start()
    live.wait_for(lambda: live.rounds() >= 1 and live.attempts(next_order(live)) == 48)
    before = live.trajectories()
    live.find("rsi_fast.trainer", str(live.run_dir), "-u").kill()
    output = check_end(live, before, "trainer")
    assert "trainer-" in output


def test_vllm_that_stops_answering(live):
    done = live.rounds()
    live.start()
    live.wait_for(in_mid_round(live, done))
    before = live.trajectories()
    live.find("EngineCore").suspend()
    check_end(live, before, "vLLM has stopped working")


def test_vllm_killed_in_mid_round(live):
    done = live.rounds()
    assert done >= 1
    live.start()
    live.wait_for(in_mid_round(live, done))
    before = live.trajectories()
    live.find("vllm.entrypoints").kill()
    check_end(live, before, "vllm-0 was killed by signal 9")


def test_ctrl_c_while_the_servers_start(live):
    live.start()
    live.wait_for(lambda: any("vllm.entrypoints" in " ".join(p.cmdline()) for p in live.processes()))
    live.process.send_signal(signal.SIGINT)
    check_end(live, live.trajectories(), "stopped by SIGINT", code=128 + signal.SIGINT)


def test_sigterm_in_mid_round(live):
    done = live.rounds()
    live.start()
    live.wait_for(in_mid_round(live, done))
    before = live.trajectories()
    live.process.send_signal(signal.SIGTERM)
    check_end(live, before, "stopped by SIGTERM", code=128 + signal.SIGTERM)


def test_the_launcher_killed(live):
    done = live.rounds()
    live.start()
    live.wait_for(in_mid_round(live, done))
    before = live.trajectories()
    live.process.kill()
    live.process.wait(timeout=5)
    deadline = time.monotonic() + END_S
    while live.processes():
        assert time.monotonic() < deadline, [p.cmdline() for p in live.processes()]
        time.sleep(0.2)
    assert before <= live.trajectories()


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system is mounted, which takes root")
def test_a_full_disk(live):
    done = live.rounds()
    live.start()
    live.wait_for(in_mid_round(live, done))
    before = live.trajectories()
    folder = live.run_dir.parent
    disk = os.statvfs(folder)
    used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
    try:
        subprocess.run(["mount", "-o", f"remount,size={used + 100_000}", str(folder)], check=True)
        check_end(live, before, "No space left on device")
    finally:
        subprocess.run(["mount", "-o", "remount,size=4g", str(folder)], check=True)


def test_after_all_that_the_run_ends_well(live):
    live.start()
    code, output = live.finish(200)
    assert code == 0, output[-3000:]
    assert live.processes() == []
    assert [line["step"] for line in live.lines()] == list(range(1, len(live.lines()) + 1))
    assert live.rounds() == 12


def test_the_soak_in_short(tmp_path):
    """Collection ahead of training, a rank and a server killed at random, started again: every trajectory is consumed
    once or dropped with a reason, and nothing is left."""
    command = [sys.executable, ROOT / "scripts" / "soak.py", "--rounds", "12", "--kills", "2", "--seed", "1"]
    done = subprocess.run([*command, "--out", tmp_path / "soak.json"], capture_output=True, text=True, timeout=270)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "soak.json").read_text())
    assert [kill["kind"] for kill in result["kills"]] == ["rank", "server"]
    assert result["rounds"] == 12
    assert result["consumed"] >= 32 + 12 * 12
    assert result["consumed"] + sum(result["dropped"].values()) == result["trajectories"] == 32 + 12 * 16
