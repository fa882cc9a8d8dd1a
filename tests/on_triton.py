"""`pytest -p on_triton`, with TRITON_INTERPRET=1: operations on CPU tensors launch their Triton kernels, which Triton's
interpreter runs. So the tests of the CPU path are tests of the GPU path too (make test-kernels)."""

import pytest
from kernel_checks import as_on_a_gpu
from rsi_kernels import runtime

assert runtime.interpreting(), "run with TRITON_INTERPRET=1"


@pytest.fixture(autouse=True)
def _on_triton(monkeypatch):
    with as_on_a_gpu(monkeypatch):
        yield


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("host"):
            item.add_marker(
                pytest.mark.skip(reason="of the CPU path alone: memory, threads, errors that cost a GPU a sync")
            )
