"""Argument checks that cost nothing: every message names the argument, what was expected and what came."""

import math

import numpy as np
import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MASKS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
IDS = (torch.int32, torch.int64)
NUMPY_NUMBERS = (np.floating, np.integer)


def fail(name: str, expected: str, got: object) -> None:
    raise ValueError(f"{name}: expected {expected}, got {got}")


def tensor(name, value, dtypes, like: torch.Tensor | None = None, shape=None) -> None:
    """Checks that value is a tensor of one of `dtypes`, on the device of `like`, of the given shape."""
    if not isinstance(value, torch.Tensor):
        fail(name, "a tensor", type(value).__name__)
    if value.dtype not in dtypes:
        fail(name, "dtype " + " or ".join(str(d).removeprefix("torch.") for d in dtypes), value.dtype)
    if like is not None and value.device != like.device:
        fail(name, f"device {like.device}, as the first argument", value.device)
    if shape is not None and tuple(value.shape) != tuple(shape):
        fail(name, f"shape {list(shape)}", list(value.shape))


def number(name, value, low: float, high: float = math.inf, open_low=False, open_high=False) -> float:
    """Checks that value is a finite number in the given interval and returns it as a float."""
    expected = (
        f"a finite number in {'(' if open_low else '['}{low}, {high}{')' if open_high or high == math.inf else ']'}"
    )
    if not torch.compiler.is_compiling() and isinstance(value, NUMPY_NUMBERS):  # torch.compile does not know them
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        fail(name, expected, type(value).__name__)
    value = float(value)
    # Comparisons alone: under torch.compile the number may be a symbol, of which math.isfinite is not known. NaN fails.
    if not (low <= value <= high and value < math.inf):
        fail(name, expected, value)
    if (open_low and value == low) or (open_high and value == high):
        fail(name, expected, value)
    return value
