"""From trajectories to micro-batches, equal in number on every rank; and the one place that shifts tokens."""

import heapq
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from rsi_fast.spool import Trajectory


@dataclass
class Sample:
    """One trajectory as 1-D tensors of its length T, all at token positions (entry t speaks of token t)."""

    token_ids: torch.Tensor  # int64
    action_mask: torch.Tensor  # bool
    turn_ids: torch.Tensor  # int32
    behaviour_logprobs: torch.Tensor  # float32
    reward: float = 0.0  # final reward
    on_policy: torch.Tensor | None = None  # bool: action tokens that the actor's present weights sampled; None: all
    # what the trainer works out, float32, 0 at masked positions
    values: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self):
        if self.on_policy is None:
            self.on_policy = self.action_mask

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_actions(self) -> int:
        return int(self.action_mask.sum())

    @classmethod
    def from_trajectory(
        cls, trajectory: Trajectory, reward: float = 0.0, weight_version: int | None = None
    ) -> "Sample":
        sample = cls(
            token_ids=torch.tensor(trajectory.token_ids, dtype=torch.int64),
            action_mask=torch.tensor(trajectory.action_mask, dtype=torch.bool),
            turn_ids=torch.tensor(trajectory.turn_ids, dtype=torch.int32),
            behaviour_logprobs=torch.tensor(trajectory.behaviour_logprobs, dtype=torch.float32),
            reward=reward,
        )
        if weight_version is not None:
            old = [i for i, turn in enumerate(trajectory.turns) if turn.weight_version != weight_version]
            sample.on_policy = sample.action_mask & ~torch.isin(sample.turn_ids, torch.tensor(old, dtype=torch.int32))
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


@dataclass
class MicroBatch:
    """Tensors [B, T] on the rank's device: a sample a row, padded at the end, or all samples in one row (packed).
    Without samples it has a single masked token."""

    samples: list[Sample]
    places: list[tuple[int, int]]  # row and first column of each sample
    token_ids: torch.Tensor
    action_mask: torch.Tensor
    apart: dict  # arguments by which a model keeps packed samples apart; none when padded

    @classmethod
    def of(cls, samples: list[Sample], device: torch.device, packed: bool = False) -> "MicroBatch":
        lengths = [len(s) for s in samples] or [1]
        if packed:
            ends = list(accumulate(lengths))
            places = [(0, end - length) for end, length in zip(ends, lengths, strict=True)]
            shape, apart = torch.Size((1, ends[-1])), _apart(lengths, ends, device)
        else:
            places = [(row, 0) for row in range(len(lengths))]
            shape, apart = torch.Size((len(lengths), max(lengths))), {}
        empty = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
        batch = cls(samples, places, *(x.to(device) for x in empty), apart)
        batch.token_ids = batch.stack("token_ids", torch.int64)
        batch.action_mask = batch.stack("action_mask", torch.bool)
        return batch

    def stack(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[B, T]: what the samples hold under `name`, 0 at padding."""
        out = torch.zeros(self.token_ids.shape, dtype=dtype)
        for sample, (row, column) in zip(self.samples, self.places, strict=False):
            x = sample.values[name] if name in sample.values else getattr(sample, name)
            out[row, column : column + len(sample)] = x
        return out.to(self.token_ids.device)

    def unstack(self, name: str, x: torch.Tensor) -> None:
        """Gives each sample its part of x, [B, T], under `name`; 0 where masked."""
        x = torch.where(self.action_mask, x.detach().float(), 0.0).cpu()
        for sample, (row, column) in zip(self.samples, self.places, strict=False):
            sample.values[name] = x[row, column : column + len(sample)].clone()


def _apart(lengths: list[int], ends: list[int], device: torch.device) -> dict:
    """As transformers names it: positions that begin anew, and where the sequences lie."""
    cu_seqlens = torch.tensor([0, *ends], dtype=torch.int32, device=device)
    longest = max(lengths)
    return {
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None].to(device),
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": longest,
        "max_length_k": longest,
    }


Hands = list[list[Sample]]  # [rank] -> the samples of an optimizer step that are its


@dataclass(frozen=True)
class Cut:
    """How samples are dealt to ranks and made into micro-batches. Every rank knows all of it, so none has to ask."""

    micro_batch_tokens: int  # padding included
    packed: bool
    attention_length: float  # of a sequence whose attention takes as many operations as all the rest; see `cost`

    def cost(self, length: int) -> float:
        """Operations of a sequence, in those of a token without attention; attention's grow with the square."""
        return length * (1 + length / self.attention_length)

    def deal(self, samples: list[Sample], world_size: int) -> Hands:
        """The most costly first, each to the rank that has least."""
        hands: Hands = [[] for _ in range(world_size)]
        load = [(0.0, rank) for rank in range(world_size)]
        for sample in sorted(samples, key=len, reverse=True):
            total, rank = heapq.heappop(load)
            hands[rank].append(sample)
            heapq.heappush(load, (total + self.cost(len(sample)), rank))
        return hands

    def groups(self, hands: Hands) -> list[list[list[Sample]]]:
        """[rank][micro-batch] -> samples. Each rank has the same number, empty ones included, since each forward and
        backward of ZeRO-3 is a collective; the largest come first, since there ranks wait for each other."""
        groups = [sorted(self._split(hand), key=self._group_cost, reverse=True) for hand in hands]
        count = max(1, *map(len, groups))
        return [own + [[]] * (count - len(own)) for own in groups]

    def micro_batches(self, hands: Hands, rank: int, device: torch.device) -> list[MicroBatch]:
        return [MicroBatch.of(group, device, self.packed) for group in self.groups(hands)[rank]]

    def waste(self, hands: Hands) -> dict[str, float]:
        """Padding as a part of the tokens that go through the model, and the part of the operations' time in which a
        rank waits for one with a larger micro-batch, mean over the ranks."""
        groups = self.groups(hands)
        tokens = sum(self._group_tokens(group) for own in groups for group in own)
        steps = [[self._group_cost(own[i]) for own in groups] for i in range(len(groups[0]))]
        longest = sum(map(max, steps)) * len(groups)
        return {
            "batch/padding": 1 - sum(len(s) for hand in hands for s in hand) / tokens if tokens else 0.0,
            "batch/imbalance": 1 - sum(map(sum, steps)) / longest if longest else 0.0,
        }

    def _split(self, samples: list[Sample]) -> list[list[Sample]]:
        """First fit, the longest first. Padded, a later sample fits where as many rows of the longest do."""
        groups: list[list[Sample]] = []
        for sample in sorted(samples, key=len, reverse=True):
            for group in groups if self.packed else groups[-1:]:
                if self._group_tokens([*group, sample]) <= self.micro_batch_tokens:
                    group.append(sample)
                    break
            else:
                groups.append([sample])
        return groups

    def _group_tokens(self, group: list[Sample]) -> int:
        lengths = [len(s) for s in group] or [0]
        return sum(lengths) if self.packed else len(lengths) * max(lengths)

    def _group_cost(self, group: list[Sample]) -> float:
        lengths = [len(s) for s in group] or [0]
        return sum(map(self.cost, lengths)) if self.packed else len(lengths) * self.cost(max(lengths))
