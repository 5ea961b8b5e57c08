"""Playing episodes. Each is a coroutine that awaits its sampler and then its environment, so none waits for another.

Every episode draws from its own random stream: what it does depends neither on its siblings nor on who finishes first.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_agents.errors import EnvironmentSetupError
from grpo_agents.rl.episode import Encoded, EndReason, Episode, Group, Prompt, Sample, Step
from grpo_agents.rl.starts import TRAIL_EVERY, RestartPool, SnapshotStore, Start, Trail, ended_badly

Draw = Callable[[Encoded, np.random.Generator | None], Awaitable[Sample]]
"""Asks the sampler for one reply; without a generator, for the likeliest one."""


@dataclass(frozen=True, eq=False)
class Play:
    """What is needed to play: the parts that rooms of their own provide.

    Attributes:
        make_env: makes one more environment (reset, step, as `PromptEnv`).
        encode: prompt to token ids and pixels.
        draw: the sampler.
        snapshots: how to save and restore an environment; None where it cannot be.
    """

    make_env: Callable[[], Any]
    encode: Callable[[Prompt], Encoded]
    draw: Draw
    snapshots: SnapshotStore | None = None


@dataclass(frozen=True, eq=False)
class Decision:
    """An action that was chosen and is not yet taken.

    Attributes:
        env: the environment, still as the policy saw it.
        episode: the steps so far.
        sample: the reply.
        seconds: from prompt to reply; it includes waiting for replies to other episodes that are played at the same time.
    """

    env: Any
    episode: Episode
    sample: Sample
    seconds: float


Watch = Callable[[Decision], bool]
"""Is shown each decision before it is carried out; False stops the episode there (EndReason.STOPPED)."""


class Rollouts:
    """Plays episodes in a pool of environments that is kept between updates.

    Args:
        play: how to play.
        trail: steps back that restarts can reach; 0 saves nothing.
    """

    def __init__(self, play: Play, trail: int = 0):
        self.play = play
        self.trail = trail
        self._idle: list[Any] = []

    def close(self) -> None:
        """Close all environments."""
        while self._idle:
            self._idle.pop().close()

    def episodes(
        self, starts: Sequence[Start], rngs: Sequence[np.random.Generator | None], watch: Watch | None = None
    ) -> list[tuple[Episode, Trail | None]]:
        """Play one episode from each start, all at once; without a generator an episode is played greedily.

        What an environment raises makes its episode a fault. What anything else raises stops all episodes and is raised
        here, and so is an environment's EnvironmentSetupError, which every other episode would meet too.
        """
        played: list[tuple[Episode, Trail | None]] = []

        async def together() -> None:
            # Not returned: on its way out, asyncio.run formats the finished task with its result, pixels and all.
            pairs = zip(starts, rngs, strict=True)
            played.extend(await asyncio.gather(*(self._episode(start, rng, watch) for start, rng in pairs)))

        asyncio.run(together())
        return played

    def groups(
        self, starts: Sequence[Start], size: int, rng_of: Callable[[int, int], np.random.Generator]
    ) -> list[list[tuple[Episode, Trail | None]]]:
        """Play `size` episodes from each start. `rng_of(group, member)` is each episode's own stream."""
        flat = self.episodes(
            [start for start in starts for _ in range(size)],
            [rng_of(g, m) for g in range(len(starts)) for m in range(size)],
        )
        played = [flat[g * size : (g + 1) * size] for g in range(len(starts))]
        for members in played:
            for member, (episode, _) in enumerate(members):
                episode.member = member
        return played

    async def _episode(
        self, start: Start, rng: np.random.Generator | None, watch: Watch | None
    ) -> tuple[Episode, Trail | None]:
        env = self._idle.pop() if self._idle else self.play.make_env()
        trail = Trail(self.trail) if self.trail and self.play.snapshots else None
        episode = Episode([], EndReason.STOPPED, start.seed, start.kind)
        try:
            await self._play(env, start, rng, episode, trail, watch)
        except _EnvironmentFault as fault:
            episode.end, episode.fault = EndReason.FAULT, str(fault)
            _close_quietly(env)  # it may be in any state; the next episode gets a new one
            return episode, None
        except BaseException:
            _close_quietly(env)
            raise
        self._idle.append(env)
        return episode, trail

    async def _play(
        self,
        env: Any,
        start: Start,
        rng: np.random.Generator | None,
        episode: Episode,
        trail: Trail | None,
        watch: Watch | None,
    ) -> None:
        with _attributed():
            prompt, _ = env.reset(seed=start.seed)
        store = self.play.snapshots
        if start.snapshot is not None and store is not None:
            store.restore(env, start.snapshot)
            prompt = env.prompt()
        while start.horizon is None or len(episode) < start.horizon:
            if trail is not None and store is not None and len(episode) % TRAIL_EVERY == 0:
                trail.add(len(episode), store.save(env))
            began = time.perf_counter()
            encoded = self.play.encode(prompt)
            sample = await self.play.draw(encoded, rng)
            if watch is not None and not watch(Decision(env, episode, sample, time.perf_counter() - began)):
                return
            action = sample.choice if sample.choice is not None else 0
            with _attributed():
                prompt, reward, terminated, truncated, _ = env.step(action)
                reward = float(reward)
            episode.steps.append(
                Step(
                    encoded=encoded,
                    sample=sample,
                    action=action,
                    valid=sample.choice is not None,
                    reward=reward,
                    terminated=bool(terminated),
                    truncated=bool(truncated),
                    observation_hash=encoded.observation_hash,
                )
            )
            if terminated or truncated:
                episode.end = EndReason.TERMINATED if terminated else EndReason.TRUNCATED
                return


def graded_groups(played: Sequence[Sequence[tuple[Episode, Trail | None]]]) -> tuple[list[Group], list[Episode]]:
    """Put members into groups, with faults set aside: they are no data, and a lone survivor has nobody to compare with.

    Returns:
        The groups of at least two members, and the faulty episodes.
    """
    groups, faults = [], []
    for members in played:
        sound = [episode for episode, _ in members if episode.end is not EndReason.FAULT]
        faults += [episode for episode, _ in members if episode.end is EndReason.FAULT]
        if len(sound) >= 2:
            groups.append(Group(sound))
    return groups, faults


def collect_restarts(
    played: Sequence[Sequence[tuple[Episode, Trail | None]]],
    pool: RestartPool,
    before: tuple[int, int],
    rng: np.random.Generator,
) -> None:
    """Keep one state from before the end of each episode that ended badly."""
    for members in played:
        for episode, trail in members:
            if trail is not None and ended_badly(episode):
                snapshot = trail.before(len(episode), *before, rng)
                if snapshot is not None:
                    pool.add(episode.seed, snapshot)


class _EnvironmentFault(Exception):
    """An exception inside an environment; its text is the traceback."""


@contextmanager
def _attributed() -> Iterator[None]:
    """Tell what the environment raises from what sampler and encoder raise: only the former is data."""
    try:
        yield
    except EnvironmentSetupError:
        raise
    except Exception as error:
        raise _EnvironmentFault(traceback.format_exc()) from error


def _close_quietly(env: Any) -> None:
    with suppress(Exception):  # it failed already, and why is on record
        env.close()
