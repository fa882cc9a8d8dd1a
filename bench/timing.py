"""Best time of interleaved calls on one thread, peak memory above what was there before, and the machine's ceilings.

Times are CPU time of the process, user and system: on an idle machine the same as the clock's with one thread, and on a
shared one free of what other processes take.
"""

import ctypes
import ctypes.util
import time
from pathlib import Path

import torch

REPEATS = 5  # at least
QUICK_S = 1.0  # a quick contestant is called on until its calls took this long together
PATIENCE_S = 15.0  # a contestant that would need longer for REPEATS calls gets as many as fit, and the record says so
MiB = 2**20


def interleaved(contestants: dict, first_s: dict) -> dict[str, tuple[float, int]]:
    """(best seconds, calls) of each contestant. first_s: what its first, untimed call took, which plans the rest.

    One that outlasts PATIENCE_S in a single call keeps the time of that call.
    """
    left = {name: _planned(first_s[name]) for name in contestants}
    best = {name: (first_s[name], 1) if not left[name] else (float("inf"), left[name]) for name in contestants}
    while any(left.values()):
        for name, function in contestants.items():
            if left[name]:
                left[name] -= 1
                best[name] = min(best[name][0], timed(function)), best[name][1]
    return best


def _planned(first_s: float) -> int:
    if first_s * REPEATS > PATIENCE_S:
        return int(PATIENCE_S / first_s)
    return max(REPEATS, min(50, int(QUICK_S / first_s)))


def timed(function) -> float:
    begin = time.process_time()
    function()
    return time.process_time() - begin


def measured(function) -> tuple:
    """(result, seconds, MiB): peak resident memory during the call, its results included, above that before it.

    NaN MiB where Linux does not tell.
    """
    libc = ctypes.CDLL(ctypes.util.find_library("c"))
    libc.malloc_trim(0)  # or memory that was freed earlier would be used again unseen
    try:
        Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back
        before = _status_bytes("VmRSS")
    except OSError:
        before = float("nan")
    begin = time.process_time()
    result = function()
    seconds = time.process_time() - begin
    return result, seconds, (_status_bytes("VmHWM") - before) / MiB if before == before else before


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def copy_gb_s(num_bytes: int = 256 * MiB) -> float:
    """Bytes read plus bytes written."""
    source = torch.ones(num_bytes // 4)
    target = torch.empty_like(source)
    return 2 * num_bytes / min(timed(lambda: target.copy_(source)) for _ in range(2 * REPEATS)) / 1e9


def matmul_gflop_s(n: int = 2048) -> float:
    """fp32 product of square matrices: on many CPUs faster than a bf16 one."""
    a, b = torch.randn(n, n), torch.randn(n, n)
    return 2 * n**3 / min(timed(lambda: a @ b) for _ in range(REPEATS)) / 1e9
