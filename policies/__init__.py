"""Vision-language models as policies: loading, LoRA, encoding, samplers."""

from grpo_agents.policies.torchvision_ops import register_missing_ops

# Before anything below this package imports transformers, which imports torchvision.
register_missing_ops()
