"""Base models and adapters that cannot be used: each is refused with its name, the cause and the fix."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from models import CORPUS, FAMILIES, Family, load, stirred

from grpo_agents.errors import PolicyLoadError
from grpo_agents.policies.base_model import fingerprint, resolve_model


@pytest.fixture
def model(tiny_folders: dict[Family, Path], tmp_path: Path) -> Path:
    """A copy of a checkpoint, to be damaged."""
    return Path(shutil.copytree(tiny_folders["qwen3_vl"], tmp_path / "model"))


@pytest.fixture(scope="module")
def saved(tiny_folders: dict[Family, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    adapter = tmp_path_factory.mktemp("saved") / "adapter"
    stirred(load(tiny_folders["qwen3_vl"])).save(adapter)
    return adapter


@pytest.fixture
def adapter(saved: Path, tmp_path: Path) -> Path:
    """A copy of a saved adapter, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "adapter"))


def other_weights(folder: Path, family: Family = "qwen3_vl") -> Path:
    from grpo_agents.policies.tiny import save_tiny

    save_tiny(folder, family, CORPUS, vocab_size=320, seed=1)
    return folder


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refusal(folder: Path | str, **settings: object) -> str:
    with pytest.raises(PolicyLoadError) as caught:
        load(folder, **settings)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_folder_without_a_configuration(model: Path) -> None:
    (model / "config.json").unlink()
    assert refusal(model) == (
        f"policy.model={model} is no model folder: {model} has no config.json. Name the folder that save_pretrained wrote"
    )


def test_a_folder_without_a_processor(model: Path) -> None:
    (model / "processor_config.json").unlink()
    assert refusal(model) == (
        f"policy.model={model} has no processor (processor_config.json or preprocessor_config.json). Save it beside the "
        "weights: AutoProcessor.from_pretrained(<base model>).save_pretrained(<folder>)"
    )


@pytest.mark.parametrize("name", ["./models/missing", "/models/missing", "~/missing", "missing", "a/b/c"])
def test_a_name_that_is_neither_a_folder_nor_on_the_hub(name: str) -> None:
    assert refusal(name) == (
        f"policy.model={name}: there is no such folder, and a hub name has the form owner/name. "
        "Use 'tiny', a folder, or a name such as Qwen/Qwen2.5-VL-3B-Instruct"
    )


def test_a_hub_name_that_does_not_answer() -> None:
    assert re.match(
        "policy.model=nobody/nothing cannot be loaded: .*download them again$", refusal("nobody/nothing"), re.S
    )


@pytest.mark.parametrize("kind", ["llama", "qwen2_vl"])
def test_a_family_that_is_not_supported_is_named_before_its_weights_are_read(model: Path, kind: str) -> None:
    edit(model / "config.json", model_type=kind)
    (model / "model.safetensors").unlink()
    assert refusal(model) == (
        f"policy.model={model} is a {kind}; the supported families are qwen2_5_vl, qwen3_vl. "
        "Use a Qwen2.5-VL or Qwen3-VL"
    )


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def scribble(path: Path) -> None:
    path.write_text("{ no")


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("model.safetensors", Path.unlink),
        ("model.safetensors", cut),
        ("model.safetensors", scribble),
        ("config.json", scribble),
        ("processor_config.json", scribble),
        ("tokenizer.json", scribble),
    ],
)
def test_a_model_with_a_damaged_file(model: Path, file: str, damage: Callable[[Path], None]) -> None:
    damage(model / file)
    message = refusal(model)
    assert message.startswith(f"policy.model={model} cannot be loaded: ")
    assert message.endswith("its files are incomplete or damaged: copy or download them again")


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_folder_without_one_of_its_files(tiny_folders: dict[Family, Path], adapter: Path, file: str) -> None:
    (adapter / file).unlink()
    expected = (
        f"{adapter} holds no peft adapter: it has no {file}. Name a folder such as runs/NAME/best, or save it again"
    )
    assert refusal(tiny_folders["qwen3_vl"], adapter=adapter) == expected
    with pytest.raises(PolicyLoadError, match=f"^{re.escape(expected)}$"):
        load(tiny_folders["qwen3_vl"]).load_adapter(adapter)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("adapter_config.json", scribble),
        ("adapter_config.json", lambda path: edit(path, peft_type="NONE")),
        ("adapter_model.safetensors", cut),
        ("adapter_model.safetensors", scribble),
        ("base_model.json", scribble),
        ("base_model.json", lambda path: path.write_text("{}")),
    ],
)
def test_an_adapter_with_a_damaged_file(
    tiny_folders: dict[Family, Path], adapter: Path, file: str, damage: Callable[[Path], None]
) -> None:
    damage(adapter / file)
    message = refusal(tiny_folders["qwen3_vl"], adapter=adapter)
    assert message.startswith(f"the adapter in {adapter} is damaged: ")
    assert message.endswith("Use an earlier checkpoint, or copy the folder again")


def test_an_adapter_that_lacks_a_layer(tiny_folders: dict[Family, Path], adapter: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(adapter / "adapter_model.safetensors")
    name = sorted(weights)[0]
    shape = tuple(weights.pop(name).shape)
    save_file(weights, adapter / "adapter_model.safetensors")
    assert refusal(tiny_folders["qwen3_vl"], adapter=adapter) == (
        f"the weights in {adapter} do not fit the policy: {name} {shape} is in only one of the two. Use the policy.lora "
        "and policy.vision settings they were trained with"
    )


@pytest.mark.parametrize("settings", [{"rank": 8}, {"vision": "trained"}, {"targets": ["q_proj"]}])
def test_weights_of_another_form_do_not_replace_a_policys(
    tiny_folders: dict[Family, Path], saved: Path, settings: dict[str, object]
) -> None:
    policy = load(tiny_folders["qwen3_vl"], **settings)  # type: ignore[arg-type]
    with pytest.raises(PolicyLoadError, match="do not fit the policy: .* is in only one of the two"):
        policy.load_adapter(saved)


def test_a_saved_adapter_keeps_its_own_rank(tiny_folders: dict[Family, Path], saved: Path) -> None:
    policy = load(tiny_folders["qwen3_vl"], rank=8, adapter=saved)
    assert {weight.shape[0] for name, weight in policy.core.named_parameters() if "lora_A" in name} == {4}


def test_a_full_model_of_another_shape(tiny_folders: dict[Family, Path], tmp_path: Path) -> None:
    from grpo_agents.policies.tiny import save_tiny

    save_tiny(tmp_path / "smaller", "qwen3_vl", CORPUS, vocab_size=300)
    message = refusal(tiny_folders["qwen3_vl"], rank=0, adapter=tmp_path / "smaller")
    assert message.startswith(f"the weights in {tmp_path / 'smaller'} do not fit the policy: lm_head.weight ")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_of_another_base_is_refused_though_the_folders_have_one_name(
    saved: Path, tmp_path: Path, family: Family
) -> None:
    trained_on = json.loads((saved / "adapter_config.json").read_text())["base_model_name_or_path"]
    other = other_weights(tmp_path / Path(trained_on).name, family)
    assert refusal(other, adapter=saved) == (
        f"the adapter in {saved} was trained on {trained_on}, whose weights are not those of {other}. Set policy.model to "
        "the model it was trained on, or start a new run"
    )


def test_an_adapter_moves_with_its_base_to_another_machine(model: Path, adapter: Path) -> None:
    moved = model.rename(model.parent / "renamed")
    edit(adapter / "adapter_config.json", base_model_name_or_path="/not/on/this/machine")
    load(moved, adapter=adapter)


def test_an_adapter_is_refused_once_its_bases_weights_were_replaced(model: Path, tmp_path: Path) -> None:
    load(model).save(tmp_path / "adapter")
    shutil.rmtree(model)
    other_weights(model)
    assert "whose weights are not those of" in refusal(model, adapter=tmp_path / "adapter")


def test_an_adapter_from_elsewhere_is_judged_by_the_base_it_names(
    tiny_folders: dict[Family, Path], model: Path, adapter: Path, tmp_path: Path
) -> None:
    """A folder that peft alone wrote holds a name. It is enough where it is the policy's, or leads to the same weights."""
    (adapter / "base_model.json").unlink()
    load(tiny_folders["qwen3_vl"], adapter=adapter)
    load(model, adapter=adapter)
    assert "whose weights are not those of" in refusal(other_weights(tmp_path / "other"), adapter=adapter)
    edit(adapter / "adapter_config.json", base_model_name_or_path="/not/on/this/machine")
    assert "was trained on /not/on/this/machine, whose" in refusal(model, adapter=adapter)


def test_the_fingerprint_is_of_the_weights_alone(model: Path) -> None:
    before = fingerprint(str(model))
    assert before is not None and re.fullmatch("[0-9a-f]{32}", before)
    edit(model / "config.json", comment="another text")
    assert fingerprint(str(model)) == before
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert fingerprint(str(model)) != before
    weights.unlink()
    assert fingerprint(str(model)) is None
    assert fingerprint("nobody/nothing") is None


def test_names_are_resolved_to_folders_where_there_are_such(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    assert resolve_model("model") == str(model)
    assert resolve_model("Qwen/Qwen2.5-VL-3B-Instruct") == "Qwen/Qwen2.5-VL-3B-Instruct"
    assert (Path(resolve_model("tiny")) / "config.json").is_file()
