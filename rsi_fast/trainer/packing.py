"""Samples packed into one row without padding: an attention that keeps them apart, and the probe that decides whether
the whole model does. Layers that carry a state along the row, such as Gated DeltaNet without its kernels, do not."""

import torch
import torch.distributed as dist
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rsi_fast.config import Config
from rsi_fast.errors import UserError
from rsi_fast.trainer.batching import Cut, MicroBatch, Sample
from rsi_fast.trainer.engines import Engine
from rsi_fast.trainer.models import attention_length

ATTENTION = "rsi_fast_packed"
# In parts of the standard deviation of a sample's log-probs:
MOST_LEAK = 1e-3  # what another neighbour may change; beyond rounding nothing should
# of a packed sample from one alone, which rounds otherwise
MOST_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    **others,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence of one row, as transformers calls it.

    query: [1, H, N, D]; key, value: [1, K, N, D], H a multiple of K -> [1, N, H, D]. On a GPU in half precision
    PyTorch's varlen flash attention; else one call a sequence, without a mask and without work on padding.
    """
    unknown = [k for k in ("sliding_window", "softcap", "s_aux", "position_bias") if others.get(k) is not None]
    if unknown or dropout or attention_mask is not None:
        raise UserError(
            f"this model's attention wants {', '.join(unknown) or 'dropout or a mask'}, which is not known how to do "
            "with packed samples; set trainer.packing = false"
        )
    gqa = query.shape[1] != key.shape[1]
    if query.is_cuda and query.dtype != torch.float32:
        rows = (x[0].transpose(0, 1) for x in (query, key, value))
        out = varlen_attn(
            *rows,
            cu_seq_lens_q,
            cu_seq_lens_q,
            max_length_q,
            max_length_q,
            scale=scaling,
            window_size=(-1, 0),
            enable_gqa=gqa,
        )
        return out[None], None
    bounds = cu_seq_lens_q.tolist()
    lengths = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
    parts = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    outs = [scaled_dot_product_attention(*qkv, is_causal=True, scale=scaling, enable_gqa=gqa) for qkv in parts]
    return torch.cat(outs, dim=2).transpose(1, 2), None


AttentionInterface.register(ATTENTION, packed_attention)


def decide_cut(actor: Engine, config: Config, device: torch.device) -> Cut:
    """A collective; the actor is set to it."""
    model, reason = actor.module.model, "trainer.packing = false"
    if config.trainer.packing:
        reason = why_not(actor, model.config.get_text_config().vocab_size, device)
    print(f"micro-batches are {f'padded: {reason}' if reason else 'packed'}", flush=True)
    return Cut(config.trainer.micro_batch_tokens, not reason, attention_length(model))


def pack(engine: Engine) -> None:
    """From now on the engine's model takes packed micro-batches, and no others."""
    engine.module.model.set_attn_implementation(ATTENTION)


def why_not(actor: Engine, vocab_size: int, device: torch.device) -> str | None:
    """Why the model must not be given packed samples; None when it may, and then the actor is set to it. A collective.

    Two samples are packed into one row, and then the second with another neighbour: its log-probs must stay what they
    are, and be those of the sample alone.
    """
    model = actor.module.model
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"])
    if not kinds <= {"full_attention", "linear_attention"}:
        return f"its layers are of the kinds {', '.join(sorted(kinds))}, and packing knows full and linear attention"
    random = torch.Generator().manual_seed(0)
    neighbour, other, sample = (_sample(length, vocab_size, random) for length in (70, 70, 37))
    alone = _logprobs(actor, [sample], device, packed=False)
    pack(actor)
    with_neighbour = _logprobs(actor, [neighbour, sample], device, packed=True)
    with_other = _logprobs(actor, [other, sample], device, packed=True)
    spread = float(alone.std())
    leak = float((with_neighbour - with_other).abs().max()) / spread
    difference = float((with_neighbour - alone).abs().max()) / spread
    reason = None
    if not leak <= MOST_LEAK:
        reason = f"a sample's log-probs depend on its neighbour in the row, by {leak:.2g} of their standard deviation"
    elif not difference <= MOST_DIFFERENCE[next(model.parameters()).dtype]:
        reason = f"a packed sample's log-probs differ from those alone by {difference:.2g} of their standard deviation"
    verdict = [reason]
    dist.broadcast_object_list(verdict, src=0)
    if verdict[0]:
        model.set_attn_implementation("sdpa")
    return verdict[0]


def _sample(length: int, vocab_size: int, random: torch.Generator) -> Sample:
    mask = torch.ones(length, dtype=torch.bool)
    mask[0] = False
    token_ids = torch.randint(vocab_size, (length,), generator=random)
    return Sample(token_ids, mask, torch.zeros(length, dtype=torch.int32), torch.zeros(length))


def _logprobs(actor: Engine, samples: list[Sample], device: torch.device, packed: bool) -> torch.Tensor:
    """Of the last sample's action tokens."""
    batch = MicroBatch.of(samples, device, packed)
    batch.unstack("probe", actor.forward(batch.token_ids, batch.action_mask, batch.apart, 1.0, train=False))
    return samples[-1].values.pop("probe")[1:]
