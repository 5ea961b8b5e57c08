"""An environment put to a policy: the gymnasium interface, the window of frames, the words, and what cannot be put."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from worlds import WORDS, Track, track

from grpo_agents.config import EnvConfig, FramesConfig
from grpo_agents.envs import make_env, register_env
from grpo_agents.envs.prompt_env import PromptEnv
from grpo_agents.envs.registry import FrameSettings, PromptSettings, _registered, prompt_settings
from grpo_agents.errors import EnvironmentSetupError
from grpo_agents.rl.episode import Frame, ImagePart, Prompt, TextPart, VideoPart

ENVS = ("CartPole-v1", "MountainCar-v0", "Acrobot-v1", "worlds:Track-v0")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is forgotten after it."""
    kept = dict(_registered)
    yield
    _registered.clear()
    _registered.update(kept)


def texts(prompt: Prompt) -> list[str]:
    return [part.text for message in prompt.messages for part in message.parts if isinstance(part, TextPart)]


def frames_of(prompt: Prompt) -> list[Frame]:
    visuals = [v.frames if isinstance(v, VideoPart) else (v.frame,) for v in prompt.visuals()]
    return [frame for frames in visuals for frame in frames]


def pictures(prompt: Prompt) -> list[bytes]:
    return [frame.digest for frame in frames_of(prompt)]


@pytest.mark.filterwarnings("ignore:.*different from the unwrapped version")
@pytest.mark.parametrize("name", ENVS)
def test_gymnasium_finds_nothing_wrong(name: str) -> None:
    env = make_env(EnvConfig(id=name))
    check_env(env, skip_render_check=True)  # makes its own environments by the spec, without a policy's wrapper
    env.close()


@pytest.mark.parametrize("name", ENVS)
def test_a_seed_determines_the_episode(name: str) -> None:
    def episode(seed: int) -> list[Any]:
        env = make_env(EnvConfig(id=name, frames=FramesConfig(size=(32, 32))))
        prompt, _ = env.reset(seed=seed)
        env.action_space.seed(seed)
        seen: list[Any] = [texts(prompt), pictures(prompt)]
        for _ in range(10):
            prompt, *rest = env.step(env.action_space.sample())
            seen += [pictures(prompt), rest[:3]]
        env.close()
        return seen

    assert episode(3) == episode(3)
    assert episode(3) != episode(4)


@pytest.mark.parametrize("kind", ["images", "video"])
def test_frames_are_a_stride_apart_and_the_first_is_repeated_at_the_start(kind: Any) -> None:
    env = track(frames=FrameSettings(history=3, stride=2, kind=kind), steps=7)
    prompts = [env.reset(seed=1)[0]]
    moments = [env.latest_frame()]
    over = False
    while not over:
        prompt, _, terminated, truncated, _ = env.step(len(prompts) % 2)
        prompts.append(prompt)
        moments.append(env.latest_frame())
        over = terminated or truncated
    assert len(prompts) == 8
    for step, prompt in enumerate(prompts):
        for frame, back in zip(frames_of(prompt), (4, 2, 0), strict=True):
            assert frame is moments[max(step - back, 0)]
        assert prompt in env.observation_space
    # The window begins anew with each episode.
    assert len(set(pictures(env.reset(seed=2)[0]))) == 1


def test_a_prompt_is_rules_then_frames_then_the_question() -> None:
    video, images = (
        track(frames=FrameSettings(history=2, stride=5, kind=kind)).reset(seed=0)[0] for kind in ("video", "images")
    )
    (message,) = video.messages
    assert message.role == "user"
    rules, shown, question = message.parts
    assert isinstance(shown, VideoPart)
    assert shown.fps == 2.0  # 10 a second, of which every fifth is shown
    assert [len(shown.frames), shown.frames[0].pixels.shape] == [2, (16, 32, 3)]
    assert (rules, question) == (TextPart("Keep the ball on the track."), TextPart("Move?"))
    assert [type(part) for part in images.messages[0].parts] == [TextPart, ImagePart, ImagePart, TextPart]


def test_the_space_of_prompts_knows_its_own() -> None:
    env = track(frames=FrameSettings(history=2, kind="images"))
    prompt, _ = env.reset(seed=0)
    sample = env.observation_space.sample()
    assert sample in env.observation_space
    assert prompt in env.observation_space
    assert texts(sample) == texts(prompt)
    assert pictures(sample) != pictures(prompt)
    assert track(frames=FrameSettings(history=1, kind="images")).reset(seed=0)[0] not in env.observation_space
    small = FrameSettings(history=2, kind="images", size=(16, 16))
    assert track(frames=small).reset(seed=0)[0] not in env.observation_space
    assert "a text" not in env.observation_space


def test_a_caption_is_off_by_default_and_tells_the_state_where_wanted() -> None:
    plain, _ = make_env(EnvConfig(id="CartPole-v1")).reset(seed=0)
    env = make_env(EnvConfig(id="CartPole-v1", caption=True))
    told, _ = env.reset(seed=0)
    assert texts(plain)[1:] == ["Move?"]
    unwrapped: Any = env.unwrapped
    x, x_dot, theta, theta_dot = unwrapped.state
    assert texts(told)[1:] == [
        f"Cart at {x:+.2f} m moving {x_dot:+.2f} m/s, pole leaning {theta:+.3f} rad turning {theta_dot:+.2f} rad/s. Move?"
    ]
    # As old as the newest frame.
    assert texts(env.step(1)[0])[1] != texts(told)[1]


def test_a_caption_is_given_the_environment_without_its_wrappers() -> None:
    register_env("Track-v0", caption=lambda env: f"It is a {type(env).__name__}.")
    prompt, _ = make_env(EnvConfig(id="Track-v0", caption=True)).reset(seed=0)
    assert texts(prompt)[1] == "It is a Track. Move?"


def test_a_caption_that_nobody_wrote_is_refused() -> None:
    with pytest.raises(EnvironmentSetupError, match=r"caption=true, but MountainCar-v0 has no caption.*register_env"):
        make_env(EnvConfig(id="MountainCar-v0", caption=True))


def test_actions_are_counted_from_the_start_of_the_space() -> None:
    class Recorded(Track):
        taken: list[int] = []  # noqa: RUF012 (one for the test)

        def step(self, action: Any) -> Any:
            self.taken.append(int(action))
            return super().step(action)

    env = PromptEnv(Recorded("rgb_array", first_action=5), PromptSettings())
    assert env.action_space == spaces.Discrete(2)
    env.reset(seed=0)
    for action in (0, 1):
        env.step(action)
    assert Recorded.taken == [5, 6]


def test_actions_without_words_are_named_after_their_meanings_or_numbered() -> None:
    class Meaningful(Track):
        def get_action_meanings(self) -> list[str]:
            return ["LEFT", "RIGHT"]

    assert PromptEnv(Meaningful("rgb_array"), PromptSettings()).actions == ("left", "right")
    assert PromptEnv(Track("rgb_array"), PromptSettings()).actions == ("0", "1")
    assert make_env(EnvConfig(id="MountainCar-v0")).actions == ("0", "1", "2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["left"], r"CartPole-v1 has 2 actions and env.actions names 1: \['left'\]"),
        (["left", "stay", "right"], r"CartPole-v1 has 2 actions and env.actions names 3"),
        (["push", "push"], "env.actions of CartPole-v1 repeats 'push'; words must differ"),
    ],
)
def test_words_that_do_not_fit_the_actions_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(EnvironmentSetupError, match=message):
        make_env(EnvConfig(id="CartPole-v1", actions=words))


def test_registered_settings_are_taken_and_the_users_own_are_laid_on_top() -> None:
    register_env(
        "Track-v0",
        rules="Stay on the track.",
        actions=["west", "east"],
        question="Where to?",
        frames={"history": 3, "stride": 2, "kind": "images"},
    )
    env = make_env(EnvConfig(id="worlds:Track-v0"))
    prompt, _ = env.reset(seed=0)
    assert texts(prompt) == ["Stay on the track.", "Where to?"]
    assert len(prompt.visuals()) == 3
    assert env.actions == ("west", "east")
    config = EnvConfig(
        id="Track-v0",
        rules="",
        actions=["l", "r"],
        frames=FramesConfig(stride=1, size=(16, 8), invert=True),
    )
    assert prompt_settings(config) == PromptSettings(
        rules="",
        actions=("l", "r"),
        question="Where to?",
        frames=FrameSettings(history=3, stride=1, kind="images", size=(16, 8), invert=True),
    )
    assert [frame.pixels.shape for frame in frames_of(make_env(config).reset(seed=0)[0])] == [(8, 16, 3)] * 3


def test_a_later_registration_replaces_an_earlier_one_whole() -> None:
    register_env("Track-v0", rules="Old.", question="Old?")
    register_env("Track-v0", rules="New.")
    assert prompt_settings(EnvConfig(id="Track-v0")) == PromptSettings(rules="New.")
    assert prompt_settings(EnvConfig(id="Unheard-of-v0")) == PromptSettings()


def test_keyword_arguments_reach_the_environment() -> None:
    env = make_env(EnvConfig(id="Track-v0", kwargs={"first_action": 2}))
    assert env.env.action_space == spaces.Discrete(2, start=2)
    with pytest.raises(EnvironmentSetupError, match="env.id=Track-v0 cannot be made: .*no_such_option"):
        make_env(EnvConfig(id="Track-v0", kwargs={"no_such_option": 2}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CartPool-v1", "no environment 'CartPool-v1'; did you mean .*CartPole-v1"),
        ("CartPole-v7", "no environment 'CartPole-v7'; did you mean .*CartPole-v1"),
        ("worlds:Trakc-v0", "no environment 'worlds:Trakc-v0'; did you mean Track-v0"),
        ("xyzzy", "no environment 'xyzzy' "),
        ("no_such_module:Track-v0", "env.id=no_such_module:Track-v0 cannot be made: .*no_such_module"),
    ],
)
def test_an_unknown_environment_is_answered_with_the_closest_known(name: str, message: str) -> None:
    with pytest.raises(EnvironmentSetupError, match=message):
        make_env(EnvConfig(id=name))


def unusual(**changes: Any) -> type[Track]:
    return type("Unusual", (Track,), changes)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_environment_that_cannot_be_rendered_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = gym.spec("Track-v0")
    for modes in (["human"], []):
        kind = unusual(metadata={"render_modes": modes})
        monkeypatch.setattr(spec, "entry_point", kind)
        with pytest.raises(EnvironmentSetupError, match=r"Track-v0 cannot be rendered .* modes are .*render_modes"):
            make_env(EnvConfig(id="Track-v0"))
    monkeypatch.setattr(spec, "entry_point", lambda: Track())
    with pytest.raises(EnvironmentSetupError, match="env.id=Track-v0 cannot be made: .*render_mode"):
        make_env(EnvConfig(id="Track-v0"))


@pytest.mark.parametrize(
    ("rendered", "what"),
    [
        (None, "NoneType"),
        ([np.zeros((4, 4, 3), np.uint8)], "list"),
        (np.zeros((4, 4), np.uint8), r"uint8 of shape \(4, 4\)"),
        (np.zeros((3, 4, 4), np.uint8), r"uint8 of shape \(3, 4, 4\)"),
        (np.zeros((4, 4, 3), np.float32), r"float32 of shape \(4, 4, 3\)"),
    ],
)
def test_what_is_no_picture_is_refused(rendered: Any, what: str) -> None:
    env = PromptEnv(unusual(render=lambda self: rendered)("rgb_array"), PromptSettings())
    with pytest.raises(EnvironmentSetupError, match=rf"render\(\) of Unusual returned {what}.*uint8 of shape \(height"):
        env.reset(seed=0)


def test_actions_that_are_no_choice_are_refused_and_the_environment_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentSetupError, match=r"Pendulum-v1 has the action space Box\(.*Discrete"):
        make_env(EnvConfig(id="Pendulum-v1"))
    closed: list[Any] = []
    monkeypatch.setattr(Track, "close", lambda self: closed.append(self))
    with pytest.raises(EnvironmentSetupError):
        make_env(EnvConfig(id="Track-v0", actions=list(WORDS) * 2))
    assert len(closed) == 1
