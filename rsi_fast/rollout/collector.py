"""Attempts at tasks: many at once, each in its sandbox, each turn a completion of the policy.

`python -m rsi_fast.rollout.collector RUN` serves the trainer's orders until the run is done. What the model sampled is
never tokenized again: each prompt is the last prompt, the sampled ids and the observation's ids.
"""

import asyncio
import json
import os
import sys
import time
import traceback
import zlib
from collections.abc import Coroutine
from pathlib import Path

from rsi_fast.config import Config, load_config
from rsi_fast.errors import UserError, leave_error
from rsi_fast.rollout.agent import Agent, make_agent
from rsi_fast.rollout.client import ServerError, VllmClient
from rsi_fast.sandbox import SandboxError, open_sandbox
from rsi_fast.spool import WEIGHTS_FILE, Order, Spool, Trajectory, Turn, read_json
from rsi_fast.tasks import Task, load_task_set
from rsi_fast.verifier import VerifierError, verify

POLL_S = 0.05
PROGRESS_EVERY_S = 0.3
VERSION_TIMEOUT_S = 300.0


class Collector:
    """Attempts of one run directory, with one client. A fixed number of them is under way as long as there is work, of
    one order or of several: evaluations first, then the newest stage, and of its orders the oldest."""

    def __init__(self, config: Config, client: VllmClient, agent: Agent):
        self.config, self.client, self.agent = config, client, agent
        self.spool = Spool(config.run.dir)
        self._task_sets: dict[str, dict[str, Task]] = {}
        self._queue: asyncio.PriorityQueue = asyncio.PriorityQueue()
        self._progress: dict[str, _Progress] = {}  # by name of the order

    async def collect(self, order: Order) -> None:
        """Writes every missing trajectory of the order the moment it ends. Raises ServerError or UserError; what was
        written stays."""

        async def work() -> None:
            await self._take(order)
            await self._queue.join()

        await self._with_workers(work())

    async def serve(self) -> None:
        """The same for every order that the trainer gives, until RUN/done.json is there."""

        async def work() -> None:
            taken: set[str] = set()
            while not (self.config.run.dir / "done.json").exists():
                for order in self.spool.orders(skip=taken):
                    await self._take(order)
                    taken.add(order.name)
                await asyncio.sleep(POLL_S)

        await self._with_workers(work())

    async def _take(self, order: Order) -> None:
        """Puts the missing attempts of an order before the workers, as soon as its weights are live."""
        missing = self.spool.missing(order)
        if not missing:
            return
        tasks = self._tasks(order.task_set)
        if unknown := [name for name in order.tasks if name not in tasks]:
            raise UserError(f"order {order.name} asks for task {unknown[0]}, which is not in its set")
        await self._wait_for_version(order)
        self._progress[order.name] = _Progress(self.config.run.dir, order, len(missing))
        for index in missing:
            self._queue.put_nowait((order.task_set == "train", -order.stage_number, order.name, index, order))

    async def _worker(self) -> None:
        while True:
            *_, index, order = await self._queue.get()
            task = self._tasks(order.task_set)[order.tasks[index]]
            self._write(order, index, await self._attempt_until_valid(order, index, task))
            self._progress[order.name].step()
            self._queue.task_done()

    async def _with_workers(self, work: Coroutine) -> None:
        """Until `work` ends, or a worker or a server fails."""
        jobs = [asyncio.create_task(self._worker()) for _ in range(self.config.rollout.max_concurrency)]
        jobs += [asyncio.create_task(self.client.watch()), asyncio.create_task(work)]
        try:
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            for job in done:
                job.result()
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            for progress in self._progress.values():
                progress.write()

    def _write(self, order: Order, index: int, trajectory: Trajectory) -> None:
        try:
            self.spool.write(order, index, trajectory)
        except OSError as error:
            raise UserError(
                f"a trajectory could not be written to {self.spool.spool_dir}: {error.strerror}. Make room (the spool "
                "of old runs, checkpoints), then start the run again: it goes on"
            ) from error

    def _tasks(self, which: str) -> dict[str, Task]:
        if which not in self._task_sets:
            settings = getattr(self.config.tasks, which)
            self._task_sets[which] = load_task_set(settings, self.config.run.seed, self.config.run.dir)
        return self._task_sets[which]

    async def _wait_for_version(self, order: Order) -> None:
        """Until the servers have the order's weights, and no others; or, where they may be newer, at least these."""
        deadline = time.monotonic() + VERSION_TIMEOUT_S
        while not await self._has_version(order):
            if time.monotonic() > deadline and not self._lookahead(order):
                live = sorted(await self.client.weight_versions())
                raise UserError(
                    f"order {order.name} wants weight version {order.weight_version}; the servers have {live}"
                )
            await asyncio.sleep(POLL_S)

    async def _has_version(self, order: Order) -> bool:
        if self._lookahead(order):
            return self._weight_version(order) is not None
        return await self.client.weight_versions() == {str(order.weight_version)}

    def _lookahead(self, order: Order) -> bool:
        return order.task_set == "train" and self.config.rollout.max_staleness > 0

    def _weight_version(self, order: Order) -> int | None:
        """Of the next turn. With lookahead the version that the trainer has last made live: a sync may be under way,
        so the turn's weights are these or newer. None: they are older than what the order asks for."""
        if not self._lookahead(order):
            return order.weight_version
        live = (read_json(self.config.run.dir / WEIGHTS_FILE) or {}).get("version", -1)
        return live if live >= order.weight_version else None

    async def _attempt_until_valid(self, order: Order, index: int, task: Task) -> Trajectory:
        """A sandbox or verifier that fails is tried again; then the attempt is kept as invalid, with the reason."""
        for _ in range(self.config.rollout.retries + 1):
            trajectory = await self._attempt(order, index, task)
            if trajectory.valid:
                break
        return trajectory

    async def _attempt(self, order: Order, index: int, task: Task) -> Trajectory:
        name = f"{order.name}/{index:05d}"
        attempt = _Attempt(name, self.agent.prompt_ids(task.instruction))
        sandbox = open_sandbox(self.config.sandbox)
        verdict = None
        try:
            await sandbox.start(task)
            reason = await self._turns(order, index, task, attempt, sandbox)
            start = time.perf_counter()
            verdict = await verify(task, sandbox, self.config.sandbox.verifier_timeout_s)
            attempt.seconds["verify"] = time.perf_counter() - start
            invalid = None
        except (SandboxError, VerifierError) as error:
            reason, invalid = "error", f"{type(error).__name__}: {error}"
        finally:
            self.client.end_session(name)
            await sandbox.close()
        return Trajectory(
            id=name,
            task=task.name,
            token_ids=attempt.token_ids,
            action_mask=attempt.action_mask,
            turn_ids=attempt.turn_ids,
            behaviour_logprobs=attempt.logprobs,
            turns=attempt.turns,
            finish_reason=reason,
            invalid_reason=invalid,
            success=verdict is not None and verdict.success and reason == "submit",
            checks=verdict.checks if verdict else [],
            timing=attempt.timing(),
        )

    async def _turns(self, order: Order, index: int, task: Task, attempt: "_Attempt", sandbox) -> str:
        """Turns until the attempt ends; returns the finish reason."""
        limits, agent = self.config.rollout, self.agent
        wall_time_s = min(limits.wall_time_s, task.agent_timeout_s or limits.wall_time_s)
        while True:
            number = len(attempt.turns)
            room = self.config.model.max_tokens - len(attempt.token_ids)
            if room < 1:
                return "max_tokens"
            version = self._weight_version(order)
            start = time.perf_counter()
            completion = await self.client.complete(
                attempt.token_ids,
                max_tokens=min(limits.max_turn_tokens, room),
                temperature=order.temperature,
                seed=zlib.crc32(f"{order.seed}/{index}/{number}".encode()),
                stop_token_ids=agent.stop_token_ids,
                session=attempt.name,
            )
            generated = time.perf_counter()
            attempt.add_action(completion.token_ids, completion.logprobs, number)
            action = agent.parse(completion.token_ids)
            turn = Turn(
                reply=action.text,
                command=action.command,
                observation=None,
                weight_version=version,
                generate_s=generated - start,
            )
            attempt.turns.append(turn)
            if not completion.token_ids:
                return "empty_reply"
            if completion.finish_reason == "length":
                return "turn_length" if room > limits.max_turn_tokens else "max_tokens"
            if action.submit:
                return "submit"
            if action.command is None:
                turn.observation = agent.no_command
            else:
                settings = self.config.sandbox
                result = await sandbox.run(action.command, settings.command_timeout_s, settings.output_limit_bytes)
                turn.observation, turn.exit_code = result.output, result.exit_code
                turn.sandbox_s = time.perf_counter() - generated
            if order.blank_observations:
                turn.observation = ""
            if len(attempt.turns) >= limits.max_turns:
                return "max_turns"
            if time.perf_counter() - attempt.started > wall_time_s:
                return "wall_time"
            seen = agent.observation_ids(turn.observation, turn.exit_code, limits.max_observation_tokens)
            if len(attempt.token_ids) + len(seen) >= self.config.model.max_tokens:
                return "max_tokens"
            attempt.add_observation(seen)


class _Attempt:
    """The growing token lists of one attempt."""

    def __init__(self, name: str, prompt_ids: list[int]):
        self.name = name
        self.started = time.perf_counter()
        self.token_ids: list[int] = []
        self.action_mask: list[int] = []
        self.turn_ids: list[int] = []
        self.logprobs: list[float] = []
        self.turns: list[Turn] = []
        self.seconds: dict[str, float] = {}
        self.add_observation(prompt_ids)

    def add_observation(self, token_ids: list[int]) -> None:
        self._add(token_ids, 0, -1, [0.0] * len(token_ids))

    def add_action(self, token_ids: list[int], logprobs: list[float], turn: int) -> None:
        self._add(token_ids, 1, turn, logprobs)

    def _add(self, token_ids: list[int], mask: int, turn: int, logprobs: list[float]) -> None:
        self.token_ids += token_ids
        self.action_mask += [mask] * len(token_ids)
        self.turn_ids += [turn] * len(token_ids)
        self.logprobs += logprobs

    def timing(self) -> dict[str, float]:
        return {
            "generate": sum(turn.generate_s for turn in self.turns),
            "sandbox": sum(turn.sandbox_s for turn in self.turns),
            "verify": self.seconds.get("verify", 0.0),
            "total": time.perf_counter() - self.started,
        }


class _Progress:
    """RUN/collect.json, for the launcher's bar."""

    def __init__(self, run_dir: Path, order: Order, missing: int):
        self._path, self._order = run_dir / "collect.json", order
        self._before, self._done = len(order.tasks) - missing, 0
        self._started, self._written = time.monotonic(), 0.0
        self.write()

    def step(self) -> None:
        self._done += 1
        if time.monotonic() - self._written > PROGRESS_EVERY_S:
            self.write()

    def write(self) -> None:
        self._written = time.monotonic()
        rate = self._done / max(1e-3, self._written - self._started)
        state = {"order": self._order.name, "done": self._before + self._done, "total": len(self._order.tasks)}
        # Not through write_json_atomic: nobody needs it after a crash, and its fsync is not free.
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(state | {"rate": round(rate, 2)}))
        part.replace(self._path)


def _client(config: Config, urls: list[str], api_key: str) -> VllmClient:
    return VllmClient(urls, api_key, config.rollout.request_timeout_s, config.rollout.stall_timeout_s)


async def collect_order(config: Config, order: Order, urls: list[str], api_key: str) -> None:
    """One order. A ServerError becomes a UserError."""
    try:
        async with _client(config, urls, api_key) as client:
            await Collector(config, client, make_agent(config.rollout.agent, config.model.path)).collect(order)
    except ServerError as error:
        raise UserError(f"vLLM: {error}") from error


async def serve_orders(config: Config, api_key: str) -> None:
    """Every order of the run, until RUN/done.json is there."""
    urls = read_json(config.run.dir / "servers.json")["urls"]
    async with _client(config, urls, api_key) as client:
        await Collector(config, client, make_agent(config.rollout.agent, config.model.path)).serve()


def main() -> int:
    run_dir = Path(sys.argv[1])
    config = load_config(run_dir / "config.toml")
    try:
        asyncio.run(serve_orders(config, os.environ["RSI_FAST_API_KEY"]))
    except (UserError, ServerError) as error:
        kind = "vLLM: " if isinstance(error, ServerError) else ""
        print(f"error: {kind}{error}", flush=True)
        leave_error(run_dir, "collector", f"{kind}{error}")
        return 2
    except Exception as error:
        traceback.print_exc()
        leave_error(run_dir, "collector", f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
