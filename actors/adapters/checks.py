"""Checks of an adapter before an engine sees it: what SGLang would trip over, or serve wrongly. Needs no torch.

Each failure is an AdapterRejectedError that says what is wrong with which value. Sources: PEFT's LoraConfig, the
safetensors format, Hugging Face configuration keys of Llama-like models.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from actors.engine.identity import CONFIG_FILE

MAX_NAME_LENGTH: Final = 128
"""Names end up in metrics, headers and URLs."""
_EXPONENTS: Final = {"BF16": (np.uint16, 0x7F80), "F16": (np.uint16, 0x7C00), "F32": (np.uint32, 0x7F800000)}
"""By dtype: words of its size, and the exponent bits that are all set in an infinity or NaN."""
_WEIGHT: Final = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:.*\.)?(\w+)\.lora_([AB])(?:\.\w+)?\.weight")
_READ_BYTES: Final = 1 << 22


class AdapterRejectedError(ValueError):
    """The adapter can't be served by this deployment; the message says why."""


@dataclass(frozen=True, slots=True)
class BaseModel:
    """What of the base model an adapter must fit. `widths`: input and output size of a module, where known."""

    num_layers: int | None
    widths: Mapping[str, tuple[int, int]]


def check_name(name: str, *, served_name: str, taken: Collection[str] = ()) -> str:
    """The name in its normal form. Raises AdapterRejectedError."""
    name = normal(name)
    if not name or not name.isprintable() or name != name.strip() or len(name) > MAX_NAME_LENGTH:
        raise AdapterRejectedError(
            f"name {name!r} must be printable, trimmed, and 1 to {MAX_NAME_LENGTH} characters long"
        )
    if "=" in name:
        raise AdapterRejectedError(f"name {name!r} must not hold '=': SGLang splits name=path there")
    if name == served_name or name.startswith(f"{served_name}:"):
        raise AdapterRejectedError(f"adapter {name!r} is named like the served model {served_name!r}; rename it")
    for other in taken:
        if other != name and folded(other) == folded(name):
            raise AdapterRejectedError(f"name {name!r} can't be told from {other!r}, which is taken")
    return name


def normal(name: str) -> str:
    """The form under which a name is kept: however it was typed, it is the same."""
    return unicodedata.normalize("NFC", name)


def folded(name: str) -> str:
    """Equal for names that people can't tell apart."""
    return unicodedata.normalize("NFKC", name).casefold()


def read_base_model(config_file: Path) -> BaseModel:
    """From the model's config.json; what it doesn't say isn't checked."""
    raw = json.loads(config_file.read_text())
    config: dict[str, Any] = {**raw, **raw.get("text_config", {})}
    hidden, inner = config.get("hidden_size"), config.get("intermediate_size")
    heads, layers = config.get("num_attention_heads"), config.get("num_hidden_layers")
    widths: dict[str, tuple[int, int]] = {}
    if hidden and heads:
        head = config.get("head_dim") or hidden // heads
        grouped = head * (config.get("num_key_value_heads") or heads)
        widths |= {"q_proj": (hidden, head * heads), "k_proj": (hidden, grouped), "v_proj": (hidden, grouped)}
        widths["o_proj"] = (head * heads, hidden)
    if hidden and inner and not (config.get("num_experts") or config.get("num_local_experts")):
        widths |= {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    return BaseModel(layers, widths)


def check_adapter(folder: Path, *, base: BaseModel | None, max_rank: int, target_modules: Collection[str]) -> int:
    """Check the files of a PEFT adapter; returns its rank. `base` None: shapes aren't compared.

    Raises:
        AdapterRejectedError: it can't be served.
    """
    rank, modules = _check_config(folder / CONFIG_FILE, max_rank=max_rank, target_modules=target_modules)
    weights = folder / "adapter_model.safetensors"
    if not weights.is_file():
        raise AdapterRejectedError("its weights are a pickle (adapter_model.bin), which can run code: save safetensors")
    seen: dict[tuple[int, str], set[str]] = {}
    with weights.open("rb") as stream:
        header = _header(stream.read(8), stream.read)
        start = stream.tell()
        for key, tensor in header.items():
            match = _WEIGHT.fullmatch(key)
            if match is None:
                raise AdapterRejectedError(f"weight {key!r} isn't a LoRA matrix of a layer")
            layer, module, side = int(match[1]), match[2], match[3]
            seen.setdefault((layer, module), set()).add(side)
            _check_shape(key, tensor["shape"], layer, module, side, rank=rank, modules=modules, base=base)
            stream.seek(start + tensor["data_offsets"][0])
            _check_finite(key, tensor, stream.read)
    halves = sorted(f"layers.{layer}.{module}" for (layer, module), sides in seen.items() if len(sides) != 2)
    if halves:
        raise AdapterRejectedError(f"{halves[0]} has only one of lora_A and lora_B")
    if not seen:
        raise AdapterRejectedError("its weights hold no LoRA matrix")
    return rank


def _check_config(file: Path, *, max_rank: int, target_modules: Collection[str]) -> tuple[int, set[str] | None]:
    """Rank, and modules that it names (None: a pattern)."""
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as exc:
        raise AdapterRejectedError(f"{CONFIG_FILE} can't be read: {exc}") from exc
    if not isinstance(config, dict):
        raise AdapterRejectedError(f"{CONFIG_FILE} isn't an object")
    if config.get("peft_type", "LORA") != "LORA":
        raise AdapterRejectedError(f"peft_type is {config['peft_type']!r}, only 'LORA' can be served")
    rank = config.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise AdapterRejectedError(f"its rank r is {rank!r}, not a positive number")
    if rank > max_rank:
        raise AdapterRejectedError(f"its rank is {rank}, engines were started with lora.max_rank {max_rank}")
    if config.get("use_dora") or config.get("rank_pattern"):
        raise AdapterRejectedError("it uses DoRA or a rank pattern, which SGLang doesn't serve")
    named = config.get("target_modules")
    if isinstance(named, str) or named is None:
        return rank, None
    if not isinstance(named, list):
        raise AdapterRejectedError(f"its target_modules are {named!r}, neither a list nor a pattern")
    modules = {str(module).rsplit(".", 1)[-1] for module in named}
    missing = sorted(modules - set(target_modules)) if "all" not in target_modules else []
    if missing:
        raise AdapterRejectedError(
            f"it changes module {missing[0]!r}, engines were started with lora.target_modules {sorted(target_modules)}"
        )
    return rank, modules


def _header(length: bytes, read: Any) -> dict[str, Any]:
    """The header of a safetensors file: name -> dtype, shape, data_offsets."""
    try:
        size = int.from_bytes(length, "little")
        if len(length) != 8 or size > 100_000_000:
            raise ValueError(f"a header of {size} bytes")
        header = json.loads(read(size))
        header.pop("__metadata__", None)
        at = 0
        for tensor in sorted(header.values(), key=lambda tensor: tensor["data_offsets"]):
            begin, end = tensor["data_offsets"]
            numbers = [begin, end, *tensor["shape"]]
            if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers) or begin != at:
                raise ValueError(f"a tensor {tensor}")
            if not isinstance(tensor["dtype"], str):
                raise ValueError(f"a tensor {tensor}")
            at = end
        return dict(header)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise AdapterRejectedError(f"adapter_model.safetensors is damaged: {exc}") from exc


def _check_shape(
    key: str,
    shape: list[int],
    layer: int,
    module: str,
    side: str,
    *,
    rank: int,
    modules: set[str] | None,
    base: BaseModel | None,
) -> None:
    if modules is not None and module not in modules:
        raise AdapterRejectedError(f"weight {key!r} belongs to no module of its target_modules {sorted(modules)}")
    if len(shape) != 2 or shape[0 if side == "A" else 1] != rank:
        raise AdapterRejectedError(f"weight {key!r} has shape {shape}, which isn't of rank {rank}")
    if base is None:
        return
    if base.num_layers is not None and layer >= base.num_layers:
        raise AdapterRejectedError(f"weight {key!r} is of layer {layer}, the model has {base.num_layers}")
    if module in base.widths:
        wide = base.widths[module][0 if side == "A" else 1]
        if shape[1 if side == "A" else 0] != wide:
            raise AdapterRejectedError(f"weight {key!r} has shape {shape}, the model's {module} is {wide} wide there")


def _check_finite(key: str, tensor: Mapping[str, Any], read: Any) -> None:
    if tensor["dtype"] not in _EXPONENTS:
        raise AdapterRejectedError(f"weight {key!r} is {tensor['dtype']}, only {', '.join(_EXPONENTS)} can be served")
    words, exponent = _EXPONENTS[tensor["dtype"]]
    left = tensor["data_offsets"][1] - tensor["data_offsets"][0]
    if left != math.prod(tensor["shape"]) * np.dtype(words).itemsize:
        raise AdapterRejectedError(f"weight {key!r} has {left} bytes for shape {tensor['shape']}")
    for chunk in _chunks(read, left):
        left -= len(chunk)
        if len(chunk) % np.dtype(words).itemsize:
            break
        values = np.frombuffer(chunk, words)
        if ((values & exponent) == exponent).any():
            raise AdapterRejectedError(f"weight {key!r} holds an infinity or NaN")
    if left:
        raise AdapterRejectedError(f"weight {key!r} is cut short: {left} bytes are missing")


def _chunks(read: Any, size: int) -> Iterator[bytes]:
    while size > 0 and (chunk := read(min(size, _READ_BYTES))):
        size -= len(chunk)
        yield chunk
