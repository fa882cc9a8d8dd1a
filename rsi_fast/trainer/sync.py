"""The trainer's side of the weight sync: all ranks gather, rank 0 sends, and all know whether it went well."""

import json
import time
from pathlib import Path

import torch.distributed as dist

from rsi_fast.config import Config
from rsi_fast.errors import UserError
from rsi_fast.rollout.weight_sync import WeightSender
from rsi_fast.spool import WEIGHTS_FILE, write_json_atomic
from rsi_fast.trainer.engines import Engine


class Publisher:
    """Brings the actor's weights into the servers that `servers.json` of the run names."""

    def __init__(self, config: Config, api_key: str):
        self.config = config
        self.api_key = api_key
        self.sender: WeightSender | None = None  # rank 0
        self.live: int | None = None  # weight version in the servers

    def connect(self, actor: Engine) -> None:
        """Waits for the servers, joins them and compares the models, once. A collective."""
        if self.live is None:
            self._connect(actor)

    def ensure(self, actor: Engine, version: int) -> None:
        """Sends the weights if the servers have others (after a resume, say). A collective."""
        self.connect(actor)
        if self.live != version:
            self.send(actor, version)
        else:
            self._note_live()

    def send(self, actor: Engine, version: int) -> int:
        """Sends all weights as `version`; returns their bytes. A collective."""
        self.connect(actor)
        buckets = actor.gathered_buckets()
        sent = 0
        if dist.get_rank() == 0:
            sent = self.sender.send(version, buckets)
        else:
            for _ in buckets:
                pass
        self.live = version
        self._note_live()
        return sent

    def _note_live(self) -> None:
        """For a collector that works ahead. After the sync, so that what it says is never newer than the weights."""
        if dist.get_rank() == 0:
            write_json_atomic(self.config.run.dir / WEIGHTS_FILE, json.dumps({"version": self.live}))

    def _connect(self, actor: Engine) -> None:
        live = [0]
        if dist.get_rank() == 0:
            urls = _wait_for_servers(self.config.run.dir / "servers.json", self.config.server.start_timeout_s + 60)
            self.sender = WeightSender(
                urls,
                self.api_key,
                backend="nccl" if self.config.model.device == "cuda" else "gloo",
                timeout_s=self.config.trainer.sync_timeout_s,
            )
            self.sender.connect()
            self.sender.check(actor.shapes())
            versions = {self.sender.version(url) for url in urls}
            # A server that outlives its runs may hold another run's weights under the same number, or half an update.
            live = [versions.pop() if len(versions) == 1 and not self.config.server.urls else -1]
        dist.broadcast_object_list(live, src=0)
        self.live = live[0]


def _wait_for_servers(path: Path, timeout_s: float) -> list[str]:
    """The URLs that the launcher writes once every server answers."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise UserError(f"no vLLM server was ready within {timeout_s:g} s; see logs/vllm-0.log")
        time.sleep(0.2)
    return json.loads(path.read_text())["urls"]
