"""Independent random streams from one root seed, and three panels of environment seeds that cannot overlap.

Nothing here keeps state: a stream is a function of the root and of its names, so a resumed run asks for the same
streams by the same names and needs no saved generator. Names are hashed with BLAKE2, never with `hash()`, whose result
for text differs between processes.
"""

from __future__ import annotations

import hashlib
import operator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

PANEL_SIZE = 2**29
"""Seeds in each panel: a quarter of the 31 bits that environments and torch take everywhere."""


@dataclass(frozen=True)
class Streams:
    """Named streams below one root seed.

    Attributes:
        root: the run's seed, 0 or more.
    """

    root: int

    def generator(self, *names: str | int) -> np.random.Generator:
        """A generator at the start of the stream called `names`; the same names give the same stream, other names an
        independent one. `1` and `"1"` are different names, and so are `"ab"` and `"a", "b"`."""
        return np.random.Generator(np.random.Philox(self._sequence("generator", names)))

    def seed(self, *names: str | int) -> int:
        """A seed below 2**31 for what takes an integer, such as `torch.manual_seed`."""
        return int(self._sequence("seed", names).generate_state(1, np.uint32)[0] >> 1)

    def _sequence(self, purpose: str, names: tuple[str | int, ...]) -> np.random.SeedSequence:
        if not names:
            raise ValueError("a stream needs at least one name, such as generator('sampler', update)")
        digest = hashlib.blake2b(digest_size=16, person=purpose.encode())
        for name in names:
            kind, text = ("s", name) if isinstance(name, str) else ("i", str(operator.index(name)))
            data = text.encode()
            digest.update(f"{kind}{len(data)}:".encode() + data)
        words = np.frombuffer(digest.digest(), dtype="<u4")
        return np.random.SeedSequence(self.root, spawn_key=tuple(int(word) for word in words))


@dataclass(frozen=True)
class SeedPanels:
    """Environment seeds for training, validation and the held-out table.

    The two low bits of a seed name its panel, so the panels are disjoint by construction, for one root and across
    roots: a seed that any run ever trained on is never validated on or reported. The high bits walk through all 2**29
    values in an order fixed by the root, so a panel repeats no seed before all are used, and a panel's first seeds do
    not depend on how many were drawn from it or from another.

    Attributes:
        root: the run's seed, 0 or more.
    """

    root: int

    def training(self, index: int) -> int:
        """Seed of the training start number `index`, from 0 without end (a seed returns after 2**29 others)."""
        return self._seed(0, index)

    def validation(self, n: int) -> list[int]:
        """The first `n` seeds of the validation panel, all different."""
        return [self._seed(1, index) for index in range(self._checked(n))]

    def held_out(self, n: int) -> list[int]:
        """The first `n` seeds of the held-out panel, all different."""
        return [self._seed(2, index) for index in range(self._checked(n))]

    @cached_property
    def _walks(self) -> list[tuple[int, int]]:
        """Offset and odd stride of each panel's walk; an odd stride visits every value modulo a power of two."""
        streams = Streams(self.root)
        return [(streams.seed("panel", p, "offset"), streams.seed("panel", p, "stride") | 1) for p in range(3)]

    def _seed(self, panel: int, index: int) -> int:
        if index < 0:
            raise ValueError(f"seed number {index} of a panel: seeds are numbered from 0")
        offset, stride = self._walks[panel]
        return (offset + index * stride) % PANEL_SIZE * 4 + panel

    @staticmethod
    def _checked(n: int) -> int:
        if not 0 <= n <= PANEL_SIZE:
            raise ValueError(f"{n} seeds asked of a panel, which holds {PANEL_SIZE}; ask for 0 to that many")
        return n
