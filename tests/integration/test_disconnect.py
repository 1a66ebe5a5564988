"""Clients that leave: their request ends in the engine too, and nothing stays booked."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.integration.asking import CHAT, COMPLETIONS, ask, events, noise, user
from tests.integration.background_loop import poll
from tests.integration.event_tap import barrier, tapped
from tests.integration.local_fleet import ADAPTERS, SERVED, LocalFleet

pytestmark = pytest.mark.engine

LONG = {"max_tokens": 900, "ignore_eos": True, "temperature": 0}
"""Seconds to minutes on a CPU."""
FEW_TOKENS = 600
"""Whoever stopped before this didn't run to the end."""


@contextmanager
def sent(url: str, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A request on a socket of its own; leaving closes it at once."""
    address = urlsplit(url)
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    with closing(socket.create_connection((address.hostname or "", address.port or 0), timeout=60)) as connection:
        connection.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        yield connection


def busy(fleet: LocalFleet) -> int:
    return sum(fleet.running(worker_id) for worker_id in fleet.workers)


def booked(fleet: LocalFleet) -> int:
    return fleet.call(lambda: int(fleet.core.load.running.sum()))


@pytest.fixture(autouse=True)
def at_rest(fleet: LocalFleet) -> Iterator[None]:
    poll(lambda: busy(fleet) == 0, what="engines idle")
    fleet.settle()
    yield
    poll(lambda: busy(fleet) == 0, what="engines idle")
    fleet.settle()
    fleet.check()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/generate"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("samples", [1, 2])
def test_a_client_that_leaves_ends_its_request_in_the_engine(
    fleet: LocalFleet, path: str, stream: bool, samples: int
) -> None:
    prompt = noise(random.Random(f"{path}{stream}{samples}"), 20)
    body: dict[str, Any] = {"model": ADAPTERS[0], "prompt": prompt, "stream": stream, "n": samples, **LONG}
    if path == CHAT:
        body["messages"] = user(prompt)
    if path == "/generate":
        params = {"max_new_tokens": 900, "ignore_eos": True, "n": samples}
        body = {"text": prompt, "stream": stream, "sampling_params": params}
    with tapped(fleet) as taps:
        poll(lambda: busy(fleet) == 0, what="engines idle")
        with sent(fleet.url, path, body) as connection:
            if stream:
                answer = b""
                while b"data: " not in answer:
                    answer += connection.recv(4096)
            poll(lambda: busy(fleet) > 0, what="engine busy")
            assert booked(fleet) == 1
        poll(lambda: booked(fleet) == 0, what="nothing booked")
        poll(lambda: busy(fleet) == 0, what="request gone from the engine")
        for source, tap in taps.items():
            barrier(fleet, source, tap)
        computed = sum(len(e["token_ids"]) for tap in taps.values() for e in tap.events("BlockStored"))
    if stream or (samples == 1 and path != "/generate"):  # else no rid is known, and the engine looks every 4 s only
        assert computed < FEW_TOKENS, "the engine went on after the client had left"


@pytest.mark.parametrize("path", [CHAT, "/generate"])
def test_a_client_that_leaves_ends_nobody_elses_request(fleet: LocalFleet, path: str) -> None:
    """SGLang aborts whatever starts with the rid that it is told, and ours all start alike."""
    prompt = noise(random.Random(path), 40)
    with httpx.Client(base_url=fleet.url, timeout=120) as client:
        worker = ask(client, prompt=prompt).worker
        body = {"model": SERVED, "prompt": prompt, **LONG, "max_tokens": 200, "stream": True}
        with client.stream("POST", COMPLETIONS, json=body) as bystander:
            assert bystander.headers["x-loray-worker"] == worker
            chunks = bystander.iter_text()
            text = next(chunks)
            for rid in ("c", "cmpl-", "chatcmpl-"):
                theirs = {"model": SERVED, "stream": True, "rid": rid, **LONG}
                theirs |= {"messages": user("x"), "input_ids": list(prompt.encode())}
                if path == "/generate":
                    params = {"max_new_tokens": 900, "ignore_eos": True}
                    theirs = {"text": prompt, "stream": True, "rid": rid, "sampling_params": params}
                with sent(fleet.url, path, theirs) as connection:
                    while b"data: " not in connection.recv(4096):
                        pass
                poll(lambda: booked(fleet) <= 1, what="request gone")
            text += "".join(chunks)
    assert json.loads(events(text)[-2])["choices"][0]["finish_reason"] == "length"


def test_a_client_that_leaves_before_its_body_is_whole_books_nothing(fleet: LocalFleet) -> None:
    address = urlsplit(fleet.url)
    for sent_bytes in (
        b"POST /v1/completions HTTP/1.1\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{",
    ):
        with socket.create_connection((address.hostname or "", address.port or 0)) as connection:
            connection.sendall(sent_bytes)
    assert booked(fleet) == 0


def test_others_are_served_while_clients_come_and_go(fleet: LocalFleet) -> None:
    for i in range(6):
        with sent(
            fleet.url, COMPLETIONS, {"model": SERVED, "prompt": noise(random.Random(i), 40), "stream": True, **LONG}
        ):
            if i % 2:
                poll(lambda: booked(fleet) > 0, what="booked")
    poll(lambda: booked(fleet) == 0, what="nothing booked")
    poll(lambda: busy(fleet) == 0, what="requests gone from the engines")
    for source in fleet.sources():
        with fleet.engine(source.worker_id) as engine:
            assert ask(engine, prompt="still there?").text
