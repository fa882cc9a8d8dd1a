"""Numbers over all ranks."""

import math

import torch
import torch.distributed as dist


def global_sum(value: float, device: torch.device) -> float:
    """The sum of a number over all ranks."""
    total = torch.tensor(float(value), dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return float(total)


def global_moments(x: torch.Tensor) -> tuple[float, float]:
    """Mean and standard deviation over the elements of all ranks; (0, 0) where there are none."""
    x = x.double()
    sums = torch.stack([x.sum(), torch.tensor(float(x.numel()), dtype=torch.float64, device=x.device)])
    dist.all_reduce(sums)
    total, count = sums.tolist()
    if not count:
        return 0.0, 0.0
    mean = total / count
    squares = (x - mean).square().sum()
    dist.all_reduce(squares)
    return mean, math.sqrt(float(squares) / count)


class Sums:
    """What is gathered over the optimizer steps of a round. Shares stay on the device until `means`."""

    def __init__(self):
        self._numbers: dict[str, list[float]] = {}
        self._shares: dict[str, torch.Tensor] = {}

    def count(self, name: str) -> int:
        return len(self._numbers.get(name, ()))

    def add(self, numbers: dict[str, float]) -> None:
        """Numbers of one optimizer step, the same on every rank."""
        for name, value in numbers.items():
            self._numbers.setdefault(name, []).append(value)

    def add_shares(self, shares: dict[str, torch.Tensor]) -> None:
        """0-d tensors of one micro-batch: its share of the optimizer step's value over all ranks."""
        for name, value in shares.items():
            self._shares[name] = self._shares[name] + value if name in self._shares else value

    def means(self, device: torch.device) -> dict[str, float]:
        """Means over the optimizer steps. A collective; one copy to the host."""
        steps = max((len(values) for values in self._numbers.values()), default=1)
        means = {name: sum(values) / len(values) for name, values in self._numbers.items()}
        if self._shares:
            stacked = torch.stack([v.double().to(device) for v in self._shares.values()])
            dist.all_reduce(stacked)
            means |= dict(zip(self._shares, (stacked / steps).tolist(), strict=True))
        return means
