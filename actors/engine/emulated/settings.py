"""What an emulated engine is started with: SGLang's own command line, as far as it means something here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from actors.engine.emulated.profiles import Profile, profile_of

_DEFAULT_CONTEXT = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedSettings:
    """One engine."""

    profile: Profile
    model_path: str
    served_name: str
    host: str
    port: int
    page_size: int
    kv_tokens: int
    context_length: int
    dp_size: int
    max_loras_per_batch: int
    max_loaded_loras: int
    lora_paths: dict[str, str]
    events: dict[str, Any]
    """SGLang's KVEventsConfig."""

    @classmethod
    def parse(cls, profile: str, arguments: Sequence[str]) -> EmulatedSettings:
        """From SGLang's arguments; those that mean nothing here are passed over. Raises ValueError."""
        parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False, add_help=False)
        for name in ("model-path", "served-model-name", "host", "kv-events-config"):
            parser.add_argument(f"--{name}", required=True)
        for name, default in (
            ("port", 30000), ("page-size", 1), ("max-total-tokens", 0), ("context-length", _DEFAULT_CONTEXT),
            ("dp-size", 1), ("max-loras-per-batch", 8), ("max-loaded-loras", 64), ("chunked-prefill-size", 0),
            ("max-running-requests", 0),
        ):  # fmt: skip
            parser.add_argument(f"--{name}", type=int, default=default)
        parser.add_argument("--lora-paths", nargs="*", default=[])
        try:
            given, _ = parser.parse_known_args(arguments)
        except argparse.ArgumentError as exc:
            raise ValueError(f"not a command line of SGLang: {exc}") from exc
        timing = profile_of(profile)
        if given.chunked_prefill_size > 0:
            timing = msgspec.structs.replace(timing, chunk_tokens=given.chunked_prefill_size)
        if given.max_running_requests > 0:
            timing = msgspec.structs.replace(timing, max_running=given.max_running_requests)
        return cls(
            profile=timing,
            model_path=given.model_path,
            served_name=given.served_model_name,
            host=given.host,
            port=given.port,
            page_size=given.page_size,
            kv_tokens=given.max_total_tokens or timing.kv_tokens,
            context_length=given.context_length,
            dp_size=given.dp_size,
            max_loras_per_batch=given.max_loras_per_batch,
            max_loaded_loras=given.max_loaded_loras,
            lora_paths=dict(pair.split("=", 1) for pair in given.lora_paths),
            events=msgspec.json.decode(given.kv_events_config),
        )
