"""What an engine's answer says of its cache: usage in bodies and in streams. Streams pass through as bytes."""

from __future__ import annotations

import msgspec

_MARK = b'"usage":{'
_END = b"\n\n"


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    choices: list[msgspec.Raw] = []


class _Message(msgspec.Struct):
    message: str = ""


class _Error(msgspec.Struct):
    """As SGLang's OpenAI paths answer it whole, or, under `error`, in streams and on its own paths."""

    object: str = ""
    message: str = ""
    error: _Message | None = None


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request as its engine counted them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


_decode = msgspec.json.Decoder(_Answer).decode
_decode_error = msgspec.json.Decoder(_Error).decode


def usage_of(answer: bytes) -> Usage | None:
    """Usage in a whole answer or one stream event's data; None where there is none."""
    try:
        usage = _decode(answer).usage
    except msgspec.MsgspecError:
        return None
    if usage is None:
        return None
    details = usage.prompt_tokens_details
    return Usage(usage.prompt_tokens, usage.completion_tokens, details.cached_tokens if details else 0)


def error_of(answer: bytes) -> str:
    """Message of an engine's error, from a whole body or from the first event of a stream; '' where it is none."""
    try:
        said = _decode_error(answer.partition(_END)[0].removeprefix(b"data: "))
    except msgspec.MsgspecError:
        return ""
    if said.error is not None:
        return said.error.message
    return said.message if said.object == "error" else ""


class StreamFilter:
    """Passes a stream of server-sent events on, whole events at a time, reading the usage on its way.

    With `hide_usage`, the event that carries nothing but usage is taken out: the client didn't ask for it.
    """

    def __init__(self, *, hide_usage: bool) -> None:
        self.usage: Usage | None = None
        self._hide_usage = hide_usage
        self._rest = b""

    def feed(self, chunk: bytes) -> bytes:
        """Bytes to send on now."""
        data = self._rest + chunk if self._rest else chunk
        end = data.rfind(_END)
        if end < 0:
            self._rest = data
            return b""
        whole, self._rest = data[: end + 2], data[end + 2 :]
        return whole if _MARK not in whole else self._read_usage(whole)

    def flush(self) -> bytes:
        """What is left at the end of the stream."""
        rest, self._rest = self._rest, b""
        return rest

    def _read_usage(self, whole: bytes) -> bytes:
        kept = []
        for event in whole.split(_END)[:-1]:
            if _MARK in event:
                data = event.removeprefix(b"data: ")
                self.usage = usage_of(data) or self.usage
                if self._hide_usage and not _has_choices(data):
                    continue
            kept.append(event + _END)
        return b"".join(kept)


def _has_choices(data: bytes) -> bool:
    try:
        return bool(_decode(data).choices)
    except msgspec.MsgspecError:
        return True
