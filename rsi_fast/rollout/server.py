"""vLLM's OpenAI-compatible server: its command line and environment, and the wait until it answers."""

import socket
import sys
import time
from collections.abc import Callable

import httpx

from rsi_fast.config import Config
from rsi_fast.errors import UserError

HOST = "127.0.0.1"
MODEL_NAME = "policy"
OURS = "RSI_FAST_SERVER"  # set in the environment of a server that this run starts, and ends with it


def server_commands(config: Config, api_key: str) -> list[tuple[str, list[str], dict[str, str], str]]:
    """(process name, command, environment, url) of every server that this run starts. The key goes through the
    environment, where other users cannot read it."""
    settings, taken = config.server, set()
    commands = []
    for i in range(settings.num_servers):
        port = free_port(None if settings.port is None else settings.port + i, taken)
        taken.add(port)
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *_flags(config, port)]
        commands.append((f"vllm-{i}", command, _environment(config, i, api_key), f"http://{HOST}:{port}"))
    return commands


def _flags(config: Config, port: int) -> list[str]:
    cpu = config.model.device == "cpu"
    flags = {
        "--model": str(config.model.path),
        "--served-model-name": MODEL_NAME,
        "--host": HOST,
        "--port": port,
        "--dtype": config.model.dtype,
        "--max-model-len": config.model.max_tokens,
        "--max-num-seqs": config.server.max_num_seqs,
        "--tensor-parallel-size": config.server.tensor_parallel_size,
        "--generation-config": "vllm",  # no sampling defaults from the model folder
        "--logprobs-mode": "processed_logprobs",  # of the distribution that was sampled from: temperature included
        "--weight-transfer-config": f'{{"backend": "{"gloo" if cpu else "nccl"}"}}',
        "--worker-extension-cls": "rsi_fast.rollout.weight_engine.WorkerExtension",
        "--middleware": "rsi_fast.rollout.auth.RequireKey",
        "--seed": config.run.seed,
    }
    if cpu:
        # A prompt cut over two steps makes vLLM rewind the request's random generator, which crashes it on a CPU.
        flags["--max-num-batched-tokens"] = max(8192, config.model.max_tokens)
        if config.server.tensor_parallel_size == 1:
            # vLLM would run its worker in one more process, which waits by spinning: on two cores, half the speed.
            flags["--distributed-executor-backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    else:
        flags["--gpu-memory-utilization"] = config.server.gpu_memory_utilization
    switches = ["--enable-prefix-caching", "--disable-uvicorn-access-log"] + (
        ["--enforce-eager", "--no-enable-chunked-prefill"] if cpu else []
    )
    return [*(str(word) for pair in flags.items() for word in pair), *switches, *config.server.extra_args]


def _environment(config: Config, index: int, api_key: str) -> dict[str, str]:
    env = {
        "VLLM_API_KEY": api_key,
        OURS: "1",
        "VLLM_SERVER_DEV_MODE": "1",  # the paths of weight transfer
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_COLOR": "0",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
        "HF_HUB_OFFLINE": "1",
    }
    if config.model.device == "cpu":
        # One thread each: trainer ranks share the cores, and OpenMP's waits would take them from each other.
        threads = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
        return env | threads | {"VLLM_CPU_KVCACHE_SPACE": str(config.server.kv_cache_gib), "CUDA_VISIBLE_DEVICES": ""}
    first = config.trainer.num_ranks + index * config.server.tensor_parallel_size
    gpus = range(first, first + config.server.tensor_parallel_size)
    return env | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}


def free_port(wanted: int | None, taken: set[int] = frozenset()) -> int:
    """The wanted port, or any free one. UserError when a wanted one is in use."""
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, wanted or 0))
            except OSError as error:
                raise UserError(
                    f"port {wanted} is not free ({error.strerror}); choose another server.port, or leave it out and "
                    "any free one is taken"
                ) from None
            port = probe.getsockname()[1]
        if port not in taken:
            return port


def wait_ready(urls: list[str], api_key: str, timeout_s: float, check: Callable[[], None]) -> None:
    """Returns when every server answers, has a weight version (0 for the model it was started with) and has served one
    request: the first one compiles for seconds. `check` raises when a server's process died."""
    deadline = time.monotonic() + timeout_s
    with httpx.Client(headers={"Authorization": f"Bearer {api_key}"}, timeout=5.0) as client:
        for url in urls:
            while not _healthy(client, url):
                check()
                if time.monotonic() > deadline:
                    raise UserError(
                        f"the vLLM server {url} did not answer within server.start_timeout_s = {timeout_s:g} s"
                    )
                time.sleep(0.25)
            _warm_up(client, url, max(30.0, deadline - time.monotonic()))


def _healthy(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def _warm_up(client: httpx.Client, url: str, timeout_s: float) -> None:
    try:
        reply = client.get(f"{url}/weight_info", timeout=timeout_s)
        reply.raise_for_status()
        if reply.json()["weight_version"] == "default":
            client.post(f"{url}/update_weight_version", json={"new_version": "0"}, timeout=timeout_s).raise_for_status()
        body = {"model": MODEL_NAME, "prompt": [0], "max_tokens": 2, "temperature": 1.0, "logprobs": 0, "seed": 0}
        client.post(f"{url}/v1/completions", json=body, timeout=timeout_s).raise_for_status()
    except httpx.HTTPError as error:
        raise UserError(
            f"the vLLM server {url} is up but refused its first request ({error}). If it runs elsewhere: it must serve "
            f"the model as {MODEL_NAME!r}, with VLLM_SERVER_DEV_MODE=1 and the key in RSI_FAST_API_KEY"
        ) from None
