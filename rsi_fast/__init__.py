"""rsi-fast: PPO for terminal agents. The operations are importable from here; the trainer is `rsi-fast run`."""
