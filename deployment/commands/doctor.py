"""`doctor CONFIG`: what would go wrong on this machine, before anything starts, and what to do about it."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from actors.engine.identity import AdapterFilesError, adapter_files
from actors.engine.spec import LoraConfig
from deployment.config import Config

PINNED: Final = {"sglang": "0.5.23", "ray": "2.60.0", "torch": "2.14.1"}
"""What we are tested with; the same as in pyproject.toml, which a Ray job does not bring along."""
_CPU_ENGINE_GB: Final = 1.5
"""Resident memory of a CPU engine before weights and cache, three processes together."""
_GB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. `fix` says what to do where it failed."""

    check: str
    ok: bool
    found: str
    fix: str = ""


def run(arguments: argparse.Namespace) -> int:
    """0 if every check passed."""
    config = Config.load(Path(arguments.config))
    findings = list(examine(config))
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{'ok  ' if finding.ok else 'FAIL'} {finding.check:22} {finding.found}")
            if not finding.ok:
                print(f"     {'':22} -> {finding.fix}")
    return 0 if all(finding.ok for finding in findings) else 1


def examine(config: Config) -> Iterator[Finding]:
    """All checks of this machine for a configuration; they start nothing and change nothing."""
    yield from _versions()
    yield _devices(config)
    yield _memory(config)
    yield from _ports(config)
    yield _model(config)
    for name, path in config.lora.adapters.items():
        yield _adapter(name, Path(path), config.lora)


def _versions() -> Iterator[Finding]:
    for package, wanted in PINNED.items():
        try:
            have = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            have = "nothing"
        ok = have.split("+")[0] == wanted
        yield Finding(f"{package} version", ok, have, f"pip install {package}=={wanted}")


def _devices(config: Config) -> Finding:
    needed = config.workers.count * config.workers.gpus
    if not needed:
        return Finding("devices", True, f"CPU only, {psutil.cpu_count()} cores for {config.workers.count} workers")
    import torch

    have = torch.cuda.device_count()
    return Finding(
        "devices",
        have >= needed,
        f"{have} GPUs here, {needed} needed by {config.workers.count} workers",
        "fine if other nodes of the cluster have the rest; otherwise lower workers.count",
    )


def _memory(config: Config) -> Finding:
    if config.device == "cuda":
        return Finding("memory", True, "left to SGLang's --mem-fraction-static")
    weights = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
    needed = config.workers.count * (_CPU_ENGINE_GB + 2 * weights / _GB)
    free = psutil.virtual_memory().available / _GB
    return Finding("memory", free >= needed, f"{free:.1f} GB free, about {needed:.1f} needed", "lower workers.count")


def _ports(config: Config) -> Iterator[Finding]:
    router = config.router
    taken = _port_error(router.host, router.port)
    fix = "stop what listens there, or change router.port"
    yield Finding("router port", not taken, f"{router.host}:{router.port} {taken or 'free'}", fix)
    first = config.kv_events.first_port
    if first is not None:
        each = 2 + 2 * config.workers.dp_size
        ports = range(first, first + config.workers.count * each)
        busy = [port for port in ports if _port_error("", port)]
        found = f"{ports[0]}-{ports[-1]} {'busy: ' + ', '.join(map(str, busy)) if busy else 'free'}"
        yield Finding("engine ports", not busy, found, "change kv_events.first_port, or leave it out for free ports")


def _port_error(host: str, port: int) -> str:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            return str(exc.strerror)
    return ""


def _model(config: Config) -> Finding:
    path = Path(config.model.path)
    if not path.is_absolute():
        return Finding("model", True, f"{config.model.path} (hub id: every node must reach the hub or its cache)")
    missing = [name for name in ("config.json",) if not (path / name).is_file()]
    missing += [] if any(path.glob("tokenizer*")) else ["tokenizer.json"]
    missing += [] if any(path.glob("*.safetensors")) or any(path.glob("*.bin")) else ["*.safetensors"]
    fix = f"put a Hugging Face model into {path} (demo model: python -m deployment.assets smollm2)"
    return Finding("model", not missing, f"{path}" + (f" lacks {', '.join(missing)}" if missing else ""), fix)


def _adapter(name: str, path: Path, lora: LoraConfig) -> Finding:
    check = f"adapter {name}"
    try:
        files = adapter_files(path)
        described: dict[str, Any] = json.loads(files[0].read_text())
    except (AdapterFilesError, ValueError) as exc:
        return Finding(check, False, str(exc), f"correct lora.adapters.{name}, or put a PEFT adapter there")
    rank, modules = described.get("r"), described.get("target_modules")
    problems: list[tuple[Callable[[], bool], str, str]] = [
        (lambda: isinstance(rank, int) and rank <= lora.max_rank, f"rank {rank}", f"raise lora.max_rank to {rank}"),
        (lambda: _covered(modules, lora), f"target_modules {modules}", "extend lora.target_modules, or use [all]"),
    ]
    for passes, found, fix in problems:
        if not passes():
            return Finding(check, False, found, fix)
    return Finding(check, True, f"rank {rank}, {sum(file.stat().st_size for file in files) / 1e6:.1f} MB")


def _covered(modules: Any, lora: LoraConfig) -> bool:
    if "all" in lora.target_modules:
        return True
    return isinstance(modules, list) and set(modules) <= set(lora.target_modules)
