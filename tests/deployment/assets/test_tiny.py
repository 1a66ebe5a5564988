"""The tiny model is a function of its seed, loads in transformers, and its adapters show in the text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from deployment.assets import tiny
from deployment.assets.folder import AssetError, ensure

if TYPE_CHECKING:
    from pathlib import Path

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    assert ensure(folder, tiny.build)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_same_seed_gives_the_same_bytes(model_dir: Path, tmp_path: Path) -> None:
    tiny.build(tmp_path)
    assert files(tmp_path) == files(model_dir)


def test_other_seed_gives_another_model(model_dir: Path, tmp_path: Path) -> None:
    tiny.build(tmp_path, seed=1)
    assert files(tmp_path)["model.safetensors"] != files(model_dir)["model.safetensors"]


def test_adapters_of_one_seed_are_equal_and_of_two_seeds_differ(model_dir: Path, tmp_path: Path) -> None:
    first, again, other = (
        files(tiny.make_adapter(model_dir, tmp_path / name, seed=seed))
        for name, seed in (("first", 7), ("again", 7), ("other", 8))
    )
    assert first == again
    assert first[WEIGHTS] != other[WEIGHTS]
    assert first["adapter_config.json"] == other["adapter_config.json"]


def test_other_seed_replaces_an_adapter_in_place(model_dir: Path, tmp_path: Path) -> None:
    before = files(tiny.make_adapter(model_dir, tmp_path, seed=7))
    after = files(tiny.make_adapter(model_dir, tmp_path, seed=8))
    assert after.keys() == before.keys()
    assert after[WEIGHTS] != before[WEIGHTS]


def test_adapter_has_the_asked_rank_modules_and_dtype(model_dir: Path, tmp_path: Path) -> None:
    tiny.make_adapter(model_dir, tmp_path, seed=0, rank=4, target_modules=("k_proj", "down_proj"), dtype=torch.float32)
    config = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 8, ["k_proj", "down_proj"])
    tensors = load_file(tmp_path / WEIGHTS)
    layer = "base_model.model.model.layers.1"
    assert len(tensors) == 2 * 2 * tiny.SHAPE.num_layers
    assert tensors[f"{layer}.self_attn.k_proj.lora_B.weight"].shape == (128, 4)
    assert tensors[f"{layer}.mlp.down_proj.lora_A.weight"].shape == (4, 512)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_unknown_module_is_refused_by_name(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'qkv_proj'.*choose from q_proj"):
        tiny.make_adapter(model_dir, tmp_path, seed=0, target_modules=("qkv_proj",))


def test_ensure_builds_once_and_never_overwrites_foreign_files(model_dir: Path, tmp_path: Path) -> None:
    assert not ensure(model_dir, tiny.build)
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(AssetError, match="remove it"):
        ensure(tmp_path, tiny.build)
    assert files(tmp_path) == {"notes.txt": b"mine"}


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build_half(folder: Path) -> None:
        (folder / "config.json").write_text("{}", encoding="utf-8")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        ensure(tmp_path / "model", build_half)
    assert list(tmp_path.iterdir()) == []


def test_transformers_loads_model_and_tokenizer(model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir)
    text = "caf\u00e9 \U0001f600\n<0x41>"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    messages = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == "user: hi\nassistant:"

    base = greedy_text(model, tokenizer, prompt)
    assert len(base) == 16  # one printable byte a token, and no early end
    assert base.isprintable()
    for name in tiny.ADAPTER_SEEDS:
        adapted: Any = AutoModelForCausalLM.from_pretrained(model_dir)
        merge(adapted, model_dir / "adapters" / name)
        assert greedy_text(adapted, tokenizer, prompt) != base


def greedy_text(model: Any, tokenizer: Any, prompt: str) -> str:
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    text: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    return text


def merge(model: Any, adapter_dir: Path) -> None:
    """Add the adapter's update to the model's weights, as PEFT defines it: (alpha / r) * B @ A."""
    config = json.loads((adapter_dir / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = load_file(adapter_dir / WEIGHTS)
    for name, a in tensors.items():
        if ".lora_A." in name:
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            path = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
            weight = model.get_parameter(path)
            weight.data += (config["lora_alpha"] / config["r"]) * (b @ a)
