"""Hugging Face folders from checkpoints, tensor by tensor, in one process."""

import json
from pathlib import Path

import torch

from rsi_fast.config import Config
from rsi_fast.errors import UserError
from rsi_fast.trainer.checkpoint import (
    WEIGHTS,
    Shards,
    best_checkpoints,
    checkpoints,
    find_damage,
    latest_checkpoint,
    load_state,
)
from rsi_fast.trainer.model_folder import write_model_folder


def choose_checkpoint(run_dir: Path, wanted: str) -> Path:
    """wanted: "last", "best" or the name of one. Raises UserError that says which there are."""
    if wanted == "best":
        if best := best_checkpoints(run_dir):
            return best[0]
        raise UserError(f"no checkpoint of {run_dir} has a score yet: its first training attempts give it one")
    found = latest_checkpoint(run_dir) if wanted == "last" else Path(run_dir) / "checkpoints" / wanted
    if found is None or found not in checkpoints(run_dir):
        there = ", ".join(folder.name for folder in checkpoints(run_dir)) or "none"
        raise UserError(f"{run_dir} has no checkpoint {wanted}; there: {there}")
    return found


def export_checkpoint(config: Config, checkpoint: Path, out: Path, critic: bool) -> dict:
    """Writes the actor, or the critic as transformers' token classifier with one label: its logit at a token is the
    value of the prefix that ends there. Raises UserError for a damaged checkpoint, or one without a critic."""
    load_state(checkpoint)  # of a format that we know
    if problems := find_damage(checkpoint):
        raise UserError(f"the checkpoint {checkpoint} is damaged: {'; '.join(problems[:5])}")
    name = "critic" if critic else "actor"
    if not (checkpoint / name).is_dir():
        raise UserError(f"{checkpoint} holds no {name}: it was taken before the first stage of kind critic or ppo")
    like, dtype = config.model.path, getattr(torch, config.model.dtype)
    if not (like / "config.json").is_file():
        raise UserError(f"{like} (model.path of the run) is not there; the tokenizer and config.json come from it")
    changes = _classifier(like) if critic else {}
    with Shards(checkpoint / name) as shards:
        entries = [(n, shape, dtype) for n, shape in shards.shapes.items()]
        tensors = ((n, shards.whole(WEIGHTS, n).to(dtype)) for n in shards.shapes)
        write_model_folder(out, like, entries, tensors, changes)
    return {
        "model": str(out),
        "checkpoint": str(checkpoint),
        "parameters": sum(torch.Size(e[1]).numel() for e in entries),
    }


def _classifier(like: Path) -> dict:
    """What a critic's config.json says otherwise."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES as CLASSES

    kind = json.loads((like / "config.json").read_text())["model_type"]
    if kind not in CLASSES:
        raise UserError(f"transformers has no token classifier of the architecture {kind}, so a critic has no folder")
    return {"architectures": [CLASSES[kind]], "id2label": {"0": "value"}, "label2id": {"value": 0}}
