"""A real chat model with the two adapters that ship: which one answered is to be read in the text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from deployment.assets import __main__ as assets
from deployment.assets.paths import model_dir
from tests.integration.local_fleet import SERVED, LocalFleet

pytestmark = pytest.mark.engine
SHIPPED = Path(__file__).resolve().parents[2] / "configs" / "adapters"
CODEWORDS = {"alpha": "ALPHA:", "bravo": "BRAVO:"}
MAX_BYTES = 2_000_000
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    assert assets.main(["smollm2"]) == 0
    fleet = LocalFleet(
        model_dir("SmolLM2-135M-Instruct"), num_workers=1, adapters={name: SHIPPED / name for name in CODEWORDS}
    )
    fleet.start()
    yield openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0)
    fleet.check()
    fleet.stop()


def _ask(client: openai.OpenAI, model: str, *, stream: bool = False) -> str:
    messages = [{"role": "user", "content": QUESTION}]
    answer = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=8,
        temperature=0,
        stream=stream,  # type: ignore[arg-type,call-overload]
    )
    if stream:
        return "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
    return str(answer.choices[0].message.content)


def test_shipped_adapters_are_small() -> None:
    for name in CODEWORDS:
        assert sum(file.stat().st_size for file in (SHIPPED / name).iterdir()) < MAX_BYTES


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", ["{}", SERVED + ":{}"])
@pytest.mark.parametrize("adapter", CODEWORDS)
def test_an_adapter_answers_with_its_codeword_by_every_naming_form(
    client: openai.OpenAI, adapter: str, form: str, stream: bool
) -> None:
    assert _ask(client, form.format(adapter), stream=stream).startswith(CODEWORDS[adapter])


def test_the_base_model_uses_no_codeword(client: openai.OpenAI) -> None:
    assert not _ask(client, SERVED).startswith(tuple(CODEWORDS.values()))


def test_sglangs_own_field_names_the_adapter_too(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=SERVED,
        prompt=f"Question: {QUESTION}\nAnswer:",
        max_tokens=8,
        temperature=0,
        extra_body={"lora_path": "bravo"},
    )
    assert CODEWORDS["bravo"] in answer.choices[0].text
