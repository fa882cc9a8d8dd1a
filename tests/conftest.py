import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    """The same random numbers for a test whatever ran before it."""
    torch.manual_seed(0)
