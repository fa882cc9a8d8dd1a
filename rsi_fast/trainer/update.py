"""One round's mathematics: old log-probs and values, credit, and the losses of actor and critic.

What runs a model or sums over ranks is a collective: all ranks call it, each with its own samples.
"""

import random
from collections.abc import Iterator

import torch
from rsi_kernels import turn_gae, value_loss

from rsi_fast.config import Config, Stage
from rsi_fast.errors import UserError
from rsi_fast.trainer.batching import Cut, Hands, MicroBatch, Sample
from rsi_fast.trainer.engines import Engine
from rsi_fast.trainer.statistics import Sums, global_moments, global_sum


def learning_rate_factor(config: Config, stage: Stage, step: int) -> float:
    """The part of the stage's learning rate that holds at one of its optimizer steps (from 0): a linear warm-up, and
    linearly down to final_lr_fraction at the stage's end."""
    trainer = config.trainer
    total = stage.steps or stage.rounds * trainer.minibatches * trainer.epochs
    warm = min(1.0, (step + 1) / (stage.lr_warmup_steps or 1))
    return warm * (1 - (1 - stage.final_lr_fraction) * step / total)


def permutation(n: int, seed: int, purpose: str) -> list[int]:
    return random.Random(f"{seed}/{purpose}").sample(range(n), n)


def split_round(samples: list[Sample], config: Config, purpose: str, cut: Cut, world_size: int) -> list[list[Hands]]:
    """[epoch][minibatch] -> what each rank has of it. What a minibatch holds over all ranks does not depend on their
    number; a sample stays with the rank that has its old log-probs and values."""
    count = config.trainer.minibatches
    epochs: list[list[list[Sample]]] = []
    for epoch in range(config.trainer.epochs):
        order = permutation(len(samples), config.run.seed, f"{purpose}/{epoch}")
        epochs.append([[samples[j] for j in order[i::count]] for i in range(count)])
    first = [cut.deal(minibatch, world_size) for minibatch in epochs[0]]
    owner = {id(s): rank for hands in first for rank, hand in enumerate(hands) for s in hand}
    later = [
        [[[s for s in minibatch if owner[id(s)] == rank] for rank in range(world_size)] for minibatch in epoch]
        for epoch in epochs[1:]
    ]
    return [first, *later]


def num_action_tokens(hands: Hands) -> float:
    """Of an optimizer step over all ranks, at least 1."""
    return float(max(1, sum(s.num_actions for hand in hands for s in hand)))


def score_tokens(
    batches: list[MicroBatch], actor: Engine, critic: Engine, config: Config, device: torch.device
) -> dict:
    """Gives the samples `old_logprobs` and `old_values`, without gradient; stops the run when vLLM's log-probs of the
    same tokens, sampled by the same weights, are far from the trainer's."""
    difference, entropy, tokens, compared = 0.0, 0.0, 0, 0
    for batch in batches:
        logprobs, entropies = actor.forward(
            batch.token_ids, batch.action_mask, batch.apart, config.rollout.temperature, True, train=False
        )
        batch.unstack("old_logprobs", logprobs)
        batch.unstack("old_values", critic.forward(batch.token_ids, batch.apart, train=False))
        distance = (logprobs - batch.stack("behaviour_logprobs")).abs()
        same_weights = batch.stack("on_policy", torch.bool)
        difference += float(torch.where(same_weights, distance, 0.0).sum())
        compared += int(same_weights.sum())
        entropy += float(entropies.sum())
        tokens += int(batch.action_mask.sum())
    tokens = global_sum(tokens, device)
    difference = global_sum(difference, device) / max(1.0, global_sum(compared, device))
    bound = config.trainer.max_logprob_abs_diff
    if not difference <= bound:
        raise UserError(
            f"the trainer's log-probs differ from vLLM's by {difference:.4g} on average, beyond "
            f"trainer.max_logprob_abs_diff = {bound:g}: they do not run the same weights, or the server's sampling "
            "settings changed. Look at the last weight sync in logs/, or raise the bound for low precision. A spool "
            "that `rsi-fast collect` filled is for the model it was collected with, before any other stage."
        )
    return {
        "rollout/logprob_abs_diff": difference,
        "actor/entropy": global_sum(entropy, device) / max(1.0, tokens),
    }


def assign_credit(samples: list[Sample], config: Config, device: torch.device) -> dict:
    """Gives the samples `advantages` (whitened over the action tokens of all ranks, if so configured) and `returns`."""
    batch = MicroBatch.of(samples, device, packed=True)  # turn_gae keeps samples apart, whatever the model
    mask = batch.action_mask[0]
    old_values = batch.stack("old_values")[0]
    out = turn_gae(
        old_values,
        mask,
        batch.stack("turn_ids", torch.int32)[0],
        final_rewards=torch.tensor([s.reward for s in samples] or [0.0], device=device),
        cu_seqlens=batch.apart["cu_seq_lens_q"],
        **config.credit.model_dump(exclude={"family_weights"}),
    )
    mean, std = global_moments(out.advantages[mask])
    return_mean, return_std = global_moments(out.returns[mask])
    error = (out.returns - old_values)[mask]
    _, error_std = global_moments(error)
    square_mean, _ = global_moments(error.square())
    advantages = out.advantages
    if config.trainer.whiten_advantages:
        advantages = torch.where(mask, (advantages - mean) / (std + 1e-6), 0.0)
    batch.unstack("advantages", advantages[None])
    batch.unstack("returns", out.returns[None])
    return {
        "advantage/mean": mean,
        "advantage/std": std,
        "return/mean": return_mean,
        "return/std": return_std,
        "critic/explained_variance": 1 - error_std**2 / max(return_std**2, 1e-8),
        "critic/loss": 0.5 * square_mean,  # of the critic as the round found it
    }


def actor_losses(
    actor: Engine, batches: list[MicroBatch], num_tokens: float, config: Config, updates: Sums
) -> Iterator[torch.Tensor]:
    """Each micro-batch's share of the policy loss; num_tokens: action tokens of the optimizer step over all ranks."""
    trainer = config.trainer
    for batch in batches:
        arguments = dict(
            old_logprobs=batch.stack("old_logprobs"),
            advantages=batch.stack("advantages"),
            clip_low=trainer.clip_low,
            clip_high=trainer.clip_high,
            dual_clip=trainer.dual_clip,
            behaviour_logprobs=batch.stack("behaviour_logprobs") if trainer.importance_cap else None,
            is_cap=trainer.importance_cap,
            denominator=num_tokens,
        )
        temperature = config.rollout.temperature
        loss, stats = actor.forward(
            batch.token_ids, batch.action_mask, batch.apart, temperature, False, arguments, train=True
        )
        share = stats["num_tokens"] / num_tokens
        updates.add_shares({"actor/loss": loss.detach()})
        updates.add_shares({f"actor/{k}": stats[k] * share for k in ("approx_kl", "clip_fraction", "ratio_mean")})
        yield loss


def critic_losses(
    critic: Engine, batches: list[MicroBatch], num_tokens: float, config: Config
) -> Iterator[torch.Tensor]:
    """Each micro-batch's share of the value loss."""
    for batch in batches:
        yield value_loss(
            critic.forward(batch.token_ids, batch.apart, train=True),
            batch.stack("old_values"),
            batch.stack("returns"),
            batch.action_mask,
            clip=config.trainer.value_clip,
            denominator=num_tokens,
        ).loss


def sft_losses(actor: Engine, batches: list[MicroBatch], num_tokens: float, updates: Sums) -> Iterator[torch.Tensor]:
    """Each micro-batch's share of the mean negative log-likelihood of the action tokens."""
    for batch in batches:
        loss = -actor.forward(batch.token_ids, batch.action_mask, batch.apart, 1.0, train=True).sum() / num_tokens
        updates.add_shares({"sft/loss": loss.detach()})
        yield loss
