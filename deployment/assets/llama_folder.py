"""The files of a Hugging Face Llama folder, written so that transformers and SGLang both load them.

Called by the builders in this package (smollm2, tiny) with weights and a tokenizer of their own.
Knows the file formats and the shapes of a Llama's layers; needs neither torch nor transformers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer

ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_MODULES = ("gate_proj", "up_proj", "down_proj")


class LinearShape(NamedTuple):
    """Sizes of one weight matrix, in the order in which torch stores it."""

    out_features: int
    in_features: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """What decides the sizes of a Llama's tensors and how far its positions reach."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context_tokens: int
    rope_theta: float
    norm_eps: float
    ties_embeddings: bool

    @classmethod
    def load(cls, folder: Path) -> LlamaShape:
        """Read the shape back from `folder`/config.json."""
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return cls(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=raw["num_attention_heads"],
            num_kv_heads=raw["num_key_value_heads"],
            head_dim=raw["head_dim"],
            max_context_tokens=raw["max_position_embeddings"],
            rope_theta=raw["rope_theta"],
            norm_eps=raw["rms_norm_eps"],
            ties_embeddings=raw["tie_word_embeddings"],
        )

    def linear(self, module: str) -> LinearShape:
        """Return the sizes of a decoder layer's `module`; ValueError if a Llama has none by that name."""
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        shapes = {
            "q_proj": LinearShape(query, hidden),
            "k_proj": LinearShape(kv, hidden),
            "v_proj": LinearShape(kv, hidden),
            "o_proj": LinearShape(hidden, query),
            "gate_proj": LinearShape(inner, hidden),
            "up_proj": LinearShape(inner, hidden),
            "down_proj": LinearShape(hidden, inner),
        }
        if module not in shapes:
            raise ValueError(f"no module {module!r} in a Llama layer; choose from {', '.join(shapes)}")
        return shapes[module]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """The texts of the tokens that a tokenizer and a generation config name."""

    bos: str
    eos: str
    pad: str
    unk: str | None = None


def module_path(layer: int, module: str) -> str:
    """Return the parameter path of a layer's linear module, without a trailing ".weight"."""
    block = "self_attn" if module in ATTENTION_MODULES else "mlp"
    return f"model.layers.{layer}.{block}.{module}"


def write_configs(folder: Path, shape: LlamaShape, tokenizer: Tokenizer, special: SpecialTokens) -> None:
    """Write config.json and generation_config.json of a bfloat16 model."""
    token_ids = {
        "bos_token_id": tokenizer.token_to_id(special.bos),
        "eos_token_id": tokenizer.token_to_id(special.eos),
        "pad_token_id": tokenizer.token_to_id(special.pad),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_context_tokens,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.ties_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        # Old and new spelling of the same two facts: readers in the field understand one or the other.
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        **token_ids,
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", token_ids)


def write_tokenizer(
    folder: Path, tokenizer: Tokenizer, special: SpecialTokens, *, chat_template: str, max_context_tokens: int
) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        # The generic class: model-specific ones rebuild the pre-tokenizer instead of reading it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special.bos,
        "eos_token": special.eos,
        "pad_token": special.pad,
        "model_max_length": max_context_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    if special.unk is not None:
        config["unk_token"] = special.unk
    write_json(folder / "tokenizer_config.json", config)
    (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` in one fixed layout, so that equal values give equal bytes."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
