"""`python -m bench.compile_report`: every kernel in every form in which it is launched, compiled for sm_80, sm_90 and
sm_100. Prints a table, writes results/compile.json, and fails where a kernel spills registers. Needs no GPU."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rsi_kernels.compilation import LaunchConfiguration, compile_for, launch_configurations
from triton import knobs

RESULTS = Path(__file__).parent / "results" / "compile.json"
CAPABILITIES = (80, 90, 100)


def report(configuration: LaunchConfiguration, capability: int) -> dict:
    """One record; spills: bytes of local memory a thread needs because registers do not suffice."""
    compiled = compile_for(configuration, capability)
    usage = resource_usage(compiled.asm["cubin"])
    return dict(
        kernel=configuration.kernel.__name__,
        config=configuration.name,
        target=f"sm_{capability}",
        registers=usage["REG"],
        spills=usage["STACK"] + usage["LOCAL"],
        shared_bytes=usage["SHARED"],
        widest_load_bits=widest_load_bits(compiled.asm["ptx"]),
    )


def resource_usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK, SHARED, LOCAL as cuobjdump, which comes with Triton, reads them from the binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    usage = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    if usage.keys() != {"REG", "STACK", "SHARED", "LOCAL"}:
        raise RuntimeError(f"cuobjdump said nothing that can be read: {text[:300]!r}")
    return usage


def widest_load_bits(ptx: str) -> int:
    """Of one thread's loads from global memory; 0 without any."""
    loads = re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.[busf](\d+)\b", ptx)
    return max((int(vector or 1) * int(bits) for vector, bits in loads), default=0)


def main() -> None:
    records = [
        report(configuration, capability) for configuration in launch_configurations() for capability in CAPABILITIES
    ]
    print(f"{'kernel':<14} {'target':<7} {'registers':>9} {'spills':>6} {'shared':>6} {'load':>5}  config")
    for r in records:
        print(
            f"{r['kernel']:<14} {r['target']:<7} {r['registers']:>9} {r['spills']:>6} {r['shared_bytes']:>6}"
            f" {r['widest_load_bits']:>5}  {r['config']}"
        )
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(records, indent=1) + "\n")
    if spilling := [r for r in records if r["spills"]]:
        sys.exit(f"{len(spilling)} of {len(records)} compiled kernels spill registers")
    print(f"{len(records)} compiled kernels, none spills registers")


if __name__ == "__main__":
    main()
