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
from pathlib import Path

from rsi_fast.config import Config, load_config
from rsi_fast.errors import UserError, leave_error
from rsi_fast.rollout.agent import Agent, make_agent
from rsi_fast.rollout.client import ServerError, VllmClient
from rsi_fast.sandbox import SandboxError, open_sandbox
from rsi_fast.spool import Order, Spool, Trajectory, Turn, read_json
from rsi_fast.tasks import Task, load_task_set
from rsi_fast.verifier import VerifierError, verify

POLL_S = 0.05
PROGRESS_EVERY_S = 0.3
VERSION_TIMEOUT_S = 300.0


class Collector:
    """Attempts of one run directory, with one client."""

    def __init__(self, config: Config, client: VllmClient, agent: Agent):
        self.config, self.client, self.agent = config, client, agent
        self.spool = Spool(config.run.dir)
        self._task_sets: dict[str, dict[str, Task]] = {}

    async def collect(self, order: Order) -> None:
        """Writes every missing trajectory of the order the moment it ends. Raises ServerError or UserError; what was
        written stays."""
        await self._wait_for_version(order)
        tasks = self._tasks(order.task_set)
        missing = iter(self.spool.missing(order))
        progress = _Progress(self.config.run.dir, order, len(self.spool.missing(order)))

        async def worker() -> None:
            for index in missing:  # shared: each worker takes the next one
                task = tasks.get(order.tasks[index])
                if task is None:
                    raise UserError(f"order {order.name} asks for task {order.tasks[index]}, which is not in its set")
                self._write(order, index, await self._attempt_until_valid(order, index, task))
                progress.step()

        watch = asyncio.create_task(self.client.watch())
        workers = [asyncio.create_task(worker()) for _ in range(self.config.rollout.max_concurrency)]
        everything = asyncio.gather(*workers)
        try:
            await asyncio.wait([everything, watch], return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                watch.result()
            await everything
        finally:
            for job in (watch, *workers):
                job.cancel()
            await asyncio.gather(watch, everything, *workers, return_exceptions=True)
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
        deadline = time.monotonic() + VERSION_TIMEOUT_S
        while (live := await self.client.weight_versions()) != {str(order.weight_version)}:
            if time.monotonic() > deadline:
                raise UserError(
                    f"order {order.name} wants weight version {order.weight_version}; the servers have {sorted(live)}"
                )
            await asyncio.sleep(POLL_S)

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
                weight_version=order.weight_version,
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
    """Every order of the run, oldest first, until RUN/done.json is there."""
    run_dir = config.run.dir
    urls = read_json(run_dir / "servers.json")["urls"]
    done: set[str] = set()
    async with _client(config, urls, api_key) as client:
        collector = Collector(config, client, make_agent(config.rollout.agent, config.model.path))
        while not (run_dir / "done.json").exists():
            for order in collector.spool.orders(skip=done):
                if collector.spool.missing(order):
                    await collector.collect(order)
                done.add(order.name)
            await asyncio.sleep(POLL_S)


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
