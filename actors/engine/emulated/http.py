"""The HTTP surface of an emulated engine: as much of SGLang's as routers, workers and clients of them use."""

from __future__ import annotations

import asyncio
import hmac
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import contextmanager
from typing import Any, Final

import msgspec
from aiohttp import web
from sglang.version import __version__

from actors.engine.emulated.engine import Ask, EmulatedEngine, RefusedError, Request
from router.net.tokenizer import PromptTokenizer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_DEFAULT_TOKENS: Final = 16
_MAX_BODY: Final = 64 << 20


class HttpSurface:
    """Handlers. One engine."""

    def __init__(self, engine: EmulatedEngine, tokenizer: PromptTokenizer | None, api_key: str) -> None:
        """`tokenizer`: None where only token ids are served."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._api_key = api_key

    def app(self) -> web.Application:
        """To be served."""
        app = web.Application(middlewares=[self._guard], client_max_size=_MAX_BODY)
        app.router.add_get("/ready", self._ok)
        app.router.add_get("/health", self._ok)
        app.router.add_get("/server_info", self._info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_post("/v1/tokenize", self._tokenize)
        app.router.add_post("/load_lora_adapter", self._load)
        app.router.add_post("/unload_lora_adapter", self._unload)
        app.router.add_post("/flush_cache", self._flush)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        is_open = not self._api_key or request.path in ("/ready", "/health")
        if not is_open and not hmac.compare_digest(given.encode(), self._api_key.encode()):
            return web.json_response({"error": "Unauthorized"}, status=401)
        try:
            return await handler(request)
        except RefusedError as exc:
            return web.json_response({"object": "error", "message": str(exc), "code": 400}, status=400)
        except (KeyError, TypeError, ValueError, msgspec.MsgspecError) as exc:
            text = f"{type(exc).__name__}: {exc}"
            return web.json_response({"object": "error", "message": text, "code": 400}, status=400)

    # -- looking -------------------------------------------------------------------------------------------------

    async def _ok(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _info(self, _request: web.Request) -> web.Response:
        settings = self._engine.settings
        return web.json_response({
            "page_size": settings.page_size,
            "max_total_num_tokens": settings.kv_tokens,
            "version": __version__,
            "speculative_algorithm": None,
            "dp_size": settings.dp_size,
            "emulated": settings.profile.name,
        })  # fmt: skip

    async def _models(self, _request: web.Request) -> web.Response:
        settings = self._engine.settings
        card = {"object": "model", "owned_by": "sglang", "max_model_len": settings.context_length}
        names = [settings.served_name, *self._engine.adapters]
        return web.json_response({"object": "list", "data": [{"id": name, "root": name, **card} for name in names]})

    async def _loads(self, _request: web.Request) -> web.Response:
        settings = self._engine.settings
        rows = [
            {
                "dp_rank": i,
                "num_running_reqs": len(rank.model.running),
                "num_waiting_reqs": rank.num_requests - len(rank.model.running),
                "num_waiting_uncached_tokens": rank.model.waiting_tokens,
                "num_used_tokens": rank.used_tokens,
                "max_total_num_tokens": settings.kv_tokens,
                "max_running_requests": settings.profile.max_running,
            }
            for i, rank in enumerate(self._engine.ranks)
        ]
        return web.json_response({"version": __version__, "loads": rows})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await _json(request)
        tokens = await (self._chat_tokens(body) if "messages" in body else self._text_tokens(body["prompt"]))
        return web.json_response({"tokens": tokens, "count": len(tokens)})

    # -- control -------------------------------------------------------------------------------------------------

    async def _load(self, request: web.Request) -> web.Response:
        body = await _json(request)
        await self._engine.load(body["lora_name"], body["lora_path"])
        return web.json_response({"success": True, "loaded_adapters": self._engine.adapters})

    async def _unload(self, request: web.Request) -> web.Response:
        body = await _json(request)
        await self._engine.unload(body["lora_name"])
        return web.json_response({"success": True, "loaded_adapters": self._engine.adapters})

    async def _flush(self, request: web.Request) -> web.Response:
        until_s = time.monotonic() + float(request.query.get("timeout", "0"))
        while not self._engine.flush():
            if time.monotonic() >= until_s:
                return web.Response(status=400, text="Flush cache failed: requests run or wait.\n")
            await asyncio.sleep(0.01)
        return web.Response(text="Cache flushed.\n")

    async def _abort(self, request: web.Request) -> web.Response:
        body = await _json(request)
        self._engine.abort(body.get("rid") or "")
        return web.Response()

    # -- inference -----------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await _json(request)
        sampling = body.get("sampling_params") or {}
        tokens = body.get("input_ids") or await self._text_tokens(body["text"])
        ask = self._ask(body, tokens, sampling.get("max_new_tokens"), adapter=body.get("lora_path"))
        with self._started(ask) as started:
            async for _ in _growing(started):
                pass
            job = started.stream.job
            meta = {
                "id": ask.rid,
                "finish_reason": {"type": "length", "length": job.max_output},
                "prompt_tokens": job.num_tokens,
                "completion_tokens": started.stream.num_tokens,
                "cached_tokens": job.cached,
            }
            return web.json_response({"text": _text(started), "output_ids": _output(started), "meta_info": meta})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await _json(request)
        prompt = body["prompt"]
        tokens = await self._text_tokens(prompt) if isinstance(prompt, str) else prompt
        limit = body.get("max_tokens")

        def choice(text: str, reason: str | None) -> dict[str, Any]:
            return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}

        return await self._answer(request, body, tokens, limit, "text_completion", "text_completion", choice, choice)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await _json(request)
        tokens = body.get("input_ids") or await self._chat_tokens(body)
        limit = body.get("max_completion_tokens") or body.get("max_tokens")

        def whole(text: str, reason: str | None) -> dict[str, Any]:
            return {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}

        def part(text: str, reason: str | None) -> dict[str, Any]:
            return {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": reason}

        return await self._answer(request, body, tokens, limit, "chat.completion", "chat.completion.chunk", whole, part)

    async def _answer(
        self,
        request: web.Request,
        body: dict[str, Any],
        tokens: list[int],
        limit: int | None,
        kind: str,
        part_kind: str,
        whole: Callable[[str, str | None], dict[str, Any]],
        part: Callable[[str, str | None], dict[str, Any]],
    ) -> web.StreamResponse:
        adapter = self._adapter(body)
        no_reuse = bool(body.get("echo")) and body.get("logprobs") is not None
        ask = self._ask(body, tokens, limit, adapter=adapter, no_reuse=no_reuse)
        head = {"id": ask.rid, "created": int(time.time()), "model": body["model"]}
        with self._started(ask) as started:
            if not body.get("stream"):
                async for _ in _growing(started):
                    pass
                done = {"object": kind, **head, "choices": [whole(_text(started), "length")], "usage": _usage(started)}
                return web.json_response(done)
            growing = _growing(started)
            first = await anext(growing, None)  # an answer begins with its first token
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            sent = 0
            while first is not None:
                text, sent = _text(started)[sent:first], first
                await _send(response, {"object": part_kind, **head, "choices": [part(text, None)], "usage": None})
                first = await anext(growing, None)
            await _send(response, {"object": part_kind, **head, "choices": [part("", "length")], "usage": None})
            if (body.get("stream_options") or {}).get("include_usage"):
                await _send(response, {"object": part_kind, **head, "choices": [], "usage": _usage(started)})
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
            return response

    @contextmanager
    def _started(self, ask: Ask) -> Any:
        request = self._engine.start(ask)
        try:
            yield request
        finally:
            self._engine.finish(request)

    def _ask(
        self,
        body: dict[str, Any],
        tokens: list[int],
        limit: int | None,
        *,
        adapter: str | None,
        no_reuse: bool = False,
    ) -> Ask:
        return Ask(
            tokens=tokens,
            max_tokens=_DEFAULT_TOKENS if limit is None else limit,
            rid=body.get("rid") or uuid.uuid4().hex,
            adapter=adapter,
            extra_key=body.get("extra_key"),
            cache_salt=body.get("cache_salt"),
            local_rank=body.get("routed_dp_rank"),
            no_reuse=no_reuse,
        )

    def _adapter(self, body: dict[str, Any]) -> str | None:
        """As SGLang reads it: `<base>:<adapter>` in the model's name, else `lora_path`."""
        served, model = self._engine.settings.served_name, str(body["model"])
        if model != served and ":" in model:
            return model.removeprefix(served + ":") if model.startswith(served + ":") else model.split(":", 1)[1]
        path = body.get("lora_path")
        return str(path) if path is not None else None

    async def _text_tokens(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise RefusedError("this engine has no tokenizer; send token ids")
        return await self._tokenizer.completion(text)

    async def _chat_tokens(self, body: dict[str, Any]) -> list[int]:
        tokens = None if self._tokenizer is None else await self._tokenizer.chat(body)
        if tokens is None:
            raise RefusedError("this engine renders plain text chats only")
        return tokens


async def _growing(started: Request) -> AsyncIterator[int]:
    """Tokens of output so far, each time there are more."""
    stream, told = started.stream, 0
    while True:
        if stream.num_tokens > told:
            told = stream.num_tokens
            yield told
        elif stream.ended:
            return
        else:
            await stream.more()


def _output(started: Request) -> list[int]:
    job = started.stream.job
    return job.prompt.upto(job.num_tokens + started.stream.num_tokens)[job.num_tokens :].tolist()


def _text(started: Request) -> str:
    """A letter for each token."""
    return "".join(map(chr, _output(started)))


def _usage(started: Request) -> dict[str, Any]:
    job, num_output = started.stream.job, started.stream.num_tokens
    return {
        "prompt_tokens": job.num_tokens,
        "completion_tokens": num_output,
        "total_tokens": job.num_tokens + num_output,
        "prompt_tokens_details": {"cached_tokens": job.cached},
    }


async def _json(request: web.Request) -> dict[str, Any]:
    body = msgspec.json.decode(await request.read())
    if not isinstance(body, dict):
        raise RefusedError("the body must be a JSON object")
    return body


async def _send(response: web.StreamResponse, data: dict[str, Any]) -> None:
    await response.write(b"data: " + msgspec.json.encode(data) + b"\n\n")
