"""What an operator sees of a run, beside the files: alarms, TensorBoard, Weights & Biases, Prometheus.

Only rank 0 has a Monitor. What fails while the run is on is said once in the log and left out from then on; the run
goes on, since metrics.jsonl has it all.
"""

import json
import re
import secrets
from pathlib import Path

from rsi_fast.config import Config
from rsi_fast.errors import UserError
from rsi_fast.spool import read_json, write_json_atomic
from rsi_fast.trainer import metrics
from rsi_fast.trainer.alarms import MEANINGS, alarm_texts, find_alarms

WANDB_TIMEOUT_S = 60.0  # of its start and of its last upload; what is not uploaded then, `wandb sync` can


class Monitor:
    """Writes the lines of metrics and shows them. `step`: of the checkpoint that the run goes on from, else 0."""

    def __init__(self, config: Config, step: int):
        self.limits = config.monitor
        self.path = config.run.dir / "metrics.jsonl"
        metrics.drop_after(self.path, step)
        self.history = [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []
        self.standing = next((line["alarms"] for line in reversed(self.history) if "alarms" in line), [])
        self.sinks: list[TensorBoard | WeightsAndBiases | Prometheus] = []
        if config.monitor.prometheus_port:
            self.sinks.append(Prometheus(config.monitor.prometheus_port))
        if config.monitor.tensorboard:
            self._try("TensorBoard", lambda: self.sinks.append(TensorBoard(config.run.dir / "tensorboard", step)))
        if config.monitor.wandb_project:
            self._try("Weights & Biases", lambda: self.sinks.append(WeightsAndBiases(config, self.history)))

    def log(self, line: dict, watch: metrics.Stopwatch) -> None:
        if line["kind"] in ("critic", "ppo"):
            line["alarms"] = find_alarms(self.history, line, self.limits)
            for text in alarm_texts(self.standing, line):
                print(f"{text} (step {line['step']})", flush=True)
            self.standing = line["alarms"]
        line = metrics.append(self.path, line, watch)
        self.history.append(line)
        for sink in list(self.sinks):
            if not self._try(sink.name, lambda sink=sink: sink.write(line)):
                self.sinks.remove(sink)

    def close(self) -> None:
        for sink in self.sinks:
            self._try(sink.name, sink.close)

    def _try(self, name: str, action) -> bool:
        try:
            action()
        except Exception as error:  # of whatever kind: these are other people's libraries, disks and networks
            print(f"{name} failed and is left out from here on: {type(error).__name__}: {error}", flush=True)
            return False
        return True


def curves(line: dict) -> dict[str, float]:
    """The numbers of a line that make curves over steps. Evaluations and syncs have theirs under names of their own,
    since rollouts on held-out tasks, say, do not belong into the curve of the training tasks."""
    kind = line["kind"]
    prefix = f"{kind}/" if kind in ("eval", "sync") else ""
    numbers = {key: value for key, value in _numbers(line).items() if "/" in key or key == "weight_version"}
    return {key if key.startswith(prefix) else prefix + key: value for key, value in numbers.items()}


def _numbers(line: dict) -> dict[str, float]:
    return {k: v for k, v in line.items() if isinstance(v, int | float)}


class TensorBoard:
    """RUN/tensorboard. `step`: the last that an earlier start has written for good; what it wrote after is dropped."""

    name = "TensorBoard"

    def __init__(self, folder: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, line: dict) -> None:
        for key, value in curves(line).items():
            self._writer.add_scalar(key, value, line["step"], walltime=line["time"])
        for name in MEANINGS if "alarms" in line else ():
            self._writer.add_scalar(f"alarms/{name}", float(name in line["alarms"]), line["step"], line["time"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """RUN/wandb. The key comes from wandb's own login or environment and is never ours to read.

    A W&B run only grows, so a step that a resumed run does again is not sent again: RUN/wandb.json has the run's id and
    the last step sent. Lines of earlier starts that had no W&B, or lost it, are sent first.
    """

    name = "Weights & Biases"

    def __init__(self, config: Config, history: list[dict]):
        import wandb

        self._path = config.run.dir / "wandb.json"
        self._sent = read_json(self._path) or {"id": secrets.token_hex(8), "step": 0}
        write_json_atomic(self._path, json.dumps(self._sent))
        self._run = wandb.init(
            project=config.monitor.wandb_project,
            name=config.run.dir.name,
            id=self._sent["id"],
            resume="allow",
            mode=config.monitor.wandb_mode,
            dir=str(config.run.dir),
            # URLs and flags of servers may hold credentials.
            config=config.model_dump(mode="json", exclude={"server"}),
            settings=wandb.Settings(
                console="off", disable_git=True, init_timeout=WANDB_TIMEOUT_S, finish_timeout=WANDB_TIMEOUT_S
            ),
        )
        for line in history:
            self.write(line)

    def write(self, line: dict) -> None:
        if line["step"] <= self._sent["step"]:
            return
        self._sent["step"] = line["step"]
        write_json_atomic(self._path, json.dumps(self._sent))  # first: rather a step lost to a kill than one twice
        alarms = {f"alarms/{name}": int(name in line["alarms"]) for name in MEANINGS} if "alarms" in line else {}
        self._run.log(curves(line) | alarms, step=line["step"], commit=True)

    def close(self) -> None:
        self._run.finish()


class Prometheus:
    """http://127.0.0.1:PORT/metrics, for this machine alone: the last value of every number of a line, by stage and
    kind, and how much has been done since this start."""

    name = "Prometheus"

    def __init__(self, port: int):
        from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

        self._registry = CollectorRegistry()
        self._new_gauge, self._gauges = Gauge, {}
        self._orders = Counter(
            "rsi_fast_orders", "Rounds and evaluations that were collected.", ["kind"], registry=self._registry
        )
        self._trajectories = Counter(
            "rsi_fast_trajectories", "Attempts of those.", ["kind", "valid"], registry=self._registry
        )
        try:
            self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=self._registry)
        except OSError as error:
            raise UserError(
                f"monitor.prometheus_port = {port} cannot be used ({error.strerror}): choose another port, or leave it "
                "out; the metrics are in metrics.jsonl all the same"
            ) from error

    def write(self, line: dict) -> None:
        labels = {"stage": line["stage"], "kind": line["kind"]}
        for key, value in _numbers(line).items():
            self._gauge(f"rsi_fast_{re.sub('[^a-zA-Z0-9_]', '_', key)}", key, tuple(labels)).labels(**labels).set(value)
        for name in MEANINGS if "alarms" in line else ():
            self._gauge("rsi_fast_alarm", "1 while it stands.", ("name",)).labels(name).set(name in line["alarms"])
        if attempts := line.get("rollout/attempts"):
            self._orders.labels(line["kind"]).inc()
            self._trajectories.labels(line["kind"], "false").inc(line["rollout/invalid"])
            self._trajectories.labels(line["kind"], "true").inc(attempts - line["rollout/invalid"])

    def _gauge(self, name: str, text: str, labels: tuple[str, ...]):
        if name not in self._gauges:
            self._gauges[name] = self._new_gauge(name, text, labels, registry=self._registry)
        return self._gauges[name]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
