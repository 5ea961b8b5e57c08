"""The policy against transformers' and peft's own forward passes, one whole sequence at a time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import KINDS, game_prompt, load, plain_logits, random_frames, stirred
from torch import Tensor

from grpo_agents.errors import PolicyLoadError
from grpo_agents.policies.qwen_vl import QwenVL
from grpo_agents.policies.sequences import TokenBatch, TokenSequence, collate
from grpo_agents.rl.episode import ImagePart, Message, Prompt, TextPart

REPLIES = [[264, 296], [278], [260, 86, 64, 81], [79, 277, 82]]
ALLOWED = [((260, 264), (40, 296, 300)), ((260, 264, 278, 299),), ((260,), (86,), (64, 65), (81, 90)), None]
TOLERANCE = {"rtol": 0.0, "atol": 1e-5}


@pytest.fixture(scope="module")
def base(folder: Path) -> Any:
    """The checkpoint as transformers loads it."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder).eval()


def prompts(kind: str) -> list[Prompt]:
    """Prompts of several lengths and picture sizes that begin alike."""
    sizes = [(2, 32, 16), (3, 16, 16), (2, 48, 32), (4, 32, 32)]
    return [
        game_prompt(kind, random_frames(*size, seed=seed), question=" up" * seed + "Move")
        for seed, size in enumerate(sizes)
    ]


def sequences(policy: QwenVL, kind: str, *, allowed: bool = False) -> list[TokenSequence]:
    made = []
    for prompt, reply, options in zip(prompts(kind), REPLIES, ALLOWED, strict=True):
        encoded = policy.encode(prompt)
        start = len(encoded.layout.ids)
        sets = (options or tuple((token, token + 1) for token in reply)) if allowed else None
        made.append(TokenSequence(encoded, np.array(reply), range(start, start + len(reply)), sets))
    return made


def batch_of(policy: QwenVL, kind: str = "video", *, allowed: bool = False) -> TokenBatch:
    return collate(sequences(policy, kind, allowed=allowed), policy.pad_id)


def expected(model: Any, policy: QwenVL, kind: str) -> list[Tensor]:
    return [
        plain_logits(model, policy.processor, prompt, reply)
        for prompt, reply in zip(prompts(kind), REPLIES, strict=True)
    ]


def rows(values: Tensor, batch: TokenBatch) -> list[Tensor]:
    return [row[mask] for row, mask in zip(values, batch.mask, strict=True)]


def assert_all_close(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, **TOLERANCE)


def gradients(policy: QwenVL, batch: TokenBatch) -> tuple[float, dict[str, Tensor]]:
    """A loss over log-probabilities and entropies, and the gradient of every weight that has one."""
    policy.zero_grad(set_to_none=True)
    logprobs, entropies = policy(batch, 0.7)
    loss = -logprobs.sum() - 0.1 * entropies.sum()
    loss.backward()
    found = {name: weight.grad for name, weight in policy.core.named_parameters() if weight.grad is not None}
    return float(loss.detach()), found


def count_layers(policy: QwenVL) -> dict[str, int]:
    """How often each layer begins, counted from now on: those of the language model, and the tower's if it is trained."""
    counts: dict[str, int] = {}
    for name, module in policy.core.named_modules():
        if name.endswith(".mlp") and ("layers." in name or ("blocks." in name and policy.vision_trained)):

            def count(*_: Any, name: str = name) -> None:
                counts[name] = counts.get(name, 0) + 1

            module.register_forward_pre_hook(count)
    return counts


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_a_plain_forward_of_each_sequence_alone(policy: QwenVL, kind: str) -> None:
    """Rows share their prefix and are padded on the right; the plain forward does neither."""
    batch = batch_of(policy, kind)
    assert len(batch.prefix_ids) > 10
    assert len({len(layout.ids) for layout in (source.layout for source in batch.sources)}) == 4
    with torch.no_grad():
        logits = policy.token_logits(batch)
    assert_all_close(rows(logits, batch), expected(policy.core, policy, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_logprobs_and_entropies_over_the_whole_vocabulary(policy: QwenVL, kind: str, temperature: float) -> None:
    batch = batch_of(policy, kind)
    with torch.no_grad():
        logprobs, entropies = policy(batch, temperature)
    assert logprobs[~batch.mask].eq(0).all() and entropies[~batch.mask].eq(0).all()
    for ours, entropy, logits, reply in zip(
        rows(logprobs, batch), rows(entropies, batch), expected(policy.core, policy, kind), REPLIES, strict=True
    ):
        distribution = torch.distributions.Categorical(logits=logits / temperature)
        torch.testing.assert_close(ours, distribution.log_prob(torch.tensor(reply)), **TOLERANCE)
        torch.testing.assert_close(entropy, distribution.entropy(), **TOLERANCE)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_and_entropies_over_the_allowed_tokens(policy: QwenVL, temperature: float) -> None:
    made = sequences(policy, "video", allowed=True)
    batch = collate(made, policy.pad_id)
    with torch.no_grad():
        logprobs, entropies = policy(batch, temperature)
    assert logprobs[~batch.mask].eq(0).all() and entropies[~batch.mask].eq(0).all()
    for row, logits in enumerate(expected(policy.core, policy, "video")):
        for column, options in enumerate(made[row].allowed or ()):
            distribution = torch.distributions.Categorical(logits=logits[column, list(options)] / temperature)
            chosen = torch.tensor(options.index(REPLIES[row][column]))
            torch.testing.assert_close(logprobs[row, column], distribution.log_prob(chosen), **TOLERANCE)
            torch.testing.assert_close(entropies[row, column], distribution.entropy(), **TOLERANCE)


def test_what_stands_beside_a_sequence_does_not_change_it(policy: QwenVL) -> None:
    made = sequences(policy, "video")
    with torch.no_grad():
        together, _ = policy(collate(made, policy.pad_id))
        for row, sequence in enumerate(made):
            alone, _ = policy(collate([sequence], policy.pad_id))
            torch.testing.assert_close(together[row, : len(REPLIES[row])], alone[0], **TOLERANCE)


def test_texts_without_pictures_share_a_batch_with_pictures(policy: QwenVL) -> None:
    bare = Prompt((Message("user", (TextPart("Keep the pole up. Move"),)),))
    asked = [bare, *prompts("images")[:2], bare]
    made = []
    for prompt in asked:
        encoded = policy.encode(prompt)
        made.append(TokenSequence(encoded, np.array([264]), [len(encoded.layout.ids)]))
    with torch.no_grad():
        logits = policy.token_logits(collate(made, policy.pad_id))
    assert_all_close(list(logits), [plain_logits(policy.core, policy.processor, prompt, [264]) for prompt in asked])


def test_a_picture_after_the_last_target_keeps_its_features_from_the_next_row(policy: QwenVL) -> None:
    first, last = (ImagePart(random_frames(1, 32, 16, seed=seed)[0]) for seed in (7, 8))
    talk = (Message("user", (first, TextPart("Move"))), Message("assistant", (TextPart("left"),)))
    longer = policy.encode.encode(Prompt((*talk, Message("user", (last,)))), add_generation_prompt=False)
    start = len(policy.encode(Prompt(talk[:1])).layout.ids)
    made = [
        TokenSequence(longer, np.empty(0, dtype=np.int64), [start]),
        *sequences(policy, "images")[:1],
    ]
    with torch.no_grad():
        logits = policy.token_logits(collate(made, policy.pad_id))
    assert_all_close(
        [logits[0, :1], logits[1]],
        [
            plain_logits(policy.core, policy.processor, Prompt(talk[:1]), [264]),
            plain_logits(policy.core, policy.processor, prompts("images")[0], REPLIES[0]),
        ],
    )


@pytest.mark.parametrize("kind", KINDS)
def test_observations_are_means_of_the_vision_features_kept_or_computed(policy: QwenVL, kind: str) -> None:
    encoded = [policy.encode(prompt) for prompt in prompts(kind)]
    words = policy.encode(Prompt((Message("user", (TextPart("Move"),)),)))
    with torch.no_grad():
        features = [policy.vision([prompt])[0] for prompt in encoded]
    rows = policy.observations([*encoded, words], [*features[:2], *[None] * 3])
    for row, feature, prompt in zip(rows, features, encoded, strict=False):
        newest = prompt.layout.spans[-1].count // prompt.layout.spans[-1].grid[0]
        means = torch.cat([feature.mean(1).flatten(), feature[:, -newest:].mean(1).flatten()])
        np.testing.assert_allclose(row, means.numpy(), atol=1e-5)
    assert not rows[-1].any()
    assert policy.observations([words], [None]).shape == (1, 0)


def test_free_replies_and_action_words_do_not_share_a_batch(policy: QwenVL) -> None:
    free, chosen = (sequences(policy, "video", allowed=allowed)[0] for allowed in (False, True))
    with pytest.raises(ValueError, match="cannot share a batch"):
        collate([free, chosen], policy.pad_id)


def test_a_new_adapter_changes_nothing(folder: Path, base: Any) -> None:
    policy = load(folder)
    batch = batch_of(policy)
    with torch.no_grad():
        assert_all_close(rows(policy.token_logits(batch), batch), expected(base, policy, "video"))


def test_the_seed_settles_a_new_adapter_and_leaves_the_global_generator_alone(folder: Path) -> None:
    torch.manual_seed(5)
    first = load(folder, seed=1)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))
    same, other = ([*load(folder, seed=seed).trainable_parameters()] for seed in (1, 2))
    mine = first.trainable_parameters()
    assert all(torch.equal(a, b) for a, b in zip(mine, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


@pytest.mark.parametrize("vision", ["frozen", "trained"])
@pytest.mark.parametrize("rank", [4, 0])
def test_the_reference_is_the_model_before_training(folder: Path, base: Any, rank: int, vision: str) -> None:
    policy = load(folder, rank=rank, vision=vision)
    stirred(policy)
    batch = batch_of(policy)
    with torch.no_grad():
        trained = policy.token_logits(batch)
        with policy.reference():
            reference = policy.token_logits(batch)
        again = policy.token_logits(batch)
    assert (trained - reference)[batch.mask].abs().max() > 0.1
    assert torch.equal(trained, again)
    assert_all_close(rows(reference, batch), expected(base, policy, "video"))


@pytest.mark.parametrize("rank", [4, 0])
def test_the_reference_is_left_after_an_error_too(folder: Path, rank: int) -> None:
    policy = stirred(load(folder, rank=rank))
    batch = batch_of(policy)
    with torch.no_grad():
        trained = policy.token_logits(batch)
        with pytest.raises(KeyError), policy.reference():
            raise KeyError
        assert torch.equal(policy.token_logits(batch), trained)


@pytest.mark.parametrize(
    ("rank", "vision", "reached"),
    [
        (4, "frozen", {"language lora"}),
        (4, "trained", {"language lora", "vision lora"}),
        (0, "frozen", {"language"}),
        (0, "trained", {"language", "vision"}),
    ],
)
def test_gradients_reach_the_trained_weights_and_no_others(
    folder: Path, rank: int, vision: str, reached: set[str]
) -> None:
    policy = stirred(load(folder, rank=rank, vision=vision))
    _, found = gradients(policy, batch_of(policy))
    trained = {name for name, weight in policy.core.named_parameters() if weight.requires_grad}
    assert found.keys() == trained
    assert len(trained) == len(policy.trainable_parameters())
    assert all(gradient.abs().max() > 0 for gradient in found.values())
    parts = {("vision" if ".visual." in name else "language") + (" lora" if "lora" in name else "") for name in trained}
    assert parts == reached


def test_rank_0_trains_all_weights_of_the_language_model(folder: Path) -> None:
    policy = load(folder, rank=0)
    names = {name for name, weight in policy.core.named_parameters() if weight.requires_grad}
    assert names == {name for name, _ in policy.core.named_parameters() if name.startswith("model.language_model.")}
    assert policy.core.lm_head.weight is policy.language.embed_tokens.weight


def test_target_modules_settle_which_layers_are_adapted(folder: Path) -> None:
    policy = load(folder, targets=["q_proj", "down_proj"], vision="trained")
    adapted = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name, _ in policy.named_parameters() if "lora_" in name}
    tower = {"down_proj"} if policy.core.config.model_type == "qwen2_5_vl" else set()
    assert adapted == {"q_proj", "down_proj"} | tower


def test_unknown_target_modules_are_refused_with_those_there_are(folder: Path) -> None:
    with pytest.raises(PolicyLoadError) as caught:
        load(folder, targets=["q_proj", "query", "dense"])
    assert str(caught.value) == (
        "policy.lora.target_modules names dense, query, which this model does not have; its linear layers are "
        "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    )


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("rank", "vision"), [(4, "frozen"), (4, "trained"), (0, "trained")])
def test_gradient_checkpointing_gives_the_same_loss_and_gradients(
    folder: Path, rank: int, vision: str, training: bool
) -> None:
    plain, checkpointed = (
        stirred(load(folder, rank=rank, vision=vision, gradient_checkpointing=on)).train(training)
        for on in (False, True)
    )
    batch = batch_of(plain, allowed=True).without_prefix()  # the prefix would be a pass of its own
    once, twice = count_layers(plain), count_layers(checkpointed)
    loss, found = gradients(plain, batch)
    again, recomputed = gradients(checkpointed, batch)
    assert again == pytest.approx(loss, abs=1e-5)
    assert once and twice == {name: 2 * count for name, count in once.items()}
    assert found.keys() == recomputed.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(checkpointed(batch, 0.7)[0], plain(batch, 0.7)[0], **TOLERANCE)
    assert gradients(checkpointed, batch_of(plain, allowed=True))[0] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "auto"])
def test_the_dtype_is_the_one_asked_for(folder: Path, base: Any, dtype: str) -> None:
    policy = load(folder, dtype=dtype)
    wanted = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    assert policy.core.dtype == policy.language.embed_tokens.weight.dtype == wanted
    batch = batch_of(policy)
    loss, found = gradients(policy, batch)
    assert np.isfinite(loss) and all(gradient.isfinite().all() for gradient in found.values())
    with torch.no_grad():
        logits = policy.token_logits(batch)
    assert logits.dtype == torch.float32
    for ours, theirs in zip(rows(logits, batch), expected(base, policy, "video"), strict=True):
        # bfloat16 has 8 bits: rounding of 0.4% in each of four layers, on logits of up to 4.
        assert (ours - theirs).abs().max() < 0.25


@pytest.mark.parametrize("vision", ["frozen", "trained"])
def test_a_saved_adapter_is_peft_and_needs_no_code_of_ours(folder: Path, tmp_path: Path, vision: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    policy = stirred(load(folder, vision=vision))
    policy.save(tmp_path)
    theirs = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(folder), tmp_path).eval()
    batch = batch_of(policy)
    with torch.no_grad():
        assert_all_close(rows(policy.token_logits(batch), batch), expected(theirs, policy, "video"))


def test_a_saved_full_model_needs_no_code_of_ours(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    policy = stirred(load(folder, rank=0, vision="trained"))
    policy.save(tmp_path)
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    processor = AutoProcessor.from_pretrained(tmp_path)
    batch = batch_of(policy)
    logits = [plain_logits(theirs, processor, p, r) for p, r in zip(prompts("video"), REPLIES, strict=True)]
    with torch.no_grad():
        assert_all_close(rows(policy.token_logits(batch), batch), logits)


@pytest.mark.parametrize("rank", [4, 0])
def test_what_was_saved_comes_back_and_trains_on(folder: Path, base: Any, tmp_path: Path, rank: int) -> None:
    policy = stirred(load(folder, rank=rank))
    policy.save(tmp_path)
    batch = batch_of(policy)
    loss, found = gradients(policy, batch)
    replaced = stirred(load(folder, rank=rank), seed=1)
    replaced.load_adapter(tmp_path)
    for other in (load(folder, rank=rank, adapter=tmp_path), replaced):
        again, same = gradients(other, batch)
        assert again == loss
        assert same.keys() == found.keys() and all(torch.equal(same[name], found[name]) for name in found)
        with torch.no_grad(), other.reference():
            assert_all_close(rows(other.token_logits(batch), batch), expected(base, other, "video"))


def test_the_tiny_model_of_the_package_is_the_default() -> None:
    from grpo_agents.config import PolicyConfig

    policy = QwenVL.load(PolicyConfig(device="cpu"))
    assert Path(policy.source).parts[-2:] == ("assets", "tiny-qwen-vl")
    assert policy.core.config.model_type == "qwen3_vl"
