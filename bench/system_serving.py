"""Collector and weight sync beside a real vLLM server: against bare requests, and against a bare broadcast."""

import asyncio
import multiprocessing
import socket
import time
from pathlib import Path

import httpx
import torch
from rich.console import Console
from transformers import Qwen3Config, Qwen3ForCausalLM

from rsi_fast.commands import servers_running
from rsi_fast.config import Config
from rsi_fast.rollout.agent import make_agent
from rsi_fast.rollout.collector import Collector, _client
from rsi_fast.rollout.server import MODEL_NAME
from rsi_fast.rollout.weight_sync import WeightSender, broadcast_bytes, gloo_group
from rsi_fast.spool import Order, Spool, Trajectory
from rsi_fast.tasks import load_task_set

ROOT = Path(__file__).parent.parent
IN_FLIGHT = 64
BUCKET_BYTES = 64 * 2**20


def settings(run_dir: Path, model: Path, max_tokens: int) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": run_dir},
            "model": {"path": model, "dtype": "float32", "device": "cpu", "max_tokens": max_tokens},
            "tasks": {"train": {"generator": "demo", "count": 64}},
            "sandbox": {"command_timeout_s": 1.0, "output_limit_bytes": 200},
            "server": {"max_num_seqs": IN_FLIGHT},
            "rollout": {
                "agent": "plain",
                "max_turns": 8,
                "max_turn_tokens": 32,
                "max_observation_tokens": 40,
                "max_concurrency": IN_FLIGHT,
            },
            "stages": [{"kind": "ppo", "rounds": 1, "attempts": 1, "actor_lr": 1.0, "critic_lr": 1.0}],
        }
    )


# ---- collector


def collector(folder: Path, attempts: int, repeats: int, console: Console) -> dict:
    """Tokens per second that the server samples: for the collector with its sandboxes, and for bare requests with the
    same prompts, lengths and concurrency. The best of each, called in turn."""
    config = settings(folder / "collector", ROOT / "models" / "demo-base", 256)
    config.run.dir.mkdir()
    (config.run.dir / "logs").mkdir()
    names = list(load_task_set(config.tasks.train, 0, config.run.dir))
    best, overlap, trajectories = {"ours": 0.0, "reference": 0.0}, 0.0, []
    with servers_running(config, console) as (launcher, urls):
        for repeat in range(repeats + 1):  # the first is for warmth
            order = Order(
                name=f"01-ppo-{repeat:04d}",
                task_set="train",
                tasks=[names[i % len(names)] for i in range(attempts)],
                weight_version=0,
                temperature=1.0,
                seed=7,
            )
            _forget_prefixes(urls[0], launcher.api_key)
            start = time.perf_counter()
            asyncio.run(_collect(config, order, urls, launcher.api_key))
            seconds = time.perf_counter() - start
            trajectories = Spool(config.run.dir).read(order)
            tokens = sum(sum(t.action_mask) for t in trajectories)
            _forget_prefixes(urls[0], launcher.api_key)
            bare_seconds = asyncio.run(_bare(urls[0], launcher.api_key, trajectories))
            if repeat:
                best["ours"] = max(best["ours"], tokens / seconds)
                best["reference"] = max(best["reference"], tokens / bare_seconds)
                in_sandbox = sum(t.timing["sandbox"] + t.timing["verify"] for t in trajectories)
                overlap = max(overlap, in_sandbox / seconds)
    return best | {
        "unit": "sampled tokens/s",
        "higher_is_better": True,
        "attempts": attempts,
        "tokens": tokens,
        "latencies": [t.timing["total"] for t in trajectories],  # seconds of each attempt
        "attempts_in_sandboxes": overlap,  # mean over the collection: above 0 they overlap with generation
    }


async def _collect(config: Config, order: Order, urls: list[str], key: str) -> None:
    async with _client(config, urls, key) as client:
        await Collector(config, client, make_agent(config.rollout.agent, config.model.path)).collect(order)


def _forget_prefixes(url: str, key: str) -> None:
    httpx.post(f"{url}/reset_prefix_cache", headers={"Authorization": f"Bearer {key}"}, timeout=60).raise_for_status()


async def _bare(url: str, key: str, trajectories: list[Trajectory]) -> float:
    """Seconds for the same turns as requests and nothing else: no sandbox, no parsing, no files."""
    waiting = iter(trajectories)

    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=300) as client:

        async def worker() -> None:
            for t in waiting:
                for turn in range(len(t.turns)):
                    first = t.turn_ids.index(turn)
                    length = t.turn_ids.count(turn)
                    body = {
                        "model": MODEL_NAME,
                        "prompt": t.token_ids[:first],
                        "max_tokens": length,
                        "min_tokens": length,
                        "ignore_eos": True,
                        "temperature": 1.0,
                        "logprobs": 0,
                        "return_token_ids": True,
                    }
                    (await client.post(f"{url}/v1/completions", json=body)).raise_for_status()

        start = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
        return time.perf_counter() - start


# ---- weight sync


def weight_sync(folder: Path, tiny: bool, repeats: int, console: Console) -> dict:
    """Seconds until a server runs new weights, and for a gloo broadcast of the same bytes in the same buckets to a
    process that does nothing with them."""
    model = folder / "model"
    size = 128 if tiny else 1024
    shape = {"hidden_size": size, "intermediate_size": 3 * size, "num_hidden_layers": 2 if tiny else 12}
    heads = {"num_attention_heads": size // 64, "num_key_value_heads": size // 128, "head_dim": 64}
    torch.manual_seed(0)
    made = Qwen3ForCausalLM(Qwen3Config(vocab_size=32 * size, tie_word_embeddings=True, **shape, **heads))
    made.save_pretrained(model)
    for path in (ROOT / "models" / "demo-base").glob("*token*"):
        (model / path.name).write_bytes(path.read_bytes())
    parameters = [(name, p.detach()) for name, p in made.named_parameters()]
    buckets = list(_buckets(parameters))
    config = settings(folder / "sync", model, 128)
    config.run.dir.mkdir()
    (config.run.dir / "logs").mkdir()
    with servers_running(config, console) as (launcher, urls):
        sender = WeightSender(urls, launcher.api_key, "gloo", 120.0)
        sender.connect()
        sender.check([(name, tuple(p.shape), p.dtype) for name, p in parameters])
        ours, reference = [], []
        with _Receiver([_flat(bucket).numel() for bucket in buckets], repeats + 1) as send_bare:
            for repeat in range(repeats + 1):
                start = time.perf_counter()
                num_bytes = sender.send(repeat + 1, buckets)
                ours.append(time.perf_counter() - start)
                start = time.perf_counter()
                for bucket in buckets:
                    send_bare(_flat(bucket))
                reference.append(time.perf_counter() - start)
    return {"ours": min(ours[1:]), "reference": min(reference[1:]), "unit": "s", "bytes": num_bytes}


def _buckets(parameters: list[tuple[str, torch.Tensor]]):
    bucket, size = [], 0
    for name, parameter in parameters:
        bucket.append((name, parameter))
        size += parameter.numel() * 4
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _flat(bucket: list[tuple[str, torch.Tensor]]) -> torch.Tensor:
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in bucket])


class _Receiver:
    """A process that takes broadcasts of these sizes, so many times over."""

    def __init__(self, sizes: list[int], times: int):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        arguments = (self.port, sizes, times)
        self.process = multiprocessing.get_context("spawn").Process(target=_receive, args=arguments, daemon=True)

    def __enter__(self):
        self.process.start()
        group = gloo_group("127.0.0.1", self.port, 0, 2, 120.0)
        return lambda flat: broadcast_bytes(group, flat)

    def __exit__(self, *exception) -> None:
        self.process.join(timeout=30)
        self.process.kill()


def _receive(port: int, sizes: list[int], times: int) -> None:
    torch.set_num_threads(1)
    group = gloo_group("127.0.0.1", port, 1, 2, 120.0)
    for _ in range(times):
        for size in sizes:
            broadcast_bytes(group, torch.empty(size, dtype=torch.uint8))
