"""Scripted demonstrations for SFT: real sandbox runs, many of them with a typical mistake.

A few kinds are always shown right; of the others one demonstration in eight is right and seven hold a mistake (cp for
mv, > for >>, the last step forgotten). So the agent learns to act from all of them, and PPO has something to mend.
"""

import asyncio
import random
import tempfile
from pathlib import Path

from rsi_fast import config as run_config
from rsi_fast.demo.kinds import KINDS, WELL_TAUGHT, Instance, make_instance
from rsi_fast.demo.tasks import write_task
from rsi_fast.sandbox import open_sandbox
from rsi_fast.spool import Trajectory, Turn, write_json_atomic
from rsi_fast.tasks import Task, load_task
from rsi_fast.verifier import verify

RIGHT_ONE_IN = 8
COMMAND_TIMEOUT_S = 1.0
OUTPUT_LIMIT_BYTES = 200


def write_demonstrations(folder: Path, count: int, seed: int, agent, max_observation_tokens: int = 40) -> None:
    """`count` demonstrations on training tasks, all kinds in turn, as trajectory files; `agent` is an agent format."""
    asyncio.run(_write(folder, count, seed, agent, max_observation_tokens))


async def _write(folder: Path, count: int, seed: int, agent, max_observation_tokens: int) -> None:
    kinds, rng = list(KINDS), random.Random(f"demonstrations/{seed}")
    with tempfile.TemporaryDirectory() as scratch:
        for i in range(count):
            kind = kinds[i % len(kinds)]
            # "d/": demonstrations are on other instances than the training tasks of the same seed.
            instance = make_instance(kind, "train", f"d/{seed}/{i}")
            right = kind in WELL_TAUGHT or (i // len(kinds)) % RIGHT_ONE_IN == 0
            commands = instance.commands if right else rng.choice(instance.mistakes)
            task_folder = Path(scratch) / f"{kind}-{i:06d}"
            write_task(task_folder, instance, "train")
            trajectory = await demonstrate(load_task(task_folder), instance, commands, agent, max_observation_tokens)
            write_json_atomic(folder / f"{i:05d}.json", trajectory.model_dump_json())


async def demonstrate(
    task: Task, instance: Instance, commands: list[str], agent, max_observation_tokens: int
) -> Trajectory:
    sandbox = open_sandbox(run_config.Sandbox())
    await sandbox.start(task)
    ids = list(agent.prompt_ids(task.instruction))
    mask, turn_ids, turns = [0] * len(ids), [-1] * len(ids), []
    for number, command in enumerate([*commands, "submit"]):
        reply = agent.reply_ids(command)
        ids += reply
        mask += [1] * len(reply)
        turn_ids += [number] * len(reply)
        observation = None
        if command != "submit":
            result = await sandbox.run(command, COMMAND_TIMEOUT_S, OUTPUT_LIMIT_BYTES)
            observation = result.output
            seen = agent.observation_ids(observation, result.exit_code, max_observation_tokens)
            ids += seen
            mask += [0] * len(seen)
            turn_ids += [-1] * len(seen)
        ran = None if command == "submit" else command
        turns.append(Turn(reply=command, command=ran, observation=observation, weight_version=0))
    verdict = await verify(task, sandbox, timeout_s=5.0)
    return Trajectory(
        id=f"demonstration/{task.name}",
        task=task.name,
        token_ids=ids,
        action_mask=mask,
        turn_ids=turn_ids,
        behaviour_logprobs=[0.0] * len(ids),
        turns=turns,
        finish_reason="demonstration",
        success=verdict.success,
        checks=verdict.checks,
    )
