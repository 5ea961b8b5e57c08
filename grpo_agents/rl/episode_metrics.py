"""What a log line says of the episodes of an update and of their groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_agents.rl.credit import Credit
from grpo_agents.rl.episode import EndReason, Episode


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Returns (of episodes from a reset; those of restarts tell nothing about whole episodes), lengths, ends, validity."""
    whole = [episode.episode_return for episode in episodes if episode.start == "reset"]
    restarted = [len(episode) for episode in episodes if episode.start == "restart"]
    steps = [step for episode in episodes for step in episode.steps]
    metrics: dict[str, Any] = {"episodes": len(episodes)}
    if whole:
        metrics |= {
            "return/mean": float(np.mean(whole)),
            "return/p10": float(np.percentile(whole, 10)),
            "return/p90": float(np.percentile(whole, 90)),
        }
    if restarted:
        metrics["restart/length"] = float(np.mean(restarted))
    ends = Counter(episode.end.value for episode in episodes)
    metrics |= {f"end/{reason.value}": ends[reason.value] for reason in EndReason}
    if steps:
        metrics["actions/invalid"] = float(np.mean([not step.valid for step in steps]))
        metrics["truncation"] = float(np.mean([step.sample.finish == "length" for step in steps]))
    for name in sorted({name for episode in episodes for name in episode.scores}):
        values = [value for episode in episodes if (value := episode.scores.get(name)) is not None]
        if values:
            metrics[f"reward/{name}"] = float(np.mean(values))
    return metrics


def credit_metrics(credit: Credit) -> dict[str, Any]:
    """The share of groups without a signal, the count of each cause, and what the values explain where there are some."""
    metrics: dict[str, Any] = {"groups/flat": credit.flat_share}
    metrics |= {f"groups/{cause}": n for cause, n in sorted(credit.flat.items())}
    if credit.explained_variance is not None:
        metrics["value/explained_variance"] = credit.explained_variance
    return metrics
