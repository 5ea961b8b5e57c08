"""The numbers a run goes on from."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Self


@dataclass
class RunState:
    """What a checkpoint holds besides adapter, optimizer and restart pool.

    Attributes:
        update: updates done.
        env_steps: training steps played.
        starts: reset starts used, which is the index of the next training seed.
        best_update, best_return: the update whose adapter is kept as the best, and its validation mean.
        solved: whether validation met the threshold.
        wall_s: seconds of training so far, over all sessions.
    """

    update: int = 0
    env_steps: int = 0
    starts: int = 0
    best_update: int = 0
    best_return: float = -math.inf
    solved: bool = False
    wall_s: float = 0.0

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> Self:
        """The state of a checkpoint, given as `dataclasses.asdict` wrote it; what it holds beyond the fields is dropped."""
        return cls(**{field.name: saved[field.name] for field in fields(cls)})
