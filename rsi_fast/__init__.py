"""rsi-fast: PPO for terminal agents. The operations are importable from here; the trainer is `rsi-fast run`."""

from rsi_kernels import (
    FamilyRewards,
    GAEOutput,
    PolicyLoss,
    ValueLoss,
    family_rewards,
    linear_ppo_loss,
    linear_token_logprobs,
    policy_loss,
    token_logprobs,
    turn_gae,
    value_loss,
)

__all__ = [
    "FamilyRewards",
    "GAEOutput",
    "PolicyLoss",
    "ValueLoss",
    "family_rewards",
    "linear_ppo_loss",
    "linear_token_logprobs",
    "policy_loss",
    "token_logprobs",
    "turn_gae",
    "value_loss",
]
