"""The one place that knows about devices, Triton and its interpreter."""

import importlib.util

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None


def uses_triton(tensor: torch.Tensor) -> bool:
    """True where an op launches its Triton kernel."""
    return HAS_TRITON and tensor.device.type == "cuda"


def uses_numba(tensor: torch.Tensor) -> bool:
    """True where an op takes loops compiled for the CPU."""
    return tensor.device.type == "cpu"


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
