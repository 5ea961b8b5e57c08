"""What a viewer is shown, what a viewer is, and how fast it plays."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

SHOWN_ACTIONS = 20
"""Most actions a viewer lists; of longer lists the likeliest are kept."""


@dataclass(frozen=True, eq=False)
class Moment:
    """One decision of an episode.

    Attributes:
        picture: uint8 (H, W, 3), the environment as it was rendered, before any crop or resize.
        seen: uint8 (h, w, 3), the newest frame as the policy sees it.
        actions: the A action words, in the order of the action space; none for a free reply.
        probabilities: (A,), probability of each action.
        choice: index of the action taken; outside 0..A-1 none is marked.
        step: steps of the episode so far.
        episode: number of the episode, shown as it is.
        total: return so far.
        title: what plays what, such as "CartPole-v1, trained".
    """

    picture: NDArray[np.uint8]
    seen: NDArray[np.uint8]
    actions: tuple[str, ...]
    probabilities: NDArray[np.floating[Any]]
    choice: int
    step: int
    episode: int
    total: float
    title: str

    def listed(self, most: int = SHOWN_ACTIONS) -> list[int]:
        """Indices of the actions that fit a list, ascending: all, or the chosen one and the likeliest others."""
        ranked = sorted(range(len(self.actions)), key=lambda index: (index != self.choice, -self.probabilities[index]))
        return sorted(ranked[:most])

    def total_text(self) -> str:
        """The return without decimals where it has none."""
        return f"{self.total:.0f}" if float(self.total).is_integer() else f"{self.total:.2f}"


class Viewer(Protocol):
    """A way of watching episodes. A context manager that closes itself."""

    def show(self, moment: Moment) -> bool:
        """Show the next moment; False when the user has closed the viewer, which is a wish to stop."""
        ...

    def close(self) -> None:
        """Finish. May be called twice."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Pace:
    """Lets moments pass at an even rate. Time that was lost is not caught up by playing faster.

    Args:
        fps: moments a second.
        clock: seconds from any origin.
        sleep: waits for so many seconds.
    """

    def __init__(
        self, fps: float, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ):
        self._period = 1.0 / fps
        self._clock = clock
        self._sleep = sleep
        self._due: float | None = None

    def wait(self) -> None:
        """Return when the next moment is due; the first is due at once."""
        now = self._clock()
        if self._due is not None and now < self._due:
            self._sleep(self._due - now)
            now = self._due
        self._due = now + self._period
