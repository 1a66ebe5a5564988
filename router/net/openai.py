"""Request bodies of the OpenAI API: what is checked here, what is changed for the engine, the rest left as it came."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgspec

from router.errors import InvalidRequest
from router.names import engine_fields, resolve_model

_GENERATE: Final = "/generate"


class Api(StrEnum):
    """The endpoints that are understood; their paths."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A checked request."""

    api: Api
    body: dict[str, Any]
    adapter: str | None
    stream: bool
    wants_usage: bool
    """Whether the client asked for the usage chunk of a stream; without it, it must not see one."""

    @property
    def text(self) -> str | None:
        """A completion's prompt, where it is a single text."""
        prompt = self.body.get("prompt")
        return prompt if isinstance(prompt, str) else None

    @property
    def token_ids(self) -> list[int] | None:
        """Token ids that the client sent itself."""
        given = self.body.get("input_ids") if self.api is Api.CHAT else self.body.get("prompt")
        return given if isinstance(given, list) and given and all(type(t) is int for t in given) else None

    @property
    def max_cached_tokens(self) -> int | None:
        """0 where prompt logprobs are asked for, since SGLang then computes the whole prompt."""
        return 0 if self.body.get("echo") and self.body.get("logprobs") is not None else None

    @property
    def max_output_tokens(self) -> int | None:
        """The client's limit, where it says one that the engine can obey."""
        limits = [self.body.get("max_completion_tokens"), self.body.get("max_tokens")]
        return next((limit for limit in limits if type(limit) is int and limit > 0), None)

    @property
    def can_replace_prompt(self) -> bool:
        """Whether the engine may get token ids instead of the text: it must not need the text itself."""
        return not self.body.get("echo") and not self.body.get("suffix")

    @property
    def predictable(self) -> bool:
        """Several samples share their prompt with each other, so their cached tokens tell nothing of before."""
        return self.body.get("n") in (None, 1)


def parse_json(raw: bytes) -> dict[str, Any]:
    """A request body. Raises InvalidRequest that says where the JSON breaks."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise InvalidRequest(f"the body is not valid JSON: {exc}") from exc
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {type(body).__name__}")
    return body


def check_call(api: Api, body: dict[str, Any], *, served_name: str, adapters: Collection[str]) -> Call:
    """Check what routing needs; what only the engine needs, the engine checks. Raises InvalidRequest, UnknownModel."""
    if "model" not in body:
        raise InvalidRequest(f"'model' is missing; send {served_name!r} or an adapter's name")
    adapter = resolve_model(body["model"], body.get("lora_path"), served_name=served_name, adapters=adapters)
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise InvalidRequest(f"'stream' must be true or false, got {stream!r}")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise InvalidRequest(f"'stream_options' must be an object, got {options!r}")
    for field in ("extra_key", "cache_salt"):
        if body.get(field) is not None and not isinstance(body[field], str | list):
            raise InvalidRequest(f"{field!r} must be a string, got {body[field]!r}")
    if api is Api.CHAT:
        _check_messages(body.get("messages"))
    else:
        _check_prompt(body.get("prompt"))
    return Call(
        api=api,
        body=body,
        adapter=adapter,
        stream=bool(stream),
        wants_usage=bool((options or {}).get("include_usage")),
    )


def engine_body(
    call: Call, *, served_name: str, request_id: str, token_ids: list[int] | None, local_rank: int | None
) -> bytes:
    """The body for the engine: the adapter as it knows it, the tokens that were hashed, the rank, usage always."""
    body = {key: value for key, value in call.body.items() if key != "lora_path"}
    body |= engine_fields(body["model"], served_name=served_name, adapter=call.adapter)
    body["rid"] = request_id  # never the client's own: SGLang aborts all requests whose rid starts with an aborted one
    if token_ids is not None:
        body["input_ids" if call.api is Api.CHAT else "prompt"] = token_ids
    if local_rank is not None:
        body["routed_dp_rank"] = local_rank
    if call.stream:
        body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    return msgspec.json.encode(body)


def relayed_body(path: str, body: dict[str, Any], *, served_name: str, adapter: str | None, request_id: str) -> bytes:
    """The body of any other request: the adapter in SGLang's own field, which all its paths read, unlike `model`."""
    body = dict(body)
    if adapter is not None:
        body["lora_path"] = adapter
        if "model" in body:
            body["model"] = served_name
    if path == _GENERATE and not isinstance(body.get("rid"), list):
        body["rid"] = request_id  # as in engine_body
    return msgspec.json.encode(body)


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest(f"'messages' must be a non-empty list, got {_shown(messages)}")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise InvalidRequest(f"messages[{i}] must be an object, got {_shown(message)}")
        if not isinstance(message.get("role"), str):
            raise InvalidRequest(f"messages[{i}].role must be a string, got {_shown(message.get('role'))}")
        if not isinstance(message.get("content"), str | list | None):
            raise InvalidRequest(f"messages[{i}].content must be a string or a list of parts")


def _check_prompt(prompt: Any) -> None:
    if not isinstance(prompt, str | list) or not prompt:
        raise InvalidRequest(f"'prompt' must be a non-empty string or list, got {_shown(prompt)}")


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)[:80]
