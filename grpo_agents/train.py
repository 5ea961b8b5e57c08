"""Train an agent with GRPO: `python -m grpo_agents.train env=CartPole-v1`.

Each update collects groups of episodes, scores them, compares the members of each group, trains on what was better or
worse than its siblings, hands the new weights to the sampler, and writes everything down. The run stops when greedy play
on validation seeds reaches the environment's own threshold, or at its limits; the best adapter then plays held-out seeds
beside the random policy and the untrained model. Ctrl-C or SIGTERM stops it; resume=runs/NAME goes on.

Several processes share a run when `accelerate launch` (GPUs) or `torchrun` (GPUs or CPUs) starts them; all have to see the
same runs folder, which the first of them alone writes to.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from rich.console import Console

from grpo_agents.config import TrainConfig
from grpo_agents.errors import ConfigError, GrpoAgentsError
from grpo_agents.run.checkpoint import RunFolder
from grpo_agents.run.command import draw_without_display, run_command
from grpo_agents.run.config import check_train, load_yaml, parse, to_yaml
from grpo_agents.run.progress import Progress, result_table

PATIENCE = 30.0
"""Seconds in which the first of several processes may say why the run ends, before another one says it."""


def main(argv: list[str]) -> int:
    try:
        return _main(argv)
    except GrpoAgentsError:
        if not _first():
            # What stops one process mostly stops all. The first says it, and the launcher ends this one; were this one to
            # end before, the launcher would end the first before it has spoken.
            time.sleep(PATIENCE)
        raise


def _main(argv: list[str]) -> int:
    config = parse(TrainConfig, argv, prog="python -m grpo_agents.train", summary=__doc__ or "")
    is_new = config.resume is None
    folder, config = _open_run(config)
    draw_without_display()
    try:
        train(config, folder)
    except KeyboardInterrupt:
        if _first():
            print("\nstopped; everything up to the last update is saved. Go on with:")
            print(f"  python -m grpo_agents.train resume={folder.path}")
        raise
    except GrpoAgentsError as error:
        # A setting was wrong: the name stays free.
        if _first() and is_new and error.exit_status == 2 and not folder.checkpoints():
            folder.discard()
        raise
    return 0


def train(config: TrainConfig, folder: RunFolder) -> dict[str, Any]:
    """Train until solved or at a limit, then play the held-out seeds.

    Args:
        config: all settings.
        folder: the run's folder; what it already holds is gone on from.

    Returns:
        The summary that is also written to summary.json.
    """
    from grpo_agents.rl.processes import join
    from grpo_agents.trainer import Trainer

    join(config.policy.device)
    trainer = Trainer(config, folder)
    state = trainer.state
    console = Console() if _first() else Console(quiet=True, force_terminal=False)
    with Progress(
        config.updates, config.env_steps, start_update=state.update, start_env_steps=state.env_steps, console=console
    ) as progress:
        trainer.describe(progress.note)
        trainer.baselines(progress.note)
        while (why := trainer.finished()) is None:
            progress.phase("play")
            played, groups = trainer.collect()
            trainer.score(groups)
            credit = trainer.credit(groups)
            progress.phase("update")
            metrics = trainer.update(credit)
            trainer.sync()
            progress.phase("validate")
            metrics |= trainer.validate()
            trainer.log(metrics, played, groups, credit)
            trainer.save()
            progress.update(metrics)
        progress.note(f"stopped: {why}")
        progress.phase("held-out episodes")
        summary = trainer.finish(why)
        if summary["best_update"]:
            progress.note(
                f"best validation mean {summary['best_validation']:.1f}, after update {summary['best_update']}"
            )
    rows: dict[str, Any] = {name: summary[name] for name in ("random", "untrained", "trained") if name in summary}
    console.print(result_table(rows, env_steps=summary["env_steps"], wall_s=summary["wall_s"]))
    console.print(f"written to {folder.path}", highlight=False)
    return summary


def _open_run(config: TrainConfig) -> tuple[RunFolder, TrainConfig]:
    problems = check_train(config)
    if problems:
        raise ConfigError(problems)
    if config.resume is None:
        return _new_run(config) if os.environ.get("WORLD_SIZE", "1") == "1" else _new_shared_run(config)
    folder = RunFolder.open(config.resume)
    given: dict[str, Any] = {
        key: getattr(config, key) for key in ("updates", "env_steps", "episodes") if key in config.model_fields_set
    }
    config = load_yaml(TrainConfig, folder.config).model_copy(update=given)
    if given and _first():
        folder.write_text("config.yaml", to_yaml(config))
    return folder, config


def _new_run(config: TrainConfig) -> tuple[RunFolder, TrainConfig]:
    env = config.env.id.rpartition(":")[2].replace("/", "-")
    name = config.name or f"{env}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = RunFolder.create(name)
    config = config.model_copy(update={"name": name})
    folder.write_text("config.yaml", to_yaml(config))
    return folder, config


def _new_shared_run(config: TrainConfig) -> tuple[RunFolder, TrainConfig]:
    # Only the first process makes the folder, and its name tells the time of that process.
    from grpo_agents.rl.processes import everyone, join

    join(config.policy.device)
    made: tuple[RunFolder, TrainConfig] | None = None
    error: GrpoAgentsError | None = None
    if _first():
        try:
            made = _new_run(config)
        except GrpoAgentsError as problem:
            error = problem
    made, reason = everyone((made, str(error)))[0]
    if made is None:
        raise error or GrpoAgentsError(reason)
    return made


def _first() -> bool:
    """Whether this is the process of the run that writes and prints."""
    return os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":
    sys.exit(run_command(main))
