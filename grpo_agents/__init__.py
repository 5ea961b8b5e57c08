"""Train Qwen-VL agents with GRPO in Gymnasium environments.

`python -m grpo_agents.train env=CartPole-v1` starts a run; see README.md.
"""

from pathlib import Path

from grpo_agents.errors import GrpoAgentsError

__all__ = ["GrpoAgentsError", "__version__"]
__version__ = "0.1.0"

# `envs`, `policies`, `rewards` and `assets` live at the repository's top level and are links inside this package. A
# checkout without symbolic links (Windows, some archives) has plain files in their place; then the top level itself is
# searched, so that `grpo_agents.envs` is found all the same.
if not (Path(__file__).parent / "envs").is_dir():
    __path__.append(str(Path(__file__).parent.parent))
