"""The benchmark of CartPole-v1: its page says what its results say, and its measurements compare like with like."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from matplotlib.image import imread
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent.parent / "experiments"))  # as when the script is run

import bench_cartpole as script
from bench import page, ppo, rendering, throughput
from bench.figure import draw
from bench.results import Results

from grpo_agents.config import EnvConfig, PolicyConfig, TrainConfig
from grpo_agents.envs import make_env
from grpo_agents.errors import ConfigError
from grpo_agents.policies.qwen_vl import QwenVL
from grpo_agents.rl.episode import VideoPart
from grpo_agents.run.config import parse, read_experiment

ROOT = Path(__file__).parent.parent


def row(mean: float, low: float, high: float) -> dict[str, float]:
    return {"mean": mean, "ci_low": low, "ci_high": high, "episodes": 100}


def trained(seed: int, mean: float, steps: int, solved: bool, words: str = "") -> dict[str, Any]:
    return {
        "command": f"python -m grpo_agents.train env=CartPole-v1 seed={seed}{words} name=bench-{seed}",
        "seed": seed,
        "env_steps": 100_000,
        "jobs": 1,
        "threads": 2,
        "summary": {
            "random": row(22.3, 20.0, 24.75),
            "untrained": row(12.8, 11.7, 14.1),
            "trained": row(mean, mean - 2, mean + 1),
            "env_steps": steps,
            "wall_s": 200.0,
            "solved": solved,
            "versions": {"python": "3.11.7", "torch": "2.13.0"},
            "hardware": {"cpus": 2, "threads": 2, "gpu": None, "machine": "x86_64"},
        },
        "curve": {
            "env_steps": [20_000, 43_211],
            "return/mean": [50.0, 210.0],
            "validation/mean": [None, 480.0],
            "time/play": [40.0, 60.0],
            "time/sample": [30.0, 40.0],
            "time/model": [25.0, 35.0],
            "time/update": [20.0, 30.0],
            "time/validate": [None, 10.0],
        },
    }


def ppo_record(seed: int, validation: list[float | None]) -> dict[str, Any]:
    return {
        "seed": seed,
        "jobs": 2,
        "threads": 1,
        "wall_s": 61.5,
        "curve": {
            "env_steps": [43_008, 45_056, 100_352],
            "return/mean": [90.0, 95.0, 180.0],
            "validation/mean": validation,
        },
        "held_out": {
            "at": {**row(101.0, 90.0, 112.0), "env_steps": 45_056},
            "end": {**row(402.0, 380.0, 421.0), "env_steps": 100_352},
        },
    }


@pytest.fixture
def parts() -> dict[str, Any]:
    return {
        "default-1": trained(1, 494.5, 39_554, True),
        "default-0": trained(0, 470.0, 43_211, False),
        "reset-0": trained(0, 270.0, 100_231, False, " group.start=reset"),
        "ppo-state-0": ppo_record(0, [None, 476.0, 300.0]),
        "ppo-frames-0": ppo_record(0, [100.0, None, 474.9]),
        "throughput": {
            "rows": [
                {
                    "waiting": 64,
                    "sampler_per_s": 1460.2,
                    "bare_per_s": 800.0,
                    "minimal_per_s": 1600.0,
                    "of_bare": 1.825,
                    "of_minimal": 0.913,
                }
            ],
            "repeats": 25,
            "jobs": 1,
            "threads": 2,
        },
        "rendering": {
            "frame": {"capture_ms": 0.5, "render_ms": 3.25, "ratio": 6.5},
            "play": {"steps": 4658, "ms_per_step": 1.5, "shares": {"rendering": 0.25, "model": 0.75}},
            "jobs": 1,
            "threads": 2,
        },
    }


def test_the_page_holds_the_numbers_of_the_results(parts: dict[str, Any]) -> None:
    lines = page.compose(parts, "../assets/figures/cartpole.png", page.NOTHING_YET).splitlines()
    assert "    python -m grpo_agents.train env=CartPole-v1" in lines
    assert "Measured on 2 CPU cores (x86_64; GPU: none), with python 3.11.7, torch 2.13.0." in lines
    assert any(
        line.startswith("Held-out mean of the default command: 470.0 (seed 0), 494.5 (seed 1); 1 of 2 at 475 or more")
        for line in lines
    )
    expected = [
        "| random policy | 0 | 22.3 [20.0, 24.8] |  |  |  |  |",
        "| untrained policy | 1 | 12.8 [11.7, 14.1] |  |  |  |  |",
        "| GRPO, default | 0 | 470.0 [468.0, 471.0] | 43,211 | 3:20 | no | 2 threads |",
        "| GRPO, default | 1 | 494.5 [492.5, 495.5] | 39,554 | 3:20 | yes | 2 threads |",
        "| GRPO, `group.start=reset` | 0 | 270.0 [268.0, 271.0] | 100,231 | 3:20 | no | 2 threads |",
        "| state (4 numbers), `MlpPolicy` | 0 | 101.0 [90.0, 112.0] at 45,056 | 402.0 [380.0, 421.0] at 100,352 | not played "
        "| 45,056 | 1:01 | 1 thread, 2 runs side by side |",
        "| frames (2 of 96x32), `CnnPolicy` | 0 | 101.0 [90.0, 112.0] at 45,056 | 402.0 [380.0, 421.0] at 100,352 "
        "| not played | never | 1:01 | 1 thread, 2 runs side by side |",
        "| play: sampler without the model | 5% | 5% |",
        "| rendering (draw, crop, resize) | 25% |",
        "| 64 | 1,460/s | 800/s | 1,600/s | 182% | 91% |",
        "![return against environment steps](../assets/figures/cartpole.png)",
    ]
    assert [line for line in expected if line not in lines] == []


def test_a_page_of_no_results_is_written_too(tmp_path: Path) -> None:
    page.write_page({}, tmp_path / "page.md", tmp_path / "none.png")
    text = (tmp_path / "page.md").read_text()
    assert text.startswith("# CartPole-v1 from frames\n")
    assert text.endswith("\n\n## What we learned\n\nNothing is measured yet.\n")


def test_only_the_section_written_by_hand_is_kept(tmp_path: Path, parts: dict[str, Any]) -> None:
    path = tmp_path / "page.md"
    path.write_text("# Old\n\n| 999 |\n\n## What we learned\n\nRestarts matter.\n\n### More\n\nText.\n")
    page.write_page(parts, path, tmp_path / "none.png")
    once = path.read_text()
    assert "999" not in once
    assert once.endswith("\n\n## What we learned\n\nRestarts matter.\n\n### More\n\nText.\n")
    page.write_page(parts, path, tmp_path / "none.png")
    assert path.read_text() == once


def test_time_shares_of_a_run_add_up_to_its_wall_time(parts: dict[str, Any]) -> None:
    # 200 s: play 100, of it sampling 70, of it the model 60; update 50; validation 10.
    assert list(page.time_shares(parts["default-0"]).values()) == pytest.approx([0.15, 0.30, 0.05, 0.25, 0.05, 0.20])
    del parts["default-0"]["curve"]["time/validate"]
    assert list(page.time_shares(parts["default-0"]).values()) == pytest.approx([0.15, 0.30, 0.05, 0.25, 0.0, 0.25])


def test_the_figure_has_the_colour_of_each_variant_that_ran(tmp_path: Path, parts: dict[str, Any]) -> None:
    draw(parts, tmp_path / "figures" / "curve.png")
    pixels = (imread(tmp_path / "figures" / "curve.png")[..., :3].reshape(-1, 3) * 255).round().astype(np.int64)
    colors = {f"#{color:06X}" for color in np.unique(pixels @ [65536, 256, 1])}
    assert {"#0072B2", "#009E73", "#D55E00", "#666666"} <= colors
    assert "#E69F00" not in colors  # the episode variant has not run


def test_results_are_kept_one_line_a_part_and_added_to(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    Results(path).put("b", {"x": [1, None]})
    Results(path).put("a", {"x": 2})
    Results(path).put("b", {"x": [3]})
    assert path.read_text() == '{\n"a": {"x": 2},\n"b": {"x": [3]}\n}\n'
    assert json.loads(path.read_text()) == Results(path).parts
    path.write_text("{")
    with pytest.raises(ConfigError, match="is no results file"):
        Results(path)


def names(config: script.BenchConfig, done: set[str]) -> list[list[str]]:
    return [[part.name for part in stage] for stage in script.chosen_parts(config, done)]


def test_parts_that_are_there_are_not_measured_again() -> None:
    config = script.BenchConfig(seeds=[0, 1])
    done = {"default-0", "reset-1", "ppo-state-0", "ppo-frames-0", "ppo-frames-1", "throughput"}
    left = [["default-1", "episode-0", "episode-1", "reset-0"], ["ppo-state-1"], [], ["rendering"]]
    done |= {"return_to_go-0", "return_to_go-1"}
    assert names(config, done) == left
    config = script.BenchConfig(seeds=[0, 1], only=["default", "ppo-state-1", "throughput"])
    assert names(config, done) == [["default-1"], ["ppo-state-1"], [], []]
    config.again = True
    assert names(config, done) == [["default-0", "default-1"], ["ppo-state-1"], ["throughput"], []]
    assert names(script.BenchConfig(only=["page"]), set()) == [[], [], [], []]
    with pytest.raises(ConfigError, match="only=default-7: no such part"):
        script.chosen_parts(script.BenchConfig(only=["default-7"]), set())


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (script.Part("default", 2), "-m grpo_agents.train env=CartPole-v1 seed=2 name=x"),
        (
            script.Part("episode", 0),
            "-m grpo_agents.train env=CartPole-v1 seed=0 group.advantage=episode env_steps=100000 name=x",
        ),
        (
            script.Part("ppo-frames", 1),
            "experiments/bench/ppo.py observations=frames seed=1 env_steps=100000 at=43211 episodes=100 "
            "output=runs/x.json",
        ),
        (script.Part("rendering"), "experiments/bench/rendering.py output=runs/x.json"),
    ],
)
def test_each_part_is_one_command(part: script.Part, words: str) -> None:
    assert script.command_of(part, script.BenchConfig(), "x", 43_211) == words.split()


def test_the_recipe_is_the_default_command() -> None:
    path = ROOT / "experiments" / "cartpole.yaml"
    recipe = parse(TrainConfig, [f"experiment={path}"], prog="train", summary="")
    command = read_experiment(path)[1]["command"].split()
    assert command[:3] == ["python", "-m", "grpo_agents.train"]
    typed = parse(TrainConfig, command[3:], prog="train", summary="")
    assert recipe.model_copy(update={"experiment": None}) == typed


def test_frames_for_ppo_are_those_of_the_prompt() -> None:
    env = ppo.make_frames()
    assert env.observation_space.shape == (6, 32, 96)
    prompted = make_env(EnvConfig(id="CartPole-v1"))
    seen, _ = env.reset(seed=3)
    prompt, _ = prompted.reset(seed=3)
    for action in (0, 0, 0, 0, 1):
        (video,) = prompt.visuals()
        assert isinstance(video, VideoPart)
        assert np.array_equal(seen[:3], video.frames[0].pixels.transpose(2, 0, 1))
        assert np.array_equal(seen[3:], video.frames[1].pixels.transpose(2, 0, 1))
        seen = env.step(action)[0]
        prompt = prompted.step(action)[0]
    assert not np.array_equal(seen[:3], seen[3:])
    env.close()
    prompted.close()


@pytest.mark.filterwarnings("ignore:.*is different from the unwrapped version:UserWarning")
def test_the_frames_environment_keeps_gymnasium_s_contract() -> None:
    env = ppo.make_frames()
    # The checks of rendering and closing make CartPole anew from its spec, without its wrappers.
    check_env(env, skip_render_check=True, skip_close_check=True)
    env.close()


def test_white_is_zero_to_the_cnn() -> None:
    torch.manual_seed(0)
    space = gym.spaces.Box(0, 255, (6, 32, 96), np.uint8)
    network = ppo.SmallCnn(space)
    features = network(torch.ones(2, 6, 32, 96))
    assert features.shape == (2, network.features_dim)
    assert torch.equal(features, network.head(network.convolutions(torch.zeros(2, 6, 32, 96))))


class AgainstTheLean:
    """Pushes to the side that the pole leans to."""

    def predict(self, observations: NDArray[np.float32], deterministic: bool) -> tuple[NDArray[np.int64], None]:
        assert deterministic
        return (observations[:, 2] > 0).astype(np.int64), None


def test_side_by_side_play_gives_the_returns_of_lone_play() -> None:
    expected = []
    for seed in (5, 6, 7):
        env = gym.make("CartPole-v1")
        state, _ = env.reset(seed=seed)
        steps, over = 0, False
        while not over:
            state, _, terminated, truncated, _ = env.step(int(state[2] > 0))
            steps, over = steps + 1, terminated or truncated
        expected.append(float(steps))
    assert len(set(expected)) > 1
    assert ppo.greedy_returns(AgainstTheLean(), ppo.make_state, [5, 6, 7]) == expected


def test_the_bare_forward_does_the_sampler_s_work() -> None:
    policy = QwenVL.load(PolicyConfig(device="cpu"))
    prompts = [policy.encode(prompt) for prompt in throughput.distinct_prompts(EnvConfig(), 3)]
    assert len({prompt.observation_hash for prompt in prompts}) == 3
    bare = throughput.bare_logits(policy, throughput.bare_inputs(policy, prompts))
    minimal = throughput.minimal_logits(policy, throughput.minimal_batch(policy, prompts), None)
    assert not torch.allclose(bare[0], bare[1], atol=1e-3)
    torch.testing.assert_close(bare, minimal, rtol=1e-4, atol=1e-4)  # float32, other order of summation


def test_throughput_is_compared_by_medians() -> None:
    times = {"8": {"sampler": [0.02, 0.01, 9.0], "bare": [0.016, 0.016, 0.0], "minimal": [0.01, 0.01, 0.01]}}
    (line,) = throughput.table(times)
    assert line["waiting"] == 8
    assert line["sampler_per_s"] == pytest.approx(400)
    assert line["of_bare"] == pytest.approx(0.8)
    assert line["of_minimal"] == pytest.approx(0.5)


def test_a_clock_on_a_method_is_taken_off_again() -> None:
    class Worker:
        def work(self, amount: int) -> int:
            return 2 * amount

    original, spent = Worker.work, {"work": 0.0}
    with rendering.clocked(Worker, "work", spent, "work"):
        assert Worker().work(21) == 42
    assert Worker.work is original
    assert spent["work"] > 0
