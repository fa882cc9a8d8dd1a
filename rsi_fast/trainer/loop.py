"""The recipe as a loop: for each stage, for each round: wait for rollouts, score, log-probs and values, `turn_gae`,
critic step, actor step, sync, log, checkpoint."""

import json
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from rsi_fast.config import Config, Stage
from rsi_fast.errors import UserError
from rsi_fast.spool import Order, Spool, Trajectory, write_json_atomic
from rsi_fast.trainer import checkpoint as checkpoints
from rsi_fast.trainer import packing, rollouts, update
from rsi_fast.trainer.batching import Hands, MicroBatch, Sample
from rsi_fast.trainer.checkpoint import State
from rsi_fast.trainer.engines import Engine
from rsi_fast.trainer.intake import Intake
from rsi_fast.trainer.metrics import Stopwatch, profiled
from rsi_fast.trainer.models import load_actor, load_critic
from rsi_fast.trainer.monitor import Monitor
from rsi_fast.trainer.statistics import Sums
from rsi_fast.trainer.sync import Publisher


class Trainer:
    """One rank of a run. `publisher` is None when it trains from a spool alone, without servers."""

    def __init__(self, config: Config, task_names: dict[str, list[str]], publisher: Publisher | None):
        self.config = config
        self.run_dir = config.run.dir
        self.task_names = task_names
        self.publisher = publisher
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device(config.model.device)
        self.dtype = getattr(torch, config.model.dtype)
        self.spool = Spool(self.run_dir)
        self.intake = Intake(config, task_names.get("train", []), offline=publisher is None)
        self.watch = Stopwatch()
        self.demonstrations: tuple[str, list[Sample]] = ("", [])  # of the open sft stage
        self.critic: Engine | None = None
        self.actor = Engine(config, lambda: load_actor(config.model.path, self.dtype), "actor")
        self.cut = packing.decide_cut(self.actor, config, self.device)
        self.state = State()
        self._resume()
        self.monitor = Monitor(config, self.state.step) if self.rank == 0 else None

    # ---- the recipe

    def train(self) -> None:
        if self.config.eval.at_start and not self.state.started:
            self._evaluate("base", stage_number=0)
        self.state.started = True
        while self.state.stage < len(self.config.stages):
            stage = self.config.stages[self.state.stage]
            if not self.state.stage_open:
                self._open_stage(stage)
            while self.state.round < (stage.steps or stage.rounds) and not self.state.gate_met:
                self.watch = Stopwatch()
                with profiled(self._trace(stage)) as operations, self.watch.phase("total"):
                    metrics = self._sft_step(stage) if stage.kind == "sft" else self._rl_round(stage)
                self._log(stage.label, stage.kind, metrics | operations)
                self.state.round += 1
                if self.state.round % stage.checkpoint_every == 0:
                    self._checkpoint()
            self._close_stage(stage)
        if self.rank == 0:
            write_json_atomic(self.run_dir / "done.json", json.dumps({"step": self.state.step}))
            self.monitor.close()

    def _rl_round(self, stage: Stage) -> dict:
        config, state, phase = self.config, self.state, self.watch.phase
        with phase("collect"):
            if self.publisher:
                self.publisher.ensure(self.actor, state.weight_version)
            taken = self.intake.take(state, stage)
        with phase("score"):
            version = state.weight_version if self.publisher else None
            samples, metrics = rollouts.score(
                list(taken.trajectories.values()), stage.partial_cap, config.credit.family_weights, version
            )
            metrics |= taken.counts()
            if self.rank == 0:
                checkpoints.note_score(self.run_dir, metrics["rollout/success"])
            name = rollouts.order_name(state.stage + 1, stage.label, state.round)
            epochs = update.split_round(samples, config, name, self.cut, self.world_size)
            whole = [sum(hands, []) for hands in zip(*epochs[0], strict=True)]
        with phase("forward"):
            metrics |= update.score_tokens(self._batches(whole), self.actor, self.critic, config, self.device)
        with phase("credit"):
            metrics |= update.assign_credit(whole[self.rank], config, self.device)
        self._gate(stage, metrics)

        updates = Sums()
        step = state.round * config.trainer.epochs * config.trainer.minibatches
        for hands in (hands for epoch in epochs for hands in epoch):
            num_tokens = update.num_action_tokens(hands)
            batches = self._batches(hands)
            updates.add(self.cut.waste(hands))
            lr = update.learning_rate_factor(config, stage, step)
            with phase("critic"):
                losses = update.critic_losses(self.critic, batches, num_tokens, config)
                norm = self.critic.step(losses, len(batches), stage.critic_lr * lr)
                updates.add({"critic/grad_norm": norm, "critic/lr": stage.critic_lr * lr})
            if stage.kind == "ppo":
                with phase("actor"):
                    losses = update.actor_losses(self.actor, batches, num_tokens, config, updates)
                    norm = self.actor.step(losses, len(batches), stage.actor_lr * lr)
                    updates.add({"actor/grad_norm": norm, "actor/lr": stage.actor_lr * lr})
            step += 1
        metrics |= updates.means(self.device)
        if stage.kind == "ppo":
            metrics |= self._publish()
        return metrics

    def _sft_step(self, stage: Stage) -> dict:
        demonstrations = self._load_demonstrations(stage)
        batch_size = min(stage.batch_size, len(demonstrations))
        chosen = []
        for position in range(self.state.round * batch_size, (self.state.round + 1) * batch_size):
            lap, place = divmod(position, len(demonstrations))
            order = update.permutation(len(demonstrations), self.config.run.seed, f"{stage.label}/{lap}")
            chosen.append(demonstrations[order[place]])
        hands = self.cut.deal(chosen, self.world_size)
        num_tokens, batches = update.num_action_tokens(hands), self._batches(hands)
        lr = stage.actor_lr * update.learning_rate_factor(self.config, stage, self.state.round)
        updates = Sums()
        with self.watch.phase("actor"):
            norm = self.actor.step(update.sft_losses(self.actor, batches, num_tokens, updates), len(batches), lr)
        updates.add({"sft/grad_norm": norm, "actor/lr": lr} | self.cut.waste(hands))
        return updates.means(self.device)

    def _evaluate(self, name: str, stage_number: int) -> None:
        """Scores the held-out set with the actor as it is. Without servers: only if the spool holds the attempts."""
        order = rollouts.eval_order(
            self.config, stage_number, name, self.task_names["heldout"], self.state.weight_version
        )
        if self.publisher is None and self.spool.find_order(order.name) is None:
            return
        self.watch = Stopwatch()
        if self.publisher is not None:
            with self.watch.phase("wait_servers"):
                self.publisher.connect(self.actor)
        with self.watch.phase("total"), self.watch.phase("collect"):
            trajectories = self._collect(order)
        self._log(name, "eval", {"eval/name": name} | rollouts.evaluation(trajectories))

    # ---- stages

    def _open_stage(self, stage: Stage) -> None:
        """Fresh optimizers for what the stage trains, and a critic where there is none yet."""
        state = self.state
        if stage.kind != "critic":
            self.actor.reset_optimizer()
        if stage.kind != "sft" and self.critic is None:
            trained = [s.label for s in self.config.stages[: state.stage] if s.kind != "critic"]
            state.critic_from = str(self._model_folder(trained[-1]) if trained else self.config.model.path)
            self._make_critic()
        elif stage.kind == "critic":
            self.critic.reset_optimizer()
        state.stage_open, state.first_value_loss, state.gate_met = True, None, False

    def _gate(self, stage: Stage, metrics: dict) -> None:
        """A critic stage ends when its gate is met by the critic as this round found it, before its update."""
        if stage.kind != "critic":
            return
        loss = metrics["critic/loss"]
        if self.state.first_value_loss is None:
            self.state.first_value_loss = loss
        drop, variance = stage.min_value_loss_drop, stage.min_explained_variance
        self.state.gate_met = (drop is not None and loss <= (1 - drop) * self.state.first_value_loss) or (
            variance is not None and metrics["critic/explained_variance"] >= variance
        )

    def _close_stage(self, stage: Stage) -> None:
        if stage.kind != "sft" and self.rank == 0:
            self.intake.close(self.state, stage)
        if stage.kind != "critic":
            self.actor.export(self._model_folder(stage.label), like=self.config.model.path)
        if stage.kind == "sft":
            self.watch = Stopwatch()
            with self.watch.phase("total"):
                metrics = self._publish()
            self._log(stage.label, "sync", metrics)
        if stage.eval_after:
            self._evaluate(stage.label, self.state.stage + 1)
        self.state.stage += 1
        self.state.round, self.state.stage_open, self.state.gate_met = 0, False, False
        self._checkpoint()

    def _make_critic(self) -> None:
        folder, seed = Path(self.state.critic_from), self.config.run.seed
        self.critic = Engine(self.config, lambda: load_critic(folder, self.dtype, seed), "critic")
        if self.cut.packed:
            packing.pack(self.critic)

    def _model_folder(self, label: str) -> Path:
        return self.run_dir / "models" / label

    # ---- micro-batches

    def _batches(self, hands: Hands) -> list[MicroBatch]:
        return self.cut.micro_batches(hands, self.rank, self.device)

    # ---- rollouts and weights

    def _collect(self, order: Order) -> list[Trajectory]:
        """An order of its own, such as an evaluation, whole."""
        if self.publisher is None:
            return rollouts.read_from(self.spool, order.name)
        self.publisher.ensure(self.actor, self.state.weight_version)
        if self.rank == 0:
            self.spool.give_order(order)
        return rollouts.wait_for(self.spool, order, self.config.rollout.round_timeout_s)

    def _publish(self) -> dict:
        """The actor changed: a new weight version, live in every server when this returns."""
        self.state.weight_version += 1
        if self.publisher is None:
            return {}
        with self.watch.phase("wait_servers"):
            self.publisher.connect(self.actor)
        with self.watch.phase("sync"):
            return {"sync/bytes": self.publisher.send(self.actor, self.state.weight_version)}

    def _load_demonstrations(self, stage: Stage) -> list[Sample]:
        if self.demonstrations[0] != stage.label:
            folder = self.run_dir / "demonstrations" if stage.demonstrations == "demo" else stage.demonstrations
            self.demonstrations = (stage.label, rollouts.load_demonstrations(folder))
        return self.demonstrations[1]

    # ---- records

    def _log(self, label: str, kind: str, metrics: dict) -> None:
        self.state.step += 1
        line = {"stage": label, "kind": kind, "round": self.state.round, "step": self.state.step}
        line |= {"weight_version": self.state.weight_version, "time": round(time.time(), 3)} | metrics
        if self.rank == 0:
            self.monitor.log(line, self.watch)

    def _trace(self, stage: Stage) -> Path | None:
        """Where the profile of the round to come goes, if it is to be profiled."""
        wanted = stage.kind != "sft" and self.state.round == self.config.trainer.profile_round
        name = f"{stage.label}-{self.state.round:04d}.json.gz"
        return self.run_dir / "profile" / name if wanted and self.rank == 0 else None

    def _engines(self) -> dict[str, Engine]:
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})

    def _checkpoint(self) -> None:
        trainer = self.config.trainer
        checkpoints.save_checkpoint(
            self.run_dir, self.state, self._engines(), trainer.keep_checkpoints, trainer.keep_best
        )

    def _resume(self) -> None:
        if checkpoint := checkpoints.latest_checkpoint(self.run_dir):
            try:
                checkpoints.check(checkpoint)
                self.state = checkpoints.load_state(checkpoint)
                if self.state.critic_from:
                    self._make_critic()
                checkpoints.load_engines(checkpoint, self._engines())
            except Exception as error:
                traceback.print_exc()
                what = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                raise UserError(
                    f"the checkpoint {checkpoint} could not be loaded ({what}). If it is damaged, move it out of "
                    f"{checkpoint.parent}: the run then goes on from the one before, or from its start"
                ) from error
        if self.rank == 0:
            checkpoints.tidy(self.run_dir, self.config.trainer.keep_checkpoints, self.config.trainer.keep_best)
            self.intake.resume(self.state)
