"""A template that refuses messages: the router leaves them to the engine, and trusts its tokens for the others."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from deployment.assets import tiny
from deployment.assets.folder import ensure
from deployment.assets.paths import model_dir
from router.net.engine_tokenizer import disagreement
from router.net.tokenizer import PROBE, PromptTokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
)
REFUSED = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}
PLAIN = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def tokenizer() -> PromptTokenizer:
    folder = model_dir("tiny-llama")
    ensure(folder, tiny.build)
    tokenizer = PromptTokenizer(str(folder))
    tokenizer._tokenizer.chat_template = TEMPLATE
    return tokenizer


async def compared(tokenizer: PromptTokenizer, *, differs: bool) -> str | None:
    """With an engine that refuses the same, and that tokenizes other chats alike, or not."""

    async def tokenize(request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        if "prompt" in body:
            return web.json_response({"tokens": await tokenizer.completion(body["prompt"])})
        tokens = await tokenizer.chat(body)
        if tokens is None:
            return web.json_response({"message": "System role not supported"}, status=400)
        return web.json_response({"tokens": [*tokens, 1] if differs else tokens})

    app = web.Application()
    app.router.add_post("/v1/tokenize", tokenize)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        return await disagreement(session, str(server.make_url("")).rstrip("/"), tokenizer)


async def test_messages_that_the_template_refuses_are_left_to_the_engine(tokenizer: PromptTokenizer) -> None:
    assert await tokenizer.chat(REFUSED) is None
    assert await tokenizer.chat({"messages": list(PROBE)}) is None
    assert await tokenizer.chat(PLAIN) is not None


async def test_a_template_without_system_messages_is_compared_all_the_same(tokenizer: PromptTokenizer) -> None:
    assert await compared(tokenizer, differs=False) == ""
    assert "a chat without a system message gives" in (await compared(tokenizer, differs=True) or "")
