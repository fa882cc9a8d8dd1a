"""The run file: TOML into pydantic models, checked whole before anything starts.

Every rule about which settings fit together stands here and nowhere else. Paths in a run file are relative to the
directory from which the command is started.
"""

import difflib
import fnmatch
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rsi_fast.errors import UserError

Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
PositiveCount = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Run(Section):
    dir: Path  # everything the run writes goes here; on several nodes, a file system that all of them see
    seed: Count = 0


class Model(Section):
    path: Path  # Hugging Face folder: config.json, *.safetensors, tokenizer
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of weights and activations in the trainer and in vLLM
    device: Literal["cpu", "cuda"] = "cuda"
    max_tokens: PositiveCount  # longest trajectory, prompt and observations included


class TaskSet(Section):
    """Tasks from a folder of Harbor tasks, or from the demo's generator."""

    path: Path | None = None
    generator: Literal["demo"] | None = None
    split: Literal["train", "dev", "heldout"] = "train"  # of the generator
    count: PositiveCount | None = None  # of the generator; for a folder, the first `count` tasks in order of name

    @model_validator(mode="after")
    def _one_source(self):
        if (self.path is None) == (self.generator is None):
            raise ValueError("give either path (a folder of Harbor tasks) or generator, not both")
        if self.generator and self.count is None:
            raise ValueError("a generator needs count, the number of tasks to make")
        return self


class Sandbox(Section):
    kind: Literal["bashkit"] = "bashkit"
    command_timeout_s: Positive = 10.0  # one command of the agent
    verifier_timeout_s: Positive = 60.0  # the default where a task gives none
    output_limit_bytes: PositiveCount = 16384  # of one command; what is beyond is cut, and the agent is told


class Server(Section):
    """vLLM: started by the launcher, or running elsewhere and given by `urls`."""

    urls: list[str] = []  # given: the launcher starts none
    num_servers: PositiveCount = 1
    port: int | None = Field(default=None, ge=1, le=65535)  # of the first server; None takes free ports
    tensor_parallel_size: PositiveCount = 1
    max_num_seqs: PositiveCount = 64
    kv_cache_gib: PositiveCount = 1  # on CPU
    gpu_memory_utilization: Fraction = 0.9
    start_timeout_s: Positive = 900.0
    extra_args: list[str] = []  # passed to vLLM as they are


class Rollout(Section):
    agent: Literal["plain", "fenced"] = "fenced"
    temperature: Positive = 1.0
    max_turns: PositiveCount = 50
    max_turn_tokens: PositiveCount = 4096  # sampled in one turn
    max_observation_tokens: PositiveCount = 4096  # of one command's output; cut at the tail
    wall_time_s: Positive = 3600.0  # of one attempt, verifier excluded
    max_concurrency: PositiveCount = 64  # attempts in flight
    request_timeout_s: Positive = 900.0  # one completion
    stall_timeout_s: Positive = 30.0  # requests wait and no token was made for so long: the server is dead
    round_timeout_s: Positive = 86400.0  # the trainer's wait for one round's trajectories
    retries: Count = 2  # of an attempt whose sandbox or verifier failed; then it is kept as invalid
    # Collection runs ahead of training by so many rounds. 0: each round's attempts are made by the weights it trains.
    # Attempts under way go on over a sync; those with a turn of weights that are more versions old are dropped.
    max_staleness: Count = 0


class Curriculum(Section):
    """Tasks that teach nothing rest: those whose last attempts all succeeded, or all failed."""

    attempts: Annotated[int, Field(ge=2)] | None = None  # so many last attempts alike; None: no task rests
    rest_rounds: PositiveCount = 10
    floor: Annotated[float, Field(gt=0, le=1)] = 0.1  # this part of the resting tasks comes all the same


class Credit(Section):
    """Arguments of `turn_gae`; see its docstring."""

    gamma: Fraction = 1.0
    lam: Fraction = 0.95
    token_gamma: Fraction = 1.0
    token_lam: Fraction = 1.0
    critic_lam: Fraction | None = None
    credit: Literal["token", "turn"] = "token"
    family_weights: dict[str, Positive] = {}  # 1 where not named


class Optimizer(Section):
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: Positive = 1.0


class Zero(Section):
    """What DeepSpeed ZeRO-3 may be told."""

    param_persistence_threshold: Count = 100_000  # parameters smaller than this stay whole on every rank
    offload_optimizer: Literal["none", "cpu"] = "none"
    offload_param: Literal["none", "cpu"] = "none"


class Trainer(Section):
    num_ranks: PositiveCount = 1  # processes on this node; one GPU each on CUDA
    micro_batch_tokens: PositiveCount = 16384  # of one forward pass, padding included
    packing: bool = True  # samples in one row without padding, if the model keeps them apart; the log says if not
    minibatches: PositiveCount = 4  # optimizer steps a round and epoch
    epochs: PositiveCount = 1
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Positive = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    importance_cap: Positive | None = None  # truncated importance weight against the behaviour log-probs
    value_clip: Positive = 0.2
    whiten_advantages: bool = True
    optimizer: Optimizer = Optimizer()
    zero: Zero = Zero()
    keep_checkpoints: PositiveCount = 2  # the last ones
    keep_best: Count = 0  # and of all so many whose weights solved most of the training attempts made with them
    max_logprob_abs_diff: Positive = 0.1  # mean over a round's tokens, trainer against vLLM, beyond which the run stops
    sync_timeout_s: Positive = 120.0
    # Of critic and ppo stages, from 0: kernels/* in its metrics and a Chrome trace in RUN/profile. It takes longer.
    profile_round: Count | None = None


class Stage(Section):
    kind: Literal["sft", "critic", "ppo"]
    name: str | None = Field(default=None, pattern=r"^[a-z0-9_-]{1,40}$")  # default: the kind
    eval_after: bool = False  # score the held-out set with the stage's last weights
    checkpoint_every: PositiveCount = 1  # rounds, or steps of sft; the end of a stage always makes one
    actor_lr: float = Field(default=0.0, ge=0)
    critic_lr: float = Field(default=0.0, ge=0)
    lr_warmup_steps: Count = 0
    final_lr_fraction: Fraction = 1.0  # linear to this part of the rate at the stage's end
    # sft
    demonstrations: Path | Literal["demo"] | None = None  # a spool folder, or the demo's generator
    num_demonstrations: PositiveCount | None = None  # of the generator
    steps: PositiveCount | None = None
    batch_size: PositiveCount = 32
    # critic, ppo
    rounds: PositiveCount | None = None  # critic: at most so many
    attempts: PositiveCount | None = None  # a round
    partial_cap: Annotated[float, Field(ge=0, lt=1)] = 0.4
    # critic: over before `rounds` when either is met
    min_explained_variance: Fraction | None = None
    min_value_loss_drop: Fraction | None = None  # of the first round's value loss

    @property
    def label(self) -> str:
        return self.name or self.kind

    @model_validator(mode="after")
    def _fits_kind(self):
        needs = {
            "sft": ("steps", "demonstrations", "actor_lr"),
            "critic": ("rounds", "attempts", "critic_lr"),
            "ppo": ("rounds", "attempts", "actor_lr", "critic_lr"),
        }[self.kind]
        for key in needs:
            if not getattr(self, key):
                raise ValueError(f"a stage of kind {self.kind} needs {key}")
        foreign = {
            "sft": {"rounds", "attempts", "critic_lr", "min_explained_variance", "min_value_loss_drop"},
            "critic": {"steps", "demonstrations", "num_demonstrations", "actor_lr"},
            "ppo": {"steps", "demonstrations", "num_demonstrations", "min_explained_variance", "min_value_loss_drop"},
        }[self.kind]
        # The resolved config spells defaults out, so a key counts as used where its value is another.
        fields = type(self).model_fields
        wrong = sorted(key for key in foreign if getattr(self, key) != fields[key].default)
        if wrong:
            raise ValueError(f"{', '.join(wrong)} means nothing in a stage of kind {self.kind}; remove it")
        if self.demonstrations == "demo" and self.num_demonstrations is None:
            raise ValueError('demonstrations = "demo" needs num_demonstrations')
        return self


class Monitor(Section):
    """What an operator sees beside metrics.jsonl, and when the run raises an alarm. Alarms stop nothing."""

    tensorboard: bool = False  # RUN/tensorboard
    wandb_project: str | None = Field(default=None, min_length=1)  # log in with `wandb login` or WANDB_API_KEY
    wandb_mode: Literal["online", "offline"] = "online"  # offline: RUN/wandb, for `wandb sync` later
    prometheus_port: int | None = Field(default=None, ge=1, le=65535)  # on 127.0.0.1: no key guards it
    # Alarms. 0 or 1 where a fraction switches one off.
    min_entropy_fraction: Fraction = 0.2  # of the first round's entropy: below, the policy hardly explores
    max_ratio_distance: Positive = 0.1  # of actor/ratio_mean from 1, where it stays but for rounding and clipped tails
    max_approx_kl: Positive = 0.1  # of one round's update; 0.001 to 0.02 is usual
    critic_warmup_rounds: Count = 4  # of the run, after which explained variance below 0 is an alarm
    max_invalid: PositiveFraction = 0.1  # of a round's attempts: more is a broken sandbox or verifier
    max_truncated: PositiveFraction = 0.5  # of a round's attempts: more means a limit that is too tight, or loops


class Eval(Section):
    at_start: bool = False  # score the model as it was given
    attempts_per_task: PositiveCount = 1
    temperature: Positive = 1.0


class Tasks(Section):
    train: TaskSet | None = None
    heldout: TaskSet | None = None


class Config(Section):
    run: Run
    model: Model
    tasks: Tasks = Tasks()
    sandbox: Sandbox = Sandbox()
    server: Server = Server()
    rollout: Rollout = Rollout()
    curriculum: Curriculum = Curriculum()
    credit: Credit = Credit()
    trainer: Trainer = Trainer()
    monitor: Monitor = Monitor()
    eval: Eval = Eval()
    stages: list[Stage] = Field(min_length=1)

    @model_validator(mode="after")
    def _fits_together(self):
        labels = [stage.label for stage in self.stages]
        if len(set(labels)) < len(labels):
            raise ValueError(f"two stages share a name ({', '.join(labels)}); give each its own `name`")
        if any(stage.kind != "sft" for stage in self.stages) and self.tasks.train is None:
            raise ValueError("stages of kind critic or ppo need [tasks.train]")
        if (self.eval.at_start or any(s.eval_after for s in self.stages)) and self.tasks.heldout is None:
            raise ValueError("eval.at_start and eval_after need [tasks.heldout]")
        if self.rollout.max_turn_tokens >= self.model.max_tokens:
            raise ValueError(
                f"rollout.max_turn_tokens ({self.rollout.max_turn_tokens}) must be below model.max_tokens "
                f"({self.model.max_tokens}), or no prompt has room"
            )
        if self.trainer.micro_batch_tokens < self.model.max_tokens:
            raise ValueError(
                f"trainer.micro_batch_tokens ({self.trainer.micro_batch_tokens}) must hold one whole trajectory: "
                f"at least model.max_tokens ({self.model.max_tokens})"
            )
        if self.rollout.max_staleness and self.trainer.importance_cap is None:
            raise ValueError(
                "rollout.max_staleness > 0 trains on tokens of older weights, and that needs truncated importance "
                "weights: give trainer.importance_cap, such as 2.0"
            )
        if self.server.urls and self.server.port is not None:
            raise ValueError("server.port is for servers that the launcher starts; with server.urls leave it out")
        first, ours = self.server.port, self.monitor.prometheus_port
        if first is not None and ours in range(first, first + self.server.num_servers):
            raise ValueError(f"monitor.prometheus_port ({ours}) is a server's (server.port); choose another")
        return self

    def save(self, path: Path) -> None:
        """Writes the resolved config, defaults included, as TOML."""
        text = tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))
        part = path.with_name(f".{path.name}.part")
        part.write_text(text)
        part.replace(path)


# A run may go on with other values of these: they say where and how fast the work is done, and change results by not
# more than the rounding of sums.
MAY_CHANGE = (
    "run.dir",
    "server.*",
    "rollout.max_concurrency",
    "rollout.request_timeout_s",
    "rollout.stall_timeout_s",
    "rollout.round_timeout_s",
    "trainer.num_ranks",
    "trainer.micro_batch_tokens",
    "trainer.packing",
    "trainer.zero.*",
    "trainer.keep_checkpoints",
    "trainer.keep_best",
    "trainer.max_logprob_abs_diff",
    "trainer.sync_timeout_s",
    "trainer.profile_round",
    "monitor.*",
    "stages.*.checkpoint_every",
)


def changes(old: Config, new: Config) -> tuple[list[str], list[str]]:
    """What is another value in `new`, as "key = new (was old)": (what a run may go on with, what it may not)."""
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    allowed, refused = [], []
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            may = any(fnmatch.fnmatchcase(key, pattern) for pattern in MAY_CHANGE)
            (allowed if may else refused).append(f"{key} = {after.get(key)} (was {before.get(key)})")
    return allowed, refused


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys, as --set takes them."""
    if isinstance(node, dict):
        pairs = node.items()
    elif isinstance(node, list) and node and isinstance(node[0], dict):
        pairs = enumerate(node)
    else:
        return {prefix: node}
    return {key: value for name, part in pairs for key, value in _flat(part, f"{prefix}.{name}".lstrip(".")).items()}


def load_config(path: Path, overrides: list[str] = ()) -> Config:
    """Reads a run file and applies `section.key=value` overrides (value: TOML, or else a plain string).

    Raises UserError that names the key, what was expected and, for an unknown key, the nearest known one.
    """
    try:
        raw = tomllib.loads(Path(path).read_text())
    except FileNotFoundError:
        raise UserError(f"config file {path} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"config file {path} cannot be read: {error}") from None
    for override in overrides:
        _apply_override(raw, override)
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise UserError(_explain(error, str(path))) from None


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise UserError(f"--set {override}: expected section.key=value, such as run.seed=1 or stages.0.steps=10")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    node: Any = raw
    for part in parts[:-1]:
        if isinstance(node, list):
            if not part.isdigit() or int(part) >= len(node):
                raise UserError(f"--set {override}: {part} is not one of the {len(node)} entries (counted from 0)")
            node = node[int(part)]
        else:
            node = node.setdefault(part, {})
        if not isinstance(node, dict | list):
            raise UserError(f"--set {override}: {part} is a value, not a section")
    if isinstance(node, list):
        raise UserError(f"--set {override}: name a key of an entry, such as {'.'.join(parts)}.steps")
    node[parts[-1]] = value


def _explain(error: ValidationError, source: str) -> str:
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"]) or "the file as a whole"
        if item["type"] == "extra_forbidden":
            known = _known_keys(item["loc"][:-1])
            near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known keys here: {', '.join(sorted(known))}"
            lines.append(f"{where}: unknown key; {hint}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            got = "" if item["type"] in ("missing", "value_error") else f" (got {item['input']!r})"
            lines.append(f"{where}: {message}{got}")
    return f"config {source} is not valid:\n  " + "\n  ".join(lines)


def _known_keys(location: tuple[str | int, ...]) -> list[str]:
    model: Any = Config
    for part in location:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        model = next(t for t in _types(annotation) if isinstance(t, type) and issubclass(t, BaseModel))
    return list(model.model_fields)


def _types(annotation: Any) -> list[Any]:
    inner = getattr(annotation, "__args__", None)
    return [t for arg in inner for t in _types(arg)] if inner else [annotation]
