"""From trajectories to padded micro-batches, equal in number on every rank; and the one place that shifts tokens."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from rsi_fast.spool import Trajectory


@dataclass
class Sample:
    """One trajectory as 1-D tensors of its length T, all at token positions (entry t speaks of token t)."""

    token_ids: torch.Tensor  # int64
    action_mask: torch.Tensor  # bool
    turn_ids: torch.Tensor  # int32
    behaviour_logprobs: torch.Tensor  # float32
    reward: float = 0.0  # final reward
    # what the trainer works out, float32, 0 at masked positions
    values: dict[str, torch.Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_actions(self) -> int:
        return int(self.action_mask.sum())

    @classmethod
    def from_trajectory(cls, trajectory: Trajectory, reward: float = 0.0) -> "Sample":
        sample = cls(
            token_ids=torch.tensor(trajectory.token_ids, dtype=torch.int64),
            action_mask=torch.tensor(trajectory.action_mask, dtype=torch.bool),
            turn_ids=torch.tensor(trajectory.turn_ids, dtype=torch.int32),
            behaviour_logprobs=torch.tensor(trajectory.behaviour_logprobs, dtype=torch.float32),
            reward=reward,
        )
        if len(sample) and sample.action_mask[0]:
            raise ValueError(
                f"trajectory {trajectory.id} begins with an action token; its log-prob has no prefix to come from"
            )
        return sample


def prediction_targets(token_ids: torch.Tensor, action_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets and mask for each hidden state: state t predicts token t+1. The last state predicts nothing.

    token_ids: [B, T] int64; action_mask: [B, T] bool -> (targets [B, T] int64, mask [B, T] bool).
    """
    return to_prediction_positions(token_ids), to_prediction_positions(action_mask)


def to_prediction_positions(x: torch.Tensor) -> torch.Tensor:
    """What is known of tokens, [B, T], at the hidden states that predict them: token t's moves to t-1; 0 comes last."""
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1)


def to_token_positions(x: torch.Tensor) -> torch.Tensor:
    """Results of hidden states, [B, T], back to the token they speak of: state t's moves to t+1; 0 comes first."""
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)


def deal(lengths: list[int], world_size: int) -> list[list[int]]:
    """Indices for each rank: longest first, back and forth, so that ranks get alike amounts of tokens."""
    hands: list[list[int]] = [[] for _ in range(world_size)]
    for place, index in enumerate(sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))):
        turn, seat = divmod(place, world_size)
        hands[seat if turn % 2 == 0 else world_size - 1 - seat].append(index)
    return hands


def split_by_tokens(samples: list[Sample], micro_batch_tokens: int) -> list[list[Sample]]:
    """Groups of samples of like length whose padded size (rows times longest) is within the budget."""
    groups: list[list[Sample]] = []
    for sample in sorted(samples, key=len, reverse=True):
        longest = len(groups[-1][0]) if groups else 0
        if groups and (len(groups[-1]) + 1) * longest <= micro_batch_tokens:
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return groups


@dataclass
class MicroBatch:
    """Padded [B, T] tensors on the rank's device. An empty one has a single masked token."""

    samples: list[Sample]
    token_ids: torch.Tensor
    action_mask: torch.Tensor

    @classmethod
    def of(cls, samples: list[Sample], device: torch.device) -> "MicroBatch":
        shape = torch.Size((max(1, len(samples)), max((len(s) for s in samples), default=1)))
        return cls(
            samples=samples,
            token_ids=_pad([s.token_ids for s in samples], shape, torch.int64, device),
            action_mask=_pad([s.action_mask for s in samples], shape, torch.bool, device),
        )

    def stack(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[B, T]: what the samples hold under `name`, 0 at padding."""
        rows = [s.values[name] if name in s.values else getattr(s, name) for s in self.samples]
        return _pad(rows, self.token_ids.shape, dtype, self.token_ids.device)

    def unstack(self, name: str, x: torch.Tensor) -> None:
        """Gives each sample its row of x, [B, T], under `name`."""
        rows = x.detach().float().cpu()
        for row, sample in zip(rows, self.samples, strict=False):
            sample.values[name] = row[: len(sample)].clone()


def _pad(rows: list[torch.Tensor], shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    out = torch.zeros(shape, dtype=dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out.to(device)


def micro_batches(samples: list[Sample], micro_batch_tokens: int, device: torch.device) -> Iterator[MicroBatch]:
    """This rank's samples as micro-batches. Every rank yields the same number: a rank that has fewer joins with empty
    ones, since each forward and backward of ZeRO-3 is a collective."""
    groups = split_by_tokens(samples, micro_batch_tokens)
    count = torch.tensor(len(groups), device=device)
    if dist.is_initialized():
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
    for i in range(max(1, int(count))):
        yield MicroBatch.of(groups[i] if i < len(groups) else [], device)
