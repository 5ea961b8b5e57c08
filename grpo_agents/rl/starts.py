"""Where the episodes of a group start: a seed, or a state saved shortly before an earlier failure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from grpo_agents.rl.episode import EndReason, Episode

TRAIL_EVERY = 5
"""Steps between two saved states of an episode."""
_LOOKAHEAD = 20
"""Steps that an ending is weighed against."""


def ended_badly(episode: Episode) -> bool:
    """Whether the environment ended the episode where going on would have been worth as much or more: a fall, no goal.

    A termination does not tell a failure from a success; the rewards do. The last step's reward, which is all that the end
    brought, is weighed against `_LOOKAHEAD` more steps at the mean reward of the steps before. A fallen pole (1 for each
    step) ends badly, and so does a crash; a car on top of its hill (-1 for each step) and a reward that comes with the goal
    alone end well. An episode of one step has nothing to weigh against and ends badly.
    """
    if episode.end is not EndReason.TERMINATED:
        return False
    before, last = episode.rewards[:-1], episode.rewards[-1]
    return not len(before) or bool(last <= _LOOKAHEAD * before.mean())


class SnapshotStore(Protocol):
    """How to save and restore an environment (`grpo_agents.envs.snapshot`)."""

    def save(self, env: Any) -> Any: ...

    def restore(self, env: Any, snapshot: Any) -> None: ...


@dataclass(frozen=True, eq=False)
class Start:
    """One start, shared by all members of a group.

    Attributes:
        seed: given to `env.reset`.
        snapshot: state to continue from after the reset; None starts from the reset itself.
        horizon: most steps played from here; reaching it is a limit of time and no failure. None leaves the end to the
            environment.
    """

    seed: int
    snapshot: Any = None
    horizon: int | None = None

    @property
    def kind(self) -> str:
        return "reset" if self.snapshot is None else "restart"


class Trail:
    """States of the last steps of one episode, saved every `TRAIL_EVERY` steps.

    Args:
        length: most steps back that will be asked for.
    """

    def __init__(self, length: int):
        self._saved: deque[tuple[int, Any]] = deque(maxlen=length // TRAIL_EVERY + 1)

    def add(self, step: int, snapshot: Any) -> None:
        self._saved.append((step, snapshot))

    def before(self, end: int, least: int, most: int, rng: np.random.Generator) -> Any | None:
        """A state from `least` to `most` steps before step `end`, each saved one equally likely; None if there is none."""
        fitting = [snapshot for step, snapshot in self._saved if least <= end - step <= most]
        return fitting[int(rng.integers(len(fitting)))] if fitting else None


class RestartPool:
    """The newest states from before failures.

    Args:
        capacity: states kept.
    """

    def __init__(self, capacity: int):
        self._states: deque[tuple[int, Any]] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self._states)

    def add(self, seed: int, snapshot: Any) -> None:
        self._states.append((seed, snapshot))

    def draw(self, rng: np.random.Generator, horizon: int) -> Start:
        """A start from one of the states, each equally likely."""
        seed, snapshot = self._states[int(rng.integers(len(self._states)))]
        return Start(seed, snapshot, horizon)

    def state(self) -> list[tuple[int, Any]]:
        """What a checkpoint keeps."""
        return list(self._states)

    def load_state(self, state: list[tuple[int, Any]]) -> None:
        self._states.clear()
        self._states.extend(state)
