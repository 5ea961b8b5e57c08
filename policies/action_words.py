"""Action words as token tries: which tokens may come next so that the reply is one of the words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from grpo_agents.errors import EnvironmentSetupError


@dataclass(eq=False)
class Node:
    """A prefix of one or more action words.

    Attributes:
        children: next token to next node.
        choice: index of the word that ends here, or None.
    """

    children: dict[int, Node] = field(default_factory=dict)
    choice: int | None = None

    @property
    def options(self) -> tuple[int, ...]:
        """Tokens that may come next, ascending."""
        return tuple(sorted(self.children))

    @property
    def forced(self) -> bool:
        return len(self.children) == 1

    @cached_property
    def rest(self) -> tuple[tuple[int, ...], int] | None:
        """The tokens to the end of the only word left and that word's index; None while there is still a choice."""
        tokens: list[int] = []
        node = self
        while node.choice is None:
            if not node.forced:
                return None
            ((token, node),) = node.children.items()
            tokens.append(token)
        return tuple(tokens), node.choice


@dataclass(eq=False)
class ActionWords:
    """The replies that are actions.

    A word that is the beginning of another one ("left", "left fast") is told apart by the end-of-turn token: it has to
    follow the shorter word, and only there. Words that end alone need no end-of-turn token, and once a word is the only one
    left its other tokens are certain: an action that one token decides costs one forward pass.

    Attributes:
        words: the replies, in the order of the action space.
        root: the trie of their tokens.
    """

    words: tuple[str, ...]
    root: Node

    @classmethod
    def build(cls, words: Sequence[str], tokenizer: Any) -> ActionWords:
        """Build the trie.

        Args:
            words: at least two different words.
            tokenizer: the policy's; its `eos_token_id` ends a turn.

        Raises:
            EnvironmentSetupError: fewer than two words, an empty word, or two words with the same tokens.
        """
        if len(words) < 2:
            raise EnvironmentSetupError(f"a policy needs at least two actions to choose from, got {list(words)}")
        root = Node()
        for choice, word in enumerate(words):
            ids = tokenizer(word, add_special_tokens=False).input_ids
            if not ids:
                raise EnvironmentSetupError(
                    f"action {choice} has the empty word {word!r}; give it a name in env.actions"
                )
            node = root
            for token in ids:
                node = node.children.setdefault(token, Node())
            if node.choice is not None:
                raise EnvironmentSetupError(
                    f"actions {node.choice} and {choice} have the same word {word!r}; give each its own in env.actions"
                )
            node.choice = choice
        _end_prefixes(root, int(tokenizer.eos_token_id))
        return cls(tuple(words), root)

    def first_tokens(self) -> tuple[int, ...]:
        """For each word the token that decides it at the first branching of the trie (a shared beginning is skipped)."""
        node = self.root
        while node.forced:
            (node,) = node.children.values()
        tokens = [0] * len(self.words)
        for token, child in node.children.items():
            for choice in _choices(child):
                tokens[choice] = token
        return tuple(tokens)


def _choices(node: Node) -> list[int]:
    own = [] if node.choice is None else [node.choice]
    return own + [choice for child in node.children.values() for choice in _choices(child)]


def _end_prefixes(node: Node, end_of_turn: int) -> None:
    for child in list(node.children.values()):
        _end_prefixes(child, end_of_turn)
    if node.choice is not None and node.children:
        node.children[end_of_turn] = Node(choice=node.choice)
        node.choice = None
