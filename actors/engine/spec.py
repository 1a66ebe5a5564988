"""An engine to be started, and the command line that starts it. Pure; the process itself is child.py's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from actors.engine.plugin import PUBLISHER
from router.ids import DpRank

Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `model`: what all workers serve."""

    path: NonEmpty
    """Folder or hub id."""
    served_name: NonEmpty
    """Name that clients ask for."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    context_length: PositiveInt | None = None
    """Tokens of prompt and output; None for the model's own limit."""
    tensor_parallel: PositiveInt = 1


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `kv_events`: how engines publish what they hold."""

    format: Literal["dynamo", "default"] = "dynamo"
    first_port: Port | None = None
    """First port for engines, 2 + 2 * dp_size for each worker of the deployment; None for any free ones."""
    hwm: PositiveInt = 100_000
    """Batches that ZMQ queues for a slow subscriber before it drops the newest."""
    replay_buffer: PositiveInt = 10_000
    """Batches that an engine keeps for replay."""


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `lora`: the adapters, and what engines reserve for them."""

    adapters: dict[NonEmpty, NonEmpty] = {}
    """Name -> folder."""
    max_loras_per_batch: PositiveInt = 8
    """Adapters that can run in one batch; SGLang counts the base model as one."""
    max_rank: PositiveInt = 64
    target_modules: tuple[NonEmpty, ...] = ("all",)


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one engine is started with. `dp_size` ranks take the ports from `event_port` and `replay_port` on."""

    model: ModelConfig
    kv_events: KvEventsConfig
    lora: LoraConfig
    device: Literal["cpu", "cuda"]
    host: str
    port: int
    event_port: int
    replay_port: int
    first_dp_rank: DpRank
    dp_size: int
    cpu_cores: tuple[int, ...] = ()
    """Cores for each rank of a CPU engine; empty where the system may choose."""
    extra_args: tuple[str, ...] = ()
    """SGLang arguments of the user, which win over ours."""

    def arguments(self) -> list[str]:
        """SGLang's command line, without the API key."""
        flags: dict[str, object] = {
            "model-path": str(Path(self.model.path).expanduser()),
            "served-model-name": self.model.served_name,
            "host": self.host,
            "port": self.port,
            "dtype": self.model.dtype,
            "tp-size": self.model.tensor_parallel,
            "dp-size": self.dp_size,
            "max-loras-per-batch": self.lora.max_loras_per_batch,
            "max-lora-rank": self.lora.max_rank,
            "kv-events-config": msgspec.json.encode(self.events_config()).decode(),
        }
        if self.model.context_length is not None:
            flags["context-length"] = self.model.context_length
        line = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        line += ["--enable-lora", "--enable-cache-report", "--skip-server-warmup"]
        line += ["--lora-target-modules", *self.lora.target_modules]
        if self.lora.adapters:
            line += ["--lora-paths", *(f"{name}={path}" for name, path in self.lora.adapters.items())]
        if self.device == "cpu":
            line += ["--device", "cpu", "--attention-backend", "torch_native", "--lora-backend", "torch_native"]
            line += ["--disable-overlap-schedule", "--disable-cuda-graph"]
            line += ["--sleep-on-idle"]  # an idle scheduler spins otherwise, and takes the core of its neighbour
        return [*line, *self.extra_args]

    def events_config(self) -> dict[str, object]:
        """SGLang's KVEventsConfig."""
        return {
            "publisher": PUBLISHER,
            "endpoint": f"tcp://{self.host}:{self.event_port}",
            "replay_endpoint": f"tcp://{self.host}:{self.replay_port}",
            "bind": True,
            "buffer_steps": self.kv_events.replay_buffer,
            "hwm": self.kv_events.hwm,
            "format": self.kv_events.format,
        }
