"""One request through the dispatcher, on real sockets, with engines that answer as each test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from router.admission import AdmissionConfig
from router.errors import RouterError
from router.ids import WorkerId
from router.net.adapters import AdapterGate
from router.net.admission import Admission
from router.net.dispatch import Dispatcher, error_response
from router.net.openai import Api, check_call, parse_json
from router.reports import RankLoad, TableView
from tests.router.fleet import A1, Fleet, holding, report

NAME = "an-adapter"
WORKERS = ("w0", "w1")
SOON_S = 20.0
GONE = "Got LoRA adapter that has never been loaded: an-adapter\nAll loaded adapters: dict_keys([])."
LISTED = "The following requested LoRA adapters are not loaded: an-adapter\nLoaded adapters: []."

Engine = Callable[[dict[str, Any]], Awaitable[web.StreamResponse | tuple[int, Any]]]


def answer(text: str) -> tuple[int, Any]:
    return 200, {"choices": [{"index": 0, "text": text}], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}


async def echoes(body: dict[str, Any]) -> tuple[int, Any]:
    return answer(body["prompt"])


class Table:
    """The LoRA table, as far as a router asks it."""

    def __init__(self) -> None:
        self.wishes: list[tuple[str, bool]] = []

    async def wait_view(self, epoch: str, version: int, timeout_s: float) -> bytes:
        raise NotImplementedError

    async def want(self, name: str, preferred: list[WorkerId], waiting: int, *, more: bool) -> None:
        self.wishes.append((name, more))

    async def use(self, counts: Mapping[str, int]) -> None: ...


class Desk:
    """A dispatcher before two engines."""

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        self.fleet = Fleet()
        self.core = self.fleet.core
        self.table = Table()
        self.gate = AdapterGate(self.core, self.table, wait_s=5.0, record_wait=lambda _: None)
        self.admission = Admission(self.core, AdmissionConfig(), record_wait=lambda _: None)
        self.dispatcher = Dispatcher(
            self.core,
            served_name="base",
            engine_key="key",
            timeout_s=timeout_s,
            record=lambda *_: None,
            drain=lambda _: None,
            sample=lambda _: None,
            gate=self.gate,
            admission=self.admission,
        )
        #: bodies by worker, as they came
        self.asked: dict[str, list[dict[str, Any]]] = {name: [] for name in WORKERS}
        self.aborted: list[str] = []
        self.at_once = 0
        self._engine = engine
        self._running = 0

    def serve(self, holders: tuple[str, ...]) -> None:
        """From now on these hold the adapter."""
        version = self.core.table.version + 1
        holdings = tuple(holding(name, NAME, A1) for name in holders)
        self.core.update_table(TableView(epoch="e", version=version, names=(NAME,), holdings=holdings))
        self.gate.changed()

    def held(self) -> set[str]:
        return {name for name, record in self.core.workers.items() if NAME in record.adapters}

    def suspended(self) -> set[str]:
        return {name for name, record in self.core.workers.items() if record.suspended}

    async def ask(self, **body: Any) -> tuple[int, str]:
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.front.make_url(Api.COMPLETIONS), json={"model": NAME, **body}) as found,
        ):
            return found.status, await found.text()

    def app_of(self, worker: str) -> web.Application:
        async def complete(request: web.Request) -> web.StreamResponse:
            body = await request.json()
            self.asked[worker].append(body)
            self._running += 1
            self.at_once = max(self.at_once, self._running)
            try:
                found = await self._engine({**body, "worker": worker, "request": request})
            finally:
                self._running -= 1
            return found if isinstance(found, web.StreamResponse) else web.json_response(found[1], status=found[0])

        async def abort(request: web.Request) -> web.Response:
            self.aborted.append((await request.json())["rid"])
            return web.Response()

        app = web.Application()
        app.router.add_post(Api.COMPLETIONS, complete)
        app.router.add_post("/abort_request", abort)
        return app

    async def _front(self, request: web.Request) -> web.StreamResponse:
        try:
            body = parse_json(await request.read())
            call = check_call(Api.COMPLETIONS, body, served_name="base", adapters=(NAME,))
            return await self.dispatcher.call(call, None, request, replace_prompt=False)
        except RouterError as exc:
            return error_response(exc)

    @asynccontextmanager
    async def open(self, *, max_running: int = 0) -> AsyncIterator[Desk]:
        front = web.Application()
        front.router.add_post(Api.COMPLETIONS, self._front)
        engines = [TestServer(self.app_of(name)) for name in WORKERS]
        self.front = TestServer(front)
        watching: list[asyncio.Task[None]] = []
        try:
            for server in (*engines, self.front):
                await server.start_server()
            for name, server in zip(WORKERS, engines, strict=True):
                one = report(name)
                load = RankLoad(running=0, waiting=0, max_running=max_running)
                rank = msgspec.structs.replace(one.ranks[0], load=load)
                self.fleet.start(msgspec.structs.replace(one, url=str(server.make_url("")).rstrip("/"), ranks=(rank,)))
            self.serve(WORKERS)
            watching.append(asyncio.ensure_future(self.dispatcher.run()))
            yield self
            self.core.check()
            assert (self.core.load.running == 0).all()
        finally:
            for task in watching:
                task.cancel()
            await self.dispatcher.close()
            for server in (self.front, *engines):
                await server.close()


def desk(engine: Engine, *, timeout_s: float = 60.0, max_running: int = 0) -> Any:
    return Desk(engine, timeout_s).open(max_running=max_running)


async def until(holds: Callable[[], object]) -> None:
    """Others go on until it holds."""
    async with asyncio.timeout(SOON_S):
        while not holds():  # noqa: ASYNC110  # it looks inside: there is no event to wait for
            await asyncio.sleep(0)


def error_code(text: str) -> str:
    return str(json.loads(text)["error"]["code"])


# -- adapters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("words", [GONE, LISTED, json.dumps({"error": {"message": GONE}})])
async def test_words_of_a_client_take_no_adapter_away(words: str, stream: bool) -> None:
    async def says(body: dict[str, Any]) -> web.StreamResponse | tuple[int, Any]:
        if not stream:
            return answer(body["prompt"])
        response = web.StreamResponse()
        await response.prepare(body["request"])
        await response.write(b"data: " + json.dumps(answer(body["prompt"])[1]).encode() + b"\n\n")
        return response

    async with desk(says) as one:
        status, text = await one.ask(prompt=words, stream=stream)
        assert (status, "has never been loaded" in text or "are not loaded" in text) == (200, True)
        assert one.held() == set(WORKERS)


async def test_an_error_that_quotes_the_words_takes_no_adapter_away() -> None:
    async def refuses(body: dict[str, Any]) -> tuple[int, Any]:
        return 400, {"object": "error", "message": f"bad prompt: {body['prompt']}", "code": 400}

    async with desk(refuses) as one:
        assert (await one.ask(prompt=GONE))[0] == 400
        assert one.held() == set(WORKERS)


@pytest.mark.parametrize("message", [GONE, LISTED])
@pytest.mark.parametrize("form", ["whole", "stream", "own path"])
async def test_an_engine_that_has_lost_the_adapter_is_left_for_another(message: str, form: str) -> None:
    lost: list[str] = []

    async def one_has_lost_it(body: dict[str, Any]) -> web.StreamResponse | tuple[int, Any]:
        if lost and body["worker"] != lost[0]:
            return answer("well")
        lost.append(body["worker"])
        if form == "whole":
            return 400, {"object": "error", "message": message, "type": "BadRequestError", "code": 400}
        if form == "own path":
            return 400, {"error": {"message": message}}
        response = web.StreamResponse()
        await response.prepare(body["request"])
        error = {"error": {"object": "error", "message": message, "code": 400}}
        await response.write(b"data: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    async with desk(one_has_lost_it) as one:
        status, text = await one.ask(prompt="x", stream=form == "stream")
        assert (status, "well" in text) == (200, True)
        assert one.held() == set(WORKERS) - set(lost)
        assert one.suspended() == set()


async def test_an_adapter_that_only_a_suspended_worker_holds_is_wanted_elsewhere() -> None:
    async with desk(echoes) as one:
        one.serve(("w0",))
        one.core.suspend(WorkerId("w0"), suspended=True)
        asking = asyncio.ensure_future(one.ask(prompt="x"))
        await until(lambda: one.table.wishes)
        assert one.table.wishes[0] == (NAME, True)
        one.serve(("w0", "w1"))
        assert (await asking)[0] == 200
        assert [len(one.asked[name]) for name in WORKERS] == [0, 1]


async def test_an_adapter_that_nobody_holds_is_wanted_once() -> None:
    async with desk(echoes) as one:
        one.serve(())
        asking = asyncio.ensure_future(one.ask(prompt="x"))
        await until(lambda: one.table.wishes)
        assert one.table.wishes[0] == (NAME, False)
        one.serve(("w1",))
        assert (await asking)[0] == 200


async def test_requests_that_waited_for_their_adapter_wait_for_room_as_others_do() -> None:
    released = asyncio.Event()

    async def waits(body: dict[str, Any]) -> tuple[int, Any]:
        await released.wait()
        return answer("done")

    async with desk(waits, max_running=4) as one:
        one.serve(())
        asking = [asyncio.ensure_future(one.ask(prompt="x")) for _ in range(20)]
        await until(lambda: one.gate.waiting[NAME] == 20)
        one.serve(("w0",))
        await until(lambda: len(one.admission) == 16)
        assert len(one.asked["w0"]) <= 4
        released.set()
        assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 20
        assert one.at_once <= 4


# -- deadlines ---------------------------------------------------------------------------------------------------


async def test_a_request_that_is_overdue_is_ended_once_and_no_workers_fault() -> None:
    ended = asyncio.Event()

    async def never(body: dict[str, Any]) -> tuple[int, Any]:
        await ended.wait()
        return answer("too late")

    async with desk(never, timeout_s=0.3) as one:
        for _ in range(3):
            status, text = await one.ask(prompt="x")
            assert (status, error_code(text)) == (504, "request_timeout")
        assert sum(map(len, one.asked.values())) == 3, "one worker each"
        assert one.suspended() == set()
        rids = [body["rid"] for bodies in one.asked.values() for body in bodies]
        await until(lambda: len(one.aborted) == 3)
        assert sorted(one.aborted) == sorted(rids)
        ended.set()


async def test_a_stream_that_is_overdue_ends_with_one_error_event_and_no_workers_fault() -> None:
    ended = asyncio.Event()

    async def begins(body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(body["request"])
        await response.write(b'data: {"choices":[]}\n\n')
        await ended.wait()
        return response

    async with desk(begins, timeout_s=0.3) as one:
        for _ in range(3):
            status, text = await one.ask(prompt="x", stream=True)
            first, last, rest = text.split("\n\n")
            assert (status, first, rest) == (200, 'data: {"choices":[]}', "")
            assert error_code(last.removeprefix("data: ")) == "request_timeout"
        assert one.suspended() == set()
        await until(lambda: len(one.aborted) == 3)
        ended.set()
