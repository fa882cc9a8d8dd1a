"""Operations for PPO on terminal agents: torch in, torch out, on CPU and GPU. Every one is a registered torch op."""

from .linear_logprob import linear_token_logprobs
from .linear_ppo import linear_ppo_loss
from .logprob import token_logprobs
from .ppo_loss import PolicyLoss, ValueLoss, policy_loss, value_loss
from .reward import FamilyRewards, family_rewards
from .turn_gae import GAEOutput, turn_gae

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
