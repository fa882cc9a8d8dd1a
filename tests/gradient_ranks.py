"""One rank: `torchrun ... tests/gradient_ranks.py OUT MODEL...`. Cuts the same samples in many ways and writes the
gradients of each, OUT/<model>/<actor|critic|sft>-<case>.safetensors, by the trainer's own engines, losses and cuts."""

import random
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from safetensors.torch import save_file

from rsi_fast.config import Config
from rsi_fast.trainer import packing, update
from rsi_fast.trainer.batching import Cut, Sample
from rsi_fast.trainer.engines import Engine
from rsi_fast.trainer.models import load_actor, load_critic
from rsi_fast.trainer.statistics import Sums

CPU = torch.device("cpu")
VOCABULARY, LONGEST, NUM_SAMPLES = 64, 40, 11
FEW = 2  # samples of the case in which ranks have nothing to do


def settings(model: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": "unused"},
            "model": {"path": model, "dtype": "float32", "device": "cpu", "max_tokens": LONGEST},
            "tasks": {"train": {"path": "unused"}},
            "rollout": {"max_turn_tokens": 8, "temperature": 0.7},
            "trainer": {
                "minibatches": 3,
                "importance_cap": 1.3,
                "dual_clip": 2.0,
                "zero": {"param_persistence_threshold": 0},  # truly sharded
            },
            "stages": [{"kind": "ppo", "rounds": 1, "attempts": 1, "actor_lr": 1.0, "critic_lr": 1.0}],
        }
    )


def make_samples() -> list[Sample]:
    """Two turns each, but for one that has no action token. Old log-probs and values are far enough from the model's
    that every branch of the losses is in use."""
    rng, torch_rng = random.Random(7), torch.Generator().manual_seed(7)
    samples = []
    for i in range(NUM_SAMPLES):
        mask, turns = [False] * rng.randint(1, 5), []
        turns = [-1] * len(mask)
        for turn in range(2):
            acting, observed = rng.randint(1, 9), rng.randint(0, 8)
            mask += [i != 4] * acting + [False] * observed
            turns += [turn] * acting + [-1] * observed
        n = len(mask)
        sample = Sample(
            token_ids=torch.randint(VOCABULARY, (n,), generator=torch_rng),
            action_mask=torch.tensor(mask),
            turn_ids=torch.tensor(turns, dtype=torch.int32),
            behaviour_logprobs=-4 + torch.rand(n, generator=torch_rng),
        )
        sample.values = {
            "old_logprobs": -4.2 + torch.rand(n, generator=torch_rng),
            "old_values": torch.rand(n, generator=torch_rng) - 0.5,
            "advantages": torch.randn(n, generator=torch_rng),
            "returns": torch.rand(n, generator=torch_rng),
        }
        samples.append(sample)
    return samples


def windows(samples: list[Sample], config: Config, cut: Cut, world_size: int) -> list[list[list[Sample]]]:
    """[optimizer step] -> hands: 11 samples in steps of 4, 4 and 3."""
    return update.split_round(samples, config, "gradients", cut, world_size)[0]


def cases(samples: list[Sample], config: Config, world_size: int, can_pack: bool) -> dict[str, tuple[Cut, list]]:
    shuffled = random.Random(1).sample(samples, len(samples))
    found = {}
    for kind, packed in [("padded", False)] + [("packed", True)] * can_pack:
        one, many = Cut(10_000, packed, 100.0), Cut(LONGEST, packed, 100.0)
        found[f"{kind}-one"] = one, one.deal(samples, world_size)
        found[f"{kind}-many"] = many, many.deal(samples, world_size)
        found[f"{kind}-shuffled"] = many, [shuffled[rank::world_size] for rank in range(world_size)]
        found[f"{kind}-few"] = many, many.deal(samples[:FEW], world_size)
        found[f"{kind}-window"] = many, windows(samples, config, many, world_size)[-1]
    return found


def gradient(engine: Engine, losses, num_losses: int) -> dict[str, torch.Tensor]:
    """Whole gradients of all parameters, after the last backward and before clipping."""
    found, step = {}, engine.engine.step

    def look_and_step() -> None:
        if engine.engine.is_gradient_accumulation_boundary():
            found.update({name: safe_get_full_grad(p).clone() for name, p in engine.parameters()})
        step()

    engine.engine.step = look_and_step
    engine.step(losses, num_losses, lr=0.0)
    engine.engine.step = step
    return found


def work(model: Path, out: Path) -> None:
    config = settings(model)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    actor = Engine(config, lambda: load_actor(model, torch.float32), "actor")
    critic = Engine(config, lambda: load_critic(model, torch.float32, seed=1), "critic")
    reason = packing.why_not(actor, VOCABULARY, CPU)
    actor.module.model.set_attn_implementation("sdpa")
    if rank == 0:
        out.mkdir(parents=True)
        (out / "packing.txt").write_text(reason or "packed")
    for name, (cut, hands) in cases(make_samples(), config, world_size, not reason).items():
        for engine in (actor, critic):
            if cut.packed:
                packing.pack(engine)
        num_tokens = update.num_action_tokens(hands)
        batches = cut.micro_batches(hands, rank, CPU)
        found = {
            "actor": gradient(actor, update.actor_losses(actor, batches, num_tokens, config, Sums()), len(batches)),
            "critic": gradient(critic, update.critic_losses(critic, batches, num_tokens, config), len(batches)),
            "sft": gradient(actor, update.sft_losses(actor, batches, num_tokens, Sums()), len(batches)),
        }
        for kind, tensors in found.items():
            if rank == 0:
                save_file(tensors, out / f"{kind}-{name}.safetensors")


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    for model in map(Path, sys.argv[2:]):
        work(model, Path(sys.argv[1]) / model.name)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
