"""Builders for tests of adapters: a tiny Llama's config, PEFT folders that fit it, a desk over them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file

from actors.adapters.admission import AdapterDesk, DeskSettings
from actors.adapters.entry import AdapterConfig, Placement
from actors.engine.identity import CONFIG_FILE, WEIGHT_FILES

RANK: Final = 4
MODULES: Final = ("q_proj", "v_proj")
#: input and output size of each module of the tiny Llama below
WIDTHS: Final = {
    "q_proj": (16, 16),
    "k_proj": (16, 8),
    "v_proj": (16, 8),
    "o_proj": (16, 16),
    "gate_proj": (16, 32),
    "up_proj": (16, 32),
    "down_proj": (32, 16),
}
NUM_LAYERS: Final = 2
BASE_CONFIG: Final = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": NUM_LAYERS,
    "intermediate_size": 32,
}

Tensors = dict[str, np.ndarray[Any, Any]]


def key_of(layer: int, module: str, side: str) -> str:
    """PEFT's name of a LoRA matrix."""
    block = "mlp" if module in ("gate_proj", "up_proj", "down_proj") else "self_attn"
    return f"base_model.model.model.layers.{layer}.{block}.{module}.lora_{side}.weight"


def tensors_of(
    *, seed: int = 0, rank: int = RANK, modules: Sequence[str] = MODULES, dtype: type = np.float32
) -> Tensors:
    """Random LoRA matrices that fit the tiny Llama."""
    rng = np.random.default_rng(seed)
    return {
        key_of(layer, module, side): rng.standard_normal(
            (rank, WIDTHS[module][0]) if side == "A" else (WIDTHS[module][1], rank)
        ).astype(dtype)
        for layer in range(NUM_LAYERS)
        for module in modules
        for side in "AB"
    }


def make_adapter(
    folder: Path, *, seed: int = 0, config: Mapping[str, Any] | None = None, tensors: Tensors | None = None
) -> Path:
    """Write a PEFT folder, in place of one that is there; `config` changes single values of its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": list(MODULES), **(config or {})}
    (folder / CONFIG_FILE).write_text(json.dumps(said))
    save_file(tensors_of(seed=seed) if tensors is None else tensors, folder / WEIGHT_FILES[0])
    return folder


def safetensors_bytes(header: Mapping[str, Any] | bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file by hand; `length` is what it says of its header's size, if that is a lie."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def make_desk(folder: Path, adapters: Mapping[str, AdapterConfig | Path] | None = None, **changes: Any) -> AdapterDesk:
    """A desk over configured `adapters`; the base model, the cache and the state file lie in `folder`."""
    base = folder / "base"
    base.mkdir(parents=True, exist_ok=True)
    (base / "config.json").write_text(json.dumps(BASE_CONFIG))
    settings: dict[str, Any] = {
        "served_name": "base",
        "model_path": str(base),
        "configured": {
            name: AdapterConfig(path=str(one)) if isinstance(one, Path) else one
            for name, one in (adapters or {}).items()
        },
        "default_placement": Placement.EVERYWHERE,
        "max_rank": 8,
        "target_modules": MODULES,
        "roots": (str(folder),),
        "cache_dir": str(folder / "cache"),
        "cache_gb": 1.0,
        "state_file": str(folder / "state" / "adapters.json"),
        "run_id": "run-1",
        **changes,
    }
    return AdapterDesk(DeskSettings(**settings))
