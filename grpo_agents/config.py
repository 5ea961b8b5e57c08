"""Every setting of a run, with its type, default and meaning.

This module is the schema alone; `grpo_agents.run.config` reads settings from the command line and from files. Importing
it imports neither torch nor gymnasium, so that a typing mistake is answered at once.

On the command line each setting is `section.key=value`. A section named alone sets its main field (`MAIN_FIELDS`):
`env=CartPole-v1` is `env.id=CartPole-v1`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

MAIN_FIELDS = {
    "env": "id",
    "policy": "model",
    "policy.lora": "rank",
    "sampler": "name",
    "group": "size",
    "loss": "name",
    "learner": "lr",
    "eval": "every",
}


class Section(BaseModel):
    """A group of settings; unknown keys are errors, and assignments are checked like construction."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, validate_default=True)


class FramesConfig(Section):
    """How rendered frames become the pixels of a prompt. `None` takes what the environment's registration says."""

    history: PositiveInt | None = Field(None, description="frames in a prompt, the newest last")
    stride: PositiveInt | None = Field(None, description="environment steps between two frames of a prompt")
    crop: tuple[NonNegativeInt, NonNegativeInt, PositiveInt, PositiveInt] | None = Field(
        None, description="left,top,right,bottom in rendered pixels; the rest is cut away"
    )
    size: tuple[PositiveInt, PositiveInt] | None = Field(
        None, description="width,height in pixels after the one and only resize"
    )
    kind: Literal["video", "images"] | None = Field(
        None, description="video: one Qwen video of all frames; images: one image a frame"
    )
    invert: bool | None = Field(None, description="show dark backgrounds as white, where the tiny model's zero is")


class EnvConfig(Section):
    id: str = Field("CartPole-v1", description="any Gymnasium id; 'module:Id-v0' imports the module first")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="keyword arguments for gymnasium.make")
    rules: str | None = Field(None, description="text before the frames; default: the registered or derived rules")
    actions: list[str] | None = Field(None, description="action words, in the order of the action space")
    question: str | None = Field(None, description="text after the frames")
    caption: bool = Field(False, description="also describe the state's numbers in words (off in all reported runs)")
    frames: FramesConfig = Field(default_factory=FramesConfig)


class LoraConfig(Section):
    rank: NonNegativeInt = Field(16, description="rank of the LoRA adapter; 0 trains all language weights instead")
    alpha: PositiveFloat | None = Field(None, description="LoRA scale numerator; default: twice the rank")
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="dropout before the LoRA matrices while training")
    target_modules: list[str] | None = Field(
        None, description="names of adapted linear layers; default: every linear layer of the language model's blocks"
    )


class PolicyConfig(Section):
    model: str = Field("tiny", description="'tiny' (assets/tiny-qwen-vl), a local folder, or a Qwen-VL name on the hub")
    lora: LoraConfig = Field(default_factory=LoraConfig)
    vision: Literal["frozen", "trained"] = Field("frozen", description="whether the vision tower is trained too")
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = Field("float32", description="as in from_pretrained")
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = Field(
        "sdpa", description="as in from_pretrained"
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    device: str | None = Field(None, description="cpu, cuda, cuda:0, mps; default: the best that is there")
    threads: PositiveInt | None = Field(
        None,
        description="CPU threads; default: 1 for a model of under ten million parameters, else PyTorch's own choice",
    )


class VllmConfig(Section):
    memory: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="share of a GPU's memory for vLLM, its weights included; default: 0.3 in process, 0.9 for a server",
    )
    cache_gb: PositiveInt = Field(1, description="on a CPU: GiB for keys and values")
    max_model_len: PositiveInt | None = Field(
        None, description="longest prompt and reply together, in tokens; default: 4096 or the model's own limit if less"
    )
    block_size: PositiveInt | None = Field(
        None, description="tokens in a block of the prefix cache; default: 32 on a CPU, else vLLM's own choice"
    )
    eager: bool | None = Field(
        None, description="run without compiled graphs; default: on a CPU, where compiling takes longer than it saves"
    )


class SamplerConfig(Section):
    name: Literal["local", "vllm", "vllm-server"] = Field(
        "local",
        description="what draws the policy's replies: local (transformers), vllm (in this process), vllm-server (over HTTP)",
    )
    temperature: PositiveFloat = Field(1.0, description="divides the logits while training; the learner does the same")
    max_new_tokens: PositiveInt = Field(32, description="longest free reply, in tokens; action words need no limit")
    batch_size: PositiveInt = Field(256, description="most prompts in one forward pass")
    vllm: VllmConfig = Field(default_factory=VllmConfig)
    url: list[str] = Field(
        default_factory=list,
        description="addresses of vLLM servers, such as http://localhost:8000; requests are shared",
    )
    timeout: PositiveFloat = Field(60.0, description="seconds after which a server's answer is asked of another one")
    patience: PositiveFloat = Field(300.0, description="seconds without any server after which the run stops")
    adapters: str | None = Field(
        None, description="folder that servers read adapters from under the same path; default: a temporary one"
    )
    canary: PositiveFloat | None = Field(
        None,
        description="largest difference of log-probabilities between sampler and learner after an update; default: 1e-3 "
        "for float32, 0.05 for float16, 0.25 for bfloat16",
    )


class RestartConfig(Section):
    share: float = Field(0.6, ge=0.0, le=1.0, description="share of an update's groups that start before a failure")
    before: tuple[PositiveInt, PositiveInt] = Field((15, 200), description="least,most steps before the failure")
    horizon: PositiveInt = Field(250, description="most steps played from a restart; reaching it is no failure")
    pool: PositiveInt = Field(60, description="newest starts kept to draw from")


class GroupConfig(Section):
    size: int = Field(8, description="episodes that share one start; their returns are compared")
    count: PositiveInt = Field(8, description="groups played for an update")
    start: Literal["restart", "reset"] | None = Field(
        None,
        description="reset: from env.reset(seed); restart: a share of the groups from before a failure; default: restart "
        "where the environment can be saved and restored",
    )
    restart: RestartConfig = Field(default_factory=RestartConfig)
    advantage: Literal["gae", "return_to_go", "episode"] = Field(
        "gae",
        description="how credit is given to steps: gae, against values fitted to the other groups; return_to_go, against "
        "the other members at the same step; episode, the textbook's one number for a whole episode",
    )
    gamma: float = Field(0.995, gt=0.0, le=1.0, description="discount of gae and return_to_go")
    gae_lambda: float = Field(0.95, ge=0.0, le=1.0, description="0 trusts the values alone, 1 the outcomes alone")
    normalize: Literal["batch", "group", "none"] | None = Field(
        None,
        description="divide by the standard deviation of batch or group; default: group for episode, else batch",
    )


class LossConfig(Section):
    name: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"] = Field("grpo", description="the policy loss")
    clip_low: PositiveFloat | None = Field(None, description="the ratio is clipped below at 1 - clip_low")
    clip_high: PositiveFloat | None = Field(None, description="the ratio is clipped above at 1 + clip_high")
    beta: NonNegativeFloat = Field(0.0, description="weight of the KL (k3) to the model without its adapter")
    entropy: NonNegativeFloat = Field(0.02, description="weight of the entropy bonus")
    mismatch: Literal["none", "token", "sequence"] | None = Field(
        None,
        description="correction where sampler and learner disagree about probabilities: token weighs each token by their "
        "ratio, at most mismatch_cap; sequence weighs replies by theirs and drops those above; default: none for the "
        "local sampler, else token",
    )
    mismatch_cap: float = Field(2.0, ge=1.0, description="largest weight of that correction")


class LearnerConfig(Section):
    lr: PositiveFloat = Field(6e-4, description="peak learning rate (AdamW)")
    schedule: Literal["cosine", "linear", "constant"] = Field("linear", description="how the rate falls after warm-up")
    warmup: NonNegativeInt = Field(0, description="updates of linear warm-up")
    weight_decay: NonNegativeFloat = Field(0.0, description="decoupled weight decay")
    epochs: PositiveInt = Field(1, description="passes over the steps of an update")
    max_steps: PositiveInt = Field(4096, description="most steps trained on in one update, drawn at random from all")
    minibatch: PositiveInt = Field(128, description="steps in one optimizer step, over all processes")
    micro_batch: PositiveInt | None = Field(None, description="steps in one backward pass; default: the minibatch")
    max_grad_norm: PositiveFloat = Field(10.0, description="gradient norm above which gradients are scaled down")


class EvalConfig(Section):
    every: NonNegativeInt = Field(2, description="updates between two validations; 0: only at the end")
    episodes: PositiveInt = Field(16, description="episodes of the validation panel, always the same seeds, greedy")
    confirm: NonNegativeInt = Field(
        64,
        description="more validation seeds, played when the mean meets the threshold and the lower end of its interval does "
        "not; the run stops where that end meets it over all of them. 0: a mean that meets it is enough",
    )


class RewardConfig(Section):
    name: str = Field(description="a registered reward, or module:function")
    weight: float = Field(1.0, description="factor in the sum of rewards")


def _tensorboard() -> list[Literal["tensorboard", "wandb", "trackio"]]:
    return ["tensorboard"]


class TrainConfig(Section):
    """All settings of `python -m grpo_agents.train`."""

    env: EnvConfig = Field(default_factory=EnvConfig)
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    sampler: SamplerConfig = Field(default_factory=SamplerConfig)
    group: GroupConfig = Field(default_factory=GroupConfig)
    rewards: list[RewardConfig] = Field(
        default_factory=lambda: [RewardConfig(name="return")], description="named rewards and their weights"
    )
    loss: LossConfig = Field(default_factory=LossConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    name: str | None = Field(None, description="folder under runs/; default: environment, seed and time")
    seed: NonNegativeInt = Field(0, description="root of every random stream")
    updates: NonNegativeInt | None = Field(None, description="stop after this many updates in all; 0: only evaluate")
    env_steps: PositiveInt = Field(100_000, description="stop once this many training steps were played")
    episodes: PositiveInt = Field(100, description="held-out episodes behind each row of the final table")
    resume: str | None = Field(None, description="run folder to go on from")
    experiment: str | None = Field(None, description="YAML file of settings, laid under those of the command line")
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = Field(
        default_factory=_tensorboard, description="where metrics go besides metrics.jsonl"
    )
    keep_checkpoints: PositiveInt = Field(2, description="newest checkpoints kept besides the best")


class EvaluateConfig(Section):
    """All settings of `python -m grpo_agents.evaluate`."""

    run: str = Field(description="run folder whose best adapter plays")
    render: Literal["none", "human", "video", "terminal"] = Field("none", description="how to watch it play")
    episodes: PositiveInt | None = Field(None, description="episodes played; default: the run's, or 1 when watching")
    adapter: Literal["best", "last"] = Field("best", description="which checkpoint plays")
    greedy: bool = Field(True, description="take the likeliest action; false draws from the policy")
    fps: PositiveInt | None = Field(None, description="frames per second shown; default: the environment's")
    sampler: SamplerConfig = Field(default_factory=SamplerConfig)


class ServeConfig(Section):
    """All settings of `python -m grpo_agents.serve`."""

    model: str = Field(
        description="run folder whose best adapter is served; or a model folder or name, served as it is"
    )
    adapter: Literal["best", "last"] = Field("best", description="which checkpoint of the run is served")
    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all")
    port: PositiveInt = Field(8000, le=65535, description="port to listen on")
    dtype: Literal["float32", "bfloat16", "float16", "auto"] | None = Field(
        None, description="as in from_pretrained; default: the run's, or auto for a model"
    )
    lora_rank: NonNegativeInt | None = Field(
        None, description="highest rank of adapters that clients may load, 0 for none; default: the run's, or 16"
    )
    pictures: PositiveInt = Field(8, description="most images, and most videos, in one prompt")
    vllm: VllmConfig = Field(default_factory=VllmConfig)
    arguments: list[str] = Field(default_factory=list, description="more words for `vllm serve`, as they are")


class SftConfig(Section):
    """All settings of `python -m grpo_agents.sft`."""

    data: str = Field(
        description="JSONL file of chats (column messages), images as paths beside it; #N takes the first N"
    )
    output: str = Field(description="folder for the trained adapter, or for the whole model when policy.lora.rank=0")
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    steps: PositiveInt = Field(1000, description="optimizer steps")
    batch: PositiveInt = Field(64, description="conversations in an optimizer step")
    lr: PositiveFloat = Field(1e-3, description="peak learning rate (AdamW, cosine)")
    warmup: NonNegativeInt = Field(50, description="steps of linear warm-up")
    weight_decay: NonNegativeFloat = Field(0.01, description="decoupled weight decay")
    max_grad_norm: PositiveFloat = Field(1.0, description="gradient norm above which gradients are scaled down")
    holdout: float = Field(0.02, ge=0.0, lt=1.0, description="share of the conversations kept for the accuracy report")
    seed: NonNegativeInt = Field(0, description="order of the data and initial adapter")
