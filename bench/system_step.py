"""One optimizer step of critic and actor: `torchrun ... -m bench.system_step OUT.json [--tiny]`.

On one rank also the same tokens through plain PyTorch, without DeepSpeed: padded batches, whole logits, AdamW. Both are
called in turn; the losses are compared first.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rsi_fast.config import Config
from rsi_fast.trainer import packing, update
from rsi_fast.trainer.batching import Cut, Sample
from rsi_fast.trainer.engines import Engine
from rsi_fast.trainer.models import load_actor, load_critic
from rsi_fast.trainer.statistics import Sums

CPU = torch.device("cpu")
LENGTHS = [512, 448, 384, 320, 256, 192, 128, 96]
BUDGET = 1024
REPEATS = 5
LR = 1e-4


def make_model(folder: Path, tiny: bool) -> Path:
    torch.manual_seed(0)
    size = 64 if tiny else 384
    config = Qwen3Config(
        vocab_size=1024 if tiny else 8192,
        hidden_size=size,
        intermediate_size=4 * size,
        num_hidden_layers=2 if tiny else 4,
        num_attention_heads=size // 32,
        num_key_value_heads=size // 64,
        head_dim=32,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_samples(vocab_size: int) -> list[Sample]:
    """Turns of 20 action and 44 observation tokens."""
    random, samples = torch.Generator().manual_seed(1), []
    for length in LENGTHS:
        place = torch.arange(length)
        mask = place % 64 >= 44
        sample = Sample(
            token_ids=torch.randint(vocab_size, (length,), generator=random),
            action_mask=mask,
            turn_ids=torch.where(mask, place // 64, -1).int(),
            behaviour_logprobs=torch.zeros(length),
        )
        for name in ("old_logprobs", "old_values", "advantages", "returns"):
            sample.values[name] = torch.randn(length, generator=random) * 0.1
        sample.values["old_logprobs"] -= 9.0
        samples.append(sample)
    return samples


class Plain:
    """What one writes without a library: no packing, no sharding, whole logits."""

    def __init__(self, folder: Path, samples: list[Sample], num_tokens: float):
        self.actor = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.critic = load_critic(folder, torch.float32, seed=0)
        self.optimizers = [
            torch.optim.AdamW(m.parameters(), lr=LR, weight_decay=0.0) for m in (self.critic, self.actor)
        ]
        self.batches = Cut(BUDGET, False, 1e9).micro_batches([samples], 0, CPU)
        self.num_tokens = num_tokens

    def step(self) -> tuple[float, float]:
        """(value loss, policy loss)"""
        totals = []
        for model, optimizer, loss_of in zip(
            (self.critic, self.actor), self.optimizers, (self._value_loss, self._policy_loss), strict=True
        ):
            total = 0.0
            for batch in self.batches:
                loss = loss_of(batch)
                loss.backward()
                total += float(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            totals.append(total)
        return totals[0], totals[1]

    def _value_loss(self, batch) -> torch.Tensor:
        hidden = self.critic.backbone(input_ids=batch.token_ids, use_cache=False).last_hidden_state
        values = self.critic.value_head(hidden)[:, :-1, 0]
        old, returns = batch.stack("old_values")[:, 1:], batch.stack("returns")[:, 1:]
        near = old + (values - old).clamp(-0.2, 0.2)
        errors = torch.maximum((values - returns) ** 2, (near - returns) ** 2)
        return 0.5 * (errors * batch.action_mask[:, 1:]).sum() / self.num_tokens

    def _policy_loss(self, batch) -> torch.Tensor:
        logits = self.actor(input_ids=batch.token_ids, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(-1, batch.token_ids[:, 1:, None])[..., 0]
        ratio = (logprobs - batch.stack("old_logprobs")[:, 1:]).exp()
        advantages = batch.stack("advantages")[:, 1:]
        losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        return (losses * batch.action_mask[:, 1:]).sum() / self.num_tokens


class Ours:
    def __init__(self, folder: Path, samples: list[Sample], config: Config):
        self.config = config
        self.actor = Engine(config, lambda: load_actor(folder, torch.float32), "actor")
        self.critic = Engine(config, lambda: load_critic(folder, torch.float32, seed=0), "critic")
        cut = packing.decide_cut(self.actor, config, CPU)
        packing.pack(self.critic)
        hands = cut.deal(samples, dist.get_world_size())
        self.num_tokens = update.num_action_tokens(hands)
        self.batches = cut.micro_batches(hands, dist.get_rank(), CPU)

    def step(self) -> tuple[float, float]:
        updates, value_loss = Sums(), 0.0

        def values():
            nonlocal value_loss
            for loss in update.critic_losses(self.critic, self.batches, self.num_tokens, self.config):
                value_loss += float(loss.detach())
                yield loss

        self.critic.step(values(), len(self.batches), LR)
        losses = update.actor_losses(self.actor, self.batches, self.num_tokens, self.config, updates)
        self.actor.step(losses, len(self.batches), LR)
        return value_loss, updates.means(CPU)["actor/loss"]


def timed(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    out, tiny = Path(sys.argv[1]), "--tiny" in sys.argv
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    place: list = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(place, src=0)
    folder = Path(place[0]) / "model"
    if dist.get_rank() == 0:
        make_model(folder, tiny)
    dist.barrier()
    config = Config.model_validate(
        {
            "run": {"dir": "unused"},
            "model": {"path": folder, "dtype": "float32", "device": "cpu", "max_tokens": BUDGET},
            "tasks": {"train": {"path": "unused"}},
            "rollout": {"max_turn_tokens": 8},
            "trainer": {"micro_batch_tokens": BUDGET},
            "stages": [{"kind": "ppo", "rounds": 1, "attempts": 1, "actor_lr": LR, "critic_lr": LR}],
        }
    )
    samples = make_samples(1024 if tiny else 8192)
    ours = Ours(folder, samples, config)
    result = {"tokens": sum(LENGTHS), "losses": ours.step()}
    contestants = {"ours": ours.step}
    if dist.get_world_size() == 1:
        plain = Plain(folder, samples, ours.num_tokens)
        result["plain_losses"] = plain.step()
        contestants["plain"] = plain.step
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(1 if tiny else REPEATS):
        for name, step in contestants.items():
            seconds[name].append(timed(step))
    if dist.get_world_size() == 1:
        torch.set_num_threads(2)
        seconds["plain_2_threads"] = [timed(plain.step) for _ in range(1 if tiny else REPEATS)]
    if dist.get_rank() == 0:
        out.write_text(json.dumps(result | {"seconds": {name: min(values) for name, values in seconds.items()}}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
