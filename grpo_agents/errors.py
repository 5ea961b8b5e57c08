"""Every error this package raises on purpose.

    GrpoAgentsError                 anything below; exit status 1
    ├── ConfigError                 one or more settings are wrong; exit status 2
    ├── MissingDependencyError      an optional package is not installed; names the line to type; exit status 2
    ├── EnvironmentSetupError       an environment cannot be made, rendered or described; exit status 2
    ├── PolicyLoadError             a model, processor or adapter folder cannot be used; exit status 2
    ├── SamplerError                a sampler cannot start, cannot be reached, or has other weights than the learner
    ├── RecordError                 a rollout record contradicts itself; names the step
    ├── SnapshotError               an environment cannot be saved and restored exactly
    └── CheckpointError             a checkpoint cannot be written or read

Each message names the offending value, the likely cause and the fix.
"""


class GrpoAgentsError(Exception):
    """Base class. `exit_status` is what a command exits with when nothing catches the error."""

    exit_status = 1


class ConfigError(GrpoAgentsError):
    """Settings that cannot be used. `problems` holds one sentence for each, all found in one pass."""

    exit_status = 2

    def __init__(self, problems: list[str]):
        self.problems = list(problems)
        head = "1 setting is wrong:" if len(problems) == 1 else f"{len(problems)} settings are wrong:"
        super().__init__("\n".join([head, *(f"  - {problem}" for problem in problems)]))


class MissingDependencyError(GrpoAgentsError, ImportError):
    """An optional package is needed and absent."""

    exit_status = 2


class EnvironmentSetupError(GrpoAgentsError):
    """An environment is unknown, cannot be rendered, or has an action space that cannot be named."""

    exit_status = 2


class PolicyLoadError(GrpoAgentsError):
    """A model folder lacks a part, or an adapter belongs to another base model."""

    exit_status = 2


class SamplerError(GrpoAgentsError):
    """A sampler's engine or servers fail, or answer with other weights than the learner's."""


class RecordError(GrpoAgentsError):
    """A Step, Episode or Group fails its own invariants (see `grpo_agents.rl.record_check`)."""


class SnapshotError(GrpoAgentsError):
    """An environment's state cannot be saved and restored so that it plays on identically."""


class CheckpointError(GrpoAgentsError):
    """A checkpoint could not be written in full (disk full, no permission) or cannot be read back."""
