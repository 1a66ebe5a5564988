"""Which adapter a request means: the documented table, and no name that falls through to the base model."""

from __future__ import annotations

import pytest

from router.errors import InvalidRequest, UnknownModel
from router.names import engine_fields, resolve_model

ADAPTERS = {"ad", "ad:v2", "org/ad", "s3://b/m", "v2"}

MEANINGS = [
    ("base", "base", None),
    ("base", "ad", "ad"),
    ("base", "base:ad", "ad"),
    ("base", "base:ad:v2", "ad:v2"),
    ("base", "ad:v2", "ad:v2"),
    ("base", "org/ad", "org/ad"),
    ("base", "base:org/ad", "org/ad"),
    ("base", "base:s3://b/m", "s3://b/m"),
    ("gpt-oss:120b", "gpt-oss:120b", None),
    ("gpt-oss:120b", "gpt-oss:120b:ad", "ad"),
    ("gpt-oss:120b", "gpt-oss:120b:ad:v2", "ad:v2"),
    ("gpt-oss:120b", "ad", "ad"),
    ("s3://b/m2", "s3://b/m2", None),
    ("s3://b/m2", "s3://b/m2:ad", "ad"),
    ("s3://b/m2", "s3://b/m", "s3://b/m"),
]

UNKNOWN = [
    ("base", "bas"),
    ("base", "Base"),
    ("base", "base:"),
    ("base", "base:nope"),
    ("base", "base:base"),
    ("base", "other:ad"),
    ("base", ":ad"),
    ("base", "ad:"),
    ("base", " ad"),
    ("base", "base:ad:v3"),
    ("gpt-oss:120b", "gpt-oss"),
    ("gpt-oss:120b", "gpt-oss:ad"),
    ("gpt-oss:120b", "120b"),
    ("s3://b/m2", "s3"),
]


@pytest.mark.parametrize(("served_name", "model", "adapter"), MEANINGS)
def test_name_means(served_name: str, model: str, adapter: str | None) -> None:
    assert resolve_model(model, None, served_name=served_name, adapters=ADAPTERS) == adapter


@pytest.mark.parametrize(("served_name", "model"), UNKNOWN)
def test_any_other_name_is_unknown(served_name: str, model: str) -> None:
    with pytest.raises(
        UnknownModel, match=r"^model '.*' does not exist; GET /v1/models lists what is served$"
    ) as error:
        resolve_model(model, None, served_name=served_name, adapters=ADAPTERS)
    assert (error.value.status, error.value.body()["error"]["code"]) == (404, "model_not_found")  # type: ignore[index]


@pytest.mark.parametrize("model", ["base", "ad", "base:ad"])
def test_lora_path_names_the_same_adapter_or_adds_one_to_base(model: str) -> None:
    assert resolve_model(model, "ad", served_name="base", adapters=ADAPTERS) == "ad"


@pytest.mark.parametrize(("model", "lora_path"), [("ad", "v2"), ("base:ad", "ad:v2")])
def test_two_different_adapters_are_refused_by_name(model: str, lora_path: str) -> None:
    with pytest.raises(
        InvalidRequest, match=f"^'model' names adapter 'ad' but 'lora_path' names '{lora_path}'; name one$"
    ):
        resolve_model(model, lora_path, served_name="base", adapters=ADAPTERS)


@pytest.mark.parametrize("lora_path", ["nope", "", "base", "base:ad"])
def test_unknown_lora_path_is_unknown(lora_path: str) -> None:
    with pytest.raises(UnknownModel, match=f"^adapter '{lora_path}' does not exist"):
        resolve_model("base", lora_path, served_name="base", adapters=ADAPTERS)


@pytest.mark.parametrize("model", [None, "", 3, ["base"], {}])
def test_model_that_is_no_name_is_invalid(model: object) -> None:
    with pytest.raises(InvalidRequest, match=r"^'model' must be a non-empty string, got "):
        resolve_model(model, None, served_name="base", adapters=ADAPTERS)


@pytest.mark.parametrize("lora_path", [3, ["ad"], {}, False])
def test_lora_path_that_is_no_name_is_invalid(lora_path: object) -> None:
    with pytest.raises(InvalidRequest, match=r"^'lora_path' must be the name of one adapter, got "):
        resolve_model("base", lora_path, served_name="base", adapters=ADAPTERS)


@pytest.mark.parametrize(("served_name", "model", "adapter"), MEANINGS)
def test_engine_fields_mean_what_the_client_meant(served_name: str, model: str, adapter: str | None) -> None:
    fields = engine_fields(model, served_name=served_name, adapter=adapter)
    assert (
        resolve_model(fields["model"], fields.get("lora_path"), served_name=served_name, adapters=ADAPTERS) == adapter
    )


@pytest.mark.parametrize(
    ("model", "adapter", "fields"),
    [
        ("base", None, {"model": "base"}),
        ("base", "ad", {"model": "base", "lora_path": "ad"}),
        ("ad", "ad", {"model": "ad", "lora_path": "ad"}),
        ("base:ad", "ad", {"model": "base:ad"}),
        ("ad:v2", "ad:v2", {"model": "base:ad:v2"}),
    ],
)
def test_engine_is_given_no_name_that_it_would_split_elsewhere(
    model: str, adapter: str | None, fields: dict[str, str]
) -> None:
    assert engine_fields(model, served_name="base", adapter=adapter) == fields
