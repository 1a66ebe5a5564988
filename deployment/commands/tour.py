"""`tour`: base model and adapters, chat and completions, cold and warm; what was predicted beside what was cached."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import aiohttp

from deployment import client

_SHORT: Final = "What is the capital of France? Answer in one sentence."
_LONG: Final = (
    "You are the assistant of a small harbour library. Opening hours are nine to five, closed on Mondays. "
    "Readers may borrow six books for four weeks and renew twice. Maps, atlases and the herbarium stay in the "
    "reading room. Fines are ten cents a day, waived for children. The cat is called Ink and must not be fed. "
    "Answer briefly and kindly, name the shelf if you know it, and say so if you do not know. Shelves: A travel, "
    "B science, C novels, D poems, E children, F local history, G newspapers from 1890 on, H everything else. "
)
_MAX_TOKENS: Final = 12
_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One request of the tour."""

    model: str
    adapter: str | None
    worker: str
    dp_rank: int
    reason: str
    predicted_cached_tokens: int | None
    cached_tokens: int
    ttft_ms: float
    text: str
    kind: str


def run(arguments: argparse.Namespace) -> int:
    """Send the tour one request at a time. 0 if every prediction was exact."""
    import asyncio

    url = arguments.url or client.status(arguments.name)["router"]["url"]
    seen = asyncio.run(_tour(url, arguments.api_key, quiet=arguments.json))
    exact = sum(one.predicted_cached_tokens == one.cached_tokens for one in seen)
    if arguments.json:
        print(json.dumps({"requests": [asdict(one) for one in seen], "exact": exact, "total": len(seen)}, indent=2))
    else:
        print(f"\n{exact} of {len(seen)} predictions were exact")
    return 0 if exact == len(seen) else 1


async def _tour(url: str, api_key: str | None, *, quiet: bool) -> list[Seen]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(url, headers=headers, timeout=timeout) as session:
        async with session.get("/v1/models") as answer:
            answer.raise_for_status()
            cards = (await answer.json())["data"]
        base = next(card["id"] for card in cards if card["parent"] is None)
        adapters = [card["id"] for card in cards if card["parent"] is not None]
        if not quiet:
            print(
                f"{'model':36} {'kind':11} {'worker':6} {'rank':>4} {'why':13} {'predicted':>9} {'cached':>6} "
                f"{'ttft ms':>8}  text"
            )
        seen = []
        for model, adapter, kind, body in _requests(base, adapters):
            one = await _send(session, model, adapter, kind, body)
            seen.append(one)
            if not quiet:
                print(
                    f"{one.model[:36]:36} {one.kind:11} {one.worker:6} {one.dp_rank:4} {one.reason:13} "
                    f"{'?' if one.predicted_cached_tokens is None else one.predicted_cached_tokens:>9} "
                    f"{one.cached_tokens:6} {one.ttft_ms:8.0f}  {one.text[:40]!r}",
                    flush=True,
                )
        return seen


def _requests(base: str, adapters: list[str]) -> Iterator[tuple[str, str | None, str, dict[str, Any]]]:
    """Model name as a client says it, adapter, kind, body. Every prompt comes at least twice."""
    names: list[tuple[str, str | None]] = [(base, None)]
    names += [(name if i % 2 else f"{base}:{name}", name) for i, name in enumerate(adapters[:4])]
    system = {"role": "system", "content": _LONG}
    for stream in (False, True):
        for model, adapter in names:
            ask = [{"role": "user", "content": _SHORT}]
            yield model, adapter, "chat", {"messages": ask, "stream": stream}
            for question in ("Where are the poems?", "May I take an atlas home?"):
                ask = [system, {"role": "user", "content": question}]
                yield model, adapter, "chat", {"messages": ask, "stream": stream}
            yield (
                model,
                adapter,
                "completion",
                {"prompt": _LONG + "Question: when do you open?\nAnswer:", "stream": stream},
            )


async def _send(
    session: aiohttp.ClientSession, model: str, adapter: str | None, kind: str, body: dict[str, Any]
) -> Seen:
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    stream = body["stream"]
    body = {"model": model, "max_tokens": _MAX_TOKENS, "temperature": 0, **body}
    if stream:
        body["stream_options"] = {"include_usage": True}
    started_s = time.monotonic()
    async with session.post(path, json=body) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{path} for {model!r}: HTTP {answer.status}: {await answer.text()}")
        headers = answer.headers
        chunks = []
        ttft_s = 0.0
        async for line in answer.content:
            ttft_s = ttft_s or time.monotonic() - started_s
            if not stream:
                chunks.append(json.loads(line))
            elif line.startswith(b"data: {"):
                chunks.append(json.loads(line[len(b"data: ") :]))
    predicted = headers.get("x-loray-predicted-cached-tokens")
    usage = next(chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage"))
    return Seen(
        model=model,
        adapter=adapter,
        worker=headers["x-loray-worker"],
        dp_rank=int(headers["x-loray-dp-rank"]),
        reason=headers["x-loray-reason"],
        predicted_cached_tokens=None if predicted is None else int(predicted),
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        ttft_ms=round(ttft_s * 1000, 1),
        text="".join(_text(choice) for chunk in chunks for choice in chunk["choices"]),
        kind=kind + (" stream" if stream else ""),
    )


def _text(choice: dict[str, Any]) -> str:
    content = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
    return content.get("content") or ""
