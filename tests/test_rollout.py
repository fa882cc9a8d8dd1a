"""Collector and client against an HTTP server that speaks vLLM's protocol and answers as each test tells it."""

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rsi_fast import config as run_config
from rsi_fast.errors import UserError
from rsi_fast.rollout.agent import make_agent
from rsi_fast.rollout.client import ServerError, VllmClient
from rsi_fast.rollout.collector import collect_order, serve_orders
from rsi_fast.spool import Order, Spool
from rsi_fast.tasks import task_folders
from rsi_fast.trainer.ledger import Round

ROOT = Path(__file__).parent.parent
AGENT = make_agent("plain", ROOT / "models" / "demo-base")
END = AGENT.stop_token_ids[0]


class FakeVllm:
    """`reply(body, number)` makes the choice of a completion: {"token_ids", "logprobs", "finish_reason"}."""

    def __init__(self, reply):
        self.bodies: list[dict] = []
        self.version, self.generated, self.healthy = "0", 0, True
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                if self.path == "/weight_info":
                    self.answer(200, json.dumps({"weight_version": outer.version}))
                elif self.path == "/metrics":
                    self.answer(200, f'vllm:generation_tokens_total{{engine="0"}} {outer.generated}\n')
                else:
                    self.answer(200 if outer.healthy else 503, "")

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                choice = reply(body, len(outer.bodies) - 1)
                if isinstance(choice, int):
                    self.answer(choice, "the engine is dead")
                    return
                logprobs = choice.get("logprobs", [-0.5] * len(choice["token_ids"]))
                full = {"prompt_token_ids": body["prompt"]} | choice | {"logprobs": {"token_logprobs": logprobs}}
                self.answer(200, json.dumps({"choices": [full]}))

            def answer(self, status, text):
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(text.encode())))
                    self.end_headers()
                    self.wfile.write(text.encode())
                except BrokenPipeError:
                    self.close_connection = True  # the client gave up waiting, which some tests are about

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def fake():
    """Makes fake servers and stops them."""
    made = []

    def make(reply) -> FakeVllm:
        made.append(FakeVllm(reply))
        return made[-1]

    yield make
    for server in made:
        server.server.shutdown()


def settings(run_dir: Path, **rollout) -> run_config.Config:
    limits = {"agent": "plain", "max_turns": 4, "max_turn_tokens": 16, "max_observation_tokens": 20} | rollout
    return run_config.Config.model_validate(
        {
            "run": {"dir": run_dir},
            "model": {"path": ROOT / "models" / "demo-base", "device": "cpu", "max_tokens": 96},
            "tasks": {"train": {"generator": "demo", "count": 24}},
            "sandbox": {"command_timeout_s": 0.5, "output_limit_bytes": 200},
            "rollout": {"request_timeout_s": 5.0, "stall_timeout_s": 1.0} | limits,
            "trainer": {"importance_cap": 2.0},
            "stages": [{"kind": "ppo", "rounds": 1, "attempts": 1, "actor_lr": 1e-3, "critic_lr": 1e-3}],
        }
    )


def order(config: run_config.Config, *kinds: str, **changes) -> Order:
    folders = task_folders(config.tasks.train, 0, config.run.dir)
    names = [next(f.name for f in folders if f.name.startswith(f"{kind}-")) for kind in kinds]
    fields = {"name": "01-ppo-0000", "task_set": "train", "tasks": names, "weight_version": 0, "temperature": 0.7}
    return Order(**(fields | {"seed": 1} | changes))


def says(*commands: str):
    """Replies with these commands in turn, by the number of turns that the prompt already has."""

    def reply(body: dict, _: int) -> dict:
        turn = body["prompt"].count(END)
        return {"token_ids": AGENT.reply_ids(commands[min(turn, len(commands) - 1)]), "finish_reason": "stop"}

    return reply


def collect(config, work, *servers):
    asyncio.run(collect_order(config, work, [s.url for s in servers], "key"))
    return Spool(config.run.dir).read(work)


def solution(config, name: str) -> list[str]:
    folder = config.run.dir / "tasks" / "train" / name
    return (folder / "solution" / "solve.sh").read_text().splitlines()[1:]


def test_a_solved_task(tmp_path, fake):
    """Trap 5: every prompt is the last prompt, the sampled ids and the observation, never tokenized again."""
    config = settings(tmp_path)
    work = order(config, "look_follow")
    commands = [*solution(config, work.tasks[0]), "submit"]
    server = fake(says(*commands))
    [t] = collect(config, work, server)
    assert (t.finish_reason, t.success, t.valid) == ("submit", True, True)
    assert [turn.command for turn in t.turns] == [*commands[:-1], None]
    assert {check.family for check in t.checks} == {"files", "content", "no_collateral"}
    for i, body in enumerate(server.bodies):
        assert t.token_ids[: len(body["prompt"])] == body["prompt"]
        if i:
            assert body["prompt"][: len(server.bodies[i - 1]["prompt"])] == server.bodies[i - 1]["prompt"]
    sampled = [i for i, m in zip(t.token_ids, t.action_mask, strict=True) if m]
    assert sampled == [i for command in commands for i in AGENT.reply_ids(command)]
    assert [p for p, m in zip(t.behaviour_logprobs, t.action_mask, strict=True) if m] == [-0.5] * len(sampled)
    assert sorted({u for u, m in zip(t.turn_ids, t.action_mask, strict=True) if m}) == list(range(len(commands)))
    assert server.bodies[0]["temperature"] == 0.7
    assert len({body["seed"] for body in server.bodies}) == len(commands)


def test_solved_but_not_submitted_is_no_success(tmp_path, fake):
    config = settings(tmp_path)
    work = order(config, "two_files")
    [t] = collect(config, work, fake(says(*solution(config, work.tasks[0]), "ls")))
    assert all(check.passed for check in t.checks)
    assert (t.finish_reason, t.success) == ("max_turns", False)


def test_a_reply_cut_at_the_limit_is_neither_success_nor_run(tmp_path, fake):
    """Trap 13."""
    config = settings(tmp_path)
    cut = {"token_ids": AGENT.reply_ids("submit")[:-1] * 16, "finish_reason": "length"}
    [t] = collect(config, order(config, "swap"), fake(lambda body, _: cut))
    assert (t.finish_reason, t.success, len(t.turns)) == ("turn_length", False, 1)


def test_a_zero_length_reply(tmp_path, fake):
    """Trap 23."""
    config = settings(tmp_path)
    [t] = collect(config, order(config, "swap"), fake(lambda body, _: {"token_ids": [], "finish_reason": "stop"}))
    assert (t.finish_reason, t.success, sum(t.action_mask), t.valid) == ("empty_reply", False, 0, True)


def test_the_context_is_never_overrun(tmp_path, fake):
    """Trap 14: observation plus max_tokens beyond the context is clamped, and the attempt ends."""
    config = settings(tmp_path, max_turns=50)
    server = fake(says("ls"))
    [t] = collect(config, order(config, "look_where"), server)
    assert t.finish_reason == "max_tokens"
    assert len(t.token_ids) <= 96
    assert all(len(body["prompt"]) + body["max_tokens"] <= 96 for body in server.bodies)


def test_loops_and_floods_are_cut_and_told(tmp_path, fake):
    config = settings(tmp_path, max_observation_tokens=80)
    start = time.monotonic()
    loop, flood = collect(config, order(config, "swap", "replace"), fake(says("sleep 60", "yes", "submit")))
    assert time.monotonic() - start < 20
    assert "stopped after 0.5 s" in loop.turns[0].observation
    assert "output cut" in flood.turns[1].observation


def test_blanked_observations(tmp_path, fake):
    config = settings(tmp_path)
    work = order(config, "look_follow", blank_observations=True)
    commands = [*solution(config, work.tasks[0]), "submit"]
    [t] = collect(config, work, fake(says(*commands)))
    assert [turn.observation for turn in t.turns] == ["", "", None]


def test_a_verifier_that_crashes_is_retried_then_kept_as_invalid(tmp_path, fake):
    """Trap 24: never reward 0."""
    config = settings(tmp_path)
    work = order(config, "swap", "replace")
    (config.run.dir / "tasks" / "train" / work.tasks[0] / "tests" / "test.sh").write_text("exit 1\n")
    server = fake(says("submit"))
    broken, whole = collect(config, work, server)
    assert (broken.valid, broken.finish_reason, broken.success) == (False, "error", False)
    assert "reward.txt" in broken.invalid_reason
    assert len(server.bodies) == 3 + 1, "two retries of the broken one"
    taken = Round.of({"a": broken, "b": whole})
    assert (taken.trajectories, taken.counts()["rollout/invalid"]) == ({"b": whole}, 1)
    with pytest.raises(UserError, match="no trajectory of the round can be trained on"):
        Round.of({"a": broken})


def test_only_what_is_missing_is_collected(tmp_path, fake):
    config = settings(tmp_path)
    work = order(config, "swap", "replace", "script")
    collect(config, work, fake(says("submit")))
    (tmp_path / "spool" / work.name / "00001.json").unlink()
    server = fake(says("submit"))
    collect(config, work, server)
    assert len(server.bodies) == 1


def test_nothing_is_collected_with_other_weights(tmp_path, fake, monkeypatch):
    monkeypatch.setattr("rsi_fast.rollout.collector.VERSION_TIMEOUT_S", 0.3)
    config = settings(tmp_path)
    server = fake(says("submit"))
    server.version = "3"
    with pytest.raises(UserError, match=r"wants weight version 0; the servers have \['3'\]"):
        collect(config, order(config, "swap"), server)
    assert server.bodies == []


def test_collection_runs_ahead_and_turns_keep_the_version_they_began_with(tmp_path, fake):
    """With lookahead: an order waits until its weights are live, then goes on over newer ones, in mid-attempt too."""
    config = settings(tmp_path, max_staleness=2)
    first, second = order(config, "swap", weight_version=1), order(config, "swap", weight_version=3, name="01-ppo-0001")
    weights = tmp_path / "weights.json"
    weights.write_text('{"version": 1}')
    spool = Spool(tmp_path)
    spool.give_order(first)
    spool.give_order(second)

    def reply(body: dict, number: int) -> dict:
        if number == 0:
            weights.write_text('{"version": 2}')  # a sync that ends while the first turn is sampled
        return says("pwd", "pwd", "submit")(body, number)

    server = fake(reply)
    (tmp_path / "servers.json").write_text(json.dumps({"urls": [server.url]}))

    async def work() -> None:
        serving = asyncio.create_task(serve_orders(config, "key"))
        while spool.missing(first):
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        assert len(server.bodies) == 3, "the second waits for version 3"
        weights.write_text('{"version": 3}')
        while spool.missing(second):
            await asyncio.sleep(0.05)
        (tmp_path / "done.json").write_text("{}")
        await serving

    asyncio.run(asyncio.wait_for(work(), 30))
    assert [turn.weight_version for turn in spool.read(first)[0].turns] == [1, 2, 2]
    assert [turn.weight_version for turn in spool.read(second)[0].turns] == [3, 3, 3]


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (500, "HTTP 500: the engine is dead"),
        ({"token_ids": [5, 6], "logprobs": [-1.0], "finish_reason": "stop"}, "2 token ids came with 1 log-probs"),
        ({"token_ids": [5], "finish_reason": "stop", "prompt_token_ids": [1]}, "changed the prompt's token ids"),
        ({"token_ids": [5], "finish_reason": "abort"}, "finish_reason 'abort'"),
        ({"finish_reason": "stop", "token_ids": [5], "logprobs": None}, "not the answer of a vLLM server"),
    ],
)
def test_wrong_answers_end_the_collection_and_keep_what_is_done(tmp_path, fake, choice, words):
    config = settings(tmp_path, max_concurrency=1)
    good = says("submit")
    work = order(config, "swap", "replace")
    server = fake(lambda body, number: good(body, number) if number == 0 else choice)
    with pytest.raises(UserError) as caught:
        collect(config, work, server)
    assert words in str(caught.value)
    assert server.url in str(caught.value)
    assert Spool(tmp_path).missing(work) == [1]


def test_a_server_that_stops_making_tokens(tmp_path, fake):
    """Trap 18: requests hang behind a healthy front; the watch ends the wait."""
    config = settings(tmp_path, request_timeout_s=60.0)
    server = fake(lambda body, _: time.sleep(30) or 500)
    start = time.monotonic()
    with pytest.raises(UserError, match="no token was made for rollout.stall_timeout_s = 1 s"):
        collect(config, order(config, "swap"), server)
    assert time.monotonic() - start < 10


def test_a_server_that_is_gone(tmp_path):
    config = settings(tmp_path)
    work = order(config, "swap")
    with pytest.raises(UserError, match="Connect"):
        asyncio.run(collect_order(config, work, ["http://127.0.0.1:9"], "key"))


def test_a_session_stays_with_its_server(fake):
    servers = [fake(says("submit")), fake(says("submit"))]

    async def work() -> None:
        async with VllmClient([s.url for s in servers], "key", 5.0, 5.0) as client:
            for _ in range(3):
                for session in ("a", "b", "c", "d"):
                    await client.complete(
                        [1], max_tokens=4, temperature=1.0, seed=0, stop_token_ids=[END], session=session
                    )

    asyncio.run(work())
    assert [len(s.bodies) for s in servers] == [6, 6]


def test_a_full_disk_names_the_disk(tmp_path, fake, monkeypatch):
    config = settings(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="No space left on device.*Make room"):
        collect(config, order(config, "swap"), fake(says("submit")))


def test_the_watch_sees_a_sick_server(fake):
    server = fake(says("submit"))
    server.healthy = False

    async def work() -> None:
        async with VllmClient([server.url], "key", 5.0, 1.0) as client:
            await asyncio.wait_for(client.watch(), 10)

    with pytest.raises(ServerError, match="503"):
        asyncio.run(work())
