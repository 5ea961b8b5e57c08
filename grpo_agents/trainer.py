"""The steps of a training run, in the order in which `grpo_agents.train` takes them.

Every random choice comes from a stream named after what it is for and the update it belongs to, so that a run resumed at
any update goes on exactly as the one that was never stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from grpo_agents.agent import Agent, random_returns
from grpo_agents.config import TrainConfig
from grpo_agents.errors import GrpoAgentsError
from grpo_agents.rewards import resolve_rewards, score
from grpo_agents.rl.credit import Credit, TrainingStep
from grpo_agents.rl.episode import EndReason, Episode, Group
from grpo_agents.rl.episode_metrics import credit_metrics, episode_metrics
from grpo_agents.rl.learner import Learner, learning_rate
from grpo_agents.rl.mismatch import Mismatch
from grpo_agents.rl.processes import all_episodes, credit_of_all, everyone, on_cpu
from grpo_agents.rl.record_check import check_groups
from grpo_agents.rl.rollout import Rollouts, collect_restarts, graded_groups
from grpo_agents.rl.starts import RestartPool, Start, Trail
from grpo_agents.run.checkpoint import RunFolder, damaged
from grpo_agents.run.metrics import MetricsLog
from grpo_agents.run.plots import return_curve, return_histograms
from grpo_agents.run.provenance import hardware, versions
from grpo_agents.run.seeding import SeedPanels, Streams
from grpo_agents.run.state import RunState
from grpo_agents.run.statistics import summarize

Played = list[list[tuple[Episode, Trail | None]]]

_FAULT_SHARE = 0.5
"""Share of an update's episodes that may fail before the run stops: more is no accident but a broken environment."""


class Trainer:
    """Holds what a run needs. The methods are called by `grpo_agents.train.train`, once an update each.

    Args:
        config: all settings.
        folder: the run's folder.
    """

    def __init__(self, config: TrainConfig, folder: RunFolder):
        self.config, self.folder = config, folder
        self.streams, self.panels = Streams(config.seed), SeedPanels(config.seed)
        self.rewards = resolve_rewards(config.rewards)
        self.accelerator = Accelerator(
            cpu=on_cpu(config.policy.device),
            log_with=list(config.trackers) or None,
            project_config=ProjectConfiguration(project_dir=str(folder.path), logging_dir=str(folder.path)),
        )
        last = folder.newest_checkpoint()
        self.accelerator.wait_for_everyone()  # all have looked before the main process writes the first one
        if config.policy.device is None:
            config = config.model_copy(
                update={"policy": config.policy.model_copy(update={"device": str(self.accelerator.device)})}
            )
        want = {"restart": True, "reset": False, None: None}[config.group.start]
        self.agent = Agent.build(
            config.env,
            config.policy,
            config.sampler,
            seed=self.streams.seed("adapter"),
            adapter=last / "adapter" if last else None,
            snapshots=want,
        )
        self.restarts = self.agent.play.snapshots is not None
        reach = config.group.restart.before[1] if self.restarts else 0
        self.rollouts = Rollouts(self.agent.play, trail=reach)
        self.evaluation = Rollouts(self.agent.play)
        self.pool = RestartPool(config.group.restart.pool)
        own: Mismatch = "none" if config.sampler.name == "local" else "token"
        self.learner = Learner(
            self.agent.policy,
            self.agent.collate,
            config.loss.model_copy(update={"mismatch": config.loss.mismatch or own}),
            config.learner,
            self.accelerator,
            max_tokens=config.sampler.max_new_tokens,
            on_skip=self._keep_skipped,
        )
        self.state = RunState()
        self._canary = 0.0
        self._retries: dict[str, int] = {}
        self._clock: dict[str, float] = {}
        self._began = time.perf_counter()
        if last is not None:
            self._load(last)
        self.sync()
        self.metrics: MetricsLog | None = None
        if self.accelerator.is_main_process:
            folder.recover_best(self.state.best_update)
            self.metrics = MetricsLog(folder.metrics)
            self.metrics.truncate_after(self.state.update)
        self._start_trackers()
        if last is None:
            self.save()

    def describe(self, note: Callable[[str], None]) -> None:
        """Say what is going to happen, in numbers."""
        group, learner = self.config.group, self.config.learner
        trained = sum(p.numel() for p in self.agent.policy.trainable_parameters())
        everything = sum(p.numel() for p in self.agent.policy.core.parameters())
        starts = f"{group.restart.share:.0%} of them from before failures" if self.restarts else "all from reset"
        note(f"run {self.folder.path}, seed {self.config.seed}")
        note(f"policy {self.agent.policy.source}: {trained:,} of {everything:,} parameters trained")
        if self.accelerator.num_processes > 1:
            note(f"{self.accelerator.num_processes} processes, which share the groups and the steps of an update")
        note(
            f"an update: {group.count} groups of {group.size} episodes, {starts}; at most {learner.max_steps} steps in "
            f"minibatches of {learner.minibatch}, micro-batches of {self.learner.micro_batch}"
        )
        if self.state.update:
            note(f"going on after update {self.state.update}, {self.state.env_steps:,} environment steps")

    def baselines(self, note: Callable[[str], None]) -> None:
        """Play the held-out seeds with random actions and with the untrained model, once for a number of episodes."""
        self._baselines = self.folder.read_json("baselines.json")
        self.accelerator.wait_for_everyone()  # all have looked before the main process writes it
        if self._baselines is None or len(self._baselines["untrained"]) != self.config.episodes:
            seeds = self.panels.held_out(self.config.episodes)
            chance = random_returns(self.config.env, seeds, self.streams.generator("random policy"))
            with self.agent.policy.reference():
                self.agent.sampler.sync(self.state.update)
                untrained = self._greedy_returns(seeds)
            self.sync()
            self._baselines = {"random": chance, "untrained": untrained}
            if self.accelerator.is_main_process:
                self.folder.write_json("baselines.json", self._baselines)
        means = {name: float(np.mean(returns)) for name, returns in self._baselines.items()}
        threshold = self.agent.reward_threshold
        goal = f"; solved at {threshold:g}" if threshold is not None else ""
        note(f"held-out return: random {means['random']:.1f}, untrained model {means['untrained']:.1f}{goal}")

    def finished(self) -> str | None:
        """Why the run is over, or None while it is not."""
        state, config = self.state, self.config
        if state.solved:
            sure = ", as does the lower end of its interval" if config.eval.confirm else ""
            threshold = self.agent.reward_threshold
            return f"solved: validation mean {state.best_return:.1f} meets the threshold {threshold:g}{sure}"
        if config.updates is not None and state.update >= config.updates:
            return f"limit of {config.updates} updates"
        if state.env_steps >= config.env_steps:
            return f"limit of {config.env_steps:,} environment steps"
        return None

    def collect(self) -> tuple[Played, list[Group]]:
        """Play this update's groups; faults are set aside, and states from before failures are kept for restarts."""
        begin = time.perf_counter()
        self._clock = {}
        update, ranks, rank = self.state.update, self.accelerator.num_processes, self.accelerator.process_index
        starts = self._starts()
        mine = range(rank, len(starts), ranks)
        self.agent.sampler.statistics()
        played = self.rollouts.groups(
            [starts[g] for g in mine],
            self.config.group.size,
            lambda g, member: self.streams.generator("play", update, mine[g], member),
        )
        groups, faults = graded_groups(played)
        self._stop_if_broken(played, faults)
        if self.restarts:
            before = self.config.group.restart.before
            found = RestartPool(self.config.group.restart.pool)
            collect_restarts(played, found, before, self.streams.generator("pool", update, rank))
            self.pool.load_state([state for part in [self.pool.state(), *everyone(found.state())] for state in part])
        counts = self.agent.sampler.statistics()
        self._clock["play"] = time.perf_counter() - begin
        self._clock["sample"] = counts["seconds"]
        self._clock["model"] = counts["model_seconds"]
        self._retries = {f"sampler/{key}": counts[key] for key in ("retries", "rejoins") if key in counts}
        encode = self.agent.policy.encode
        sizes = {"patch": encode.patch, "temporal": encode.temporal, "merge": encode.merge}
        check_groups(groups, **sizes, version=update)
        return played, groups

    def score(self, groups: Sequence[Group]) -> None:
        """Grade every episode with the configured rewards."""
        for group in groups:
            for episode in group.episodes:
                score(episode, self.rewards)

    def credit(self, groups: Sequence[Group]) -> Credit:
        """Compare the members of each group."""
        return credit_of_all(groups, self.config.group, self.agent.observe)

    def update(self, credit: Credit) -> dict[str, Any]:
        """Train on the compared steps."""
        begin = time.perf_counter()
        progress = self.state.env_steps / self.config.env_steps
        lr = learning_rate(self.config.learner, self.state.update, progress)
        rng = self.streams.generator("learner", self.state.update, self.accelerator.process_index)
        metrics = self.learner.update(credit.steps, lr, rng)
        self._clock["update"] = time.perf_counter() - begin
        self.state.update += 1
        return metrics

    def sync(self) -> None:
        """Let the sampler play with the new weights, and see that it does."""
        begin = time.perf_counter()
        self.agent.sampler.sync(self.state.update)
        self._canary = self.agent.canary.check(self.agent.sampler)
        self._clock["sync"] = time.perf_counter() - begin

    def validate(self, *, end: bool = False) -> dict[str, float]:
        """Every few updates, play the validation seeds greedily; keep the best adapter; see whether it is solved.

        Args:
            end: the run ends here. Its last update is then validated too, if it was not due. No checkpoint knows of that,
                so that a run goes on from this end as one that was never stopped.
        """
        every = self.config.eval.every
        due = bool(every) and self.state.update % every == 0
        if due == end:
            return {}
        begin = time.perf_counter()
        few, confirm = self.config.eval.episodes, self.config.eval.confirm
        panel = self.panels.validation(few + confirm)
        returns = self._greedy_returns(panel[:few])
        threshold = self.agent.reward_threshold
        if threshold is not None and np.mean(returns) >= threshold:
            # Adapters are looked at until one passes: its mean is flattered by the luck of its episodes.
            if confirm and summarize(returns)["ci_low"] < threshold:
                returns += self._greedy_returns(panel[few:])
            self.state.solved = not confirm or bool(summarize(returns)["ci_low"] >= threshold)
        mean = float(np.mean(returns))
        if mean > self.state.best_return or self.state.solved:
            self.state.best_return, self.state.best_update = mean, self.state.update
            if self.accelerator.is_main_process:
                self.folder.save_best(self.agent.policy.save, end_of=self.state.update if end else None)
        self._clock["validate"] = time.perf_counter() - begin
        return {"validation/mean": mean, "validation/min": float(np.min(returns)), "validation/episodes": len(returns)}

    def log(self, metrics: dict[str, Any], played: Played, groups: Sequence[Group], credit: Credit) -> None:
        """Complete the update's metrics in place and write them to metrics.jsonl and the trackers."""
        episodes = all_episodes([episode for group in groups for episode in group.episodes])
        mine = [episode for members in played for episode, _ in members]
        counts = everyone((sum(e.end is EndReason.FAULT for e in mine), sum(map(len, mine))))
        faults, steps = (sum(numbers) for numbers in zip(*counts, strict=True))
        self.state.env_steps += steps
        self.state.wall_s += time.perf_counter() - self._began
        self._began = time.perf_counter()
        described = {"update": self.state.update, "env_steps": self.state.env_steps}
        metrics |= described | episode_metrics(episodes) | credit_metrics(credit)
        metrics |= {"faults": faults, "restart_pool": len(self.pool), "canary": self._canary, **self._retries}
        metrics |= {f"time/{name}": seconds for name, seconds in self._clock.items()}
        metrics["time/steps_per_second"] = steps / max(self._clock["play"] + self._clock["update"], 1e-9)
        metrics["time/wall"] = self.state.wall_s
        if self.metrics is not None:
            ordered = {key: metrics[key] for key in ("update", "env_steps", *sorted(metrics)) if key in metrics}
            self.metrics.append(ordered)
            numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
            self.accelerator.log(numbers, step=self.state.update)

    def save(self) -> None:
        """Write a checkpoint from which the run goes on exactly."""
        if self.accelerator.is_main_process:
            self.folder.save_checkpoint(
                self.state.update, self.agent.policy.save, self._save_state, self.config.keep_checkpoints
            )
        self.accelerator.wait_for_everyone()

    def finish(self, why: str) -> dict[str, Any]:
        """Play the held-out seeds once with the best adapter; write summary and pictures."""
        rows = {name: summarize(returns) for name, returns in self._baselines.items()}
        trained: list[float] = []
        last: dict[str, float] = {}
        if self.state.update:
            last = self.validate(end=True)
            self._load_best()
            trained = self._greedy_returns(self.panels.held_out(self.config.episodes))
            rows["trained"] = summarize(trained)
        self.state.wall_s += time.perf_counter() - self._began
        summary = {
            **rows,
            "env": self.config.env.id,
            "seed": self.config.seed,
            "solved": self.state.solved,
            "stopped": why,
            "reward_threshold": self.agent.reward_threshold,
            "updates": self.state.update,
            "env_steps": self.state.env_steps,
            "best_update": self.state.best_update,
            "best_validation": self.state.best_return if self.state.best_update else None,
            "wall_s": round(self.state.wall_s, 1),
            "seeds": {
                "training": f"{self.state.starts} seeds from {self.panels.training(0)} on",
                "validation": self.panels.validation(self.config.eval.episodes + self.config.eval.confirm),
                "held_out": self.panels.held_out(self.config.episodes),
            },
            "versions": versions(),
            "hardware": hardware(),
        }
        if self.metrics is not None:
            self.folder.write_json("summary.json", summary)
            self._draw(trained, last)
            self.metrics.close()
        self.accelerator.end_training()
        self.rollouts.close()
        self.evaluation.close()
        return summary

    def _starts(self) -> list[Start]:
        group, update = self.config.group, self.state.update
        restarts = round(group.count * group.restart.share) if len(self.pool) else 0
        fresh = group.count - restarts
        starts = [Start(self.panels.training(self.state.starts + i)) for i in range(fresh)]
        self.state.starts += fresh
        rng = self.streams.generator("restart", update)
        return starts + [self.pool.draw(rng, group.restart.horizon) for _ in range(restarts)]

    def _stop_if_broken(self, played: Played, faults: Sequence[Episode]) -> None:
        episodes = sum(len(members) for members in played)
        if faults and len(faults) > _FAULT_SHARE * episodes:
            raise GrpoAgentsError(
                f"{len(faults)} of {episodes} episodes of update {self.state.update + 1} failed in the environment. "
                f"The first failure, with seed {faults[0].seed}:\n{faults[0].fault}"
            )

    def _greedy_returns(self, seeds: Sequence[int]) -> list[float]:
        """Return of a greedy episode from each seed; the processes share them, and all know all of them."""
        mine = seeds[self.accelerator.process_index :: self.accelerator.num_processes]
        episodes = self.agent.greedy_episodes(self.evaluation, mine)
        found = dict(pair for part in everyone([(e.seed, e.episode_return) for e in episodes]) for pair in part)
        return [found[seed] for seed in seeds]

    def _keep_skipped(self, steps: list[TrainingStep]) -> None:
        folder = self.folder.path / "skipped"
        folder.mkdir(exist_ok=True)
        rank, number = self.accelerator.process_index, len(list(folder.iterdir()))
        torch.save(steps, folder / f"update_{self.state.update + 1:06d}_process_{rank}_{number}.pt")

    def _save_state(self, path: Path) -> None:
        torch.save(
            {
                "state": asdict(self.state),
                "optimizer": self.learner.optimizer.state_dict(),
                "micro_batch": self.learner.micro_batch,
                "pool": self.pool.state(),
            },
            path,
        )

    def _load(self, checkpoint: Path) -> None:
        try:
            saved = torch.load(checkpoint / "state.pt", weights_only=False)
        except Exception as error:  # torch raises many kinds for a damaged file
            raise damaged(checkpoint, error) from error
        self.state = RunState.restored(saved["state"])
        self.learner.optimizer.load_state_dict(saved["optimizer"])
        self.learner.micro_batch = saved["micro_batch"]
        self.pool.load_state(saved["pool"])

    def _load_best(self) -> None:
        self.accelerator.wait_for_everyone()  # until the main process has written it
        best = self.folder.best if self.folder.best.is_dir() else self.folder.checkpoint(self.state.update) / "adapter"
        self.agent.policy.load_adapter(best)
        self.sync()

    def _start_trackers(self) -> None:
        if not self.config.trackers:
            return
        tensorboard = {"purge_step": self.state.update + 1} if self.state.update else {}
        self.accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": tensorboard})

    def _draw(self, trained: list[float], last: dict[str, float]) -> None:
        chance, untrained = self._baselines["random"], self._baselines["untrained"]
        lines = {"random": float(np.mean(chance)), "untrained": float(np.mean(untrained))}
        history = MetricsLog.read(self.folder.metrics)
        history[-1:] = [line | last for line in history[-1:]]
        return_curve(
            history, self.folder.path / "return_curve.png", threshold=self.agent.reward_threshold, baselines=lines
        )
        return_histograms(untrained, trained, chance, self.folder.path / "return_histograms.png")
