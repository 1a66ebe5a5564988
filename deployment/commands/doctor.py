"""`doctor CONFIG`: what would go wrong on this machine, before anything starts, and what to do about it."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import psutil

from actors.adapters.checks import AdapterRejectedError, check_adapter, read_base_model
from actors.adapters.sources import local_path
from actors.engine.identity import AdapterFilesError, adapter_files
from deployment.config import Config

PINNED: Final = {"sglang": "0.5.23", "ray": "2.60.0", "torch": "2.14.1"}
"""What we are tested with; the same as in pyproject.toml, which a Ray job does not bring along."""
_CPU_ENGINE_GB: Final = 1.5
"""Resident memory of a CPU engine before weights and cache, three processes together."""
_EMULATED_ENGINE_GB: Final = 0.3
"""Of an emulated one, its worker's actor included."""
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
    for name, one in config.lora.configured.items():
        yield _adapter(name, one.path, config)


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
    if config.emulation is not None:
        needed = config.workers.count * _EMULATED_ENGINE_GB
    else:
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


def _adapter(name: str, source: str, config: Config) -> Finding:
    check, lora = f"adapter {name}", config.lora
    local = local_path(source)
    if local is None:
        return Finding(check, True, f"{source}, read when the deployment starts")
    try:
        files = adapter_files(local)
        base_file = Path(config.model.path) / "config.json"
        base = read_base_model(base_file) if base_file.is_file() else None
        rank = check_adapter(local, base=base, max_rank=lora.max_rank, target_modules=lora.target_modules)
    except (AdapterFilesError, AdapterRejectedError, ValueError) as exc:
        return Finding(check, False, str(exc), f"correct lora.adapters.{name}, its files, or what section lora allows")
    return Finding(check, True, f"rank {rank}, {sum(file.stat().st_size for file in files) / 1e6:.1f} MB")
