"""Actor and critic as modules that ZeRO-3 can wrap, and the guard against weights that were not loaded."""

from pathlib import Path

import torch
from rsi_kernels import linear_ppo_loss, linear_token_logprobs
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from rsi_fast.errors import UserError
from rsi_fast.trainer.batching import prediction_targets, to_prediction_positions, to_token_positions

# Batches are padded on the right, so causal attention never sees padding and no attention mask is needed. What keeps
# packed samples apart is in MicroBatch.apart.


class Actor(nn.Module):
    """A causal language model that gives the log-probs of the action tokens, or the policy loss over them. No logits
    of more than one chunk of tokens are made for either."""

    def __init__(self, language_model: nn.Module):
        super().__init__()
        self.language_model = language_model

    @property
    def model(self) -> nn.Module:
        """transformers' own."""
        return self.language_model

    @staticmethod
    def folder_name(name: str) -> str:
        """What a Hugging Face folder calls one of our parameters."""
        return name.removeprefix("language_model.")

    def forward(
        self,
        token_ids: torch.Tensor,
        action_mask: torch.Tensor,
        apart: dict,
        temperature: float,
        with_entropy: bool = False,
        policy_loss: dict | None = None,
    ) -> torch.Tensor | tuple:
        """token_ids: [B, T] int64; action_mask: [B, T] bool; apart: of the MicroBatch -> log-probs [B, T] fp32 at token
        positions, 0 where masked; with_entropy: the pair (log-probs, entropies).

        policy_loss: the other arguments of `linear_ppo_loss`, tensors at token positions -> (loss, stats)."""
        model = self.language_model
        hidden = model.get_decoder()(input_ids=token_ids, use_cache=False, **apart).last_hidden_state
        targets, mask = prediction_targets(token_ids, action_mask)
        weight = model.get_output_embeddings().weight
        if policy_loss is not None:
            arguments = {
                name: to_prediction_positions(x) if isinstance(x, torch.Tensor) else x
                for name, x in policy_loss.items()
            }
            return tuple(linear_ppo_loss(hidden, weight, targets, mask=mask, temperature=temperature, **arguments))
        out = linear_token_logprobs(hidden, weight, targets, mask, temperature=temperature, return_entropy=with_entropy)
        return tuple(to_token_positions(x) for x in out) if with_entropy else to_token_positions(out)


class Critic(nn.Module):
    """The actor's backbone with a value head. The value at token t is that of the prefix up to t-1."""

    def __init__(self, backbone: nn.Module, hidden_size: int, seed: int):
        super().__init__()
        self.backbone = backbone
        self.value_head = nn.Linear(hidden_size, 1)
        # Near zero, so that first values are; not zero, so that the first step already moves the backbone.
        with torch.no_grad():
            self.value_head.weight.normal_(0, 1e-3, generator=torch.Generator().manual_seed(seed))
            self.value_head.bias.zero_()

    @property
    def model(self) -> nn.Module:
        """transformers' own."""
        return self.backbone

    @staticmethod
    def folder_name(name: str) -> str:
        """As transformers' token classifiers with one label, which a critic is."""
        return name.replace("backbone.", "model.", 1).replace("value_head.", "score.", 1)

    def forward(self, token_ids: torch.Tensor, apart: dict) -> torch.Tensor:
        """token_ids: [B, T] int64; apart: of the MicroBatch -> values [B, T] fp32 at token positions. A sample's first
        says nothing: no token precedes it."""
        hidden = self.backbone(input_ids=token_ids, use_cache=False, **apart).last_hidden_state
        return to_token_positions(self.value_head(hidden).squeeze(-1).float())


def attention_length(model: nn.Module) -> float:
    """The tokens of a sequence whose causal attention takes as many operations as all matrix products of the backbone:
    2 P T = 2 H D T^2 summed over the layers with attention. P: their parameters; H D: width of the heads."""
    config = model.config.get_text_config()
    matrices = {id(p): p for p in model.get_decoder().parameters() if len(_shape(p)) == 2}
    matrices.pop(id(model.get_input_embeddings().weight), None)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = kinds.count("full_attention") * config.num_attention_heads * head_dim
    return sum(torch.Size(_shape(p)).numel() for p in matrices.values()) / max(1, width)


def _shape(parameter: nn.Parameter) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 leaves [0] of a parameter that is elsewhere


def load_actor(folder: Path, dtype: torch.dtype) -> Actor:
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True, output_loading_info=True
    )
    _check_loaded(folder, info, ignore_unexpected=())
    return Actor(model)


def load_critic(folder: Path, dtype: torch.dtype, seed: int) -> Critic:
    """A critic from an actor's folder: its backbone, without the language model head."""
    backbone, info = AutoModel.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True, output_loading_info=True
    )
    _check_loaded(folder, info, ignore_unexpected=("lm_head.weight",))
    hidden_size = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config().hidden_size
    return Critic(backbone, hidden_size, seed)


def _check_loaded(folder: Path, info: dict, ignore_unexpected: tuple[str, ...]) -> None:
    """A parameter that is missing or unexpected is silently random or silently dropped: that ends the run."""
    problems = [f"missing: {name}" for name in sorted(info["missing_keys"])]
    problems += [f"unexpected: {name}" for name in sorted(set(info["unexpected_keys"]) - set(ignore_unexpected))]
    problems += [f"of another shape: {entry[0]}" for entry in sorted(info["mismatched_keys"])]
    if problems:
        shown = "\n  ".join(problems[:20]) + ("\n  ..." if len(problems) > 20 else "")
        raise UserError(
            f"the weights in {folder} do not fit the model its config.json describes:\n  {shown}\n"
            "Get the folder again whole, or correct config.json."
        )
