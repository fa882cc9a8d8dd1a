"""DeepSpeed ZeRO-3 engines: their configuration, one optimizer step over many micro-batches, and their weights."""

import gc
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_local_fp32_param
from torch import nn
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from rsi_fast.config import Config
from rsi_fast.errors import UserError
from rsi_fast.trainer.model_folder import write_model_folder

BUCKET_BYTES = 512 * 2**20  # of gathered weights at a time: bounds what a sync holds beside the shards


def deepspeed_config(config: Config) -> dict:
    """DeepSpeed's own settings. Micro-batches are ours to count, so its accumulation is 1 and the boundary is set by
    hand; the learning rate is set before each step."""
    zero, optimizer = config.trainer.zero, config.trainer.optimizer
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optimizer.max_grad_norm,
        "bf16": {"enabled": config.model.dtype == "bfloat16"},
        "zero_optimization": {
            "stage": 3,
            "contiguous_gradients": True,
            "overlap_comm": config.model.device == "cuda",
            "stage3_param_persistence_threshold": zero.param_persistence_threshold,
            "offload_optimizer": {"device": zero.offload_optimizer},
            "offload_param": {"device": zero.offload_param},
        },
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": 0.0,
                "betas": list(optimizer.betas),
                "weight_decay": optimizer.weight_decay,
                "torch_adam": True,  # DeepSpeed's own needs a compiler at run time
            },
        },
        "zero_force_ds_cpu_optimizer": False,
    }


class Engine:
    """A ZeRO-3 engine and the few things that the loop does with it."""

    def __init__(self, config: Config, load: Callable[[], nn.Module], name: str):
        self.name = name
        settings = deepspeed_config(config)
        self._transformers_hook = HfDeepSpeedConfig(settings)  # while it lives, from_pretrained loads into shards
        module = load()
        del self._transformers_hook
        gc.collect()
        self.engine, *_ = deepspeed.initialize(
            model=module, model_parameters=[p for p in module.parameters() if p.requires_grad], config=settings
        )
        self.module = self.engine.module
        self._steps_until_guard = 1
        self._before: dict[str, torch.Tensor] = {}

    def forward(self, *inputs, train: bool):
        self.engine.train(train)
        with torch.set_grad_enabled(train):
            return self.engine(*inputs)

    def step(self, losses: Iterator[torch.Tensor], num_losses: int, lr: float) -> float:
        """One optimizer step. `losses` yields each micro-batch's share of the loss, already divided by the count over
        all ranks, the same number of them on every rank. Returns the gradient norm before clipping; if it or the loss
        is not finite, UserError on every rank."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        if self._steps_until_guard == 1 and lr > 0:
            self._before = self._fingerprints()
        total = torch.zeros((), device=self.engine.device)
        for i, loss in enumerate(losses):
            total += loss.detach()
            self.engine.set_gradient_accumulation_boundary(i == num_losses - 1)
            # ZeRO averages over ranks; our losses are shares of one sum.
            self.engine.backward(loss * dist.get_world_size())
            self.engine.step()
        dist.all_reduce(total)
        loss, norm = float(total), float(self.engine.get_global_grad_norm())
        # Before the guard: DeepSpeed skips such a step, so nothing moves. Its norm is inf then, in other versions -1.
        if not (math.isfinite(loss) and 0 <= norm < math.inf):
            raise UserError(
                f"the {self.name}'s loss ({loss:g}) or the norm of its gradient ({norm:g}) is not a finite number, in "
                "the step after the last line of metrics.jsonl. Nothing of this round was published or saved; the "
                "last checkpoint, if there is one, is good. The same settings are likely to come here again: begin a "
                "new run from it (rsi-fast export) with lower learning rates or a smaller max_grad_norm"
            )
        if self._before:
            self._check_every_parameter_moved()
        return norm

    def reset_optimizer(self) -> None:
        """Forgets the moments of an earlier stage; the weights stay."""
        self.engine.optimizer.optimizer.state.clear()

    def _fingerprints(self) -> dict[str, torch.Tensor]:
        marks = {}
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                shard = safe_get_local_fp32_param(parameter).double()
                marks[name] = torch.stack([shard.sum(), shard.abs().sum(), shard.square().sum()])
        return marks

    def _check_every_parameter_moved(self) -> None:
        after = self._fingerprints()
        moved = torch.tensor([float(not torch.equal(after[name], self._before[name])) for name in after])
        moved = moved.to(self.engine.device)
        dist.all_reduce(moved, op=dist.ReduceOp.MAX)
        still = [name for name, flag in zip(after, moved.tolist(), strict=True) if not flag]
        if still:
            raise UserError(
                f"after its first step these parameters of the {self.name} had not changed: {', '.join(still[:10])}. "
                "They are not part of what is trained: is the model folder right for this architecture?"
            )
        self._before, self._steps_until_guard = {}, 0

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) as a Hugging Face folder names them; a tied head is there once."""
        return [(self.module.folder_name(name), p) for name, p in self.module.named_parameters()]

    def shapes(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        # The local shape of a ZeRO-3 parameter is [0]; ds_shape is the whole one.
        return [(name, tuple(p.ds_shape), p.dtype) for name, p in self.parameters()]

    def gathered_buckets(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Whole weights, bucket by bucket, in order. A collective: every rank iterates to the end, in step.
        The tensors are valid until the next bucket."""
        bucket: list[tuple[str, nn.Parameter]] = []
        size = 0
        parameters = self.parameters()
        for i, (name, parameter) in enumerate(parameters):
            bucket.append((name, parameter))
            size += parameter.ds_numel * parameter.element_size()
            if size >= BUCKET_BYTES or i == len(parameters) - 1:
                with deepspeed.zero.GatheredParameters([p for _, p in bucket]):
                    yield [(n, p.detach()) for n, p in bucket]
                bucket, size = [], 0

    def export(self, folder: Path, like: Path) -> None:
        """Writes a Hugging Face folder that transformers and vLLM load; tokenizer and config as in `like`. Holds one
        bucket at a time. A collective."""
        if dist.get_rank() == 0:
            tensors = (pair for bucket in self.gathered_buckets() for pair in bucket)
            write_model_folder(folder, like, self.shapes(), tensors)
        else:
            for _ in self.gathered_buckets():
                pass
        dist.barrier()
