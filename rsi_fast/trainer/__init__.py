"""The PPO trainer: one process per rank, started by torchrun as `python -m rsi_fast.trainer RUN`."""
