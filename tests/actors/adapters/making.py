"""Builders for tests of adapters: a tiny Llama's config, PEFT folders that fit it, a desk over them, a fake worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file

from actors.adapters.admission import AdapterDesk, DeskSettings
from actors.adapters.entry import AdapterConfig, Assignment, Placement, Wanted
from actors.engine.identity import CONFIG_FILE, WEIGHT_FILES, lora_id
from actors.lora_table import LoraTable
from router.ids import Incarnation, WorkerId
from router.reports import AdapterState, Holding, WorkerFacts

RANK: Final = 4
MODULES: Final = ("q_proj", "v_proj")
#: input and output size of each module of the tiny Llama below
WIDTHS: Final = {
    "q_proj": (16, 16),
    "k_proj": (16, 8),
    "v_proj": (16, 8),
    "o_proj": (16, 16),
    "gate_proj": (16, 32),
    "up_proj": (16, 32),
    "down_proj": (32, 16),
}
NUM_LAYERS: Final = 2
BASE_CONFIG: Final = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": NUM_LAYERS,
    "intermediate_size": 32,
}

Tensors = dict[str, np.ndarray[Any, Any]]


def key_of(layer: int, module: str, side: str) -> str:
    """PEFT's name of a LoRA matrix."""
    block = "mlp" if module in ("gate_proj", "up_proj", "down_proj") else "self_attn"
    return f"base_model.model.model.layers.{layer}.{block}.{module}.lora_{side}.weight"


def tensors_of(
    *, seed: int = 0, rank: int = RANK, modules: Sequence[str] = MODULES, dtype: type = np.float32
) -> Tensors:
    """Random LoRA matrices that fit the tiny Llama."""
    rng = np.random.default_rng(seed)
    return {
        key_of(layer, module, side): rng.standard_normal(
            (rank, WIDTHS[module][0]) if side == "A" else (WIDTHS[module][1], rank)
        ).astype(dtype)
        for layer in range(NUM_LAYERS)
        for module in modules
        for side in "AB"
    }


def make_adapter(
    folder: Path, *, seed: int = 0, config: Mapping[str, Any] | None = None, tensors: Tensors | None = None
) -> Path:
    """Write a PEFT folder, in place of one that is there; `config` changes single values of its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": list(MODULES), **(config or {})}
    (folder / CONFIG_FILE).write_text(json.dumps(said))
    save_file(tensors_of(seed=seed) if tensors is None else tensors, folder / WEIGHT_FILES[0])
    return folder


def safetensors_bytes(header: Mapping[str, Any] | bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file by hand; `length` is what it says of its header's size, if that is a lie."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def make_desk(folder: Path, adapters: Mapping[str, AdapterConfig | Path] | None = None, **changes: Any) -> AdapterDesk:
    """A desk over configured `adapters`; the base model, the cache and the state file lie in `folder`."""
    base = folder / "base"
    base.mkdir(parents=True, exist_ok=True)
    (base / "config.json").write_text(json.dumps(BASE_CONFIG))
    settings: dict[str, Any] = {
        "served_name": "base",
        "model_path": str(base),
        "configured": {
            name: AdapterConfig(path=str(one)) if isinstance(one, Path) else one
            for name, one in (adapters or {}).items()
        },
        "default_placement": Placement.EVERYWHERE,
        "max_rank": 8,
        "target_modules": MODULES,
        "roots": (str(folder),),
        "cache_dir": str(folder / "cache"),
        "cache_gb": 1.0,
        "state_file": str(folder / "state" / "adapters.json"),
        "run_id": "run-1",
        **changes,
    }
    return AdapterDesk(DeskSettings(**settings))


class FakeWorker:
    """A worker as the table sees it: takes its assignment and tells what it holds. Loading is done at once."""

    def __init__(self, table: LoraTable, worker_id: str = "w0", *, capacity: int = 8, slots: int = 8) -> None:
        self.table = table
        self.worker_id = WorkerId(worker_id)
        self.facts: WorkerFacts | None = WorkerFacts(capacity=capacity, slots=slots)
        #: names whose loading fails here
        self.failing: set[str] = set()
        self.assignment = Assignment(epoch="", revision=0)
        self.held: dict[str, Holding] = {}
        self._num_lives = 0
        self.incarnation = Incarnation(f"{worker_id}-0")

    async def tell(self) -> None:
        """Tell all that is held."""
        await self.table.tell(self.worker_id, self.incarnation, list(self.held.values()), self.facts)

    async def poll(self, timeout_s: float = 0.0) -> None:
        """Ask what to hold, hold it, and tell so."""
        known = self.assignment
        self.assignment = await self.table.wait_wanted(self.worker_id, known.epoch, known.revision, timeout_s)
        if self.assignment.revision:
            self.hold(self.assignment.wanted)
        await self.tell()

    async def run(self) -> None:
        """Do so until cancelled."""
        await self.tell()
        while True:
            await self.poll(60.0)

    def hold(self, wanted: Sequence[Wanted]) -> None:
        """Bring what is held in line, as an engine would."""
        self.held = {one.name: self.row(one.name, one.content_id) for one in wanted}

    def row(self, name: str, content: str, state: AdapterState | None = None) -> Holding:
        """A row of this life; loaded, or failed where it is to fail."""
        failed = state is None and name in self.failing
        return Holding(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            lora_id=lora_id(name, content),
            name=name,
            content_id=content,
            state=state or (AdapterState.FAILED if failed else AdapterState.LOADED),
            error="out of memory" if failed else "",
        )

    def restart(self) -> None:
        """Another life that holds nothing."""
        self._num_lives += 1
        self.incarnation = Incarnation(f"{self.worker_id}-{self._num_lives}")
        self.held = {}


async def soon(task: asyncio.Future[Any]) -> Any:
    """The result of what must end by itself now, whatever longest wait it was given."""
    return await asyncio.wait_for(task, 5.0)
