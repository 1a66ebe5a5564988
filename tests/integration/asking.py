"""Requests as tests send them, to a router or straight to an engine, and answers as they read them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any, Final

import httpx

from tests.integration.local_fleet import SERVED

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
DONE: Final = "[DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back, headers and usage taken apart. `cached` is the engine's word, `predicted` the router's."""

    text: str
    cached: int
    prompt_tokens: int
    worker: str | None
    dp_rank: int | None
    reason: str | None
    predicted: int | None
    body: dict[str, Any]
    """The whole answer, or a stream's last chunk."""


def noise(rng: random.Random, num_chars: int) -> str:
    """Text of so many tokens: the tiny model's are bytes."""
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ,.", k=num_chars))


def user(text: str) -> list[dict[str, Any]]:
    """A chat of one message."""
    return [{"role": "user", "content": text}]


def ask(client: httpx.Client, path: str = COMPLETIONS, *, model: str = SERVED, **fields: Any) -> Answer:
    """POST and expect 200. Greedy and short, unless told otherwise."""
    body = {"model": model, "max_tokens": 2, "temperature": 0, **fields}
    if body.get("stream"):
        return _ask_stream(client, path, body)
    response = client.post(path, json=body)
    assert response.status_code == 200, f"{response.status_code}: {response.text}"
    answer = response.json()
    choice = answer["choices"][0]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    return _answer(response, text, answer["usage"], answer)


def events(lines: str) -> list[str]:
    """Data of server-sent events; every event must be one well-formed `data:` line."""
    assert lines.endswith("\n\n"), lines[-200:]
    blocks = lines.removesuffix("\n\n").split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), blocks
    return [block.removeprefix("data: ") for block in blocks]


def _ask_stream(client: httpx.Client, path: str, body: dict[str, Any]) -> Answer:
    with client.stream("POST", path, json={"stream_options": {"include_usage": True}, **body}) as response:
        response.read()
    assert response.status_code == 200, f"{response.status_code}: {response.text}"
    *chunks, done = events(response.text)
    assert done == DONE
    parts = [json.loads(chunk) for chunk in chunks]
    choices = [choice for part in parts for choice in part["choices"]]
    text = "".join((c["delta"].get("content") or "") if path == CHAT else c["text"] for c in choices)
    return _answer(response, text, parts[-1]["usage"], parts[-1])


def _answer(response: httpx.Response, text: str, usage: dict[str, Any], body: dict[str, Any]) -> Answer:
    def number(header: str) -> int | None:
        value = response.headers.get(header)
        return None if value is None else int(value)

    return Answer(
        text=text,
        cached=usage["prompt_tokens_details"]["cached_tokens"],
        prompt_tokens=usage["prompt_tokens"],
        worker=response.headers.get("x-loray-worker"),
        dp_rank=number("x-loray-dp-rank"),
        reason=response.headers.get("x-loray-reason"),
        predicted=number("x-loray-predicted-cached-tokens"),
        body=body,
    )
