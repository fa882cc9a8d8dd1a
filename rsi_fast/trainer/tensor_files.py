"""safetensors files written tensor by tensor, so that no more than one tensor is held beside the model, and on disk for
certain when `close` returns."""

import json
import os
import shutil
import zlib
from pathlib import Path

import torch

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}
CHUNK_BYTES = 16 * 2**20

Entry = tuple[str, tuple[int, ...], torch.dtype]  # name, shape, dtype of a tensor


class TensorFile:
    """One file. The entries, all of them and in the order in which they will come, are given first: the header, with
    every offset, stands at the beginning."""

    def __init__(self, path: Path, entries: list[Entry]):
        header: dict = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape, dtype in entries:
            start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
            header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._left = list(reversed(entries))
        self._file = path.open("wb")
        self.crc32, self.size = 0, 0
        self._write(len(text).to_bytes(8, "little") + text)

    def _write(self, data) -> None:
        self._file.write(data)
        self.crc32 = zlib.crc32(data, self.crc32)
        self.size += len(data)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """The next tensor. Raises ValueError when it is not the one that the entries have here."""
        expected = self._left.pop() if self._left else None
        if expected != (got := (name, tuple(tensor.shape), tensor.dtype)):
            raise ValueError(f"expected {expected} next in {self._file.name}, got {got}")
        if tensor.numel():  # a memoryview of nothing cannot be cut
            data = memoryview(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy())
            for start in range(0, len(data), CHUNK_BYTES):
                self._write(data[start : start + CHUNK_BYTES])

    def close(self) -> None:
        """Raises ValueError when tensors are missing."""
        if self._left:
            raise ValueError(f"{self._file.name} lacks {len(self._left)} tensors, the next is {self._left[-1][0]}")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, kind, *exception) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()


def crc32_of(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value


def sync_folder(folder: Path) -> None:
    """What was made, renamed or removed in the folder is so after a power cut too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(temporary: Path, folder: Path) -> None:
    """Gives a finished folder its name. What stood there is out of the way for an instant, never mixed with the new."""
    old = folder.with_name(f".{folder.name}.old")
    remove_folder(old)
    sync_folder(temporary)
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    sync_folder(folder.parent)
    remove_folder(old)


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
