"""The check of all records before an update: what is trained on is what was seen and said."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpo_agents.errors import RecordError
from grpo_agents.rl.episode import Episode, Group, Step


def check_groups(groups: Sequence[Group], *, patch: int, temporal: int, merge: int, version: int) -> None:
    """Check every record of an update.

    Placeholders match the pictures' grids; there is one finite log-probability for each token; each token lies in the
    set it was chosen from; the samples are of the current weights; all members of a group saw the same start.

    Args:
        groups: what was played.
        patch, temporal, merge: sizes of the policy's vision tower.
        version: the policy version that should have played.

    Raises:
        RecordError: names group, member and step of the first contradiction.
    """
    for g, group in enumerate(groups):
        played = [episode for episode in group.episodes if episode.steps]
        for other in played[1:]:
            if other.steps[0].observation_hash != played[0].steps[0].observation_hash:
                raise RecordError(
                    f"group {g}, member {other.member}, step 0 (seed {other.seed}): it saw another start than member "
                    f"{played[0].member}"
                )
        for episode in group.episodes:
            _check_episode(episode, f"group {g}, member {episode.member}", patch, temporal, merge, version)


def _check_episode(episode: Episode, where: str, patch: int, temporal: int, merge: int, version: int) -> None:
    for t, step in enumerate(episode.steps):
        problem = _placeholders(step, patch, temporal, merge) or _tokens(step, version)
        if problem is None and not np.isfinite(step.reward):
            problem = f"its reward is {step.reward}"
        if problem is None and t < len(episode) - 1 and (step.terminated or step.truncated):
            problem = f"it ended the episode, which goes on for {len(episode) - 1 - t} more steps"
        if problem is not None:
            raise RecordError(f"{where}, step {t} (seed {episode.seed}): {problem}")


def _placeholders(step: Step, patch: int, temporal: int, merge: int) -> str | None:
    layout = step.encoded.layout
    stand = sum(span.count for span in layout.spans)
    need = 0
    for frames in step.encoded.visuals:
        height, width, _ = frames[0].pixels.shape
        need += -(-len(frames) // temporal) * (height // patch) * (width // patch) // merge**2
    if stand != need:
        return f"its prompt has {stand} placeholder tokens for pictures that have {need}"
    if layout.position_ids.shape != (3, len(layout.ids)):
        return f"its {len(layout.ids)} prompt tokens have positions of shape {layout.position_ids.shape}"
    return None


def _tokens(step: Step, version: int) -> str | None:
    sample = step.sample
    if not len(sample.ids):
        return "its reply has no token"
    if sample.logprobs.shape != sample.ids.shape:
        return f"its reply has {len(sample.ids)} tokens and {len(sample.logprobs)} log-probabilities"
    if not np.isfinite(sample.logprobs).all():
        return f"its reply has the log-probabilities {sample.logprobs.tolist()}"
    if sample.allowed is not None:
        if len(sample.allowed) != len(sample.ids):
            return f"its reply has {len(sample.ids)} tokens and {len(sample.allowed)} sets of allowed tokens"
        outside = [i for i, ids in zip(sample.ids.tolist(), sample.allowed, strict=True) if i not in ids]
        if outside:
            return f"token {outside[0]} of its reply is not among those it was chosen from"
    if sample.policy_version != version:
        return f"it was sampled with the weights of update {sample.policy_version}, and the learner holds {version}"
    return None
