"""Train an agent with GRPO: `python -m grpo_agents.train env=CartPole-v1`.

Each update collects groups of episodes, scores them, compares the members of each group, trains on what was better or
worse than its siblings, hands the new weights to the sampler, and writes everything down. The run stops when greedy play
on validation seeds reaches the environment's own threshold, or at its limits; the best adapter then plays held-out seeds
beside the random policy and the untrained model.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from grpo_agents.config import TrainConfig
from grpo_agents.errors import ConfigError
from grpo_agents.run.checkpoint import RunFolder
from grpo_agents.run.command import INTERRUPTED, run_command
from grpo_agents.run.config import check_train, load_yaml, parse, to_yaml
from grpo_agents.run.progress import Progress


def main(argv: list[str]) -> int:
    config = parse(TrainConfig, argv, prog="python -m grpo_agents.train", summary=__doc__ or "")
    folder, config = _open_run(config)
    try:
        train(config, folder)
    except KeyboardInterrupt:
        print(
            f"\nstopped; everything up to the last update is saved. Go on with:\n  python -m grpo_agents.train resume={folder.path}"
        )
        return INTERRUPTED
    return 0


def train(config: TrainConfig, folder: RunFolder) -> dict[str, Any]:
    """Train until solved or at a limit, then play the held-out seeds.

    Args:
        config: all settings.
        folder: the run's folder; what it already holds is gone on from.

    Returns:
        The summary that is also written to summary.json.
    """
    from grpo_agents.trainer import Trainer

    trainer = Trainer(config, folder)
    state = trainer.state
    with Progress(
        config.updates, config.env_steps, start_update=state.update, start_env_steps=state.env_steps
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
    trainer.print_table(summary)
    return summary


def _open_run(config: TrainConfig) -> tuple[RunFolder, TrainConfig]:
    problems = check_train(config)
    if problems:
        raise ConfigError(problems)
    if config.resume is None:
        name = (
            config.name
            or f"{config.env.id.rpartition(':')[2].replace('/', '-')}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
        )
        folder = RunFolder.create(name)
        config = config.model_copy(update={"name": name})
        folder.write_text("config.yaml", to_yaml(config))
        return folder, config
    folder = RunFolder.open(config.resume)
    given: dict[str, Any] = {
        key: getattr(config, key) for key in ("updates", "env_steps", "episodes") if key in config.model_fields_set
    }
    return folder, load_yaml(TrainConfig, folder.config).model_copy(update=given)


if __name__ == "__main__":
    sys.exit(run_command(main))
