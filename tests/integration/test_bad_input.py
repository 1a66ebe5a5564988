"""Input that must not reach an engine, input that only the engine can judge, and paths that lead around the router."""

from __future__ import annotations

import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.integration.asking import CHAT, COMPLETIONS, ask, user
from tests.integration.local_fleet import ADAPTERS, CONTEXT, SERVED, LocalFleet

pytestmark = pytest.mark.engine

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

REFUSED_BYTES = {
    "empty": b"",
    "cut": b'{"model": "tiny-llama", "prompt": ',
    "not-json": b"prompt=hello",
    "list": b"[]",
    "string": b'"tiny-llama"',
    "null": b"null",
    "not-utf8": b'{"model": "tiny-llama", "prompt": "\xff"}',
    "lone-surrogate": rb'{"model": "tiny-llama", "prompt": "\ud800"}',
    "nan": b'{"model": "tiny-llama", "prompt": "x", "temperature": NaN}',
    "trailing": b'{"model": "tiny-llama", "prompt": "x"} x',
    "deep": b'{"model": "tiny-llama", "prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
}

REFUSED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "x"}),
    (COMPLETIONS, {"model": None, "prompt": "x"}),
    (COMPLETIONS, {"model": "", "prompt": "x"}),
    (COMPLETIONS, {"model": 5, "prompt": "x"}),
    (COMPLETIONS, {"model": [SERVED], "prompt": "x"}),
    (COMPLETIONS, {"model": SERVED}),
    (COMPLETIONS, {"model": SERVED, "prompt": None}),
    (COMPLETIONS, {"model": SERVED, "prompt": ""}),
    (COMPLETIONS, {"model": SERVED, "prompt": []}),
    (COMPLETIONS, {"model": SERVED, "prompt": 5}),
    (COMPLETIONS, {"model": SERVED, "prompt": {"text": "x"}}),
    (COMPLETIONS, {"model": SERVED, "prompt": [-1]}),
    (COMPLETIONS, {"model": SERVED, "prompt": [1, 2**32]}),
    (COMPLETIONS, {"model": SERVED, "prompt": [2**70]}),
    (COMPLETIONS, {"model": SERVED, "prompt": "x", "stream": "yes"}),
    (COMPLETIONS, {"model": SERVED, "prompt": "x", "stream": 1}),
    (COMPLETIONS, {"model": SERVED, "prompt": "x", "stream": True, "stream_options": True}),
    (COMPLETIONS, {"model": SERVED, "prompt": "x", "extra_key": 5}),
    (COMPLETIONS, {"model": SERVED, "prompt": "x", "cache_salt": {"a": 1}}),
    (COMPLETIONS, {"model": SERVED, "prompt": "x", "lora_path": [ADAPTERS[0]]}),
    (COMPLETIONS, {"model": ADAPTERS[0], "prompt": "x", "lora_path": ADAPTERS[1]}),
    (COMPLETIONS, {"model": SERVED, "prompt": "x" * CONTEXT}),
    (COMPLETIONS, {"model": SERVED, "prompt": [65] * (CONTEXT + 500)}),
    (CHAT, {"model": SERVED}),
    (CHAT, {"model": SERVED, "messages": []}),
    (CHAT, {"model": SERVED, "messages": "hello"}),
    (CHAT, {"model": SERVED, "messages": {"role": "user", "content": "x"}}),
    (CHAT, {"model": SERVED, "messages": ["hello"]}),
    (CHAT, {"model": SERVED, "messages": [{"content": "x"}]}),
    (CHAT, {"model": SERVED, "messages": [{"role": 5, "content": "x"}]}),
    (CHAT, {"model": SERVED, "messages": [{"role": "user", "content": 5}]}),
    (CHAT, {"model": SERVED, "messages": user("x"), "input_ids": [-5]}),
    (CHAT, {"model": SERVED, "messages": user("x" * CONTEXT)}),
]

ENGINES_OWN_400: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": [1, 2.5]}),
    (COMPLETIONS, {"prompt": [True, "x"]}),
    (COMPLETIONS, {"prompt": "x", "temperature": "warm"}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": -3}),
    (COMPLETIONS, {"prompt": "x", "extra_key": ["a"]}),
    (COMPLETIONS, {"prompt": "x" * (CONTEXT - 30), "max_tokens": 100}),
    (CHAT, {"messages": [{"role": "user"}]}),
    (CHAT, {"messages": [{"role": "martian", "content": "x"}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, IMAGE]}]}),
]

ENGINE_CONTROL = (
    "/flush_cache",
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/abort_request",
    "/pause_generation",
    "/update_weights_from_disk",
    "/set_internal_state",
)
DISGUISED = (
    "/flush_cache/",
    "//flush_cache",
    "/%66lush_cache",
    "/v1/../flush_cache",
    "/./flush_cache",
    "/v1/%2e%2e/flush_cache",
    "/v1/..%2fflush_cache",
    "/flush_cache%3F",
    "/flush_cache%23",
    "/flush_cache%3Fx=1",
    "/flush_cache%00",
    "/flush_cache%20",
    "/flush_cache;x",
    "/flush_cache?x=1",
    "http://127.0.0.1/flush_cache",
)


def assert_refused_by_us(response: httpx.Response, status: int = 400) -> None:
    assert response.status_code == status, response.text
    assert "x-loray-worker" not in response.headers, "an engine was asked"
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("kind", REFUSED_BYTES)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/generate"])
def test_bytes_that_are_no_json_object_are_refused(client: httpx.Client, path: str, kind: str) -> None:
    response = client.post(path, content=REFUSED_BYTES[kind], headers={"Content-Type": "application/json"})
    assert_refused_by_us(response)
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(("path", "body"), REFUSED, ids=lambda value: str(value)[:70])
def test_wrong_fields_are_refused_with_their_name(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    response = client.post(path, json=body)
    assert_refused_by_us(response)
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), ENGINES_OWN_400, ids=lambda value: str(value)[:70])
def test_what_only_the_engine_can_judge_comes_back_as_it_says(
    fleet: LocalFleet, client: httpx.Client, path: str, body: dict[str, Any], stream: bool
) -> None:
    asked = {"model": SERVED, "max_tokens": 2, "stream": stream, **body}
    response = client.post(path, json=asked)
    with fleet.engine("w0") as engine:
        theirs = engine.post(path, json=asked)
    assert response.headers["x-loray-worker"] in fleet.workers
    assert response.status_code == theirs.status_code == 400
    assert response.headers["content-type"] == theirs.headers["content-type"]
    assert response.json()["code"] == theirs.json()["code"]


def test_images_are_left_to_the_engine(client: httpx.Client) -> None:
    image = client.post(CHAT, json={"model": SERVED, "messages": [{"role": "user", "content": [IMAGE]}]})
    assert (image.status_code, image.headers["x-loray-reason"]) == (400, "not-tokenized")
    assert "image_url" in image.text


def test_chats_with_tools_are_rendered_by_an_engine_and_predicted_exactly(client: httpx.Client) -> None:
    asked = {"messages": user("which tool would you take? " * 4), "tools": [TOOL], "cache_salt": "tools"}
    first, second = ask(client, CHAT, **asked), ask(client, CHAT, **asked)
    assert (first.reason, first.predicted, first.cached) == ("least-loaded", 0, 0)
    assert (second.reason, second.worker) == ("cached-prefix", first.worker)
    assert second.predicted == second.cached
    assert second.cached
    assert second.text == first.text


def test_a_body_above_the_limit_is_413(client: httpx.Client) -> None:
    response = client.post(COMPLETIONS, json={"model": SERVED, "prompt": "x" * (1 << 20)})
    assert_refused_by_us(response, 413)
    assert response.json()["error"]["code"] == "request_too_large"


def test_several_samples(client: httpx.Client) -> None:
    answer = ask(client, CHAT, messages=user("pick one"), n=2, max_tokens=4)
    assert [choice["index"] for choice in answer.body["choices"]] == [0, 1]


def test_several_prompts(client: httpx.Client) -> None:
    for prompt in (["one", "two"], [[1, 2, 3], [4, 5]]):
        answer = ask(client, prompt=prompt)
        assert [choice["index"] for choice in answer.body["choices"]] == [0, 1]
        assert answer.reason == "not-tokenized"


def test_fields_we_do_not_know_reach_the_engine(client: httpx.Client) -> None:
    first = ask(client, prompt="tell me", max_tokens=8, ignore_eos=True, return_token_ids=True, unheard_of={"x": [1]})
    stopped = ask(client, prompt="tell me", max_tokens=8, stop_token_ids=[first.text.encode()[0]])
    assert (first.body["choices"][0]["finish_reason"], stopped.body["choices"][0]["finish_reason"]) == (
        "length",
        "stop",
    )


# -- other paths -------------------------------------------------------------------------------------------------


def test_generate_is_relayed(fleet: LocalFleet, client: httpx.Client) -> None:
    asked = {"text": "tell me", "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}
    with fleet.engine("w0") as engine:
        expected = engine.post("/generate", json={**asked, "lora_path": ADAPTERS[0]}).json()["text"]
    adapter = client.post("/generate", json={**asked, "lora_path": ADAPTERS[0]})
    base = client.post("/generate", json=asked)
    assert (adapter.status_code, base.status_code) == (200, 200)
    assert adapter.json()["text"] == expected != base.json()["text"]
    assert adapter.headers["x-loray-reason"] == "not-tokenized"


def test_generate_streams_are_relayed(client: httpx.Client) -> None:
    params = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}
    with client.stream("POST", "/generate", json={"text": "x", "sampling_params": params, "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert len(lines) == 4
    assert lines[-1] == "data: [DONE]"


@pytest.mark.parametrize("name", ["adapter-z", ADAPTERS[0] + "x"])
def test_generate_refuses_unknown_adapters(client: httpx.Client, name: str) -> None:
    response = client.post("/generate", json={"text": "x", "lora_path": name})
    assert_refused_by_us(response, 404)


def test_tokenize_is_relayed(client: httpx.Client) -> None:
    response = client.post("/v1/tokenize", json={"model": ADAPTERS[0], "prompt": "hi"})
    assert response.json()["tokens"] == [104, 105]


@pytest.mark.parametrize("path", ENGINE_CONTROL)
@pytest.mark.parametrize("method", ["POST", "GET", "PUT", "DELETE"])
def test_engine_control_is_not_offered(client: httpx.Client, method: str, path: str) -> None:
    response = client.request(method, path)
    assert response.status_code in {400, 404, 405}
    assert "x-loray-worker" not in response.headers


@pytest.mark.parametrize("path", DISGUISED)
def test_engine_control_is_not_reached_in_disguise(fleet: LocalFleet, client: httpx.Client, path: str) -> None:
    """Raw, since a client library would tidy the path up."""
    cleared = [fleet.call(lambda s=s: fleet.core.ingest.stats(s).cleared) for s in fleet.sources()]
    answer = post_raw(client, path)
    assert b" 40" in answer.split(b"\r\n")[0], answer
    assert b"x-loray-worker" not in answer
    fleet.settle()
    assert [fleet.call(lambda s=s: fleet.core.ingest.stats(s).cleared) for s in fleet.sources()] == cleared


def post_raw(client: httpx.Client, path: str) -> bytes:
    """POST an empty object to exactly this path."""
    url = urlsplit(str(client.base_url))
    head = f"POST {path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((url.hostname or "", url.port or 0), timeout=60) as connection:
        connection.sendall(f"{head}Content-Length: 2\r\nConnection: close\r\n\r\n{{}}".encode())
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    return answer
