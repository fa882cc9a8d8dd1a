"""Compiles kernels without a GPU, in the forms in which they are launched.

Every *_triton.py module lists its forms in `launch_configurations()`, and nowhere else.
"""

from itertools import groupby
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


class LaunchConfiguration(NamedTuple):
    """types: of the arguments that are no constants, such as "*bf16:16" or "i64:16" (":16": divisible by 16)."""

    kernel: triton.JITFunction
    constants: dict[str, object]
    types: dict[str, str]
    num_warps: int

    @property
    def name(self) -> str:
        """Unique: the constants, then the types in the order of the parameters, alike neighbours counted."""
        names = [p.name for p in self.kernel.params]
        flags = [f"{name}={value}" for name, value in self.constants.items() if name in names]
        runs = [(t, len(list(run))) for t, run in groupby(self.types[n] for n in names if n not in self.constants)]
        types = [f"{count} {t}" if count > 1 else t for t, count in runs]
        return f"{self.kernel.__name__}[{', '.join(flags + types)}]"


def launch_configurations() -> list[LaunchConfiguration]:
    """Of all kernels."""
    from . import logprob_triton, ppo_loss_triton, reward_triton, turn_gae_triton

    modules = (turn_gae_triton, logprob_triton, reward_triton, ppo_loss_triton)
    return [configuration for module in modules for configuration in module.launch_configurations()]


def compile_for(configuration: LaunchConfiguration, capability: int):
    """The compiled kernel for compute capability 80, 90, 100, ...; .asm has "ptx" and "cubin"."""
    kernel, constants, types, num_warps = configuration
    names = [p.name for p in kernel.params]
    source = ASTSource(
        kernel,
        {n: "constexpr" if n in constants else types[n].removesuffix(":16") for n in names},
        {(i,): constants[n] for i, n in enumerate(names) if n in constants},
        {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if types.get(n, "").endswith(":16")},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps})
