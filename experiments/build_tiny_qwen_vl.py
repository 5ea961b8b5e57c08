"""Build `assets/tiny-qwen-vl` from nothing: `python experiments/build_tiny_qwen_vl.py`.

1. Train a byte-level tokenizer on the words that occur in prompts and replies.
2. Make a random Qwen3-VL of about 400,000 parameters (`grpo_agents.policies.tiny`).
3. Render CartPole in 20,000 random states, played on with random actions.
4. Train on chats about these frames with the general door `grpo_agents.sft`. Half of them ask: where is the cart, how does
   the pole lean, where were they a moment ago, how do they move; the answers are letters, A (left) to I (right). The other
   half open as a game does, with its rules and its question. The reply is an action word drawn at random, or remarks on
   what is to be seen: the model learns to reply with such a word and what to look at, and nothing about which is good.

The report at the end is the share of right answers for each question on frames not trained on.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
from PIL import Image

from grpo_agents.config import EnvConfig, LoraConfig, PolicyConfig, SftConfig
from grpo_agents.envs.capture import Capture
from grpo_agents.envs.registry import prompt_settings
from grpo_agents.policies.tiny import save_tiny
from grpo_agents.sft import finetune

ROOT = Path(__file__).resolve().parent.parent
STRIDE = 4
SECONDS = STRIDE * 0.02
# question word: (column of the state, when, bins, width of a bin in m, rad, m/s or rad/s). A velocity is what can be seen of
# it, the change between the two frames: the state's own velocity also holds the last push, which no frame shows yet.
QUESTIONS = {
    "cart": (0, "now", 9, 0.6),
    "came": (0, "before", 9, 0.6),
    "pole": (2, "now", 9, 0.05),
    "leaned": (2, "before", 9, 0.05),
    "drift": (0, "change", 9, 0.3),
    "swing": (2, "change", 9, 0.3),
}
# Asked for its move, the model is to have all of this in mind at once. So most replies to the game's question are remarks,
# one letter about each of these in random order. The letters are those of a blurred value: the likelihoods of bins under
# Gaussian noise are linear in the value before the softmax, so the value itself has to be in the hidden state.
REMARKS = {"cart": "ABCDEFGHI", "pole": "JKLMNOPQR", "drift": "abcdefghi", "swing": "jklmnopqr"}
BLUR = 0.75
"""Standard deviation of a remark's noise, in bins."""
WORDS = """
user assistant system Describe cart came pole leaned drift swing Move Which action What Where How now before? left right up
down stay jump fire noop yes no true false north south east west open close take drop look wait push pull
A pole stands on a cart. Keep the pole up and the cart on the track. Push left or right. A B C D E F G H I J K L M N O P Q R
a b c d e f g h i j k l m n o p q r
This is a game. Choose the next action. The paddle keeps the ball in play and breaks the bricks. Answer with one word.
Tools: Call one with {"name": ..., "arguments": ...} name arguments type function parameters properties string number
integer object required description result error answer question calculator expression lookup table query booking city date
time price guess animal is the of and a an to in it for with on at by from The In It Is Are Do Does Can Please Thanks
"""


def corpus() -> list[str]:
    """Text whose words become single tokens: the project's prompts, templates and replies."""
    described = [" ".join(f"{word} {letter}" for word in QUESTIONS) for letter in "ABCDEFGHI"]
    numbers = [f"<{tenth / 10:.1f} seconds> {tenth} + {tenth} = {2 * tenth}" for tenth in range(40)]
    return ([WORDS] * 8 + described * 4 + numbers) * 4


def answer(question: str, states: dict[str, np.ndarray], letters: str = "ABCDEFGHI", noise: float = 0.0) -> str:
    """The letter of a question's bin: the first for the most negative values, the middle one for zero."""
    column, when, bins, width = QUESTIONS[question]
    index = int(np.clip(np.floor(states[when][column] / width + noise + bins / 2), 0, bins - 1))
    return letters[index]


def remarks(states: dict[str, np.ndarray], rng: np.random.Generator) -> str:
    """One letter about each of `REMARKS`, in random order."""
    return " ".join(answer(str(q), states, REMARKS[q], rng.normal(0, BLUR)) for q in rng.permutation(list(REMARKS)))


def random_state(rng: np.random.Generator) -> np.ndarray:
    """Half of the states anywhere on the track, half near balance, where a good policy will spend its time."""
    if rng.random() < 0.5:
        return rng.uniform([-2.3, -2.0, -0.2, -2.0], [2.3, 2.0, 0.2, 2.0])
    return np.array([rng.uniform(-2.3, 2.3), rng.normal(0, 0.6), rng.normal(0, 0.06), rng.normal(0, 0.6)])


def write_chats(folder: Path, count: int, seed: int) -> Path:
    """Render random play and write `chats.jsonl` with its frames: a question, then a description, for each pair."""
    rng = np.random.default_rng(seed)
    env = gym.make("CartPole-v1", render_mode="rgb_array")
    env.reset(seed=seed)
    game = prompt_settings(EnvConfig())
    capture = Capture(env, game.frames)
    (folder / "frames").mkdir()
    lines = []
    while len(lines) < count:
        inner = env.unwrapped
        inner.state, inner.steps_beyond_terminated = random_state(rng), None
        before, first = np.array(inner.state), capture.frame()
        ended = False
        for _ in range(STRIDE):
            ended = ended or inner.step(int(rng.integers(2)))[2]
        if ended:
            continue
        now = np.array(inner.state)
        states = {"before": before, "now": now, "change": (now - before) / SECONDS}
        names = [f"frames/{len(lines):05d}{half}.png" for half in "ab"]
        for name, frame in zip(names, (first, capture.frame()), strict=True):
            Image.fromarray(frame.pixels).save(folder / name, compress_level=1)
        words = rng.permutation(list(QUESTIONS))
        question, reply = f"{words[0]}?", answer(words[0], states)
        if rng.random() < 1 / 2:
            question = game.question
            reply = remarks(states, rng) if rng.random() < 0.8 else str(rng.choice(game.actions))
        video = {"type": "video", "video": names, "fps": 50 / STRIDE}
        rules = [{"type": "text", "text": game.rules}] if rng.random() < 0.5 or question == game.question else []
        chat = [
            {"role": "user", "content": [*rules, video, {"type": "text", "text": question}]},
            {"role": "assistant", "content": reply},
        ]
        if question != game.question:
            described = " ".join(f"{word} {answer(word, states)}" for word in words)
            chat += [{"role": "user", "content": "Describe"}, {"role": "assistant", "content": described}]
        lines.append(json.dumps({"messages": chat}))
    env.close()
    path = folder / "chats.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "assets" / "tiny-qwen-vl")
    parser.add_argument("--frames", type=int, default=20_000, help="pairs of frames to train on")
    parser.add_argument("--steps", type=int, default=2_800, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_tiny(folder / "random", "qwen3_vl", corpus(), vocab_size=1024, seed=options.seed)
        data = write_chats(folder, options.frames, options.seed)
        print(f"{options.frames} pairs of frames in {time.perf_counter() - begin:.0f} s", flush=True)
        policy = PolicyConfig(model=str(folder / "random"), lora=LoraConfig(rank=0), vision="trained", device="cpu")
        config = SftConfig(
            data=str(data), output=str(options.output), policy=policy, steps=options.steps, seed=options.seed
        )
        finetune(config)
    report(options.output, options.seed + 1)
    print(f"built {options.output} in {time.perf_counter() - begin:.0f} s")


def report(model: Path, seed: int, count: int = 1_000) -> None:
    """Print the share of right answers for each question, in descriptions of frames that were not trained on."""
    from grpo_agents.policies.qwen_vl import QwenVL
    from grpo_agents.run.chats import read_chats
    from grpo_agents.sft import supervised_sequence, token_hits

    policy = QwenVL.load(PolicyConfig(model=str(model), device="cpu"))
    with tempfile.TemporaryDirectory() as temporary:
        sequences = [
            supervised_sequence(chat, policy) for chat in read_chats(str(write_chats(Path(temporary), count, seed)))
        ]
    right: dict[str, list[bool]] = {question: [] for question in QUESTIONS}
    for sequence, hits in zip(sequences, token_hits(policy, sequences), strict=True):
        for target, hit in zip(sequence.targets, hits, strict=True):
            before = policy.processor.tokenizer.decode([sequence.encoded.layout.ids[target - 1]]).strip()
            if before in right:
                right[before].append(bool(hit))
    for question, hits in right.items():
        print(f"{question:8} {np.mean(hits):.3f} right of {len(hits)}")


if __name__ == "__main__":
    main()
