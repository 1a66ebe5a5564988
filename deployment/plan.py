"""Config -> settings of each part, and what may change in a running deployment. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from actors.adapters.admission import DeskSettings
from actors.router import RouterSettings
from actors.worker import WorkerSettings
from deployment.config import Config, ConfigError
from router.ids import WorkerId

_CHANGEABLE: Final = ("workers.count",)
"""What `apply` can change in a running deployment."""


def worker_settings(config: Config, index: int, *, api_key: str) -> WorkerSettings:
    """Settings of worker `index`; its node fills in the host."""
    return WorkerSettings(
        worker_id=WorkerId(f"w{index}"),
        index=index,
        host="",
        device=config.device,
        model=config.model,
        kv_events=config.kv_events,
        lora=config.lora,
        dp_size=config.workers.dp_size,
        extra_args=config.workers.extra_args,
        emulated=config.emulation.profile if config.emulation else None,
        api_key=api_key,
    )


def router_settings(config: Config, *, api_key: str) -> RouterSettings:
    """Settings of the router."""
    return RouterSettings(
        router_id="r0",
        config=config.router,
        served_name=config.model.served_name,
        model_path=config.model.path,
        api_key=api_key,
    )


def desk_settings(config: Config, *, run_id: str, state_file: str) -> DeskSettings:
    """Settings of the LoRA table's desk. `state_file`: where it keeps its catalogue unless the user says otherwise."""
    lora = config.lora
    return DeskSettings(
        served_name=config.model.served_name,
        model_path=config.model.path,
        configured=lora.configured,
        default_placement=lora.default_placement,
        max_rank=lora.max_rank,
        target_modules=lora.target_modules,
        roots=lora.roots,
        cache_dir=lora.cache_dir,
        cache_gb=lora.cache_gb,
        state_file=lora.state_file or state_file,
        run_id=run_id,
        fixed=config.workers.dp_size > 1,
    )


def check_applicable(old: Config, new: Config) -> None:
    """Raise ConfigError if `new` can't be reached from `old` without a new deployment."""
    same = msgspec.structs.replace(new, workers=msgspec.structs.replace(new.workers, count=old.workers.count))
    if same == old:
        return
    before, after = msgspec.to_builtins(old), msgspec.to_builtins(same)
    changed = [
        f"{section}.{key}" if isinstance(before[section], dict) else section
        for section in before
        if before[section] != after[section]
        for key in (before[section] if isinstance(before[section], dict) else [""])
        if not isinstance(before[section], dict) or before[section][key] != after[section][key]
    ]
    raise ConfigError(
        f"apply can change {', '.join(_CHANGEABLE)} only; also changed: {', '.join(changed)} "
        "(use down, then up with the new configuration)"
    )
