"""The configuration file: strict YAML -> Config. Sections belong to the parts they describe; cross-checks are here."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml

from actors.engine.spec import KvEventsConfig, LoraConfig, ModelConfig, PositiveInt
from router.config import RouterConfig

MAX_NAME_LENGTH = 128
"""Adapter and model names end up in metrics, headers and URLs."""
DeploymentName = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$")]


class ConfigError(ValueError):
    """The file can't be used; the message says where, what is wrong and what would be right."""


class WorkersConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `workers`."""

    count: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    gpus: Annotated[int, msgspec.Meta(ge=0, le=64)]
    """GPUs of one worker: tensor_parallel * dp_size, or 0 for the CPU."""
    cpus: Annotated[float, msgspec.Meta(ge=0)] = 1
    """CPU cores that Ray sets aside for one worker."""
    dp_size: PositiveInt = 1
    """Data-parallel replicas inside one engine; each has a KV cache and a dp_rank of its own."""
    extra_args: tuple[str, ...] = ()
    """More arguments of SGLang's server, as on its command line."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole deployment."""

    name: DeploymentName
    model: ModelConfig
    workers: WorkersConfig
    kv_events: KvEventsConfig = KvEventsConfig()
    lora: LoraConfig = LoraConfig()
    router: RouterConfig = RouterConfig()

    @property
    def device(self) -> str:
        """What the engines run on."""
        return "cuda" if self.workers.gpus else "cpu"

    @classmethod
    def load(cls, path: Path) -> Config:
        """Read a file; relative adapter and model folders are resolved against its folder. Raises ConfigError."""
        try:
            text = path.read_text()
        except OSError as exc:
            raise ConfigError(f"cannot read configuration {path}: {exc.strerror}") from exc
        try:
            return cls.parse(text, base=path.resolve().parent)
        except ConfigError as exc:
            raise ConfigError(f"{path}: {exc}") from exc

    @classmethod
    def parse(cls, text: str, *, base: Path) -> Config:
        """Read YAML. Raises ConfigError."""
        try:
            raw = yaml.load(text, Loader=_StrictLoader)
            config = msgspec.convert(raw, cls)
        except yaml.YAMLError as exc:
            raise ConfigError(f"not valid YAML: {exc}") from exc
        except msgspec.ValidationError as exc:
            raise ConfigError(_explain(str(exc))) from exc
        config = _resolve(config, base)
        _cross_check(config)
        return config


class _StrictLoader(yaml.SafeLoader):
    """YAML without its silent last-one-wins for equal keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _resolve(config: Config, base: Path) -> Config:
    def folder(value: str) -> str:
        path = Path(value).expanduser()
        return str(path if path.is_absolute() else (base / path).resolve())

    model = config.model
    if model.path.startswith(("~", "/", "./", "../")):  # anything else is a hub id
        model = msgspec.structs.replace(model, path=folder(model.path))
    adapters = {name: folder(path) for name, path in config.lora.adapters.items()}
    lora = msgspec.structs.replace(config.lora, adapters=adapters)
    return msgspec.structs.replace(config, model=model, lora=lora)


def _cross_check(config: Config) -> None:
    workers, model = config.workers, config.model
    wanted = model.tensor_parallel * workers.dp_size
    if workers.gpus not in (0, wanted):
        raise ConfigError(
            f"workers.gpus is {workers.gpus}, but model.tensor_parallel {model.tensor_parallel} * workers.dp_size "
            f"{workers.dp_size} needs {wanted} (or 0 to run on the CPU)"
        )
    if not workers.gpus and model.tensor_parallel > 1:
        raise ConfigError("model.tensor_parallel must be 1 on the CPU (workers.gpus is 0)")
    for name in (model.served_name, *config.lora.adapters):
        if not name.isprintable() or name != name.strip() or len(name) > MAX_NAME_LENGTH:
            raise ConfigError(f"name {name!r} must be printable, trimmed, and at most {MAX_NAME_LENGTH} characters")
        if "=" in name:
            raise ConfigError(f"name {name!r} must not hold '=': SGLang splits name=path there")
    if model.served_name in config.lora.adapters:
        raise ConfigError(f"adapter {model.served_name!r} is named like model.served_name; rename one of them")


def _explain(message: str) -> str:
    """msgspec's message, with the keys that a section knows where an unknown one was given."""
    if "unknown field" not in message:
        return message.replace("$.", "").replace("`$`", "top level")
    path = message.rsplit("`", 2)[1] if " - at " in message else "$"
    section: Any = Config
    for part in path.split(".")[1:]:
        section = next(f.type for f in msgspec.structs.fields(section) if f.encode_name == part)
    known = ", ".join(f.encode_name for f in msgspec.structs.fields(section))
    return f"{message.replace('$.', '').replace('`$`', 'top level')}; known here: {known}"
