"""Action words as tries of tokens."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from models import Family

from grpo_agents.errors import EnvironmentSetupError
from grpo_agents.policies.action_words import ActionWords, Node

END = 9


class Letters:
    """A tokenizer whose tokens are given: one number for each piece of a word between hyphens."""

    eos_token_id = END

    def __call__(self, word: str, add_special_tokens: bool) -> SimpleNamespace:
        assert not add_special_tokens
        return SimpleNamespace(input_ids=["_abcd".index(piece) for piece in word.split("-") if piece])


def build(*words: str) -> ActionWords:
    return ActionWords.build(words, Letters())


def follow(node: Node, *tokens: int) -> Node:
    for token in tokens:
        node = node.children[token]
    return node


def replies(node: Node, said: tuple[int, ...] = ()) -> dict[tuple[int, ...], int]:
    """Every reply that the trie allows, with the word it chooses."""
    found = {} if node.choice is None else {said: node.choice}
    for token, child in node.children.items():
        found |= replies(child, (*said, token))
    return found


def test_words_of_one_token_are_decided_by_it() -> None:
    words = build("b", "a")
    assert words.words == ("b", "a")
    assert replies(words.root) == {(2,): 0, (1,): 1}
    assert words.root.options == (1, 2)
    assert [follow(words.root, token).rest for token in (2, 1)] == [((), 0), ((), 1)]
    assert words.first_tokens() == (2, 1)


def test_once_a_word_is_the_only_one_left_its_other_tokens_are_certain() -> None:
    words = build("a-b-c", "b", "c-d")
    assert replies(words.root) == {(1, 2, 3): 0, (2,): 1, (3, 4): 2}
    assert words.root.rest is None
    assert follow(words.root, 1).rest == ((2, 3), 0)
    assert follow(words.root, 3).rest == ((4,), 2)
    assert words.first_tokens() == (1, 2, 3)


def test_a_word_that_begins_another_one_has_to_be_ended() -> None:
    words = build("a-b", "a", "a-b-c-d")
    assert replies(words.root) == {(1, 2, END): 0, (1, END): 1, (1, 2, 3, 4): 2}
    assert follow(words.root, 1).options == (2, END)
    assert follow(words.root, 1).rest is None
    assert follow(words.root, 1, END).rest == ((), 1)
    assert follow(words.root, 1, 2, 3).rest == ((4,), 2)


def test_a_shared_beginning_is_forced_and_decides_nothing() -> None:
    words = build("a-b-c", "a-b-d")
    assert words.root.forced and follow(words.root, 1).forced and not follow(words.root, 1, 2).forced
    assert words.root.rest is None
    assert words.first_tokens() == (3, 4)


def test_words_that_part_later_share_the_token_that_decides_first() -> None:
    assert build("a-b", "a-c", "d").first_tokens() == (1, 1, 4)
    assert build("a", "a-b").first_tokens() == (END, 2)


def test_the_order_of_the_words_changes_nothing_but_their_numbers() -> None:
    words = ["a-b-c", "a", "b", "a-b"]
    expected = {said: words[choice] for said, choice in replies(build(*words).root).items()}
    backwards = words[::-1]
    assert {said: backwards[choice] for said, choice in replies(build(*backwards).root).items()} == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "a policy needs at least two actions to choose from, got []"),
        (("a",), "a policy needs at least two actions to choose from, got ['a']"),
        (("a", ""), "action 1 has the empty word ''; give it a name in env.actions"),
        (("a", "b", "a"), "actions 0 and 2 have the same word 'a'; give each its own in env.actions"),
    ],
)
def test_words_that_cannot_be_told_apart_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(EnvironmentSetupError, match=f"^{re.escape(message)}$"):
        build(*words)


def test_a_models_own_tokenizer_writes_every_word_back(tiny_folders: dict[Family, Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_folders["qwen3_vl"])
    words = ["left", "left fast", "right", "up", "upward", "é and 😀"]
    said = replies(ActionWords.build(words, tokenizer).root)
    assert {choice: tokenizer.decode(ids).removesuffix(tokenizer.eos_token) for ids, choice in said.items()} == dict(
        enumerate(words)
    )
    ended = {words[choice] for ids, choice in said.items() if ids[-1] == tokenizer.eos_token_id}
    assert ended == {"left", "up"}
