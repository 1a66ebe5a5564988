"""The two files of a LoRA adapter in PEFT's format, byte-identical for equal weights.

Called by tiny (random adapters) and markers (trained ones). Needs no peft: the format is two files.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safetensors.torch import save

from deployment.assets.llama_folder import module_path, write_json

if TYPE_CHECKING:
    from pathlib import Path

    import torch


WEIGHTS_NAME = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """What an adapter_config.json says: which modules are adapted, at which rank and strength."""

    #: Hub name of the model it was trained on; None for random weights, which fit any Llama of their shape.
    base_model: str | None
    rank: int
    alpha: int
    target_modules: tuple[str, ...]


def tensor_name(layer: int, module: str, side: str) -> str:
    """Return PEFT's name of a low-rank factor; `side` is "A" (rank x in) or "B" (out x rank)."""
    return f"base_model.model.{module_path(layer, module)}.lora_{side}.weight"


def write_adapter(folder: Path, spec: AdapterSpec, tensors: dict[str, torch.Tensor]) -> None:
    """Write the adapter into `folder`, replacing one that is there.

    The weights are replaced by a rename: an engine that has the old file mapped keeps the old bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / WEIGHTS_NAME
    fresh = weights.with_suffix(".tmp")
    fresh.write_bytes(save(tensors, metadata={"format": "pt"}))
    os.replace(fresh, weights)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": spec.base_model,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(spec.target_modules),
        "modules_to_save": None,
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
    write_json(folder / "adapter_config.json", config)
