"""Settings: how words and files become typed values, and how mistakes are reported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_agents.config import EvaluateConfig, RewardConfig, SftConfig, TrainConfig
from grpo_agents.errors import ConfigError, MissingDependencyError
from grpo_agents.run.command import run_command
from grpo_agents.run.config import check_train, load_yaml, parse, read_experiment, to_yaml
from grpo_agents.run.settings import find_settings


def train(*words: str) -> TrainConfig:
    return parse(TrainConfig, list(words), prog="grpo_agents.train", summary="Train an agent.")


def problems(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        train(*words)
    return caught.value.problems


def at(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


def test_importing_the_configuration_imports_nothing_heavy() -> None:
    code = (
        "import sys, grpo_agents.config, grpo_agents.run.config, grpo_agents.run.command\n"
        "print([m for m in ('torch', 'gymnasium', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("word", "name", "value"),
    [
        ("learner.lr=1e-4", "learner.lr", 1e-4),
        ("env_steps=1e5", "env_steps", 100_000),
        ("env_steps=200_000", "env_steps", 200_000),
        ("group.restart.before=[20,30]", "group.restart.before", (20, 30)),
        ("group.restart.before=20,30", "group.restart.before", (20, 30)),
        ("env.frames.crop=0,100,600,300", "env.frames.crop", (0, 100, 600, 300)),
        ("policy.lora.target_modules=[q_proj,v_proj]", "policy.lora.target_modules", ["q_proj", "v_proj"]),
        ("env.actions=left,1,yes", "env.actions", ["left", "1", "yes"]),
        ("env.actions=push", "env.actions", ["push"]),
        ("name=007", "name", "007"),
        ("name=null", "name", None),
        ("updates=none", "updates", None),
        ("env.id=1", "env.id", "1"),
        ("env.rules=Two words: [a], #b=c", "env.rules", "Two words: [a], #b=c"),
        ("env.question=", "env.question", ""),
        ("env.caption=yes", "env.caption", True),
        ("group.normalize=none", "group.normalize", "none"),
        ("group.normalize=null", "group.normalize", None),
        ("env=Acrobot-v1", "env.id", "Acrobot-v1"),
        ("policy=/models/qwen", "policy.model", "/models/qwen"),
        ("policy.lora=4", "policy.lora.rank", 4),
        ("loss=gspo", "loss.name", "gspo"),
        ("group=16", "group.size", 16),
        ("env.frames={history: 3, size: [96, 32]}", "env.frames.size", (96, 32)),
        ("env.kwargs.gravity=1e-3", "env.kwargs", {"gravity": 1e-3}),
        ("env.kwargs={a: [1, x], b: {c: yes}}", "env.kwargs", {"a": [1, "x"], "b": {"c": True}}),
        ("trackers=[]", "trackers", []),
        ("rewards=return", "rewards", [RewardConfig(name="return")]),
        (
            "rewards=[return,my.module:bonus]",
            "rewards",
            [RewardConfig(name="return"), RewardConfig(name="my.module:bonus")],
        ),
        (
            "rewards=[{name: return}, {name: x, weight: 0.5}]",
            "rewards",
            [RewardConfig(name="return", weight=1.0), RewardConfig(name="x", weight=0.5)],
        ),
    ],
)
def test_a_word_becomes_a_value_of_the_settings_type(word: str, name: str, value: Any) -> None:
    got = at(train(word), name)
    assert got == value
    assert type(got) is type(value)


def test_words_are_applied_in_order_and_a_mapping_is_set_key_by_key() -> None:
    config = train("seed=1", "env.kwargs={a: 1}", "env.kwargs.b=two", "seed=2")
    assert config.seed == 2
    assert config.env.kwargs == {"a": 1, "b": "two"}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("group.sise=3", "unknown setting 'group.sise'; did you mean 'group.size'?"),
        ("lr=1e-3", "unknown setting 'lr'; did you mean 'learner.lr'?"),
        ("optim.lr=1e-3", "unknown setting 'optim.lr'; did you mean 'learner.lr'?"),
        ("learnr.lr=1", "unknown setting 'learnr.lr'; did you mean 'learner.lr'?"),
        ("grup=3", "unknown setting 'grup'; did you mean 'group'?"),
        ("zzzz=1", "unknown setting 'zzzz'; --help lists all settings"),
        ("sampler=vlm", "sampler.name=vlm: must be local | vllm | vllm-server"),
        ("loss=ppo", "loss.name=ppo: must be grpo | dr_grpo | dapo | gspo | cispo"),
        ("seed=-1", "seed=-1: must be a whole number from 0"),
        ("learner.lr=fast", "learner.lr=fast: must be a number above 0"),
        ("learner.lr=nan", "learner.lr=nan: must be a finite number"),
        ("group.gamma=1.5", "group.gamma=1.5: must be a number above 0 up to 1"),
        ("--seed=3", "'--seed=3': settings are written without dashes; write seed=3"),
        ("seed", "'seed' is not key=value; write it like seed=VALUE"),
        ("group.size=1", "group.size=1: a group of one has nothing to compare"),
        ("group=0", "group.size=0: must be a whole number from 2"),
        ("group.restart.before=200,15", "write [15,200]"),
        ("env.frames.crop=300,0,100,50", "right above left"),
        ("env.actions=[a,b,a]", "a stands twice"),
        ("env.actions=[]", "one word for each action"),
        ("name=a/b", "without slashes"),
        ("rewards=[]", "at least one reward"),
        ("rewards=[x,x]", "x is listed twice"),
        ("loss.clip_low=1.5", "must not be negative"),
        ("sampler=vllm-server", "sampler.url=http://localhost:8000"),
        ("sampler.url=http://localhost:8000", "sampler=vllm-server"),
        ("learner.micro_batch=256", "learner.micro_batch=256 is larger than learner.minibatch=128"),
        ("env.kwargs={a", "not readable as YAML"),
        ("env.frames=3", "env.frames is a section; set one of env.frames.history"),
        ("experiment=nowhere.yaml", "nowhere.yaml: no such file"),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(word: str, message: str) -> None:
    (problem,) = problems(word)
    assert message in problem


def test_all_problems_are_reported_at_once_and_none_is_invented() -> None:
    found = problems("group.sise=3", "seed=x", "group=1", "learner.minibatch=x", "learner.micro_batch=256", "word")
    # learner.micro_batch is not compared with the default of the minibatch that was mistyped.
    assert [text.split(":")[0].split(";")[0] for text in found] == [
        "'word' is not key=value",
        "unknown setting 'group.sise'",
        "learner.minibatch=x",
        "seed=x",
        "group.size=1",
    ]


def test_resume_takes_limits_and_nothing_else() -> None:
    assert train("resume=runs/a", "updates=3", "env_steps=9", "episodes=2").updates == 3
    (problem,) = problems("resume=runs/a", "seed=3", "env.id=X", "updates=1")
    assert "env, seed cannot be set beside it" in problem


def test_a_missing_required_setting_says_what_it_is() -> None:
    with pytest.raises(ConfigError, match=r"run=\.\.\. must be given: run folder"):
        parse(EvaluateConfig, [], prog="grpo_agents.evaluate", summary="Play.")
    config = parse(EvaluateConfig, ["run=runs/a", "render=none"], prog="grpo_agents.evaluate", summary="Play.")
    assert config.render == "none"


def test_the_defaults_have_no_problem() -> None:
    assert check_train(train()) == []


@pytest.mark.parametrize("model", [TrainConfig, EvaluateConfig, SftConfig])
def test_help_lists_every_setting_with_its_meaning(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(model, ["seed=oops", "--help"], prog="grpo_agents.train", summary="Train an agent.")
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    flat = " ".join(printed.split())
    for setting in find_settings(model).values():
        assert f"  {setting.name}=" in printed
        assert setting.meaning and setting.meaning.split()[0] in flat
    assert max(map(len, printed.splitlines())) <= 130


EXPERIMENT = """\
about:
  what: an example
  minutes: 5
env: Acrobot-v1
group:
  size: 4
  restart: {before: [20, 30]}
learner.lr: 1e-4
env.kwargs: {a: 1}
rewards: [return, {name: x, weight: 2}]
name: 007
updates: null
"""


def test_an_experiment_file_lies_under_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(EXPERIMENT)
    config = train("group.size=6", f"experiment={path}", "env.kwargs.b=2")
    assert (config.env.id, config.group.size, config.group.restart.before) == ("Acrobot-v1", 6, (20, 30))
    assert (config.learner.lr, config.name, config.updates) == (1e-4, "007", None)
    assert config.env.kwargs == {"a": 1, "b": 2}
    assert config.rewards[1] == RewardConfig(name="x", weight=2.0)
    assert config.experiment == str(path)
    settings, about = read_experiment(path)
    assert about == {"what": "an example", "minutes": 5}
    assert settings["group"]["size"] == 4 and "about" not in settings


def test_mistakes_in_a_file_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("env: X\ngroup:\n  sise: 4\nlearner:\n  lr: -1\nenv: Y\n")
    assert problems(f"experiment={path}") == [f"{path} line 6: 'env' stands twice in one mapping; keep one"]
    path.write_text("env: X\ngroup:\n  sise: 4\nlearner:\n  lr: -1\n")
    assert problems(f"experiment={path}") == [
        f"{path} line 3: unknown setting 'group.sise'; did you mean 'group.size'?",
        f"{path} line 5: learner.lr=-1: must be a number above 0",
    ]
    path.write_text("a: [1\n")
    assert "not readable as YAML" in problems(f"experiment={path}")[0]
    path.write_text("- 1\n")
    assert "'key: value' lines" in problems(f"experiment={path}")[0]


def test_a_file_repeats_a_configuration_exactly(tmp_path: Path) -> None:
    config = train(
        "name=007", "env.rules=a: 'b'\n#c ", "learner.lr=1e-7", "env.kwargs={x: '1', y: 1e-9, z: null}", "env.id=yes",
        "group.restart.before=3,4", "env.frames.crop=1,2,3,4", "env.question=none of these", "loss.clip_high=0.1",
        "rewards=[a,{name: b, weight: 0.1}]",
    )  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    again = load_yaml(TrainConfig, path)
    assert again == config
    assert to_yaml(again) == path.read_text()
    path.write_text("group:\n  sise: 3\nloss: 3\n")
    with pytest.raises(ConfigError) as caught:
        load_yaml(TrainConfig, path)
    assert len(caught.value.problems) == 2


def test_every_experiment_file_is_valid() -> None:
    for path in sorted((Path(__file__).parent.parent / "experiments").glob("*.yaml")):
        train(f"experiment={path}")
        assert read_experiment(path)[1].get("command"), f"{path} does not state its command under about:"


def _raise(error: BaseException) -> Any:
    def main(argv: list[str]) -> int:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "status", "printed"),
    [
        (ConfigError(["seed=x: must be a whole number"]), 2, "error: 1 setting is wrong:\n  - seed=x"),
        (MissingDependencyError("vllm is needed"), 2, "error: vllm is needed"),
        (KeyboardInterrupt(), 130, ""),
        (RuntimeError("broken"), 1, "Traceback"),
        (SystemExit(0), 0, ""),
    ],
)
def test_a_command_ends_with_a_message_and_a_status(
    error: BaseException, status: int, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(_raise(error), []) == status
    stderr = capsys.readouterr().err
    assert stderr.startswith(printed)
    assert ("Traceback" in stderr) == (status == 1)
    assert run_command(lambda argv: len(argv), []) == 0
