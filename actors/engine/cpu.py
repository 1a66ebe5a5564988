"""SGLang's platform for a machine without CUDA: plain torch on the CPU, with LoRA and a radix cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class LorayCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # sglang has no types
    """Out-of-tree platform, found by SGLang through its entry point."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        return "torch_native"


def tolerate_pinned_memory() -> None:
    """SGLang's LoRA code asks for pinned memory whatever the device, and torch needs a driver for it: drop the wish."""
    if getattr(torch.Tensor.pin_memory, "dropped", False):
        return
    for name in ("tensor", "empty", "zeros", "ones", "arange", "full", "empty_like", "zeros_like", "ones_like"):
        setattr(torch, name, _without_pin_memory(getattr(torch, name)))

    def pin_memory(self: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return self

    pin_memory.dropped = True  # type: ignore[attr-defined]  # marks that we were here
    torch.Tensor.pin_memory = pin_memory


def _without_pin_memory(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return wrapped
