"""An engine to be started, and the command line that starts it. Pure; the process itself is child.py's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from actors.adapters.entry import AdapterConfig, Placement
from actors.adapters.sources import AdapterCache
from actors.engine.plugin import PUBLISHER
from router.ids import DpRank
from router.reports import WorkerFacts

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

    adapters: dict[NonEmpty, NonEmpty | AdapterConfig] = {}
    """Name -> folder or URI, or the same with where it shall be."""
    max_loras_per_batch: PositiveInt = 8
    """Adapters that can run in one batch; SGLang counts the base model as one."""
    max_rank: PositiveInt = 64
    target_modules: tuple[NonEmpty, ...] = ("all",)
    max_loaded: PositiveInt | None = None
    """Adapters that an engine keeps in host memory; None for what is configured, and 32 or four batches at least."""
    max_loaded_gb: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Size of the files of all adapters that an engine keeps; None for no limit."""
    roots: tuple[NonEmpty, ...] = ()
    """Folders and URI prefixes that adapters may be loaded from at run time."""
    cache_dir: NonEmpty = "~/.cache/loray/adapters"
    """Where a node keeps the adapters it has fetched, by content."""
    cache_gb: Annotated[float, msgspec.Meta(gt=0)] = 50.0
    state_file: NonEmpty | None = None
    """Where adapters loaded or unloaded at run time are kept beyond this deployment; None: for its life only."""

    @property
    def configured(self) -> dict[str, AdapterConfig]:
        """`adapters` in their long form."""
        return {
            name: AdapterConfig(path=value) if isinstance(value, str) else value
            for name, value in self.adapters.items()
        }

    @property
    def capacity(self) -> int:
        """`max_loaded`, or what stands for it."""
        return self.max_loaded or max(32, 4 * self.max_loras_per_batch, len(self.adapters))

    def facts(self) -> WorkerFacts:
        """What one engine can hold."""
        size_bytes = int((self.max_loaded_gb or 0) * 1e9)
        return WorkerFacts(capacity=self.capacity, slots=self.max_loras_per_batch, capacity_bytes=size_bytes)

    def cache(self) -> AdapterCache:
        """This node's adapters."""
        return AdapterCache(Path(self.cache_dir).expanduser(), max_bytes=int(self.cache_gb * 1e9))

    @property
    def default_placement(self) -> Placement:
        """Where an adapter is of which nobody says it: everywhere while all configured ones run in one batch."""
        return Placement.EVERYWHERE if len(self.adapters) <= self.max_loras_per_batch else Placement.ON_DEMAND


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
    emulated: str | None = None
    """Profile of an emulated engine in place of SGLang's server; None for the real one."""

    def command(self) -> list[str]:
        """Module and arguments that Python runs."""
        if self.emulated is None:
            return ["actors.engine.serve", *self.arguments()]
        return ["actors.engine.emulated", self.emulated, *self.arguments()]

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
        line += ["--max-loaded-loras", str(max(self.lora.capacity, self.lora.max_loras_per_batch))]
        if self.dp_size > 1 and self.lora.adapters:  # which can't load at run time
            line += ["--lora-paths", *(f"{name}={one.path}" for name, one in self.lora.configured.items())]
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
