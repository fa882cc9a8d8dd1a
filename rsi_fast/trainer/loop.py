"""The recipe as a loop: for each stage, for each round: wait for rollouts, score, log-probs and values, `turn_gae`,
critic step, actor step, sync, log, checkpoint."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from rsi_kernels import policy_loss, turn_gae, value_loss

from rsi_fast.config import Config, Stage
from rsi_fast.errors import UserError
from rsi_fast.spool import Spool, Trajectory, write_json_atomic
from rsi_fast.trainer import rollouts
from rsi_fast.trainer.batching import MicroBatch, Sample, deal, micro_batches
from rsi_fast.trainer.checkpoint import State, latest_checkpoint, load_engines, load_state, save_checkpoint
from rsi_fast.trainer.engines import Engine
from rsi_fast.trainer.models import load_actor, load_critic
from rsi_fast.trainer.statistics import Sums, global_moments, global_sum
from rsi_fast.trainer.sync import Publisher


class Trainer:
    """One rank. `publisher` is None when the run trains from a spool alone, without servers."""

    def __init__(self, config: Config, task_names: dict[str, list[str]], publisher: Publisher | None):
        self.config = config
        self.run_dir = config.run.dir
        self.task_names = task_names
        self.publisher = publisher
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device(
            config.model.device, torch.cuda.current_device() if torch.cuda.is_available() else None
        )
        self.dtype = getattr(torch, config.model.dtype)
        self.spool = Spool(self.run_dir)
        self.state = State()
        self.engines: dict[str, Engine] = {
            "actor": Engine(config, lambda: load_actor(config.model.path, self.dtype), "actor")
        }
        self.seconds: dict[str, float] = {}
        self._resume()

    # ------------------------------------------------------------------------------------------------ the recipe

    def train(self) -> None:
        if self.config.eval.at_start and not self.state.started:
            self.evaluate("base", stage_number=0)
        self.state.started = True
        while self.state.stage < len(self.config.stages):
            stage = self.config.stages[self.state.stage]
            self._open_stage(stage)
            while self.state.round < (stage.steps or stage.rounds) and not self.state.gate_met:
                self._round(stage)
                self.state.round += 1
                if self.state.round % stage.checkpoint_every == 0:
                    self._checkpoint()
            self._close_stage(stage)
        if self.rank == 0:
            write_json_atomic(self.run_dir / "done.json", json.dumps({"step": self.state.step}))

    def _round(self, stage: Stage) -> None:
        self.seconds = {}
        with self._phase("total"):
            metrics = self._sft_step(stage) if stage.kind == "sft" else self._rl_round(stage)
        self._log(stage.label, stage.kind, self.state.round, metrics)

    def _rl_round(self, stage: Stage) -> dict:
        with self._phase("collect"):
            trajectories = self._collect(
                rollouts.training_order(
                    self.config,
                    self.state.stage + 1,
                    self.state.round,
                    self.task_names["train"],
                    self.state.weight_version,
                )
            )
        with self._phase("score"):
            samples, metrics = rollouts.score(trajectories, stage.partial_cap, self.config.credit.family_weights)
            minibatches = self._minibatches(samples)
            mine = [sample for minibatch in minibatches[0] for sample in minibatch]
        with self._phase("forward"):
            metrics |= self._logprobs_and_values(mine)
        with self._phase("credit"):
            metrics |= self._credit(mine)
        self._gate(stage, metrics)
        updates = Sums()
        for minibatch in (m for epoch in minibatches for m in epoch):
            tokens = global_sum(sum(s.num_actions for s in minibatch), self.device)
            batches = list(micro_batches(minibatch, self.config.trainer.micro_batch_tokens, self.device))
            lr = self._lr(
                stage, self.state.round * len(minibatches) * len(minibatches[0]) + updates.count("critic/grad_norm")
            )
            with self._phase("critic"):
                norm = self.engines["critic"].step(
                    self._critic_losses(batches, tokens), len(batches), stage.critic_lr * lr
                )
                updates.add({"critic/grad_norm": norm, "critic/lr": stage.critic_lr * lr})
            if stage.kind == "ppo":
                with self._phase("actor"):
                    losses = self._actor_losses(batches, tokens, updates)
                    norm = self.engines["actor"].step(losses, len(batches), stage.actor_lr * lr)
                    updates.add({"actor/grad_norm": norm, "actor/lr": stage.actor_lr * lr})
        metrics |= updates.means(self.device)
        if stage.kind == "ppo":
            metrics |= self._publish()
        return metrics

    # ------------------------------------------------------------------------------------------------ its parts

    def _logprobs_and_values(self, samples: list[Sample]) -> dict:
        """Old log-probs and values, without gradient, and how far the log-probs are from vLLM's."""
        temperature = self.config.rollout.temperature
        entropy, difference, tokens = 0.0, 0.0, 0
        for batch in micro_batches(samples, self.config.trainer.micro_batch_tokens, self.device):
            logprobs, entropies = self.engines["actor"].forward(
                batch.token_ids, batch.action_mask, temperature, True, train=False
            )
            batch.unstack("old_logprobs", logprobs)
            batch.unstack("values", self.engines["critic"].forward(batch.token_ids, train=False))
            behaviour = batch.stack("behaviour_logprobs")
            difference += float((logprobs - behaviour).abs().masked_fill(~batch.action_mask, 0).sum())
            entropy += float(entropies.sum())
            tokens += int(batch.action_mask.sum())
        tokens = global_sum(tokens, self.device)
        difference = global_sum(difference, self.device) / tokens
        bound = self.config.trainer.max_logprob_abs_diff
        if not difference <= bound:
            raise UserError(
                f"the trainer's log-probs differ from vLLM's by {difference:.4g} on average, beyond "
                f"trainer.max_logprob_abs_diff = {bound:g}: they no longer run the same weights, or the server's "
                "sampling settings changed. Look at the last weight sync in logs/, or raise the bound for low precision."
            )
        return {"rollout/logprob_abs_diff": difference, "actor/entropy": global_sum(entropy, self.device) / tokens}

    def _credit(self, samples: list[Sample]) -> dict:
        """Advantages and returns of this rank's samples; whitened over the action tokens of all ranks."""
        credit = self.config.credit
        batch = MicroBatch.of(samples, self.device)
        out = turn_gae(
            batch.stack("values"),
            batch.action_mask,
            batch.stack("turn_ids", torch.int32),
            final_rewards=torch.tensor([s.reward for s in samples] or [0.0], device=self.device),
            **credit.model_dump(exclude={"family_weights"}),
        )
        mask = batch.action_mask
        mean, std = global_moments(out.advantages[mask])
        return_mean, return_std = global_moments(out.returns[mask])
        error = (out.returns - batch.stack("values"))[mask]
        _, error_std = global_moments(error)
        count = global_sum(int(mask.sum()), self.device)
        whitened = torch.where(mask, (out.advantages - mean) / (std + 1e-6), 0.0)
        batch.unstack("advantages", whitened if self.config.trainer.whiten_advantages else out.advantages)
        batch.unstack("returns", out.returns)
        return {
            "advantage/mean": mean,
            "advantage/std": std,
            "return/mean": return_mean,
            "return/std": return_std,
            "critic/explained_variance": 1 - error_std**2 / max(return_std**2, 1e-8),
            "critic/loss": 0.5 * global_sum(float(error.square().sum()), self.device) / count,
        }

    def _actor_losses(self, batches: list[MicroBatch], tokens: float, updates: Sums) -> Iterator[torch.Tensor]:
        trainer = self.config.trainer
        for batch in batches:
            logprobs = self.engines["actor"].forward(
                batch.token_ids, batch.action_mask, self.config.rollout.temperature, train=True
            )
            loss, stats = policy_loss(
                logprobs,
                batch.stack("old_logprobs"),
                batch.stack("advantages"),
                batch.action_mask,
                clip_low=trainer.clip_low,
                clip_high=trainer.clip_high,
                dual_clip=trainer.dual_clip,
                behaviour_logprobs=batch.stack("behaviour_logprobs") if trainer.importance_cap else None,
                is_cap=trainer.importance_cap,
                denominator=tokens,
            )
            share = stats["num_tokens"] / tokens
            updates.add_shares({"actor/loss": loss.detach()})
            updates.add_shares({f"actor/{k}": stats[k] * share for k in ("approx_kl", "clip_fraction", "ratio_mean")})
            yield loss

    def _critic_losses(self, batches: list[MicroBatch], tokens: float) -> Iterator[torch.Tensor]:
        for batch in batches:
            values = self.engines["critic"].forward(batch.token_ids, train=True)
            yield value_loss(
                values,
                batch.stack("values"),
                batch.stack("returns"),
                batch.action_mask,
                clip=self.config.trainer.value_clip,
                denominator=tokens,
            ).loss

    def _sft_step(self, stage: Stage) -> dict:
        demonstrations = self._demonstrations(stage)
        batch_size = min(stage.batch_size, len(demonstrations))
        chosen = []
        for position in range(self.state.round * batch_size, (self.state.round + 1) * batch_size):
            lap, place = divmod(position, len(demonstrations))
            chosen.append(demonstrations[self._permutation(len(demonstrations), f"sft/{lap}")[place]])
        mine = [chosen[i] for i in deal([len(s) for s in chosen], self.world_size)[self.rank]]
        tokens = global_sum(sum(s.num_actions for s in mine), self.device)
        batches = list(micro_batches(mine, self.config.trainer.micro_batch_tokens, self.device))
        updates = Sums()

        def losses() -> Iterator[torch.Tensor]:
            for batch in batches:
                loss = (
                    -self.engines["actor"].forward(batch.token_ids, batch.action_mask, 1.0, train=True).sum() / tokens
                )
                updates.add_shares({"sft/loss": loss.detach()})
                yield loss

        with self._phase("actor"):
            lr = stage.actor_lr * self._lr(stage, self.state.round)
            norm = self.engines["actor"].step(losses(), len(batches), lr)
            updates.add({"sft/grad_norm": norm, "actor/lr": lr})
        return updates.means(self.device)

    def evaluate(self, name: str, stage_number: int) -> None:
        """Scores the held-out set with the actor as it is; of a run without servers only if the spool holds it."""
        self.seconds = {}
        order = rollouts.eval_order(
            self.config, stage_number, name, self.task_names["heldout"], self.state.weight_version
        )
        if self.publisher is None and self.spool.missing(order):
            return
        with self._phase("total"), self._phase("collect"):
            trajectories = self._collect(order)
        self._log(name, "eval", 0, {"eval/name": name} | rollouts.evaluation(trajectories))

    # ------------------------------------------------------------------------------------------------ stages

    def _open_stage(self, stage: Stage) -> None:
        """Sets up what the stage trains: a fresh optimizer, and a critic where there is none yet."""
        if self.state.stage_open:
            return
        if stage.kind in ("sft", "ppo"):
            self.engines["actor"].reset_optimizer()
        if stage.kind != "sft" and "critic" not in self.engines:
            self.state.critic_from = str(self._actor_folder())
            self._make_critic()
        elif stage.kind == "critic":
            self.engines["critic"].reset_optimizer()
        self.state.stage_open, self.state.first_value_loss, self.state.gate_met = True, None, False

    def _close_stage(self, stage: Stage) -> None:
        if stage.kind != "critic":
            self.engines["actor"].export(self.run_dir / "models" / stage.label, like=self.config.model.path)
        if stage.kind == "sft":
            self.seconds = {}
            with self._phase("total"):
                metrics = self._publish()
            self._log(stage.label, "sync", self.state.round, metrics)
        if stage.eval_after:
            self.evaluate(stage.label, self.state.stage + 1)
        self.state.stage += 1
        self.state.round, self.state.stage_open, self.state.gate_met = 0, False, False
        self._checkpoint()

    def _gate(self, stage: Stage, metrics: dict) -> None:
        """A critic stage is over when its gate is met: by the critic as this round found it, before its update."""
        if stage.kind != "critic":
            return
        loss = metrics["critic/loss"]
        first = self.state.first_value_loss = (
            loss if self.state.first_value_loss is None else self.state.first_value_loss
        )
        drop, variance = stage.min_value_loss_drop, stage.min_explained_variance
        self.state.gate_met = (drop is not None and loss <= (1 - drop) * first) or (
            variance is not None and metrics["critic/explained_variance"] >= variance
        )

    def _make_critic(self) -> None:
        folder, seed = Path(self.state.critic_from), self.config.run.seed
        self.engines["critic"] = Engine(self.config, lambda: load_critic(folder, self.dtype, seed), "critic")

    def _actor_folder(self) -> Path:
        trained = [s.label for s in self.config.stages[: self.state.stage] if s.kind != "critic"]
        return self.run_dir / "models" / trained[-1] if trained else self.config.model.path

    # ------------------------------------------------------------------------------------------------ small things

    def _collect(self, order) -> list[Trajectory]:
        if self.publisher is not None:
            self.publisher.ensure(self.engines["actor"], self.state.weight_version)
        if self.rank == 0:
            self.spool.give_order(order)
        return rollouts.wait_for(
            self.spool, order, self.config.rollout.round_timeout_s, collector_runs=self.publisher is not None
        )

    def _publish(self) -> dict:
        """The actor changed: a new weight version, live in every server when this returns."""
        self.state.weight_version += 1
        if self.publisher is None:
            return {}
        with self._phase("sync"):
            return {"sync/bytes": self.publisher.send(self.engines["actor"], self.state.weight_version)}

    def _minibatches(self, samples: list[Sample]) -> list[list[list[Sample]]]:
        """[epoch][minibatch] -> this rank's samples. What a minibatch holds over all ranks does not depend on their
        number; a sample stays with the rank that has its old log-probs and values."""
        trainer = self.config.trainer
        epochs: list[list[list[int]]] = []
        for epoch in range(trainer.epochs):
            order = self._permutation(len(samples), f"{self.state.stage}/{self.state.round}/{epoch}")
            epochs.append([order[i :: trainer.minibatches] for i in range(trainer.minibatches)])
        mine = set()
        for chunk in epochs[0]:
            mine |= {chunk[i] for i in deal([len(samples[j]) for j in chunk], self.world_size)[self.rank]}
        return [[[samples[i] for i in chunk if i in mine] for chunk in epoch] for epoch in epochs]

    def _permutation(self, n: int, purpose: str) -> list[int]:
        import random

        return random.Random(f"{self.config.run.seed}/{purpose}").sample(range(n), n)

    def _demonstrations(self, stage: Stage) -> list[Sample]:
        if getattr(self, "_loaded", (None,))[0] != stage.label:
            folder = self.run_dir / "demonstrations" if stage.demonstrations == "demo" else stage.demonstrations
            self._loaded = (stage.label, rollouts.load_demonstrations(Path(folder)))
        return self._loaded[1]

    def _lr(self, stage: Stage, step: int) -> float:
        """The part of the stage's learning rate that holds at one of its optimizer steps (from 0)."""
        trainer = self.config.trainer
        total = stage.steps or stage.rounds * trainer.minibatches * trainer.epochs
        warm = min(1.0, (step + 1) / (stage.lr_warmup_steps or 1))
        return warm * (1 - (1 - stage.final_lr_fraction) * step / max(1, total))

    def _log(self, label: str, kind: str, round_: int, metrics: dict) -> None:
        self.state.step += 1
        total = self.seconds.get("total", 0.0)
        line = {"stage": label, "kind": kind, "round": round_, "step": self.state.step}
        line |= {"weight_version": self.state.weight_version, "time": round(time.time(), 3)} | metrics
        line |= {f"seconds/{name}": round(value, 4) for name, value in self.seconds.items()}
        if total and "rollout/tokens" in metrics:
            line["throughput/tokens_per_s"] = metrics["rollout/tokens"] / total
        if self.rank == 0:
            with (self.run_dir / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def _checkpoint(self) -> None:
        save_checkpoint(self.run_dir, self.state, self.engines, self.config.trainer.keep_checkpoints)

    def _resume(self) -> None:
        checkpoint = latest_checkpoint(self.run_dir)
        if checkpoint:
            self.state = load_state(checkpoint)
            if self.state.critic_from:
                self._make_critic()
            load_engines(checkpoint, self.engines)
        if self.rank == 0:
            _drop_lines_after(self.run_dir / "metrics.jsonl", self.state.step)


def _drop_lines_after(path: Path, step: int) -> None:
    """Metrics of steps that will be done again, and a line cut by a crash, go."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (json.JSONDecodeError, KeyError):
            break
    write_json_atomic(path, "".join(kept))
