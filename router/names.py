"""From the `model` a client names to the adapter meant. SGLang itself answers unknown names with the base model.

| model | means |
|---|---|
| the served name, exactly | base model |
| an adapter's name, exactly | that adapter |
| `<served name>:<adapter>` | that adapter; the adapter's name may hold colons itself |
| anything else | UnknownModel |
"""

from __future__ import annotations

from collections.abc import Collection

from router.errors import InvalidRequest, UnknownModel


def resolve_model(model: object, lora_path: object, *, served_name: str, adapters: Collection[str]) -> str | None:
    """Adapter that a request means, None for the base model. `lora_path` is SGLang's own field for it.

    Raises:
        InvalidRequest: a field has the wrong type, or the two name different adapters.
        UnknownModel: no such model or adapter is offered.
    """
    if not isinstance(model, str) or not model:
        raise InvalidRequest(f"'model' must be a non-empty string, got {model!r}")
    if lora_path is not None and not isinstance(lora_path, str):
        raise InvalidRequest(f"'lora_path' must be the name of one adapter, got {lora_path!r}")
    named = _adapter_of(model, served_name, adapters)
    if lora_path is None or lora_path == named:
        return named
    if named is not None:
        raise InvalidRequest(f"'model' names adapter {named!r} but 'lora_path' names {lora_path!r}; name one")
    if lora_path not in adapters:
        raise UnknownModel(f"adapter {lora_path!r} does not exist; GET /v1/models lists what is served")
    return lora_path


def engine_fields(model: str, *, served_name: str, adapter: str | None) -> dict[str, str]:
    """Body fields that make SGLang serve exactly this adapter, or the base model, and answer as `model` if it can.

    SGLang splits a model name at its first colon unless it starts with the served name, and reads `lora_path` only
    for names without an adapter in them.
    """
    if adapter is None:
        return {"model": served_name}
    if ":" in model:
        return {"model": f"{served_name}:{adapter}"}
    return {"model": model, "lora_path": adapter}


def _adapter_of(model: str, served_name: str, adapters: Collection[str]) -> str | None:
    if model == served_name:
        return None
    if model in adapters:
        return model
    prefix = served_name + ":"
    if model.startswith(prefix) and model[len(prefix) :] in adapters:
        return model[len(prefix) :]
    raise UnknownModel(f"model {model!r} does not exist; GET /v1/models lists what is served")
