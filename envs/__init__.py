"""Gymnasium environments and the wrappers that turn their states into prompts."""

from grpo_agents.envs.prompt_env import PromptEnv, make_env
from grpo_agents.envs.registry import FrameSettings, register_env
from grpo_agents.envs.snapshot import Snapshot

__all__ = ["FrameSettings", "PromptEnv", "Snapshot", "make_env", "register_env"]
