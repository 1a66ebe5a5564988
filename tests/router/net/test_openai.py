"""Claims of router/net/openai.py: what is checked, what is changed, and that all else goes through."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.errors import InvalidRequest, UnknownModel
from router.net.openai import Api, Call, check_call, engine_body, parse_json, relayed_body

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}


def _call(body: dict[str, Any]) -> Call:
    api = Api.CHAT if "messages" in body else Api.COMPLETIONS
    return check_call(api, body, served_name="m", adapters=["ad", "ad:v2"])


def _sent(body: dict[str, Any], *, token_ids: list[int] | None = None, rank: int | None = None) -> dict[str, Any]:
    raw = engine_body(_call(body), served_name="m", request_id="r1", token_ids=token_ids, local_rank=rank)
    return dict(json.loads(raw))


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b'{"a": \xff}'], ids=repr)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match="JSON"):
        parse_json(raw)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "'messages' must be a non-empty list"),
        ({"messages": "hi"}, "'messages' must be a non-empty list"),
        ({"messages": ["hi"]}, r"messages\[0\] must be an object"),
        ({"messages": [{"content": "hi"}]}, r"messages\[0\].role must be a string"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content"),
        ({"stream": "yes"}, "'stream' must be true or false"),
        ({"stream_options": 1}, "'stream_options' must be an object"),
        ({"cache_salt": 1}, "'cache_salt' must be a string"),
        ({"model": ""}, "'model' must be a non-empty string"),
        ({"model": 7}, "'model' must be a non-empty string"),
        ({"lora_path": ["ad"]}, "'lora_path' must be the name of one adapter"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        _call(CHAT | change)


def test_a_missing_model_says_what_to_send() -> None:
    with pytest.raises(InvalidRequest, match="'model' is missing; send 'm'"):
        _call({"messages": CHAT["messages"]})


def test_an_unknown_model_is_unknown() -> None:
    with pytest.raises(UnknownModel):
        _call(CHAT | {"model": "m:nobody"})


@pytest.mark.parametrize("prompt", [None, "", [], 5])
def test_an_empty_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(InvalidRequest, match="'prompt' must be a non-empty"):
        _call({"model": "m", "prompt": prompt})


def test_unknown_fields_go_through() -> None:
    sent = _sent(CHAT | {"top_k": 3, "my_field": {"x": [1]}})

    assert (sent["top_k"], sent["my_field"]) == (3, {"x": [1]})


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("m", {"model": "m"}),
        ("ad", {"model": "ad", "lora_path": "ad"}),
        ("m:ad", {"model": "m:ad"}),
        ("ad:v2", {"model": "m:ad:v2"}),
        ("m:ad:v2", {"model": "m:ad:v2"}),
    ],
)
def test_the_engine_is_told_the_adapter_in_its_own_way(model: str, expected: dict[str, str]) -> None:
    sent = _sent(TEXT | {"model": model})

    assert {key: sent[key] for key in ("model", "lora_path") if key in sent} == expected


def test_token_ids_replace_the_prompt() -> None:
    assert _sent(TEXT, token_ids=[5, 6])["prompt"] == [5, 6]
    chat = _sent(CHAT, token_ids=[5, 6])
    assert (chat["input_ids"], chat["messages"]) == ([5, 6], CHAT["messages"])


def test_streams_always_ask_for_usage_and_remember_whether_the_client_did() -> None:
    silent, asking = TEXT | {"stream": True}, TEXT | {"stream": True, "stream_options": {"include_usage": True}}

    assert _sent(silent)["stream_options"] == _sent(asking)["stream_options"] == {"include_usage": True}
    assert (_call(silent).wants_usage, _call(asking).wants_usage) == (False, True)


def test_the_rank_and_our_own_request_id_are_set() -> None:
    """Never the client's id: SGLang's abort ends every request whose id begins with the given one."""
    sent = _sent(TEXT | {"rid": "c"}, rank=1)

    assert (sent["routed_dp_rank"], sent["rid"]) == (1, "r1")


def test_what_needs_its_text_keeps_it() -> None:
    assert not _call(TEXT | {"echo": True}).can_replace_prompt
    assert not _call(TEXT | {"suffix": "x"}).can_replace_prompt
    assert _call(TEXT).can_replace_prompt


def test_prompt_logprobs_promise_nothing_cached() -> None:
    assert _call(TEXT | {"echo": True, "logprobs": 1}).max_cached_tokens == 0
    assert _call(TEXT | {"logprobs": 1}).max_cached_tokens is None


def test_several_samples_are_not_compared() -> None:
    assert not _call(TEXT | {"n": 2}).predictable
    assert _call(TEXT).predictable


@pytest.mark.parametrize(
    ("path", "body", "adapter", "expected"),
    [
        ("/generate", {"text": "x", "rid": "a"}, None, {"text": "x", "rid": "r1"}),
        ("/generate", {"text": ["x"], "rid": ["a"]}, None, {"text": ["x"], "rid": ["a"]}),
        (
            "/generate",
            {"text": "x", "model": "m:ad"},
            "ad",
            {"text": "x", "model": "m", "lora_path": "ad", "rid": "r1"},
        ),
        ("/v1/embeddings", {"input": "x", "model": "ad"}, "ad", {"input": "x", "model": "m", "lora_path": "ad"}),
        ("/v1/embeddings", {"input": "x", "model": "m"}, None, {"input": "x", "model": "m"}),
        ("/tokenize", {"prompt": "x"}, None, {"prompt": "x"}),
    ],
)
def test_a_relayed_body_names_its_adapter_in_the_field_that_all_paths_read(
    path: str, body: dict[str, Any], adapter: str | None, expected: dict[str, Any]
) -> None:
    raw = relayed_body(path, body, served_name="m", adapter=adapter, request_id="r1")

    assert json.loads(raw) == expected
