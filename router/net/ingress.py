"""The HTTP surface of a router: OpenAI's API, health, metrics, and a look inside."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
from aiohttp import web

from router.config import RouterConfig
from router.core import RouterCore
from router.decision import RouteRequest
from router.errors import InvalidRequest, NoCapacity, RequestTooLarge, RouterError, Unauthorized, UnknownModel
from router.names import resolve_model
from router.net import views
from router.net.adapter_admin import AdapterRoutes
from router.net.dispatch import Dispatcher, error_response
from router.net.metrics import PrometheusRecorder
from router.net.openai import Api, Call, check_call, parse_json, relayed_body
from router.net.relay import Outgoing
from router.net.tokenizer import PromptTokenizer
from router.reports import WorkerState

log = logging.getLogger(__name__)

_OPEN_PATHS: Final = frozenset({"/health", "/ready", "/metrics"})
"""What a load balancer or scraper asks without a key."""
_ENGINE_CONTROL: Final = frozenset({
    "/abort_request", "/add_external_corpus", "/begin_weight_update", "/close_session", "/configure_logging",
    "/continue_generation", "/destroy_weights_update_group", "/dump_expert_distribution_record", "/end_weight_update",
    "/flush_cache", "/freeze_gc", "/get_weights_by_name", "/hicache/storage-backend/clear",
    "/init_weights_send_group_for_remote_instance", "/init_weights_update_group",
    "/load_lora_adapter_from_tensors", "/open_session", "/pause_generation", "/pd_role_switch",
    "/release_memory_occupation", "/remove_external_corpus", "/resume_memory_occupation",
    "/send_weights_to_remote_instance", "/set_internal_state", "/set_trace_level", "/slow_down",
    "/start_expert_distribution_record", "/start_profile", "/stop_expert_distribution_record", "/stop_profile",
    "/update_weight_version", "/update_weights_from_disk", "/update_weights_from_distributed",
    "/update_weights_from_ipc", "/update_weights_from_tensor", "/weights_checker",
})  # fmt: skip
"""SGLang paths that change one engine; sent to whichever worker is least loaded, they would make workers differ."""
_PLAIN_PATH: Final = re.compile(r"(/\w[\w.-]*)+", re.ASCII)
"""Paths that mean here what they mean to an engine: no `..`, no `?` in disguise, no slash at the end."""

_NO_CATALOGUE: Final = "the catalogue of adapters hasn't come yet; ask again in a moment"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Tokens:
    """A prompt's token ids, None where nobody knows them; `ours`: tokenized here or by the client."""

    ids: list[int] | None
    ours: bool


class Ingress:
    """Handlers of one router. `start` binds, `stop` lets running requests go."""

    def __init__(
        self,
        config: RouterConfig,
        core: RouterCore,
        dispatcher: Dispatcher,
        *,
        served_name: str,
        prometheus: PrometheusRecorder,
        before_scrape: Callable[[], None],
        audit: Callable[[], Awaitable[dict[str, Any]]],
        adapters: AdapterRoutes,
    ) -> None:
        """`before_scrape` refreshes gauges; `audit` compares all sources now."""
        self._audit_all = audit
        self._adapters = adapters
        self._config = config
        self._core = core
        self._dispatcher = dispatcher
        #: the router's own tokenizer once an engine has agreed with it; until then, engines tokenize
        self.trusted_tokenizer: PromptTokenizer | None = None
        self._served_name = served_name
        self._prometheus = prometheus
        self._before_scrape = before_scrape
        self._created_s = int(time.time())
        self._runner: web.AppRunner | None = None
        self.draining = False

    async def start(self) -> None:
        """Listen. Raises OSError if the port is taken."""
        app = web.Application(
            client_max_size=self._config.max_body_mb * 1024 * 1024, middlewares=[self._errors, self._authorize]
        )
        app.router.add_post(Api.CHAT, self._chat)
        app.router.add_post(Api.COMPLETIONS, self._completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._model)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/loray/status", self._status)
        app.router.add_post("/loray/route", self._route)
        app.router.add_post("/loray/audit", self._audit)
        app.router.add_get("/loray/decisions", self._decisions)
        self._adapters.add_to(app)
        app.router.add_post("/{path:.*}", self._relay)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._config.host, self._config.port, backlog=4096).start()

    async def stop(self) -> None:
        """Stop listening and end what still runs."""
        if self._runner is not None:
            await self._runner.cleanup()

    # -- middlewares ---------------------------------------------------------------------------------------------

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except UnknownModel as exc:  # before the first copy of the table nobody can say what doesn't exist
            return error_response(exc if self._core.table.version >= 0 else NoCapacity(_NO_CATALOGUE))
        except RouterError as exc:
            return error_response(exc)
        except web.HTTPRequestEntityTooLarge:
            limit = self._config.max_body_mb
            return error_response(RequestTooLarge(f"the body exceeds {limit} MB (router.max_body_mb)"))
        except web.HTTPException as exc:
            wrapped = InvalidRequest(f"{request.method} {request.path}: {exc.reason}")
            return web.json_response(wrapped.body(), status=exc.status)
        except (asyncio.CancelledError, ConnectionResetError):
            raise
        except Exception as exc:  # the last line before the client: logged, counted by status, told
            log.exception("%s %s failed", request.method, request.path)
            return error_response(RouterError(f"internal error: {type(exc).__name__}: {exc}"))

    @web.middleware
    async def _authorize(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        key = self._config.api_key
        if key is not None and request.path not in _OPEN_PATHS:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), key.encode()):
                raise Unauthorized("send the API key as 'Authorization: Bearer <key>'")
        return await handler(request)

    # -- inference -----------------------------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._call(Api.CHAT, request)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._call(Api.COMPLETIONS, request)

    async def _call(self, api: Api, request: web.Request) -> web.StreamResponse:
        call = self._checked(api, await request.read())
        tokens = await self._tokens(call)
        replace_prompt = tokens.ours and call.can_replace_prompt
        return await self._dispatcher.call(call, tokens.ids, request, replace_prompt=replace_prompt)

    def _checked(self, api: Api, raw: bytes) -> Call:
        body = parse_json(raw)
        return check_call(api, body, served_name=self._served_name, adapters=self._core.table.names)

    async def _tokens(self, call: Call) -> Tokens:
        if call.token_ids is not None:
            return Tokens(call.token_ids, ours=True)
        ids = None
        if self.trusted_tokenizer is not None:
            try:
                if call.api is Api.CHAT:
                    ids = await self.trusted_tokenizer.chat(call.body)
                elif call.text is not None:
                    ids = await self.trusted_tokenizer.completion(call.text)
            except (ValueError, TypeError) as exc:  # the template or tokenizer refused: SGLang shall say it
                log.info("left to the engine to tokenize: %s", exc)
        if ids is not None:
            return Tokens(ids, ours=True)
        return Tokens(await self._dispatcher.ask_tokens(call) if call.api is Api.CHAT else None, ours=False)

    async def _relay(self, request: web.Request) -> web.StreamResponse:
        """Any other POST of SGLang's API, to the least loaded worker (that holds the adapter, if one is named)."""
        if not _PLAIN_PATH.fullmatch(request.path):
            raise InvalidRequest(f"{request.path!r} is no path of the API")
        if request.path in _ENGINE_CONTROL:
            raise InvalidRequest(f"{request.path} controls a single engine and isn't offered by the router")
        raw = await request.read()
        request_id = f"relay-{uuid.uuid4().hex}"
        adapter, stream = None, False
        if request.content_type == "application/json":
            body = parse_json(raw)
            stream = body.get("stream") is True
            adapter = self._named_adapter(body)
            raw = relayed_body(
                request.path, body, served_name=self._served_name, adapter=adapter, request_id=request_id
            )
        outgoing = Outgoing(
            path=request.path,
            body=lambda _decision: raw,
            content_type=request.headers.get("Content-Type", "application/octet-stream"),
            adapter=adapter,
            predictable=False,
            stream=stream,
            request_id=request_id,
        )
        return await self._dispatcher.send(outgoing, RouteRequest(packed_tokens=None, adapter=adapter), request)

    def _named_adapter(self, body: dict[str, Any]) -> str | None:
        """Adapter that the body of a relayed request names, where it names one thing at all."""
        model, lora_path = body.get("model"), body.get("lora_path")
        if not isinstance(model, str) and not isinstance(lora_path, str):
            return None
        names = self._core.table.names
        return resolve_model(
            body.get("model", self._served_name), lora_path, served_name=self._served_name, adapters=names
        )

    # -- models --------------------------------------------------------------------------------------------------

    async def _models(self, _request: web.Request) -> web.Response:
        if self._core.table.version < 0:
            raise NoCapacity(_NO_CATALOGUE)
        names = (self._served_name, *self._core.table.names)
        return web.json_response({"object": "list", "data": [self._card(name) for name in names]})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        adapter = resolve_model(name, None, served_name=self._served_name, adapters=self._core.table.names)
        return web.json_response(self._card(adapter or self._served_name))

    def _card(self, name: str) -> dict[str, Any]:
        return views.model_card(self._core, name, served_name=self._served_name, created_s=self._created_s)

    # -- operation -----------------------------------------------------------------------------------------------

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _ready(self, _request: web.Request) -> web.Response:
        ready = sum(record.report.state is WorkerState.READY for record in self._core.workers.values())
        status = 200 if ready and not self.draining and self._core.table.version >= 0 else 503
        return web.json_response({"ready_workers": ready, "draining": self.draining}, status=status)

    async def _metrics(self, _request: web.Request) -> web.Response:
        self._before_scrape()
        return web.Response(body=self._prometheus.text(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _status(self, _request: web.Request) -> web.Response:
        return web.json_response(self.status())

    def status(self) -> dict[str, Any]:
        """All that the router knows of its workers, as JSON values."""
        return {
            **views.status(self._core),
            "tokenizer": "engine" if self.trusted_tokenizer is None else "router",
            "queued": self._dispatcher.num_queued,
        }

    async def _audit(self, _request: web.Request) -> web.Response:
        return web.json_response(await self._audit_all())

    async def _decisions(self, request: web.Request) -> web.Response:
        """The latest decisions, each with all that it depended on; `since` a number, to follow them."""
        since = request.query.get("since", "0")
        if not since.isdecimal():
            raise InvalidRequest(f"'since' must be the number of a decision, got {since!r}")
        log = self._core.decisions(since=int(since))
        body = msgspec.json.encode({"seed": str(self._core.seed), "decisions": log})
        return web.Response(body=body, content_type="application/json")

    async def _route(self, request: web.Request) -> web.Response:
        """Explain a decision without running it: same body as chat completions or completions."""
        raw = await request.read()
        api = Api.CHAT if "messages" in parse_json(raw) else Api.COMPLETIONS
        call = self._checked(api, raw)
        wanted = self._dispatcher.route_request(call, (await self._tokens(call)).ids)
        found = views.explanation(self._core, replace(wanted, now_s=time.monotonic()))
        return web.json_response({"model": call.body["model"], "adapter": call.adapter, **found})
