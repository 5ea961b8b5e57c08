"""Save an environment in mid-episode and go on from there later, as often as wanted, in this or another instance.

Classic-control environments are saved by the few values that make up their state. Of any other environment all attributes
are pickled, drawing surfaces left out, which also lets a checkpoint keep them. That is believed only after `verify`:
restored, the environment has to play on identically.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import AcrobotEnv, CartPoleEnv, MountainCarEnv, PendulumEnv
from gymnasium.envs.classic_control.continuous_mountain_car import Continuous_MountainCarEnv
from gymnasium.utils.env_checker import data_equivalence

from grpo_agents.errors import SnapshotError
from grpo_agents.rl.episode import Prompt, TextPart, VideoPart

# A subclass may have more state.
_CLASSIC = (CartPoleEnv, MountainCarEnv, Continuous_MountainCarEnv, AcrobotEnv, PendulumEnv)
_CLASSIC_STATE = ("state", "steps_beyond_terminated", "last_u")
# Of a wrapper only these plain kinds of attribute are state; spaces, specs and the inner environment are not.
_PLAIN = (int, float, bool, str, type(None), np.ndarray, np.generic, list, tuple, dict, set, deque)
_NOT_STATE = {"env", "_cached_spec", "_saved_kwargs", "_metadata", "_action_space", "_observation_space", "metadata"}


@dataclass(frozen=True, eq=False)
class Snapshot:
    """An environment's state, which can be pickled.

    Attributes:
        wrappers: name and state of each wrapper, from the outside in: what its `snapshot_state()` returned, or pickled
            attributes.
        inner: the environment itself: its values, or its pickled attributes.
    """

    wrappers: tuple[tuple[str, Any], ...]
    inner: dict[str, Any] | bytes


def save(env: gym.Env[Any, Any]) -> Snapshot:
    """Save `env` (wrappers, counters, random generator and all).

    Raises:
        SnapshotError: some part of the environment cannot be pickled.
    """
    wrappers = []
    layer: Any = env
    while isinstance(layer, gym.Wrapper):
        wrappers.append((type(layer).__name__, _wrapper_state(layer)))
        layer = layer.env
    return Snapshot(tuple(wrappers), _inner_state(layer))


def restore(env: gym.Env[Any, Any], snapshot: Snapshot) -> None:
    """Put `env` into the saved state. It may be another instance of the same environment, and must have been reset once.

    Raises:
        SnapshotError: `env` is wrapped differently from the one that was saved.
    """
    layer: Any = env
    for name, state in snapshot.wrappers:
        if type(layer).__name__ != name:
            raise SnapshotError(
                f"the saved environment has the wrapper {name} where this one has {type(layer).__name__}"
            )
        if hasattr(layer, "restore_state"):
            layer.restore_state(state)
        else:
            layer.__dict__.update(_Unpickler(state, layer).load())
        layer = layer.env
    if isinstance(layer, gym.Wrapper):
        raise SnapshotError(f"this environment has one more wrapper than the saved one: {type(layer).__name__}")
    if isinstance(snapshot.inner, bytes):
        layer.__dict__.update(_Unpickler(snapshot.inner, layer).load())
    else:
        inner = dict(snapshot.inner)
        layer.np_random.bit_generator.state = inner.pop("np_random")
        layer.__dict__.update({key: _copied(value) for key, value in inner.items()})


def verify(make: Callable[[], gym.Env[Any, Any]], *, seed: int = 0, steps: int = 20) -> None:
    """Prove that snapshots of an environment are exact: play, save, play on twice from the saved state, compare.

    The second time another instance is restored, which was reset with another seed in between. Observations (of a
    `PromptEnv`: words and pixels), rewards and ends have to be equal.

    Args:
        make: makes a fresh instance.
        seed: of the episode and of the actions.
        steps: random actions played after saving; a quarter as many are played before.

    Raises:
        SnapshotError: the environment cannot be pickled or does not play on identically.
    """
    first, second = make(), make()
    try:
        first.reset(seed=seed)
        first.action_space.seed(seed)
        for _ in range(steps // 4):
            if any(first.step(first.action_space.sample())[2:4]):
                first.reset(seed=seed)
        actions = [first.action_space.sample() for _ in range(steps)]
        saved = save(first)
        expected = _play(first, actions)
        second.reset(seed=seed + 1)
        restore(second, saved)
        if not data_equivalence(_play(second, actions), expected, exact=True):
            name = first.spec.id if first.spec else type(first.unwrapped).__name__
            raise SnapshotError(
                f"{name} does not play on identically after a snapshot: part of its state lies outside the environment "
                "object. Use group.start=reset"
            )
    finally:
        first.close()
        second.close()


def _play(env: gym.Env[Any, Any], actions: Sequence[Any]) -> list[Any]:
    seen = []
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        what = _content(observation) if isinstance(observation, Prompt) else copy.deepcopy(observation)
        seen.append((what, float(reward), bool(terminated), bool(truncated)))
        if terminated or truncated:
            break
    return seen


def _content(prompt: Prompt) -> list[str | bytes]:
    """Words and picture hashes in reading order."""
    found: list[str | bytes] = []
    for part in (part for message in prompt.messages for part in message.parts):
        if isinstance(part, TextPart):
            found.append(part.text)
        else:
            found += [frame.digest for frame in (part.frames if isinstance(part, VideoPart) else (part.frame,))]
    return found


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def _wrapper_state(wrapper: Any) -> Any:
    if hasattr(wrapper, "snapshot_state"):
        return wrapper.snapshot_state()
    own = wrapper.__dict__.items()
    return _pickled(wrapper, {key: value for key, value in own if key not in _NOT_STATE and isinstance(value, _PLAIN)})


def _inner_state(env: Any) -> dict[str, Any] | bytes:
    own = env.__dict__
    if type(env) in _CLASSIC:
        state = {key: _copied(own[key]) for key in _CLASSIC_STATE if key in own}
        return state | {"np_random": copy.deepcopy(env.np_random.bit_generator.state)}
    left_out = {"spec", "action_space", "observation_space", *_drawing_handles(env)}
    return _pickled(env, {key: value for key, value in own.items() if key not in left_out})


def _pickled(owner: Any, attributes: dict[str, Any]) -> bytes:
    """All at once, so that what two attributes share stays shared."""
    file = io.BytesIO()
    try:
        _Pickler(file, owner).dump(attributes)
    except Exception as error:  # as many kinds as there are objects
        raise SnapshotError(
            f"{type(owner).__name__} cannot be saved: {error}. Use group.start=reset, or keep handles and functions out of "
            "its attributes"
        ) from error
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Writes a mark for the owner of the attributes, which may refer to it, instead of a copy."""

    def __init__(self, file: io.BytesIO, owner: Any):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._owner = owner

    def persistent_id(self, obj: Any) -> str | None:
        return "owner" if obj is self._owner else None


class _Unpickler(pickle.Unpickler):
    """Puts the owner that is restored where the mark is."""

    def __init__(self, data: bytes, owner: Any):
        super().__init__(io.BytesIO(data))
        self._owner = owner

    def persistent_load(self, pid: Any) -> Any:
        return self._owner


def _drawing_handles(env: Any) -> set[str]:
    """Attributes that hold windows, surfaces and clocks: remade by rendering, and not to be copied."""
    return {key for key, value in env.__dict__.items() if type(value).__module__.startswith("pygame")}
