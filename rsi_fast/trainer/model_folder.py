"""Hugging Face model folders, written weight by weight, cut into files as transformers cuts them."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch

from rsi_fast.trainer.tensor_files import Entry, TensorFile, publish

MAX_FILE_BYTES = 5 * 10**9  # transformers' own limit was this for years


def write_model_folder(
    folder: Path,
    like: Path,
    entries: list[Entry],
    tensors: Iterable[tuple[str, torch.Tensor]],
    config_changes: dict | None = None,
) -> None:
    """Tokenizer and configuration as in `like`, but for `config_changes`, and the weights; `entries` says which, in the
    order in which `tensors` gives them. The folder appears when it is whole."""
    temporary = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for path in like.iterdir():
        if path.is_file() and not path.name.endswith((".safetensors", ".safetensors.index.json", ".bin")):
            shutil.copy(path, temporary / path.name)
    if config_changes:
        config = temporary / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | config_changes, indent=2))
    files = cut(entries, MAX_FILE_BYTES)
    source = iter(tensors)
    for name, part in files.items():
        with TensorFile(temporary / name, part) as file:
            for _ in part:
                file.add(*next(source))
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(map(num_bytes, entries))},
            "weight_map": {entry[0]: name for name, part in files.items() for entry in part},
        }
        (temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    publish(temporary, folder)


def cut(entries: list[Entry], max_file_bytes: int) -> dict[str, list[Entry]]:
    """File name -> what it holds. A file is at most so large, unless one tensor alone is larger."""
    parts: list[list[Entry]] = [[]]
    for entry in entries:
        if parts[-1] and sum(map(num_bytes, [*parts[-1], entry])) > max_file_bytes:
            parts.append([])
        parts[-1].append(entry)
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)}


def num_bytes(entry: Entry) -> int:
    _, shape, dtype = entry
    return torch.Size(shape).numel() * dtype.itemsize
