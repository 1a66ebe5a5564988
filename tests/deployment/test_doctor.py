"""Claims of the doctor: each thing that would fail later is found, and its mending named."""

from __future__ import annotations

import json
import socket
import tomllib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from deployment.commands.doctor import PINNED, examine
from deployment.config import Config
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]


def _config(tmp_path: Path, *, port: int = 1, rank: int = 8, gpus: int = 0) -> Config:
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    for folder in (model, adapter):
        folder.mkdir(exist_ok=True)
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / file).write_text("{}")
    (adapter / "adapter_config.json").write_text(json.dumps({"r": rank, "target_modules": ["q_proj"]}))
    save_file(
        {
            f"layers.0.self_attn.q_proj.lora_{side}.weight": np.zeros(shape, np.float32)
            for side, shape in (("A", (rank, 4)), ("B", (4, rank)))
        },
        adapter / "adapter_model.safetensors",
    )
    text = f"""
name: demo
model: {{path: {model}, served_name: m}}
workers: {{count: 2, gpus: {gpus}}}
lora: {{adapters: {{a: {adapter}}}, max_rank: 16}}
router: {{port: {port}}}
"""
    return Config.parse(text, base=tmp_path)


def _failed(config: Config) -> dict[str, str]:
    return {finding.check: f"{finding.found} -> {finding.fix}" for finding in examine(config) if not finding.ok}


def test_the_pins_are_those_of_the_package() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pins = {d.split("==")[0].split("[")[0]: d.split("==")[1] for d in dependencies}

    assert {package: pins[package] for package in PINNED} == PINNED


def test_a_good_deployment_passes(tmp_path: Path) -> None:
    assert _failed(_config(tmp_path, port=free_port())) == {}


def test_a_taken_port_is_found(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        failed = _failed(_config(tmp_path, port=taken.getsockname()[1]))

    assert "change router.port" in failed["router port"]


def test_missing_gpus_are_counted(tmp_path: Path) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        assert "needed by 2 workers" in _failed(_config(tmp_path, port=free_port(), gpus=1))["devices"]


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_model_file_is_named(tmp_path: Path, file: str) -> None:
    config = _config(tmp_path, port=free_port())
    (tmp_path / "model" / file).unlink()

    assert "lacks" in _failed(config)["model"]


def test_an_adapter_of_too_high_rank_is_named(tmp_path: Path) -> None:
    failed = _failed(_config(tmp_path, port=free_port(), rank=64))

    assert failed == {
        "adapter a": "its rank is 64, engines were started with lora.max_rank 16 -> "
        "correct lora.adapters.a, its files, or what section lora allows"
    }


def test_an_adapter_without_weights_is_named(tmp_path: Path) -> None:
    config = _config(tmp_path, port=free_port())
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()

    assert "has no weights" in _failed(config)["adapter a"]
