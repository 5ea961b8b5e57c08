"""Named rewards: plain functions of an episode.

A reward returns one number for the episode (credited to its last step), one number for each step, or None where it cannot
grade; "cannot grade" is not 0. Several are combined by weight:
`rewards='[{name: return}, {name: my_module:my_reward, weight: 0.5}]'`.
"""

from grpo_agents.rewards.registry import Reward, register_reward, resolve_rewards, score

__all__ = ["Reward", "register_reward", "resolve_rewards", "score"]
