"""Rollouts: vLLM servers, the collector that drives agents against them, and the weights that go back into them."""
