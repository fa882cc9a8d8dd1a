"""The one place that knows about devices, Triton and its interpreter."""

import functools
import importlib.util
from concurrent.futures import ThreadPoolExecutor

import torch

THREAD_WORK = 2**21  # elements for which a thread is worth starting
HAS_TRITON = importlib.util.find_spec("triton") is not None


def uses_triton(tensor: torch.Tensor) -> bool:
    """True where an op launches its Triton kernel."""
    return HAS_TRITON and tensor.device.type == "cuda"


def uses_numba(tensor: torch.Tensor) -> bool:
    """True where an op takes loops compiled for the CPU."""
    return tensor.device.type == "cpu"


@functools.cache
def cpu_multiplies_bf16() -> bool:
    """Whether the CPU has instructions for bf16 products, which it otherwise takes 100 times longer for."""
    tests = (torch.cpu, "_is_avx512_bf16_supported"), (torch.cpu, "_is_amx_tile_supported")
    return any(getattr(module, name, bool)() for module, name in tests)


def compiled(**options):
    """numba's njit, kept on disk for later processes where there is a place for it: beside this file, in the user's
    cache, or in NUMBA_CACHE_DIR. Else each process compiles anew, for seconds."""
    from numba import njit

    def decorate(function):
        try:
            return njit(cache=not options.get("forceinline"), **options)(function)
        except RuntimeError:  # numba finds no place that it may write to
            return njit(**options)(function)

    return decorate


def without_autocast(function):
    """An op computes in the dtypes it says, also inside torch.autocast."""

    @functools.wraps(function)
    def exact(*arguments):
        with torch.autocast(next(x for x in arguments if isinstance(x, torch.Tensor)).device.type, enabled=False):
            return function(*arguments)

    return exact


def in_threads(compiled, arguments: tuple, num_rows: int, width: int) -> None:
    """Calls compiled(*arguments, begin, end), which lets go of the GIL, on as many threads as torch uses.

    width: elements of a row; 0: on one thread, row after row.
    """
    count = max(min(torch.get_num_threads(), num_rows * width // THREAD_WORK, num_rows), 1)
    if count == 1:
        compiled(*arguments, 0, num_rows)
        return
    bounds = [num_rows * i // count for i in range(count + 1)]
    with ThreadPoolExecutor(count) as pool:  # made anew: threads would not outlive a fork
        for done in [pool.submit(compiled, *arguments, a, b) for a, b in zip(bounds, bounds[1:], strict=False)]:
            done.result()


def device_of(tensor: torch.Tensor):
    """Context in which kernels are launched: Triton takes the current GPU, which need not be the tensor's."""
    return torch.cuda.device(tensor.device)


def interpreting() -> bool:
    """True where Triton kernels run in Python (TRITON_INTERPRET=1 before the kernel's module is imported)."""
    if not HAS_TRITON:
        return False
    from triton import knobs

    return knobs.runtime.interpret


def checks_values(validate: bool | None, tensor: torch.Tensor) -> bool:
    """Whether to read values in order to check them. None: on CPU only, since on a GPU it costs a device sync."""
    return tensor.device.type == "cpu" if validate is None else validate
