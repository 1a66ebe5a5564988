"""The OpenAI API as its own client library sees it, and what every answer says of its routing."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from typing import Any, Final

import httpx
import openai
import pytest

from tests.integration.asking import CHAT, COMPLETIONS, Answer, ask, events, noise, user
from tests.integration.background_loop import SETTLE_S
from tests.integration.event_tap import barrier, tapped
from tests.integration.local_fleet import ADAPTERS, CONTEXT, PAGE, SERVED, LocalFleet

pytestmark = pytest.mark.engine
#: the random model may end at any token otherwise
TO_THE_END: Final[dict[str, Any]] = {"temperature": 0, "extra_body": {"ignore_eos": True}}

A, B = ADAPTERS
FORMS = {
    SERVED: SERVED,
    A: f"{SERVED}:{A}",
    f"{SERVED}:{A}": f"{SERVED}:{A}",
    B: f"{SERVED}:{B}",
    f"{SERVED}:{B}": f"{SERVED}:{B}",
}
"""Name that a client may use -> name by which an engine must be asked for the same."""
UNKNOWN = (
    "adapter-z",
    f"{SERVED}:adapter-z",
    f"{SERVED}:",
    f"{A}:{A}",
    f"{SERVED}:{A}:",
    SERVED.upper(),
    " " + SERVED,
    ".",
)


@pytest.fixture
def sdk(client: httpx.Client) -> Iterator[openai.OpenAI]:
    """The openai library, told nothing but where to go."""
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", timeout=SETTLE_S, max_retries=0) as sdk:
        yield sdk


# -- the openai library ------------------------------------------------------------------------------------------


def test_sdk_chat(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model=SERVED, messages=user("hello"), max_tokens=5, **TO_THE_END)  # type: ignore[call-overload]
    assert answer.object == "chat.completion"
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert answer.usage.prompt_tokens == len("user: hello\nassistant:")
    assert answer.usage.prompt_tokens_details is not None


def test_sdk_completion(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model=A, prompt="hello", max_tokens=5, **TO_THE_END)  # type: ignore[call-overload]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 5)


def test_sdk_stream_without_include_usage_shows_no_usage(sdk: openai.OpenAI) -> None:
    stream = sdk.chat.completions.create(model=A, messages=user("hello"), max_tokens=5, stream=True, **TO_THE_END)  # type: ignore[call-overload]
    chunks = list(stream)
    assert all(chunk.usage is None for chunk in chunks)
    assert all(chunk.choices for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_sdk_stream_with_include_usage_ends_with_it(sdk: openai.OpenAI) -> None:
    options = {"include_usage": True}
    stream = sdk.completions.create(  # type: ignore[call-overload]
        model=A, prompt="hello", max_tokens=5, stream=True, stream_options=options, **TO_THE_END
    )
    *rest, last = list(stream)
    assert all(chunk.usage is None for chunk in rest)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 5)


def test_sdk_streams_the_text_it_would_have_answered(sdk: openai.OpenAI) -> None:
    asked = {"model": B, "messages": user("once"), "max_tokens": 12, "temperature": 0}
    whole = sdk.chat.completions.create(**asked, extra_body={"cache_salt": "whole"})  # type: ignore[call-overload]
    stream = sdk.chat.completions.create(**asked, stream=True, extra_body={"cache_salt": "parts"})  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.choices[0].message.content


def test_sdk_lists_and_retrieves_models(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == [SERVED, *ADAPTERS]
    card = sdk.models.retrieve(A).to_dict()
    assert (card["parent"], card["max_model_len"], sorted(card["holders"])) == (SERVED, CONTEXT, ["w0", "w1"])
    assert sdk.models.retrieve(SERVED).to_dict()["parent"] is None
    with pytest.raises(openai.NotFoundError, match="adapter-z"):
        sdk.models.retrieve("adapter-z")


def test_sdk_sees_errors_as_openais(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        sdk.completions.create(model="adapter-z", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        sdk.completions.create(model=SERVED, prompt="x" * CONTEXT)
    assert too_long.value.code == "context_length_exceeded"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_raw_stream_holds_no_usage_unless_asked(client: httpx.Client, path: str, options: object) -> None:
    body = {"model": SERVED, "max_tokens": 3, "stream": True, "stream_options": options}
    response = client.post(path, json={**body, "messages": user("x"), "prompt": "x"})
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert not any('"usage":{' in chunk for chunk in chunks)


# -- names -------------------------------------------------------------------------------------------------------


def fresh(client: httpx.Client, path: str, model: str) -> Answer:
    """One answer that no cached prefix had a part in, so that texts compare."""
    asked = {"messages": user("tell me")} if path == CHAT else {"prompt": "tell me"}
    return ask(client, path, model=model, max_tokens=16, ignore_eos=True, cache_salt=uuid.uuid4().hex, **asked)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_name_gives_the_text_that_an_engine_gives_for_it(
    fleet: LocalFleet, client: httpx.Client, path: str
) -> None:
    with fleet.engine("w0") as engine:
        expected = {name: fresh(engine, path, name).text for name in set(FORMS.values())}
    assert len(set(expected.values())) == 3, f"adapters must change the output: {expected}"
    assert {form: fresh(client, path, form).text for form in FORMS} == {f: expected[n] for f, n in FORMS.items()}


def test_lora_path_names_an_adapter_too(client: httpx.Client) -> None:
    by_name, base = fresh(client, COMPLETIONS, A), fresh(client, COMPLETIONS, SERVED)
    by_path = ask(client, prompt="tell me", lora_path=A, max_tokens=16, ignore_eos=True, cache_salt=uuid.uuid4().hex)
    assert by_path.text == by_name.text != base.text


@pytest.mark.parametrize("model", FORMS)
def test_the_answer_names_a_model(client: httpx.Client, model: str) -> None:
    assert ask(client, model=model, prompt="x").body["model"] in {model, FORMS[model]}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_unknown_models_are_404_and_no_engine_is_asked(fleet: LocalFleet, client: httpx.Client, path: str) -> None:
    prompts = {model: noise(random.Random(path + model), 2 * PAGE) for model in UNKNOWN}
    with tapped(fleet) as taps:
        for model, prompt in prompts.items():
            asked = {"prompt": prompt, "messages": user("x"), "input_ids": list(prompt.encode())}
            response = client.post(path, json={"model": model, "max_tokens": 1, **asked})
            assert response.status_code == 404, (model, response.text)
            assert response.json()["error"]["code"] == "model_not_found"
            assert not any(header.startswith("x-loray") for header in response.headers)
        for source, tap in taps.items():
            barrier(fleet, source, tap)
            assert [model for model, prompt in prompts.items() if tap.stored(list(prompt.encode()))] == []


# -- what answers say of routing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_headers_say_where_why_and_what_was_predicted(fleet: LocalFleet, client: httpx.Client, stream: bool) -> None:
    prompt = noise(random.Random(f"headers{stream}"), 40)
    first = ask(client, prompt=prompt, stream=stream)
    again = ask(client, prompt=prompt, stream=stream)
    ranks = {source.worker_id: source.dp_rank for source in fleet.sources()}
    assert first.reason in ("least-loaded", "share"), "whichever was left out so far may get it"
    assert first.predicted == 0
    assert (again.reason, again.predicted) == ("cached-prefix", 32)
    assert again.worker == first.worker
    assert again.dp_rank == ranks[first.worker]  # type: ignore[index]


def test_an_explained_decision_is_the_one_that_is_made(client: httpx.Client) -> None:
    prompt = noise(random.Random("explain"), 70)
    first = ask(client, model=B, prompt=prompt)
    told = client.post("/loray/route", json={"model": B, "prompt": prompt}).json()
    assert (told["worker"], told["reason"], told["predicted_cached_tokens"]) == (first.worker, "cached-prefix", 64)
    assert {c["worker"]: c["predicted_cached_tokens"] for c in told["candidates"]} == {
        worker: 64 if worker == first.worker else 0 for worker in ("w0", "w1")
    }
    assert ask(client, model=B, prompt=prompt).cached == 64


def test_health_ready_and_status(fleet: LocalFleet, client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200
    assert client.get("/ready").json() == {"ready_workers": 2, "draining": False}
    status = client.get("/loray/status").json()
    assert status["adapters"] == list(ADAPTERS)
    assert {name: worker["state"] for name, worker in status["workers"].items()} == {"w0": "ready", "w1": "ready"}
    assert [rank["state"] for worker in status["workers"].values() for rank in worker["ranks"]] == ["exact"] * 2


def test_metrics_count_what_was_served(client: httpx.Client) -> None:
    def metric(name: str) -> float:
        lines = client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    prompt = noise(random.Random("metrics"), 50)
    names = [
        'loray_requests_total{adapter="adapter-a"',
        'loray_predictions_total{outcome="exact"}',
        'loray_prompt_tokens_total{adapter="adapter-a"}',
        'loray_cached_tokens_total{adapter="adapter-a"}',
        'loray_predicted_cached_tokens_total{adapter="adapter-a"}',
        'loray_ttft_seconds_count{adapter="adapter-a"}',
        'loray_decisions_total{reason="cached-prefix"}',
        'loray_predictions_total{outcome="over"}',
    ]
    before = [metric(name) for name in names]
    ask(client, model=A, prompt=prompt)
    ask(client, model=A, prompt=prompt, stream=True)
    assert [metric(name) - was for name, was in zip(names, before, strict=True)] == [2, 2, 100, 48, 48, 2, 1, 0]
    assert metric("loray_in_flight_requests") == 0
    states = [line for line in client.get("/metrics").text.splitlines() if line.startswith("loray_source_state{")]
    assert sorted(line for line in states if line.endswith(" 1.0")) == [
        f'loray_source_state{{dp_rank="{rank}",state="exact",worker="w{rank}"}} 1.0' for rank in (0, 1)
    ]
