"""The router's token ids are the engine's own, for everything that it tokenizes itself."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.integration.asking import CHAT, ask, user
from tests.integration.local_fleet import SERVED, LocalFleet

pytestmark = pytest.mark.engine

SYSTEM = {"role": "system", "content": "Be brief."}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": user("hello"),
    "system": [SYSTEM, *user("hello")],
    "turns": [SYSTEM, *user("a"), {"role": "assistant", "content": "b"}, *user("c")],
    "ends-with-assistant": [*user("a"), {"role": "assistant", "content": "b"}],
    "empty": user(""),
    "spaces": user("  two  spaces \n\n and lines \t "),
    "unicode": user("caf\u00e9 \u4f60\u597d \U0001f600 e\u0301 \u200b"),
    "template-syntax": user("{{ messages }} {% if x %} <eos> <bos> </s>"),
    "text-part": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
    "text-parts": [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", " b", "c ")]}],
    "parts-in-system": [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, *user("x")],
    "long": user("word " * 150),
}
PROMPTS = (
    "hello",
    " ",
    "a\nb\tc",
    "caf\u00e9 \u4f60\u597d \U0001f600",
    "<bos>hi<eos>",
    "user: x\nassistant:",
    "word " * 180,
)


def tokens_of(fleet: LocalFleet, **body: Any) -> list[int]:
    """What an engine makes of it."""
    with fleet.engine("w0") as engine:
        answer = engine.post("/v1/tokenize", json={"model": SERVED, **body})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["tokens"])


@pytest.mark.parametrize("name", CHATS)
def test_chats(fleet: LocalFleet, name: str) -> None:
    tokenizer = fleet.router._ingress.trusted_tokenizer
    assert tokenizer is not None
    mine = fleet.run(tokenizer.chat({"messages": CHATS[name]}))  # type: ignore[arg-type]
    assert mine == tokens_of(fleet, messages=CHATS[name])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_completions(fleet: LocalFleet, prompt: str) -> None:
    tokenizer = fleet.router._ingress.trusted_tokenizer
    assert tokenizer is not None
    assert fleet.run(tokenizer.completion(prompt)) == tokens_of(fleet, prompt=prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_served_alike_with_our_tokens_and_with_the_engines(
    fleet: LocalFleet, client: httpx.Client, name: str
) -> None:
    """Same text and same cached tokens, whoever tokenizes."""
    asked = {"messages": CHATS[name], "max_tokens": 6, "ignore_eos": True, "cache_salt": f"alike-{name}"}
    first = ask(client, CHAT, **asked)
    assert first.reason != "not-tokenized"
    with fleet.engine(first.worker or "") as engine:
        theirs = ask(engine, CHAT, **asked)
    ours = ask(client, CHAT, **asked)
    assert ours.worker == first.worker
    assert theirs.prompt_tokens == ours.prompt_tokens
    assert theirs.cached == ours.cached == ours.predicted
    assert theirs.text == ours.text
