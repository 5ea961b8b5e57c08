"""One update of the learner, against computations by hand: its gradients, and what it says of itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from models import Family, game_prompt, load, processor_inputs, random_frames, stirred
from table_policy import MAX_TOKENS, TablePolicy, collate, gradient, make_learner, recorded, replies, step
from torch import Tensor

from grpo_agents.config import LearnerConfig, LossConfig
from grpo_agents.policies import sequences
from grpo_agents.policies.action_words import ActionWords
from grpo_agents.policies.local import LocalSampler
from grpo_agents.policies.qwen_vl import QwenVL
from grpo_agents.policies.sampler import SampleRequest
from grpo_agents.rl.credit import TrainingStep
from grpo_agents.rl.episode import Prompt, Sample
from grpo_agents.rl.learner import Learner, learning_rate
from grpo_agents.rl.losses import DEFAULT_CLIP, LOSSES

NAMES = list(LOSSES)
TEMPERATURE = 0.7
# Beginnings of one another and several tokens: some of their tokens decide, others are certain.
WORDS = ["left", "left fast", "right", "press", "presumably"]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@dataclass(frozen=True, eq=False)
class Scene:
    """A step with its prompt, and with the logits of its reply's tokens, (L, vocabulary), by transformers alone."""

    prompt: Prompt
    step: TrainingStep
    logits: Tensor
    reference: Tensor


@pytest.fixture(scope="module")
def qwen(tiny_folders: dict[Family, Any]) -> QwenVL:
    return stirred(load(tiny_folders["qwen3_vl"]))


@pytest.fixture(scope="module")
def twin(tiny_folders: dict[Family, Any]) -> QwenVL:
    """The same policy once more: an optimizer step, even one of length 0, would void the graphs kept of it."""
    return stirred(load(tiny_folders["qwen3_vl"]))


def qwen_learner(qwen: QwenVL, **settings: Any) -> Learner:
    def batch(steps: Sequence[TrainingStep]) -> sequences.TokenBatch:
        rows = [sequences.TokenSequence.of_sample(step.encoded, step.sample) for step in steps]
        return sequences.collate(rows, qwen.pad_id)

    return make_learner(qwen, collate=batch, **settings)


@pytest.fixture(scope="module", params=["action words", "free text"])
def scenes(qwen: QwenVL, twin: QwenVL, request: pytest.FixtureRequest) -> list[Scene]:
    """Ten steps, not quite on policy."""
    words = ActionWords.build(WORDS, qwen.processor.tokenizer) if request.param == "action words" else None
    prompts = [game_prompt("video", random_frames(2, seed=seed)) for seed in range(10)]
    samples = LocalSampler(qwen).sample_many(
        [
            SampleRequest(qwen.encode(prompt), words, rng(seed), TEMPERATURE, max_new_tokens=1 + seed % 5)
            for seed, prompt in enumerate(prompts)
        ]
    )
    assert len({len(sample.decisions) for sample in samples}) > 1
    draws = rng()
    found = []
    for number, (prompt, sample) in enumerate(zip(prompts, samples, strict=True)):
        # Within the clip range of every loss, and outside of it.
        drift = draws.normal(scale=1e-4 if number % 2 else 0.4, size=len(sample.ids)).astype(np.float32)
        sample = replace(sample, logprobs=sample.logprobs + drift)
        step = TrainingStep(qwen.encode(prompt), sample, float(draws.normal()))
        with torch.no_grad(), twin.reference():
            reference = all_logits(twin, prompt, sample)
        found.append(Scene(prompt, step, all_logits(twin, prompt, sample), reference))
    return found


def all_logits(policy: QwenVL, prompt: Prompt, sample: Sample) -> Tensor:
    logits: Tensor = policy.core(**processor_inputs(policy.processor, prompt, sample.ids.tolist())).logits[0]
    return logits[-len(sample.ids) - 1 : -1]


def direct_loss(name: str, scenes: Sequence[Scene], *, beta: float, entropy: float) -> Tensor:
    """The loss by the papers' formulas, a sum over tokens one at a time, in double precision."""
    low, high = (1 - DEFAULT_CLIP[name][0], 1 + DEFAULT_CLIP[name][1])
    decisions = [deciding(scene.step.sample) for scene in scenes]
    tokens = sum(map(len, decisions))
    loss = torch.zeros((), dtype=torch.float64)
    for scene, places in zip(scenes, decisions, strict=True):
        sample, advantage = scene.step.sample, scene.step.advantage
        weight = {
            "grpo": 1 / (len(scenes) * len(places)),
            "gspo": 1 / (len(scenes) * len(places)),
            "dr_grpo": 1 / (len(scenes) * MAX_TOKENS),
            "dapo": 1 / tokens,
            "cispo": 1 / tokens,
        }[name]
        news = [choice(scene.logits[t], sample, t) for t in places]
        references = [choice(scene.reference[t], sample, t)[0] for t in places]
        log_ratios = [new - float(sample.logprobs[t]) for (new, _), t in zip(news, places, strict=True)]
        if name == "gspo":
            log_ratios = [torch.stack(log_ratios).mean()] * len(places)
        for (new, spread), reference, log_ratio in zip(news, references, log_ratios, strict=True):
            ratio = log_ratio.exp()
            objective = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
            if name == "cispo":
                objective = ratio.detach().clamp(low, high) * advantage * new
            difference = reference - new
            divergence = difference.exp() - difference - 1
            loss = loss + weight * (beta * divergence - objective - entropy * spread)
    return loss


def deciding(sample: Sample) -> list[int]:
    return [t for t in range(len(sample.ids)) if sample.allowed is None or len(sample.allowed[t]) > 1]


def choice(logits: Tensor, sample: Sample, t: int) -> tuple[Tensor, Tensor]:
    """Log-probability of token t, and the entropy of what it was drawn from."""
    options = list(range(len(logits))) if sample.allowed is None else list(sample.allowed[t])
    distribution = (logits[options].double() / TEMPERATURE).log_softmax(0)
    return distribution[options.index(int(sample.ids[t]))], -(distribution.exp() * distribution).sum()


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradient_are_those_of_a_direct_computation_for_every_micro_batch(
    qwen: QwenVL, twin: QwenVL, scenes: list[Scene], name: str
) -> None:
    expected = direct_loss(name, scenes, beta=0.3, entropy=0.1)
    gradients = torch.autograd.grad(expected, twin.trainable_parameters(), retain_graph=True)
    wanted = torch.cat([gradient.flatten() for gradient in gradients])
    loss = LossConfig(name=name, beta=0.3, entropy=0.1)
    for micro_batch in (1, 3, 7, None):
        learner = qwen_learner(qwen, loss=loss, micro_batch=micro_batch, minibatch=len(scenes))
        found, metrics = gradient(learner, [scene.step for scene in scenes])
        # Log-probabilities of float32 logits of size 5, in passes that sum in another order; ratios of up to 4.
        assert metrics["loss"] == pytest.approx(float(expected.detach()), rel=1e-4, abs=1e-5)
        assert float((found - wanted).norm()) < 1e-4 * float(wanted.norm())
        assert metrics["grad_norm"] == pytest.approx(float(wanted.norm()), rel=1e-4)
        assert 0 < metrics["clip_fraction"] < 1 or name == "cispo"


@pytest.mark.parametrize("name", NAMES)
def test_a_reply_of_several_tokens_of_which_one_decides_trains_as_a_reply_of_one_token(name: str) -> None:
    options = (2, 3, 5)
    loss = LossConfig(name=name, beta=0.2, entropy=0.1)
    replies = {
        "one token": step(0, [3], 0.7, (options,)),
        "followed by certain ones": step(0, [3, 1, 6], 0.7, (options, (1,), (6,))),
    }
    found = {}
    for form, reply in replies.items():
        policy = TablePolicy.random(2)
        policy.start += 0.5 * torch.randn(policy.start.shape, generator=torch.Generator().manual_seed(1))
        # The other step has three tokens, so that denominators by token and by sequence differ.
        found[form] = gradient(make_learner(policy, loss=loss), recorded(policy, [reply, step(1, [4, 4, 0], -0.3)]))
    (one, metrics), (several, others) = found.values()
    torch.testing.assert_close(several, one, rtol=0, atol=0)
    assert others == metrics
    assert one.any()


def test_a_token_that_was_certain_has_no_gradient() -> None:
    policy = TablePolicy.random(1)
    found, _ = gradient(make_learner(policy), recorded(policy, [step(0, [1, 3, 2], 1.0, ((1,), (3, 4), (2,)))]))
    table = found.view_as(policy.table)[0]
    assert table.nonzero().tolist() == [[1, 3], [1, 4]]


def test_a_step_without_any_decision_is_left_out() -> None:
    policy = TablePolicy.random(3)
    deciding = [step(0, [1, 2], 1.0), step(1, [5], -0.5)]
    certain = step(2, [4, 6], 2.0, ((4,), (6,)))
    expected, metrics = gradient(make_learner(policy), recorded(policy, deciding))
    found, others = gradient(make_learner(policy), [*recorded(policy, deciding), certain])
    torch.testing.assert_close(found, expected)
    assert others == pytest.approx(metrics)
    assert others["trained_steps"] == 2


def test_without_any_step_nothing_changes_and_nothing_is_claimed() -> None:
    policy = TablePolicy.random(1)
    metrics = make_learner(policy).update([], lr=0.1, rng=rng())
    assert torch.equal(policy.table, policy.start)
    assert metrics["optimizer_steps"] == metrics["trained_steps"] == metrics["skipped"] == 0
    unknown = ("loss", "entropy", "kl", "grad_norm", "clip_fraction", "ratio/mean", "ratio/max", "ratio/ess")
    assert all(math.isnan(metrics[key]) for key in unknown)


def test_a_long_gradient_is_scaled_down_to_the_norm_and_a_short_one_is_left() -> None:
    policy = TablePolicy.random(6)
    steps = replies(policy, 6)
    raw, metrics = gradient(make_learner(policy), steps)
    norm = float(raw.norm())
    assert metrics["grad_norm"] == pytest.approx(norm)
    clipped, metrics = gradient(make_learner(policy, max_grad_norm=norm / 4), steps)
    torch.testing.assert_close(clipped, raw / 4)
    assert metrics["grad_norm"] == pytest.approx(norm)  # the one before clipping
    short, _ = gradient(make_learner(policy, max_grad_norm=norm * 1.01), steps)
    torch.testing.assert_close(short, raw, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [2.0, 2.0, 2.0, 2.0, 2.0]),
        ("linear", [2.0, 1.5, 1.0, 0.5, 0.0]),
        ("cosine", [2.0, 1.7071067811865475, 1.0, 0.2928932188134524, 0.0]),
    ],
)
def test_the_learning_rate_falls_with_the_share_of_the_steps_played(schedule: Any, expected: list[float]) -> None:
    config = LearnerConfig(lr=2.0, schedule=schedule)
    rates = [learning_rate(config, 50, progress) for progress in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert rates == pytest.approx(expected, abs=1e-12)
    assert learning_rate(config, 50, 1.2) == pytest.approx(expected[-1], abs=1e-12)  # the last update overshoots


def test_the_learning_rate_rises_over_the_updates_of_the_warm_up() -> None:
    config = LearnerConfig(lr=1.0, schedule="constant", warmup=4)
    assert [learning_rate(config, update, 0.0) for update in range(7)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1])
    both = LearnerConfig(lr=1.0, schedule="linear", warmup=1)
    assert learning_rate(both, 0, 0.5) == pytest.approx(0.25)


def test_the_learning_rate_given_is_the_one_used() -> None:
    policy = TablePolicy.random(4)
    learner = make_learner(policy, lr=123.0)
    learner.update(replies(policy, 4), lr=0.03, rng=rng())
    moved = (policy.table.detach() - policy.start).abs()
    # Adam's first step is the learning rate in the direction of the gradient's sign, whatever its size.
    assert float(moved.max()) == pytest.approx(0.03, rel=1e-3)


def trained_contexts(seed: int, **settings: Any) -> list[int]:
    policy = TablePolicy.random(20)
    steps = replies(policy, 20)
    make_learner(policy, **settings).update(steps, lr=0.01, rng=rng(seed))
    return [context for batch in policy.trained for context in batch]


def test_max_steps_draws_steps_at_random_without_repetition_and_by_the_stream_alone() -> None:
    draws = [trained_contexts(seed, max_steps=6, minibatch=4) for seed in range(30)]
    assert all(len(draw) == len(set(draw)) == 6 for draw in draws)
    assert trained_contexts(0, max_steps=6, minibatch=4) == draws[0]
    assert len({tuple(draw) for draw in draws}) == 30
    # Expected 9 times each, with a standard deviation of 2.5.
    counts = np.bincount(np.concatenate(draws), minlength=20)
    assert counts.min() >= 2
    assert counts.max() <= 17


def test_every_epoch_trains_each_step_once_in_an_order_of_its_own() -> None:
    seen = trained_contexts(0, epochs=3, max_steps=7, minibatch=3)
    epochs = [seen[start : start + 7] for start in (0, 7, 14)]
    assert len(seen) == 21
    assert len({tuple(sorted(epoch)) for epoch in epochs}) == 1
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_dropout_is_seeded_by_the_stream_and_by_nothing_else() -> None:
    def weights(seed: int) -> Tensor:
        policy = TablePolicy.random(6, dropout=0.5)
        make_learner(policy).update(replies(policy, 6), lr=0.1, rng=rng(seed))
        return policy.table.detach()

    torch.manual_seed(1)
    first = weights(0)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(weights(0), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(weights(1), first)


def test_dropout_acts_in_training_alone() -> None:
    policy = TablePolicy.random(6, dropout=0.5)
    steps = replies(policy, 6)
    learner = make_learner(policy)
    found, metrics = gradient(learner, steps)
    assert not policy.training
    assert metrics["mismatch"] == 0.0
    assert metrics["kl"] == 0.0
    whole, _ = gradient(make_learner(TablePolicy.random(6)), steps)
    assert ((found == 0) & (whole != 0)).any()
    assert metrics["ratio/max"] > 1.0


def two_choices(**settings: Any) -> tuple[TablePolicy, dict[str, float]]:
    """An update by 0.1 on two even choices between tokens 0 and 1: 0 was taken twice, to good and to bad effect.

    Adam's first step adds 0.1 to the logits of what is to become likelier and takes 0.1 from the others.
    """
    policy = TablePolicy(torch.zeros(2, 5, 7))
    steps = recorded(policy, [step(context, [0], advantage, ((0, 1),)) for context, advantage in ((0, 1.0), (1, -1.0))])
    return policy, make_learner(policy, **settings).update(steps, lr=0.1, rng=rng())


UP, DOWN = 1 / (1 + math.exp(-0.2)), 1 / (1 + math.exp(0.2))
"""Probabilities of token 0 after one step, 0.5 before."""
KL = [0.5 / p - math.log(0.5 / p) - 1 for p in (UP, DOWN)]
"""k3 at token 0, after one step."""


def test_ratios_of_an_update_of_two_epochs_are_those_computed_by_hand() -> None:
    _, metrics = two_choices(epochs=2, loss=LossConfig(entropy=0.0, clip_low=0.05, clip_high=0.05))
    ratios = [1.0, 1.0, UP / 0.5, DOWN / 0.5]
    assert metrics["ratio/mean"] == pytest.approx(sum(ratios) / 4, rel=1e-6)
    assert metrics["ratio/max"] == pytest.approx(1.0996680, rel=1e-6)
    assert metrics["ratio/ess"] == pytest.approx(sum(ratios) ** 2 / (4 * sum(r * r for r in ratios)), rel=1e-6)
    assert metrics["clip_fraction"] == 0.5  # none in the first epoch, both in the second
    spread = -sum(p * math.log(p) for p in (UP, DOWN))
    assert metrics["entropy"] == pytest.approx((math.log(2) + spread) / 2, rel=1e-6)
    assert metrics["optimizer_steps"] == 2
    assert metrics["lr"] == 0.1


def test_without_a_kl_term_the_kl_is_measured_after_the_update() -> None:
    _, metrics = two_choices()
    assert metrics["kl"] == pytest.approx(sum(KL) / 2, rel=1e-5)


def test_with_a_kl_term_the_kl_is_that_of_the_steps_trained_on() -> None:
    # The term has no gradient where the policy is still the reference, so that the first step is the same.
    _, metrics = two_choices(epochs=2, loss=LossConfig(entropy=0.0, beta=0.1))
    assert metrics["kl"] == pytest.approx((0 + 0 + sum(KL)) / 4, rel=1e-5)


def test_the_reference_of_a_real_model_is_the_one_without_its_adapter(qwen: QwenVL, scenes: list[Scene]) -> None:
    expected = []
    for scene in scenes:
        for t in deciding(scene.step.sample):
            new, reference = (choice(x[t], scene.step.sample, t)[0] for x in (scene.logits, scene.reference))
            difference = float((reference - new).detach())
            expected.append(math.exp(difference) - difference - 1)
    for beta in (0.0, 0.5):
        learner = qwen_learner(qwen, loss=LossConfig(entropy=0.0, beta=beta))
        _, metrics = gradient(learner, [scene.step for scene in scenes])
        assert metrics["kl"] == pytest.approx(np.mean(expected), rel=1e-4)


@pytest.mark.parametrize("beta", [0.0, 0.2])
def test_entropy_and_kl_are_means_over_decisions_whatever_the_loss_divides_by(beta: float) -> None:
    found = []
    for name in NAMES:
        policy = TablePolicy.random(8)
        policy.start += 0.3
        policy.start[::2, :, 0] -= 1.0
        steps = [
            *replies(policy, 6),
            *recorded(policy, [step(6, [3, 1], 1.0, ((3, 4), (1,))), step(7, [2], 1.0, ((2, 5),))]),
        ]
        _, metrics = gradient(make_learner(policy, loss=LossConfig(name=name, beta=beta)), steps)
        found.append((metrics["entropy"], metrics["kl"]))
    policy.eval()
    with torch.no_grad():
        tokens = [policy(collate([step])) for step in steps]
        with policy.reference():
            references = torch.cat([policy(collate([step]))[0][0] for step in steps]).double()
    logprobs = torch.cat([logprob[0] for logprob, _ in tokens]).double()
    entropy = float(torch.cat([entropy[0] for _, entropy in tokens]).mean())
    ratio = (references - logprobs).exp()
    kl = float((ratio - ratio.log() - 1).mean())
    assert len(logprobs) == sum(len(step.sample.ids) for step in steps) - 1  # one token was certain
    assert found == [pytest.approx((entropy, kl), rel=1e-5)] * len(NAMES)


def test_mismatch_is_near_zero_for_what_the_sampler_of_a_real_model_drew(qwen: QwenVL, scenes: list[Scene]) -> None:
    words = None if scenes[0].step.sample.allowed is None else ActionWords.build(WORDS, qwen.processor.tokenizer)
    prompts = [qwen.encode(scene.prompt) for scene in scenes]
    asked = [SampleRequest(prompt, words, rng(seed), 1.3, 4) for seed, prompt in enumerate(prompts)]
    drawn = LocalSampler(qwen).sample_many(asked)
    steps = [TrainingStep(prompt, sample, 1.0) for prompt, sample in zip(prompts, drawn, strict=True)]
    assert gradient(qwen_learner(qwen), steps)[1]["mismatch"] < 1e-5  # float32 logits of size 5
