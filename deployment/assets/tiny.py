"""A two-layer random Llama with a byte tokenizer and two random LoRA adapters, made in a second.

Called by `python -m deployment.assets tiny` and by tests, which use `make_adapter` for adapters of
their own (other weights under an old name, other ranks). Everything is a function of the seed:
the same seed gives the same bytes. The model speaks nonsense, but repeatable printable nonsense
that depends on the prompt and on the adapter.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save
from tokenizers import AddedToken, Tokenizer, decoders, models

from deployment.assets.adapter_files import AdapterSpec, tensor_name, write_adapter
from deployment.assets.llama_folder import (
    ATTENTION_MODULES,
    MLP_MODULES,
    LlamaShape,
    SpecialTokens,
    module_path,
    write_configs,
    write_tokenizer,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

logger = logging.getLogger(__name__)

SHAPE = LlamaShape(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_context_tokens=4096,
    rope_theta=10_000.0,
    norm_eps=1e-5,
    ties_embeddings=False,
)
SPECIAL = SpecialTokens(bos="<bos>", eos="<eos>", pad="<eos>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
#: Seeds of the adapters that come with the model.
ADAPTER_SEEDS = {"adapter-a": 1, "adapter-b": 2}
#: Large enough for attention to tell prompts apart; at the usual 0.02 it only averages.
WEIGHT_STD = 0.06
#: The model can only say these bytes: no broken UTF-8, and no end of text before max_tokens.
SAYABLE_BYTES = range(0x20, 0x7F)


def build(folder: Path, *, seed: int = 0) -> None:
    """Write the model, its tokenizer and adapters/<name> into `folder`, which exists."""
    logger.info("writing %s", folder.name)
    (folder / "model.safetensors").write_bytes(save(_random_weights(seed), metadata={"format": "pt"}))
    tokenizer = _byte_tokenizer()
    write_configs(folder, SHAPE, tokenizer, SPECIAL)
    write_tokenizer(
        folder,
        tokenizer,
        SPECIAL,
        chat_template=CHAT_TEMPLATE,
        max_context_tokens=SHAPE.max_context_tokens,
    )
    for name, adapter_seed in ADAPTER_SEEDS.items():
        logger.info("writing %s", name)
        make_adapter(folder, folder / "adapters" / name, seed=adapter_seed)


def make_adapter(
    base_dir: Path,
    out_dir: Path,
    *,
    seed: int,
    rank: int = 8,
    target_modules: Sequence[str] = ATTENTION_MODULES,
    dtype: torch.dtype = torch.bfloat16,
    scale: float = 0.5,
) -> Path:
    """Write a random adapter for the Llama in `base_dir` into `out_dir` and return `out_dir`.

    `scale` is the standard deviation of the B factors: 0 leaves the base model's output as it is,
    0.5 changes the tiny model's greedy output beyond recognition. An adapter that is already in
    `out_dir` is replaced. ValueError for a module that a Llama layer lacks.
    """
    shape = LlamaShape.load(base_dir)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(shape.num_layers):
        for module in target_modules:
            linear = shape.linear(module)
            a = torch.randn(rank, linear.in_features, generator=generator) * linear.in_features**-0.5
            b = torch.randn(linear.out_features, rank, generator=generator) * scale
            tensors[tensor_name(layer, module, "A")] = a.to(dtype)
            tensors[tensor_name(layer, module, "B")] = b.to(dtype)
    spec = AdapterSpec(base_model=None, rank=rank, alpha=2 * rank, target_modules=tuple(target_modules))
    write_adapter(out_dir, spec, tensors)
    return out_dir


def _random_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * WEIGHT_STD).to(torch.bfloat16)

    def ones() -> torch.Tensor:
        return torch.ones(SHAPE.hidden_size, dtype=torch.bfloat16)

    head = normal(SHAPE.vocab_size, SHAPE.hidden_size)
    head[[row for row in range(SHAPE.vocab_size) if row not in SAYABLE_BYTES]] = 0
    tensors = {
        "model.embed_tokens.weight": normal(SHAPE.vocab_size, SHAPE.hidden_size),
        "model.norm.weight": ones(),
        "lm_head.weight": head,
    }
    for layer in range(SHAPE.num_layers):
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = ones()
        tensors[f"model.layers.{layer}.post_attention_layernorm.weight"] = ones()
        for module in (*ATTENTION_MODULES, *MLP_MODULES):
            tensors[f"{module_path(layer, module)}.weight"] = normal(*SHAPE.linear(module))
    return tensors


def _byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose token ids below 256 are the bytes of the text in UTF-8."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (SPECIAL.bos, SPECIAL.eos)])
    return tokenizer
