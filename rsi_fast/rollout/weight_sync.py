"""Weights from the trainer into vLLM, the trainer's side: rank 0 drives every server through one update.

    pause (keep) -> start_weight_update -> buckets -> finish_weight_update(version) -> reset_prefix_cache -> resume

Requests in flight freeze at `pause` and go on at `resume`. Cached prefixes are of the old weights, so the cache is
reset after the update, not before. Every reply is checked and every wait has a timeout.
"""

import contextlib
import ipaddress
import socket
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from urllib.parse import urlsplit

import httpx
import torch
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, TCPStore

from rsi_fast.errors import UserError

Parameters = list[tuple[str, tuple[int, ...], torch.dtype]]


class SyncError(UserError):
    """A weight sync failed; the servers may hold a mix of old and new weights, so the run must stop."""


def gloo_group(host: str, port: int, rank: int, world_size: int, timeout_s: float) -> ProcessGroup:
    """A process group beside torch's global one. Both sides of the transfer build it with this."""
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(host, port, world_size, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
    options = ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname=host if _is_loopback(host) else socket.gethostname())]
    return ProcessGroupGloo(PrefixStore("rsi_fast", store), rank, world_size, options)


def broadcast_bytes(group: ProcessGroup, flat: torch.Tensor) -> None:
    """flat: uint8, filled on rank 0, received elsewhere."""
    work = group.broadcast([flat], _root_rank_0())
    work.wait()


def _root_rank_0():
    from torch.distributed import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return options


class WeightSender:
    """Sends whole parameters, bucket by bucket, to all servers at once.

    backend "gloo": our engine (`weight_engine.py`) over a gloo group; "nccl": vLLM's own engine.
    """

    def __init__(self, urls: list[str], api_key: str, backend: str, timeout_s: float):
        self.urls, self.backend, self.timeout_s = urls, backend, timeout_s
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=timeout_s,
            limits=httpx.Limits(keepalive_expiry=2.0),
        )
        self._threads = ThreadPoolExecutor(len(urls) + 1)
        self._group = None  # gloo ProcessGroup, or vLLM's NCCL communicator

    # ---- control plane

    def _call(self, url: str, path: str, json: dict | None = None, method: str = "POST") -> httpx.Response:
        try:
            reply = self._http.request(method, f"{url}/{path}", json=json)
        except httpx.HTTPError as error:
            raise SyncError(f"weight sync: {url}/{path}: {type(error).__name__} {error}".rstrip()) from error
        if reply.status_code != 200:
            raise SyncError(f"weight sync: {url}/{path}: HTTP {reply.status_code}: {reply.text[:500]}")
        return reply

    def _everywhere(self, path: str, bodies: list[dict | None] | None = None) -> list[Future]:
        bodies = bodies or [None] * len(self.urls)
        return [self._threads.submit(self._call, u, path, b) for u, b in zip(self.urls, bodies, strict=True)]

    def _gather(self, futures: list[Future]) -> list[httpx.Response]:
        done, late = wait(futures, timeout=self.timeout_s + 5)
        if late:
            raise SyncError(f"weight sync: {len(late)} server(s) did not answer within {self.timeout_s:g} s")
        return [future.result() for future in futures]

    def version(self, url: str) -> int:
        """The weight version that is live in a server."""
        version = self._call(url, "weight_info", method="GET").json()["weight_version"]
        return int(version) if str(version).isdigit() else -1

    # ---- set-up

    def connect(self) -> None:
        """Builds the transfer group: this process is rank 0, the workers of all servers follow."""
        sizes = [self._num_workers(url) for url in self.urls]
        world_size = 1 + sum(sizes)
        host = _address_towards(self.urls)
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
        bodies = []
        for i in range(len(self.urls)):
            info = {"master_address": host, "master_port": port, "rank_offset": 1 + sum(sizes[:i])}
            info |= {"world_size": world_size} | ({"timeout_s": self.timeout_s} if self.backend == "gloo" else {})
            bodies.append({"init_info": info})
        futures = self._everywhere("init_weight_transfer_engine", bodies)
        try:
            if self.backend == "gloo":
                self._group = gloo_group(host, port, 0, world_size, self.timeout_s)
            else:
                self._group = _nccl_endpoint(host, port, world_size)
        except RuntimeError as error:
            for future in futures:  # a server's own words say more
                if future.done():
                    future.result()
            raise SyncError(f"weight sync: the servers did not join the transfer group: {error}") from error
        self._gather(futures)

    def _num_workers(self, url: str) -> int:
        return len(self._checkpoint_of(url))

    def _checkpoint_of(self, url: str) -> list[list]:
        """[worker] -> (name, shape) of every parameter in the checkpoint that the server was started with."""
        body = {"method": "checkpoint_parameters", "timeout": self.timeout_s}
        return self._call(url, "collective_rpc", body).json()["results"]

    def check(self, parameters: Parameters) -> None:
        """Compares what will be sent with what each server's model has. Raises UserError with both differences."""
        ours = {name: tuple(shape) for name, shape, _ in parameters}
        for url in self.urls:
            theirs = {name: tuple(shape) for name, shape in self._checkpoint_of(url)[0]}
            only_ours = [f"{n} {list(s)}" for n, s in sorted(ours.items()) if theirs.get(n) != s]
            only_theirs = [f"{n} {list(s)}" for n, s in sorted(theirs.items()) if ours.get(n) != s]
            if only_ours or only_theirs:
                raise UserError(
                    f"the trainer and the server {url} do not have the same model.\n"
                    f"only the trainer would send: {_listed(only_ours)}\nonly the server has: {_listed(only_theirs)}\n"
                    "Start the server with the model folder that the trainer loads (model.path)."
                )

    # ---- an update

    def send(self, version: int, buckets: Iterable[list[tuple[str, torch.Tensor]]]) -> int:
        """All weights as `version`, live in every server when this returns; the number of bytes sent to each. Raises
        SyncError."""
        num_bytes = 0
        self._gather(self._everywhere("pause?mode=keep"))
        try:
            self._gather(self._everywhere("start_weight_update"))
            for bucket in buckets:
                num_bytes += self._send_bucket(bucket)
            self._gather(self._everywhere("finish_weight_update", [{"weight_version": str(version)}] * len(self.urls)))
            # Requests in flight compute their prefix again, by the new weights; without that the reset would fail.
            for reply in self._gather(self._everywhere("reset_prefix_cache?reset_running_requests=true")):
                if not reply.json().get("success"):
                    raise SyncError(f"weight sync: {reply.url}: the prefix cache could not be reset")
        except BaseException:
            with contextlib.suppress(SyncError):
                self._gather(self._everywhere("resume"))
            raise
        self._gather(self._everywhere("resume"))
        return num_bytes

    def _send_bucket(self, bucket: list[tuple[str, torch.Tensor]]) -> int:
        info = {
            "names": [name for name, _ in bucket],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
        }
        futures = self._everywhere("update_weights", [{"update_info": info}] * len(self.urls))
        transfer = self._threads.submit(self._transfer, [tensor for _, tensor in bucket])
        try:
            transfer.result(timeout=self.timeout_s + 5)
        except (RuntimeError, TimeoutError) as error:
            for future in futures:  # a server's own words say more
                if future.done():
                    future.result()
            raise SyncError(f"weight sync: a server did not take a bucket: {type(error).__name__} {error}") from error
        self._gather(futures)
        return sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)

    def _transfer(self, tensors: list[torch.Tensor]) -> None:
        if self.backend == "gloo":
            flat = torch.cat([tensor.detach().contiguous().cpu().view(-1).view(torch.uint8) for tensor in tensors])
            broadcast_bytes(self._group, flat)
        else:
            for tensor in tensors:
                self._group.broadcast(tensor.contiguous(), src=0, stream=torch.cuda.current_stream())
            torch.cuda.synchronize()


def _nccl_endpoint(host: str, port: int, world_size: int):
    from vllm.distributed.weight_transfer.nccl_common import trainer_init
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    return trainer_init(
        NCCLTrainerInitInfo(rank=0, master_address=host, master_port=port, world_size=world_size, packed=False)
    )


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (host[0].isdigit() and ipaddress.ip_address(host).is_loopback)


def _address_towards(urls: list[str]) -> str:
    """The address of this machine as the servers reach it: loopback when all of them are here."""
    hosts = [urlsplit(url).hostname for url in urls]
    if all(_is_loopback(host) for host in hosts):
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((next(host for host in hosts if not _is_loopback(host)), 9))
        return probe.getsockname()[0]


def _listed(items: list[str]) -> str:
    shown = ", ".join(items[:20]) or "nothing"
    return shown + (f" and {len(items) - 20} more" if len(items) > 20 else "")
