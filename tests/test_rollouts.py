"""Playing: nothing depends on who finishes first, faults are told from errors, restarts begin in the very saved state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from worlds import Shuffled, Track, coin, encode, episode_of, reply, track

from grpo_agents.envs import snapshot
from grpo_agents.errors import EnvironmentSetupError, RecordError
from grpo_agents.rl.episode import Encoded, EndReason, Episode, Frame, Group, Sample
from grpo_agents.rl.rollout import Decision, Draw, Play, Rollouts, graded_groups
from grpo_agents.rl.starts import Start, Trail

SEEDS = (11, 12, 13, 14)


class Envs:
    """Makes tracks and remembers them.

    Args:
        change: does something to each new one, given its number.
        steps: the limit of time.
    """

    def __init__(self, change: Callable[[Track, int], None] = lambda env, number: None, steps: int = 40):
        self.made: list[Track] = []
        self._change = change
        self._steps = steps

    def __call__(self) -> Any:
        env = track(steps=self._steps)
        inner: Any = env.unwrapped
        self._change(inner, len(self.made))
        self.made.append(inner)
        return env


def rollouts(draw: Draw | None = None, *, envs: Callable[[], Any] | None = None, trail: int = 0) -> Rollouts:
    play = Play(envs or Envs(), encode, draw or Shuffled(None).draw, snapshot)
    return Rollouts(play, trail)


def streams(*, member: int = 0, count: int = len(SEEDS)) -> list[np.random.Generator]:
    return [np.random.default_rng([member, index]) for index in range(count)]


def record(episode: Episode) -> list[Any]:
    """All that was seen, said and done, to be compared."""
    steps = [(s.observation_hash, s.action, s.reward, s.terminated, s.truncated) for s in episode.steps]
    return [*steps, episode.end, episode.seed, episode.start, episode.member, episode.fault]


def play(
    player: Rollouts, starts: Sequence[Start] = tuple(map(Start, SEEDS)), **options: Any
) -> list[tuple[Episode, Trail | None]]:
    return player.episodes(starts, streams(count=len(starts)), **options)


def test_the_order_in_which_replies_come_changes_nothing() -> None:
    orders, records = [], []
    for order in (None, 0, 1, 2):
        sampler = Shuffled(order)
        player = rollouts(sampler.draw)
        # Twice, since the second time environments come from the pool in the order in which they were given back.
        records.append([record(episode) for _ in range(2) for episode, _ in play(player)])
        orders.append(sampler.answered)
    assert records[1:] == records[:-1]
    assert len(set(map(tuple, orders))) == 4
    assert len({len(episode) for episode in records[0]}) == len(SEEDS)


def test_episodes_played_together_are_those_played_alone() -> None:
    together = [record(episode) for episode, _ in play(rollouts(Shuffled(0).draw))]
    alone = [
        record(rollouts().episodes([Start(seed)], [rng])[0][0]) for seed, rng in zip(SEEDS, streams(), strict=True)
    ]
    assert together == alone


def test_members_of_a_group_share_the_seed_and_have_streams_of_their_own() -> None:
    asked: list[tuple[int, int]] = []

    def rng_of(group: int, member: int) -> np.random.Generator:
        asked.append((group, member))
        return np.random.default_rng([group, member])

    groups = rollouts(Shuffled(3).draw).groups([Start(11), Start(12)], 3, rng_of)
    assert asked == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    for members, seed in zip(groups, (11, 12), strict=True):
        episodes = [episode for episode, _ in members]
        assert [(e.seed, e.member, e.start) for e in episodes] == [(seed, m, "reset") for m in range(3)]
        assert len({e.steps[0].observation_hash for e in episodes}) == 1
        assert len({tuple(s.action for s in e.steps) for e in episodes}) == 3
    sound, faults = graded_groups(groups)
    assert [group.seed for group in sound] == [11, 12]
    assert faults == []


def test_without_a_stream_the_likeliest_reply_is_taken() -> None:
    ((episode, _),) = rollouts().episodes([Start(11)], [None])
    assert {step.action for step in episode.steps} == {0}


def test_a_step_records_what_was_said_and_done() -> None:
    drawn: list[Sample] = []

    async def draw(encoded: Encoded, rng: np.random.Generator | None) -> Sample:
        drawn.append(coin(rng))
        return drawn[-1]

    ((episode, _),) = rollouts(draw).episodes([Start(11)], streams(count=1))
    assert [step.sample for step in episode.steps] == drawn
    for step in episode.steps:
        assert step.action == step.sample.choice
        assert step.valid
        assert step.observation_hash == step.encoded.observation_hash
        assert step.reward == 1.0


def test_a_reply_that_is_no_action_is_marked_and_the_first_action_is_taken() -> None:
    async def draw(encoded: Encoded, rng: np.random.Generator | None) -> Sample:
        return Sample(np.array([5]), np.zeros(1, np.float32), None, None, None, 0, 1.0, False, "length")

    ((episode, _),) = rollouts(draw).episodes([Start(11)], [None])
    assert {(step.action, step.valid) for step in episode.steps} == {(0, False)}


def pushed(choice: int, steps: int, horizon: int | None = None) -> Episode:
    """An episode from a place in the middle, always pushed to the same side or, with choice -1, to and fro."""
    turn = iter(range(1000))

    async def draw(encoded: Encoded, rng: np.random.Generator | None) -> Sample:
        return reply(next(turn) % 2 if choice < 0 else choice)

    ((episode, _),) = rollouts(draw, envs=Envs(steps=steps)).episodes([Start(11, horizon=horizon)], [None])
    return episode


def test_terminated_truncated_and_stopped_are_told_apart() -> None:
    ends = {}
    for name, episode in {
        "rolls off": pushed(0, steps=100),
        "limit of time": pushed(-1, steps=4),
        "horizon": pushed(-1, steps=4, horizon=3),
        "limit and horizon": pushed(-1, steps=4, horizon=4),
    }.items():
        last = episode.steps[-1]
        ends[name] = (episode.end, last.terminated, last.truncated)
        assert not any(step.terminated or step.truncated for step in episode.steps[:-1])
    assert ends == {
        "rolls off": (EndReason.TERMINATED, True, False),
        "limit of time": (EndReason.TRUNCATED, False, True),
        "horizon": (EndReason.STOPPED, False, False),
        "limit and horizon": (EndReason.TRUNCATED, False, True),
    }
    assert len(pushed(-1, steps=4)) == 4
    assert len(pushed(-1, steps=4, horizon=3)) == 3


def test_an_end_at_the_limit_of_time_is_a_termination() -> None:
    free = pushed(0, steps=100)
    limited = pushed(0, steps=len(free))
    assert (limited.steps[-1].terminated, limited.steps[-1].truncated) == (True, True)
    assert limited.end is EndReason.TERMINATED


def test_a_watcher_sees_each_decision_before_it_is_carried_out() -> None:
    seen: list[tuple[int, float, int]] = []
    frames: list[bytes] = []

    def watch(decision: Decision) -> bool:
        assert decision.seconds > 0
        assert decision.sample.choice is not None
        seen.append((len(decision.episode), decision.episode.episode_return, decision.sample.choice))
        frames.append(decision.env.latest_frame().digest)
        return True

    ((episode, _),) = rollouts().episodes([Start(11)], streams(count=1), watch)
    assert seen == [(t, float(t), step.action) for t, step in enumerate(episode.steps)]
    assert frames == [step.encoded.visuals[0][-1].digest for step in episode.steps]
    assert record(episode) == record(play(rollouts())[0][0])


def test_a_watcher_can_stop_an_episode() -> None:
    player = rollouts()
    ((episode, _),) = play(player, [Start(11)], watch=lambda decision: len(decision.episode) < 3)
    assert (episode.end, len(episode)) == (EndReason.STOPPED, 3)
    assert record(play(player, [Start(11)])[0][0]) == record(play(rollouts(), [Start(11)])[0][0])


def break_in(name: str, at: int, error: BaseException, which: int = 1) -> Callable[[Track, int], None]:
    """The environment number `which` raises in its call number `at` of reset or step."""

    def change(env: Track, number: int) -> None:
        whole, calls = getattr(env, name), iter(range(1000))

        def broken(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == at:
                raise error
            return whole(*args, **kwargs)

        if number == which:
            setattr(env, name, broken)

    return change


@pytest.mark.parametrize(("name", "at", "steps"), [("reset", 0, 0), ("step", 0, 0), ("step", 2, 2), ("render", 3, 2)])
def test_an_environment_that_raises_is_a_fault_and_is_replaced(name: str, at: int, steps: int) -> None:
    envs = Envs(break_in(name, at, OSError("the emulator is gone")))
    player = rollouts(Shuffled(1).draw, envs=envs)
    played = play(player)
    sound = play(rollouts())
    for index, ((episode, trail), (other, _)) in enumerate(zip(played, sound, strict=True)):
        if index == 1:
            assert episode.end is EndReason.FAULT
            assert episode.fault is not None
            assert episode.fault.startswith("Traceback")
            assert "OSError: the emulator is gone" in episode.fault
            assert len(episode) == steps
            assert trail is None
        else:
            assert record(episode) == record(other)
    assert [env.closed for env in envs.made] == [False, True, False, False]
    assert [record(episode) for episode, _ in play(player)] == [record(episode) for episode, _ in sound]
    assert len(envs.made) == 5
    player.close()
    assert all(env.closed for env in envs.made)


def test_a_reward_that_is_no_number_is_a_fault() -> None:
    def change(env: Track, number: int) -> None:
        whole = env.step
        env.step = lambda action: (whole(action)[0], None, False, False, {})  # type: ignore[assignment, method-assign, return-value]

    ((episode, _),) = rollouts(envs=Envs(change)).episodes([Start(11)], [None])
    assert episode.end is EndReason.FAULT
    assert episode.fault is not None
    assert "TypeError" in episode.fault


def test_an_environment_that_cannot_even_be_closed_is_replaced_too() -> None:
    def change(env: Track, number: int) -> None:
        break_in("step", 0, OSError("gone"), which=0)(env, number)
        break_in("close", 0, OSError("gone as well"), which=0)(env, number)

    player = rollouts(envs=Envs(change))
    assert [play(player, [Start(11)])[0][0].end for _ in range(2)] == [EndReason.FAULT, EndReason.TERMINATED]


def test_faults_are_set_aside_and_a_lone_survivor_with_them() -> None:
    def members(*ends: EndReason) -> list[tuple[Episode, None]]:
        return [(episode_of([1.0], end, member=m), None) for m, end in enumerate(ends)]

    fault, sound = EndReason.FAULT, EndReason.TERMINATED
    groups, faults = graded_groups([members(sound, fault, sound), members(fault, sound), members(fault, fault)])
    assert [[episode.member for episode in group.episodes] for group in groups] == [[0, 2]]
    assert [episode.member for episode in faults] == [1, 0, 0, 1]


def pending_tasks() -> tuple[Callable[[], None], list[asyncio.Task[Any]]]:
    """Collects the tasks of a loop from within it."""
    tasks: list[asyncio.Task[Any]] = []
    return lambda: tasks.extend(asyncio.all_tasks()), tasks


class Oops(Exception):
    pass


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("sampler", Oops()),
        ("encoder", Oops()),
        ("watcher", Oops()),
        ("environment", EnvironmentSetupError("it has no picture")),
        ("environment", KeyboardInterrupt()),
        ("sampler", KeyboardInterrupt()),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_fault_is_raised_and_leaves_nothing_behind(where: str, error: BaseException) -> None:
    remember, tasks = pending_tasks()
    calls = {"sampler": 0, "encoder": 0, "watcher": 0}

    def meet(place: str) -> None:
        calls[place] += 1
        if calls[place] == 10:
            remember()
            if place == where:
                raise error

    sampler = Shuffled(4)

    async def draw(encoded: Encoded, rng: np.random.Generator | None) -> Sample:
        sample = await sampler.draw(encoded, rng)
        meet("sampler")
        return sample

    def encode_or_raise(prompt: Any) -> Encoded:
        meet("encoder")
        return encode(prompt)

    def watch(decision: Decision) -> bool:
        meet("watcher")
        return True

    envs = Envs(break_in("step", 2, error) if where == "environment" else lambda env, number: None)
    player = Rollouts(Play(envs, encode_or_raise, draw))
    with pytest.raises(type(error)) as raised:
        play(player, watch=watch)
    assert raised.value is error
    assert len(tasks) > len(SEEDS)
    assert all(task.done() for task in tasks)
    player.close()
    assert all(env.closed for env in envs.made)


# asyncio.run formats the finished task, and a task's text holds what its coroutine returned: with episodes of thousands of
# frames that took minutes.
def test_no_record_is_ever_printed_by_playing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object) -> str:
        raise AssertionError(f"{type(self).__name__} was formatted")

    for kind in (Sample, Frame, Encoded, Episode):
        monkeypatch.setattr(kind, "__repr__", refuse)
    assert len(play(rollouts(trail=20))) == len(SEEDS)


def test_all_members_restart_in_the_very_state_that_was_saved() -> None:
    player = rollouts(Shuffled(5).draw, trail=20)
    ((episode, trail),) = play(player, [Start(16)])
    assert trail is not None
    end = len(episode)
    assert end > 10
    for saved in range(5, end, 5):
        state = trail.before(end, end - saved, end - saved, np.random.default_rng(0))
        (members,) = player.groups([Start(16, state, 4)], 5, lambda group, member: np.random.default_rng(member))
        episodes = [member for member, _ in members]
        assert {e.steps[0].observation_hash for e in episodes} == {episode.steps[saved].observation_hash}
        assert {e.start for e in episodes} == {"restart"}
        assert max(len(e) for e in episodes) <= 4
        Group(episodes)


def test_a_restarted_episode_that_does_the_same_meets_the_same() -> None:
    player = rollouts(trail=20)
    ((episode, trail),) = play(player, [Start(16)])
    assert trail is not None
    (begin,) = [t for t in range(0, len(episode), 5) if 6 <= len(episode) - t <= 10]
    state = trail.before(len(episode), 6, 10, np.random.default_rng(0))
    again = iter(range(begin, len(episode)))

    async def repeat(encoded: Encoded, rng: np.random.Generator | None) -> Sample:
        return episode.steps[next(again)].sample

    ((rest, _),) = rollouts(repeat).episodes([Start(16, state)], [None])
    assert len(rest) == len(episode) - begin
    assert record(rest)[: len(rest)] == record(episode)[begin : len(episode)]
    assert rest.end is episode.end


def test_a_start_that_the_seed_does_not_determine_is_refused() -> None:
    def change(env: Track, number: int) -> None:
        whole = env.reset
        env.reset = lambda **_: whole(seed=number)  # type: ignore[method-assign]

    groups = rollouts(envs=Envs(change)).groups([Start(11)], 8, lambda g, m: np.random.default_rng(m))
    with pytest.raises(RecordError, match=r"8 members .* seed 11 led to [23] different first prompts.*self.np_random"):
        graded_groups(groups)
