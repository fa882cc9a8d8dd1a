"""Weights from the trainer into vLLM, vLLM's side: a weight-transfer engine over gloo, for machines without NCCL.

vLLM loads this through the entry point `vllm.general_plugins`; nothing else may import it.
"""

import json
import multiprocessing
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from rsi_fast.processes import die_with_parent
from rsi_fast.rollout.server import OURS
from rsi_fast.rollout.weight_sync import broadcast_bytes, gloo_group


def register() -> None:
    """Called by vLLM in each of its processes, in some more than once."""
    if os.environ.get(OURS) and multiprocessing.parent_process():
        # The engine outlives a front that was killed with -9, and takes SIGTERM for a request to end in good time.
        die_with_parent(signal.SIGKILL)
    if "gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("gloo", GlooEngine)


class WorkerExtension:
    """Methods that vLLM adds to its workers."""

    def checkpoint_parameters(self) -> list[tuple[str, list[int]]]:
        """(name, shape) of what the model folder holds and a trainer should send. A tied head is not sent."""
        model_config = self.model_runner.model_config
        tied = getattr(model_config.hf_config.get_text_config(), "tie_word_embeddings", False)
        found = []
        for path in sorted(Path(model_config.model).glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                found += [(name, file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
        return [(name, shape) for name, shape in found if not (tied and name == "lm_head.weight")]


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    master_address: str
    master_port: int
    rank_offset: int  # rank of this server's first worker; the trainer is 0
    world_size: int
    timeout_s: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """One bucket: what the bytes that come over the group are."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    def __post_init__(self):
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise ValueError(
                f"a bucket needs as many names as dtypes and shapes, got {len(self.names)}, {len(self.dtype_names)} "
                f"and {len(self.shapes)}: {json.dumps(self.names[:5])} ..."
            )


class GlooEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    _group = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = gloo_group(
            init_info.master_address, init_info.master_port, rank, init_info.world_size, init_info.timeout_s
        )

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict) -> None:
        # The base class synchronizes an accelerator afterwards; there is none.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        if self._group is None:
            raise RuntimeError("init_weight_transfer_engine must come before update_weights")
        dtypes = [getattr(torch, name) for name in update_info.dtype_names]
        sizes = [
            torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(update_info.shapes, dtypes, strict=True)
        ]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        broadcast_bytes(self._group, flat)
        parts = zip(update_info.names, flat.split(sizes), dtypes, update_info.shapes, strict=True)
        # Cloned, since an odd-sized neighbour would leave a view unaligned.
        self.model.load_weights((name, part.clone().view(dtype).view(shape)) for name, part, dtype, shape in parts)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        # A tied head is never loaded itself, so vLLM does not process it again; but on a CPU processing makes a packed
        # copy of its weight, which would stay the old one.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        self._group = None
