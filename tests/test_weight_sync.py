"""Weights into a real vLLM server: what it samples afterwards, what it refuses, and what happens when it hangs."""

import os
import time
from contextlib import contextmanager

import httpx
import psutil
import pytest
import torch
from live_runs import ROOT, SMOKE

from rsi_fast.config import load_config
from rsi_fast.errors import UserError
from rsi_fast.processes import Child, stop
from rsi_fast.rollout.server import MODEL_NAME, server_commands, wait_ready
from rsi_fast.rollout.weight_sync import SyncError, WeightSender

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

KEY = "a-key-for-this-test"
SYNC_TIMEOUT_S = 6.0
PROMPTS = [[5, 17, 40, 33, 8], [60, 61, 2, 2, 9, 100, 31], [77]]


@contextmanager
def vllm_server(folder):
    """The child process and the URL of a server of the demo's base model."""
    config = load_config(SMOKE, [f"run.dir={folder / 'run'}"])
    [(name, command, env, url)] = server_commands(config, KEY)
    child = Child(name, command, folder / "vllm.log", env)

    def check() -> None:
        assert child.exit_code() is None, (folder / "vllm.log").read_text()[-3000:]

    try:
        wait_ready([url], KEY, 150, check)
        yield child, url
    finally:
        stop([child])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with vllm_server(tmp_path_factory.mktemp("vllm")) as found:
        yield found


@pytest.fixture(scope="module")
def sender(server):
    sender = WeightSender([server[1]], KEY, "gloo", SYNC_TIMEOUT_S)
    sender.connect()
    return sender


@pytest.fixture(scope="module")
def model():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(ROOT / "models/demo-base", dtype=torch.float32)


def weights(model) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def shapes(model):
    return [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in weights(model)]


def greedy(url: str, prompt: list[int]) -> list[int]:
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    body |= {"ignore_eos": True}
    reply = httpx.post(f"{url}/v1/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
    reply.raise_for_status()
    return reply.json()["choices"][0]["token_ids"]


def greedy_by_transformers(model, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(12):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_greedy_tokens_follow_each_update(server, sender, model):
    _, url = server
    seen = [[greedy_by_transformers(model, prompt) for prompt in PROMPTS]]
    assert [greedy(url, prompt) for prompt in PROMPTS] == seen[0]
    for version in (1, 2):
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        everything = weights(model)
        num_bytes = sender.send(version, [everything[:7], everything[7:]])
        assert num_bytes == sum(tensor.numel() * tensor.element_size() for _, tensor in everything)
        assert sender.version(url) == version
        seen.append([greedy_by_transformers(model, prompt) for prompt in PROMPTS])
        assert seen[-1] != seen[-2], "the new weights must show"
        assert [greedy(url, prompt) for prompt in PROMPTS] == seen[-1]


def test_models_that_differ_are_refused_with_both_lists(sender, model):
    sender.check(shapes(model))
    (first, shape, dtype), *rest = shapes(model)
    with pytest.raises(UserError) as caught:
        sender.check([*rest[:-1], ("model.extra.weight", (3, 4), dtype)])
    ours, theirs = str(caught.value).split("only the server has:")
    assert "model.extra.weight [3, 4]" in ours
    assert f"{first} {list(shape)}" in theirs
    assert rest[-1][0] in theirs


def test_every_path_but_health_takes_the_key(server):
    _, url = server
    paths = httpx.get(f"{url}/openapi.json", headers={"Authorization": f"Bearer {KEY}"}, timeout=20).json()["paths"]
    assert {"/pause", "/update_weights", "/collective_rpc"} <= paths.keys()
    for path, methods in paths.items():
        for method in methods:
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                status = httpx.request(method, f"{url}{path}", headers=headers, timeout=20).status_code
                assert status == (200 if path == "/health" else 401), (method, path)


def test_a_server_that_hangs_in_mid_update_ends_the_sync_in_time(server, sender, model):
    child, _ = server
    [engine] = [p for p in psutil.Process(child.process.pid).children() if "EngineCore" in " ".join(p.cmdline())]
    everything = weights(model)

    def buckets():
        yield everything[:7]
        engine.suspend()
        yield everything[7:]

    started = time.monotonic()
    with pytest.raises(SyncError, match="weight sync"):
        sender.send(3, buckets())
    assert time.monotonic() - started < 4 * SYNC_TIMEOUT_S + 20
    assert os.getpgid(child.process.pid)  # alive until the launcher stops it
