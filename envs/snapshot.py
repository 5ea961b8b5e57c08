"""Save an environment in mid-episode and go on from there later, as often as wanted, in this or another instance.

Classic-control environments are saved by the few values that make up their state. Any other environment is deep-copied,
drawing surfaces and other handles left out, and believed only after `verify`: restored, it has to play on identically.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import AcrobotEnv, CartPoleEnv, MountainCarEnv, PendulumEnv
from gymnasium.envs.classic_control.continuous_mountain_car import Continuous_MountainCarEnv

from grpo_agents.errors import SnapshotError

_CLASSIC = (CartPoleEnv, MountainCarEnv, Continuous_MountainCarEnv, AcrobotEnv, PendulumEnv)
_CLASSIC_STATE = ("state", "steps_beyond_terminated", "last_u")
# Of a wrapper only these plain kinds of attribute are state; spaces, specs and the inner environment are not.
_PLAIN = (int, float, bool, str, type(None), np.ndarray, np.generic, list, tuple, dict)
_NOT_STATE = {"env", "_cached_spec", "_metadata", "_action_space", "_observation_space", "metadata", "settings"}


@dataclass(frozen=True, eq=False)
class Snapshot:
    """An environment's state: one entry for each wrapper from the outside in, then the environment itself."""

    wrappers: tuple[tuple[str, dict[str, Any]], ...]
    inner: dict[str, Any]


def save(env: gym.Env[Any, Any]) -> Snapshot:
    """Save `env` (wrappers, counters, random generator and all).

    Raises:
        SnapshotError: some part of the environment cannot be copied.
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
            layer.__dict__.update(copy.deepcopy(state))
        layer = layer.env
    inner = dict(snapshot.inner)
    generator = inner.pop("np_random")
    if isinstance(layer, _CLASSIC):
        layer.__dict__.update({key: _copied(value) for key, value in inner.items()})
    else:
        layer.__dict__.update(copy.deepcopy(inner))
    if generator is not None:
        layer.np_random.bit_generator.state = generator


def verify(make: Callable[[], gym.Env[Any, Any]], *, seed: int = 0, steps: int = 20) -> None:
    """Prove that snapshots of an environment are exact: play, save, play on twice from the saved state, compare.

    The second time another instance is restored. Rewards, ends and (for `PromptEnv`) frames have to be equal.

    Args:
        make: makes a fresh instance.
        seed: of the episode and of the actions.
        steps: actions played before saving at most, and after.

    Raises:
        SnapshotError: the environment cannot be copied or does not play on identically.
    """
    first, second = make(), make()
    try:
        first.reset(seed=seed)
        second.reset(seed=seed + 1)
        rng = np.random.default_rng(seed)
        actions = rng.integers(0, first.action_space.n, size=2 * steps)  # type: ignore[attr-defined]
        for action in actions[: steps // 4]:
            if any(first.step(action)[2:4]):
                first.reset(seed=seed)
        saved = save(first)
        expected = _play(first, actions[steps:])
        restore(second, saved)
        if _play(second, actions[steps:]) != expected:
            raise SnapshotError(
                f"{first.spec.id if first.spec else first} does not play on identically after a snapshot: part of its state "
                "lies outside the environment object. Use group.start=reset"
            )
    finally:
        first.close()
        second.close()


def _play(env: gym.Env[Any, Any], actions: Any) -> list[Any]:
    seen = []
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        visuals = observation.visuals() if hasattr(observation, "visuals") else None
        what = repr(observation) if visuals is None else [f.digest for v in visuals for f in getattr(v, "frames", ())]
        seen.append((what, float(reward), bool(terminated), bool(truncated)))
        if terminated or truncated:
            break
    return seen


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def _wrapper_state(wrapper: Any) -> dict[str, Any]:
    if hasattr(wrapper, "snapshot_state"):
        return wrapper.snapshot_state()  # type: ignore[no-any-return]
    return {
        key: copy.deepcopy(value)
        for key, value in wrapper.__dict__.items()
        if key not in _NOT_STATE and isinstance(value, _PLAIN)
    }


def _inner_state(env: Any) -> dict[str, Any]:
    generator = getattr(env, "_np_random", None)
    state = {"np_random": None if generator is None else copy.deepcopy(generator.bit_generator.state)}
    if isinstance(env, _CLASSIC):
        own = env.__dict__
        return state | {key: _copied(own[key]) for key in _CLASSIC_STATE if key in own}
    left_out = {"_np_random", "spec", "action_space", "observation_space", *_drawing_handles(env)}
    try:
        return state | {key: copy.deepcopy(value) for key, value in env.__dict__.items() if key not in left_out}
    except Exception as error:
        raise SnapshotError(
            f"{type(env).__name__} cannot be saved: {error}. Use group.start=reset, or keep handles out of its attributes"
        ) from error


def _drawing_handles(env: Any) -> set[str]:
    """Attributes that hold windows, surfaces and clocks: remade by rendering, and not to be copied."""
    return {key for key, value in env.__dict__.items() if type(value).__module__.startswith("pygame")}
