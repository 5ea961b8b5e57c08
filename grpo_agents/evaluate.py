"""Watch a trained agent play and print its table again: `python -m grpo_agents.evaluate run=runs/NAME render=video`."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from grpo_agents.config import EvaluateConfig, TrainConfig
from grpo_agents.errors import ConfigError, GrpoAgentsError
from grpo_agents.run.checkpoint import RunFolder
from grpo_agents.run.command import draw_without_display, run_command
from grpo_agents.run.config import load_yaml, parse
from grpo_agents.run.progress import result_table
from grpo_agents.run.seeding import SeedPanels, Streams
from grpo_agents.run.statistics import latency_summary, summarize

if TYPE_CHECKING:
    from grpo_agents.agent import Agent
    from grpo_agents.rl.rollout import Decision
    from grpo_agents.run.moment import Moment, Viewer


def main(argv: list[str]) -> int:
    config = parse(EvaluateConfig, argv, prog="python -m grpo_agents.evaluate", summary=__doc__ or "")
    folder = RunFolder.open(config.run)
    trained = load_yaml(TrainConfig, folder.config)
    row, adapter = _adapter(folder, config.adapter)
    if config.render == "human":
        from grpo_agents.run.window import check_display

        check_display()
    else:
        draw_without_display()
    from grpo_agents.agent import Agent

    agent = Agent.build(trained.env, trained.policy, config.sampler, adapter=adapter)
    count = config.episodes or (trained.episodes if config.render == "none" else 1)
    seeds = SeedPanels(trained.seed).held_out(count)
    returns, seconds = _play(agent, config, folder, seeds, trained.seed)
    rows: dict[str, Any] = dict(folder.read_json("baselines.json") or {})
    rows = {name: summarize(values) for name, values in rows.items()} | {row: summarize(returns)}
    console = Console()
    console.print(result_table(rows))
    latency = latency_summary(seconds)
    console.print(
        f"action latency, one environment: median {latency['median_ms']:.1f} ms, 95th percentile {latency['p95_ms']:.1f} ms",
        highlight=False,
    )
    return 0


def _adapter(folder: RunFolder, which: str) -> tuple[str, Path]:
    """The row of the table that an adapter fills, and its folder.

    Raises:
        ConfigError: the run has saved nothing yet.
    """
    if which == "best" and folder.best.is_dir():
        return "trained", folder.best
    checkpoints = folder.checkpoints()
    if not checkpoints:
        raise ConfigError([f"run={folder.path} has no checkpoint yet; train it first: resume={folder.path}"])
    update, newest = checkpoints[-1]
    return "trained" if update else "untrained", newest / "adapter"


def _play(
    agent: Agent, config: EvaluateConfig, folder: RunFolder, seeds: list[int], root: int
) -> tuple[list[float], list[float]]:
    """Play one episode from each seed, one after the other; returns, and seconds from prompt to action."""
    from grpo_agents.run.viewers import open_viewer

    if config.render == "none":
        return _episodes(agent, config, seeds, root, None)
    env = agent.play.make_env()
    fps = config.fps or int(env.metadata.get("render_fps") or 30)
    env.close()
    path = folder.path / "evaluation.mp4"
    with open_viewer(config.render, path=path, fps=fps) as viewer:
        played = _episodes(agent, config, seeds, root, viewer)
    if config.render == "video":
        print(f"written to {path}")
    return played


def _episodes(
    agent: Agent, config: EvaluateConfig, seeds: list[int], root: int, viewer: Viewer | None
) -> tuple[list[float], list[float]]:
    from grpo_agents.rl.episode import EndReason
    from grpo_agents.rl.rollout import Rollouts
    from grpo_agents.rl.starts import Start

    returns: list[float] = []
    seconds: list[float] = []

    def watch(decision: Decision) -> bool:
        seconds.append(decision.seconds)
        return viewer is None or viewer.show(_moment(decision, episode=len(returns)))

    with closing(Rollouts(agent.play)) as rollouts:
        for seed in seeds:
            rng = None if config.greedy else Streams(root).generator("evaluate", seed)
            ((episode, _),) = rollouts.episodes([Start(seed)], [rng], watch)
            if episode.end is EndReason.FAULT:
                raise GrpoAgentsError(f"{agent.env.id} failed in evaluation, seed {seed}:\n{episode.fault}")
            returns.append(episode.episode_return)
            if episode.end is EndReason.STOPPED:
                break
    return returns, seconds


def _moment(decision: Decision, episode: int) -> Moment:
    import numpy as np

    from grpo_agents.run.moment import Moment

    env, sample = decision.env, decision.sample
    return Moment(
        picture=env.latest_picture(),
        seen=env.latest_frame().pixels,
        actions=() if sample.choice_probs is None else env.actions,
        probabilities=np.zeros(0) if sample.choice_probs is None else sample.choice_probs,
        choice=-1 if sample.choice is None else sample.choice,
        step=len(decision.episode),
        episode=episode,
        total=decision.episode.episode_return,
        title=env.spec.id if env.spec else "",
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
