"""Prompts tokenized by an engine: for chats that the router doesn't render itself, and to check that it renders right.

One more hop, a few ms, against routing an agent's long prompt blindly. SGLang's /v1/tokenize renders messages, tools
and template arguments by the very code that serves them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiohttp
import msgspec

from router.net.tokenizer import PROBE, PROBE_TEXT, PromptTokenizer

log = logging.getLogger(__name__)

_TIMEOUT_S: Final = 10.0
_NOT_RENDERED: Final = frozenset(
    {"add_generation_prompt", "add_special_tokens", "prompt", "input_ids", "stream", "rid"}
)
"""Fields that mean something else to /v1/tokenize than to a chat."""


class _Tokens(msgspec.Struct):
    tokens: list[int]


def is_text_only(messages: Sequence[Any]) -> bool:
    """Whether no message carries media, which SGLang expands to tokens only later."""
    parts = [part for m in messages for part in (m["content"] if isinstance(m.get("content"), list) else ())]
    return all(isinstance(part, dict) and part.get("type") == "text" for part in parts)


async def tokenize_chat(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> list[int] | None:
    """Token ids that the engine at `url` would compute a chat completion on; None if it doesn't say."""
    if not is_text_only(body["messages"]):
        return None
    return await _ask(session, url, {key: value for key, value in body.items() if key not in _NOT_RENDERED})


async def disagreement(session: aiohttp.ClientSession, url: str, tokenizer: PromptTokenizer) -> str | None:
    """How the router's own tokens differ from the engine's, on a chat and a text that show most differences.

    '' where they don't, None where the engine doesn't say.
    """
    chat = {"model": "probe", "messages": list(PROBE)}
    no_system = {"model": "probe", "messages": list(PROBE[1:])}  # some templates refuse a system message
    for what, ours, body in (
        ("a chat", await tokenizer.chat(chat), chat),
        ("a chat without a system message", await tokenizer.chat(no_system), no_system),
        ("a text", await tokenizer.completion(PROBE_TEXT), {"prompt": PROBE_TEXT}),
    ):
        theirs = await _ask(session, url, body)
        if theirs is None and ours is not None:
            return None
        if ours != theirs:
            return f"{what} gives {_shown(ours)} here and {_shown(theirs)} in the engine"
    return ""


async def _ask(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> list[int] | None:
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    try:
        async with session.post(f"{url}/v1/tokenize", json=body, timeout=timeout) as answer:
            raw = await answer.read()
            if answer.status != 200:
                log.info("the engine at %s doesn't tokenize: HTTP %d: %.200s", url, answer.status, raw.decode())
                return None
        return msgspec.json.decode(raw, type=_Tokens).tokens
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as exc:
        log.info("the engine at %s doesn't tokenize: %s", url, exc)
        return None


def _shown(tokens: list[int] | None) -> str:
    return "nothing" if tokens is None else f"{len(tokens)} tokens {tokens[:8]}..."
