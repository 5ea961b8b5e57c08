"""Streams do not depend on process, order or each other; panels never overlap."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from grpo_agents.run.seeding import SeedPanels, Streams

SHOW = (
    "from grpo_agents.run.seeding import *; s = Streams(7); print(s.seed('a', 1), s.generator('a', 1).integers(2**62))"
)


def test_a_stream_is_the_same_in_every_process() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SHOW],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {f"{Streams(7).seed('a', 1)} {Streams(7).generator('a', 1).integers(2**62)}\n"}


def test_streams_of_different_names_and_roots_differ() -> None:
    names: list[tuple[str | int, ...]] = [
        ("a",),
        ("b",),
        ("a", 0),
        ("a", 1),
        ("a", "1"),
        ("a1",),
        ("a", "b"),
        ("ab",),
        (0,),
    ]
    draws = {tuple(Streams(root).generator(*name).integers(2**62, size=2)) for root in range(3) for name in names}
    seeds = {Streams(root).seed(*name) for root in range(3) for name in names}
    assert len(draws) == len(seeds) == 3 * len(names)
    assert Streams(0).seed("a", 3) == Streams(0).seed("a", np.int64(3))  # type: ignore[arg-type]
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_asking_twice_starts_the_stream_anew() -> None:
    streams = Streams(3)
    first = streams.generator("sampler", 5).random(4)
    streams.generator("other").random(100)
    np.testing.assert_array_equal(streams.generator("sampler", 5).random(4), first)


def test_the_three_panels_are_disjoint_for_all_roots_together() -> None:
    indices = [*range(300), 10**6, 2**29 - 1, 2**29 + 5, 10**12]
    training, validation, held_out = set(), set(), set()
    for root in [*range(40), 2**31, 2**63]:
        panels = SeedPanels(root)
        drawn = [panels.training(index) for index in indices]
        assert len(set(drawn[:302])) == 302
        assert len(set(panels.validation(500))) == len(set(panels.held_out(500))) == 500
        training.update(drawn)
        validation.update(panels.validation(500))
        held_out.update(panels.held_out(500))
    assert not (training & validation or training & held_out or validation & held_out)
    assert all(0 <= seed < 2**31 for seed in training | validation | held_out)


def test_a_panel_grows_without_changing_its_first_seeds() -> None:
    panels = SeedPanels(1)
    before = panels.held_out(100)
    for index in range(1000):
        panels.training(index)
    assert panels.held_out(200)[:100] == before == SeedPanels(1).held_out(100)
    assert before != SeedPanels(2).held_out(100)
    with pytest.raises(ValueError, match="numbered from 0"):
        panels.training(-1)
