"""Two processes, started by torchrun on the CPU, share an update, and a run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from doors import TINY, environment, lines, result, train_here
from learner_process import CASES, COMPARISONS, COUNTS, STEPS, groups, run, seen
from safetensors.numpy import load_file

from grpo_agents.rl.losses import LOSSES
from grpo_agents.rl.processes import credit_of_all
from grpo_agents.train import PATIENCE

HERE = Path(__file__).parent
WORDS = (*TINY, "learner.max_steps=1000", "learner.minibatch=1000", "eval.every=1", "updates=2", "name=run")
"""Each update is one optimizer step on all that was played."""


def launch(script: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script beside this one in two processes."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
            *(str(HERE / script), *words),
        ],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """What each of the two processes held after each case."""
    folder = tmp_path_factory.mktemp("updates")
    done = launch("learner_process.py", str(folder), folder=folder)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"process_{rank}.pt") for rank in range(2)]


SHARED = [
    *LOSSES, "all steps in the first", "all steps in the second", "out of memory in the second", "weight decay",
]  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_an_update_over_two_processes_is_that_of_one_process_with_all_steps(
    updates: list[dict[str, dict[str, Any]]], name: str
) -> None:
    whole = run(CASES[name], None)
    first, second = (process[name] for process in updates)
    assert torch.equal(first["table"], second["table"])
    # float32 sums in another order; Adam divides by the size of the gradient.
    torch.testing.assert_close(first["table"], whole["table"], rtol=0, atol=1e-5)
    assert float((whole["table"] - run(CASES["not finite in the second"], None)["table"]).abs().max()) > 0.1
    assert first["metrics"] == second["metrics"]
    assert first["metrics"] == pytest.approx(whole["metrics"], rel=1e-4, abs=1e-6)


def test_a_process_that_runs_out_of_memory_halves_its_own_micro_batch(
    updates: list[dict[str, dict[str, Any]]],
) -> None:
    assert [process["out of memory in the second"]["micro_batch"] for process in updates] == [128, 2]


def test_a_minibatch_that_is_not_finite_in_one_process_is_skipped_in_both(
    updates: list[dict[str, dict[str, Any]]],
) -> None:
    found = [process["not finite in the second"] for process in updates]
    assert [process["skipped"] for process in found] == [[list(range(7))], [list(range(7, STEPS))]]
    assert [process["metrics"]["skipped"] for process in found] == [1, 1]
    untouched = run(CASES["not finite in the second"], None)["table"]
    assert all(torch.equal(process["table"], untouched) for process in found)


def test_a_wrong_record_in_one_process_is_reported_by_both(updates: list[dict[str, dict[str, Any]]]) -> None:
    found = [process["a wrong record in the second"]["metrics"]["mismatch"] for process in updates]
    assert found == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(
    ("name", "optimizer_steps", "trained"),
    [("minibatches", 6, 12), ("fewer steps than all", 3, 5), ("a single step for both", 1, 1)],
)
def test_minibatch_and_max_steps_count_the_steps_of_both_processes(
    updates: list[dict[str, dict[str, Any]]], name: str, optimizer_steps: int, trained: int
) -> None:
    first, second = (process[name] for process in updates)
    assert torch.equal(first["table"], second["table"])
    assert first["metrics"] == second["metrics"]
    assert first["metrics"]["optimizer_steps"] == optimizer_steps
    assert first["metrics"]["trained_steps"] == len(first["trained"]) + len(second["trained"]) == trained


def test_a_weight_that_no_step_uses_does_not_decay(updates: list[dict[str, dict[str, Any]]]) -> None:
    found = [process["weight decay"]["idle"] for process in updates]
    assert [*found, run(CASES["weight decay"], None)["idle"]] == [[1.0, 1.0]] * 3


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("comparison", COMPARISONS)
def test_advantages_and_flat_groups_are_those_of_one_process_with_all_groups(
    updates: list[dict[str, dict[str, Any]]], comparison: str, count: int
) -> None:
    everything = groups(count)
    whole = credit_of_all(everything, COMPARISONS[comparison], seen)
    owners = [
        number % 2 for number, group in enumerate(everything) for episode in group.episodes for _ in episode.steps
    ]
    for rank, process in enumerate(updates):
        advantages, flat, number = process["groups"][f"{comparison}, {count}"]
        expected = [step.advantage for step, owner in zip(whole.steps, owners, strict=True) if owner == rank]
        assert advantages == pytest.approx(expected, rel=1e-9)
        assert (flat, number) == (dict(whole.flat), count)


def test_both_processes_know_the_episodes_of_both(updates: list[dict[str, dict[str, Any]]]) -> None:
    everything = groups(5)
    returns = [episode.episode_return for number in (0, 2, 4, 1, 3) for episode in everything[number].episodes]
    assert [process["groups"]["returns"] for process in updates] == [returns, returns]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The folder in which two processes ran, and what they said."""
    folder = tmp_path_factory.mktemp("shared")
    done = launch("train_process.py", *WORDS, folder=folder)
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run by one process."""
    folder = tmp_path_factory.mktemp("alone")
    assert train_here(folder, *WORDS) == 0
    return folder


def held(folder: Path) -> list[list[dict[str, Any]]]:
    """What each process held after each update."""
    texts = [(folder / f"process_{rank}.jsonl").read_text() for rank in range(2)]
    return [[json.loads(line) for line in text.splitlines()] for text in texts]


def test_both_processes_hold_the_same_weights_counts_and_restarts_after_each_update(
    shared: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    first, second = held(shared[0])
    assert first == second
    assert len({after["weights"] for after in first}) == len(first) == 3
    assert [bool(after["pool"]) for after in first] == [False, True, True]


def test_one_process_prints_and_one_folder_is_written(
    shared: tuple[Path, subprocess.CompletedProcess[str]], alone: Path
) -> None:
    folder, done = shared
    for words in ("2 processes", "stopped: limit of 2 updates", "Return on held-out seeds", "written to runs/run"):
        assert done.stdout.count(words) == 1
    assert [path.name for path in (folder / "runs").iterdir()] == ["run"]
    files = [result(where / "runs" / "run")["files"] for where in (folder, alone)]
    assert files[0] == files[1]
    assert [line["update"] for line in lines(folder / "runs" / "run")] == [1, 2]


def test_two_processes_play_and_learn_what_one_does(
    shared: tuple[Path, subprocess.CompletedProcess[str]], alone: Path
) -> None:
    # From the second update on, restarts are drawn from states that each process chose by a stream of its own.
    ours, theirs = (lines(where / "runs" / "run")[0] for where in (shared[0], alone))
    times = {key for key in theirs if key.startswith("time/")}
    rounding = {"mismatch", "canary"}  # nothing else
    assert ours.keys() == theirs.keys()
    for key in theirs.keys() - times - rounding:
        assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-6), key
    baselines = [(where / "runs" / "run" / "baselines.json").read_text() for where in (shared[0], alone)]
    assert baselines[0] == baselines[1]
    adapter = Path("runs", "run", "checkpoints", "update_000001", "adapter", "adapter_model.safetensors")
    ours, theirs = (load_file(where / adapter) for where in (shared[0], alone))
    for name, weight in theirs.items():
        # The half of each pair that began at 0: float32 gradients, summed in another order.
        scale = abs(weight).max()
        assert abs(ours[name] - weight).max() < 1e-2 * scale, name


@pytest.mark.slow
def test_a_shared_run_goes_on_after_a_stop_as_if_there_had_been_none(
    shared: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(shared[0] / "runs", tmp_path / "runs")) / "run"
    for path in (folder / "summary.json", folder / "checkpoints" / "update_000002"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    done = launch("train_process.py", "resume=runs/run", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert result(folder) == result(shared[0] / "runs" / "run")
    assert [process[-1] for process in held(tmp_path)] == [process[-1] for process in held(shared[0])]


def test_one_process_goes_on_from_where_two_were(
    shared: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    run = Path(shutil.copytree(shared[0] / "runs", tmp_path / "runs")) / "run"
    assert train_here(tmp_path, "resume=runs/run", "updates=3") == 0
    assert [line["update"] for line in lines(run)] == [1, 2, 3]


def test_a_wrong_setting_is_told_once(tmp_path: Path) -> None:
    done = launch("train_process.py", *WORDS, "group.size=1", folder=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("group.size=1: a group of one") == 1
    assert not (tmp_path / "runs").exists()


def test_another_process_leaves_it_to_the_first_to_say_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[float] = []
    said: list[str] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        said.append(capsys.readouterr().err)

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("grpo_agents.train.time.sleep", sleep)
    assert train_here(tmp_path, *WORDS, "group.size=1") == 2
    assert (waited, said) == ([PATIENCE], [""])
    # Nothing was wrong in the first, or the launcher would have ended this one.
    assert "group.size=1: a group of one" in capsys.readouterr().err


def test_a_name_that_is_taken_is_told_once_and_stops_both(tmp_path: Path) -> None:
    (tmp_path / "runs" / "run").mkdir(parents=True)
    (tmp_path / "runs" / "run" / "config.yaml").write_text("mine")
    done = launch("train_process.py", *WORDS, folder=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("name=run: runs/run exists") == 1
    assert (tmp_path / "runs" / "run" / "config.yaml").read_text() == "mine"
