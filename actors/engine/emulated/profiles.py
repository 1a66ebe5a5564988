"""Timing of an engine on some hardware, by a roofline: compute bounds prefill, memory bandwidth bounds decode.

For a model of P parameters in B bytes each, on a GPU of F dense bf16 FLOP/s and W bytes/s:

* prefill, per token: 2 P / (F * 0.5). Half of the peak is what tuned prefill kernels reach.
* attention, per token and token of context: 4 * layers * hidden / (F * 0.5), since each attends half of the rest.
* decode step: P * B / (W * 0.8), plus a launch, plus the KV cache that is read, KV bytes / (W * 0.8) a token.
* KV cache: 0.85 of the memory less the weights, by KV bytes a token.

Peaks: NVIDIA A100 80GB SXM datasheet (312 TFLOP/s, 2,039 GB/s), NVIDIA H200 datasheet (989 TFLOP/s dense, 4.8 TB/s,
141 GB). Model: Llama 3.1 8B's config.json (8.03e9 parameters, 32 layers, hidden 4096, 8 KV heads of 128: 131,072 bytes
of bf16 a token). An adapter of rank 16 on all linear layers is 84 MB: about 10 ms over PCIe 4 at 10 GB/s, twice that
with its copies; from storage about a second. These are models, not measurements.
"""

from __future__ import annotations

from typing import Final

import msgspec


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """How long what takes, in milliseconds."""

    name: str
    prefill_ms_per_token: float
    attention_ms_per_token_pair: float
    """For each computed token and each token before it."""
    prefill_base_ms: float = 8.0
    """A prefill step's own: scheduling, launches, sampling."""
    decode_base_ms: float
    decode_ms_per_request: float = 0.05
    decode_ms_per_context_token: float
    swap_ms: float = 20.0
    """An adapter from host memory into a slot."""
    load_ms: float = 1000.0
    """An adapter from storage into host memory."""
    kv_tokens: int
    chunk_tokens: int = 8192
    """SGLang's chunked_prefill_size for this memory."""
    max_running: int = 256


def _roofline(name: str, *, tflops: float, bandwidth_gb: float, memory_gb: float) -> Profile:
    parameters, layers, hidden, kv_bytes = 8.03e9, 32, 4096, 131_072
    flops, bandwidth = tflops * 1e12 * 0.5, bandwidth_gb * 1e9 * 0.8
    return Profile(
        name=name,
        prefill_ms_per_token=2 * parameters / flops * 1000,
        attention_ms_per_token_pair=4 * layers * hidden / flops * 1000,
        decode_base_ms=2 * parameters / bandwidth * 1000 + 1.5,
        decode_ms_per_context_token=kv_bytes / bandwidth * 1000,
        kv_tokens=int((memory_gb * 1e9 * 0.85 - 2 * parameters) / kv_bytes),
    )


PROFILES: Final = {
    profile.name: profile
    for profile in (
        _roofline("a100-llama-8b", tflops=312, bandwidth_gb=2039, memory_gb=80),
        _roofline("h200-llama-8b", tflops=989, bandwidth_gb=4800, memory_gb=141),
        Profile(
            name="tiny-cpu",
            prefill_ms_per_token=0.05,
            attention_ms_per_token_pair=0.0,
            prefill_base_ms=10.0,
            decode_base_ms=6.0,
            decode_ms_per_request=0.5,
            decode_ms_per_context_token=0.0,
            swap_ms=1.0,
            load_ms=20.0,
            kv_tokens=1 << 14,
        ),
        Profile(
            name="instant",
            prefill_ms_per_token=0.0,
            attention_ms_per_token_pair=0.0,
            prefill_base_ms=0.0,
            decode_base_ms=0.0,
            decode_ms_per_request=0.0,
            decode_ms_per_context_token=0.0,
            swap_ms=0.0,
            load_ms=0.0,
            kv_tokens=1 << 20,
        ),
    )
}
"""By name. `tiny-cpu` is about what the two-layer test model takes on two cores; `instant` takes no time."""


def profile_of(name: str) -> Profile:
    """Raises ValueError with the names there are."""
    try:
        return PROFILES[name]
    except KeyError:
        raise ValueError(f"no profile {name!r}; there are {', '.join(PROFILES)}") from None
