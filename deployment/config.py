"""The configuration file: strict YAML -> Config. Sections belong to the parts they describe; cross-checks are here."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
import yaml

from actors.adapters.checks import MAX_NAME_LENGTH, AdapterRejectedError, check_name
from actors.adapters.entry import Placement
from actors.engine.emulated.profiles import profile_of
from actors.engine.spec import KvEventsConfig, LoraConfig, ModelConfig, PositiveInt
from router.config import RouterConfig

_ALWAYS = (Placement.EVERYWHERE, Placement.REPLICAS)
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


class EmulationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `emulation`: engines without a GPU, for scale and faults; they compute nothing and take their time."""

    profile: str
    """Whose time: one of actors/engine/emulated/profiles.py."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole deployment."""

    name: DeploymentName
    model: ModelConfig
    workers: WorkersConfig
    kv_events: KvEventsConfig = KvEventsConfig()
    lora: LoraConfig = LoraConfig()
    router: RouterConfig = RouterConfig()
    emulation: EmulationConfig | None = None

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

    def source(value: str) -> str:
        return value if urlsplit(value).scheme else folder(value)

    adapters = {
        name: source(one) if isinstance(one, str) else msgspec.structs.replace(one, path=source(one.path))
        for name, one in config.lora.adapters.items()
    }
    roots = tuple(source(root) for root in config.lora.roots)
    lora = msgspec.structs.replace(config.lora, adapters=adapters, roots=roots)
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
    if config.lora.max_loaded is not None and config.lora.max_loaded < config.lora.max_loras_per_batch:
        raise ConfigError(
            f"lora.max_loaded is {config.lora.max_loaded}, less than lora.max_loras_per_batch "
            f"{config.lora.max_loras_per_batch}: a batch couldn't be filled"
        )
    if config.emulation is not None:
        if workers.gpus:
            raise ConfigError("emulation needs no GPU: set workers.gpus to 0, or leave emulation out")
        try:
            profile_of(config.emulation.profile)
        except ValueError as exc:
            raise ConfigError(f"emulation.profile: {exc}") from exc
    _check_adapters(config)


def _check_adapters(config: Config) -> None:
    served_name, lora = config.model.served_name, config.lora
    if not served_name.isprintable() or served_name != served_name.strip() or len(served_name) > MAX_NAME_LENGTH:
        raise ConfigError(f"name {served_name!r} must be printable, trimmed, and at most {MAX_NAME_LENGTH} characters")
    taken: list[str] = []
    for name in lora.adapters:
        try:
            taken.append(check_name(name, served_name=served_name, taken=taken))
        except AdapterRejectedError as exc:
            raise ConfigError(f"lora.adapters: {exc}") from exc
    always = [n for n, one in lora.configured.items() if (one.placement or lora.default_placement) in _ALWAYS]
    if len(always) > lora.capacity:
        raise ConfigError(
            f"{len(always)} adapters are placed everywhere or by replicas, but lora.max_loaded is {lora.capacity}"
        )
    if config.workers.dp_size == 1:
        return
    for name, one in lora.configured.items():
        if one.placement not in (None, Placement.EVERYWHERE) or urlsplit(one.path).scheme:
            raise ConfigError(
                f"adapter {name!r} must be a folder, placed everywhere: engines with workers.dp_size "
                f"{config.workers.dp_size} are started with their adapters and can't load at run time"
            )


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
