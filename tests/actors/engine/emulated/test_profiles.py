"""Profiles are numbers that a time can be made of, and those named after hardware follow from its datasheet."""

from __future__ import annotations

import math

import msgspec
import pytest

from actors.engine.emulated.profiles import PROFILES, Profile, profile_of

TIMES = [field for field in Profile.__struct_fields__ if "_ms" in field]
COUNTS = ["kv_tokens", "chunk_tokens", "max_running"]


def test_every_field_is_a_time_or_a_count() -> None:
    assert {"name", *TIMES, *COUNTS} == set(Profile.__struct_fields__)


@pytest.mark.parametrize("name", PROFILES)
def test_all_is_finite_and_nothing_negative(name: str) -> None:
    profile = PROFILES[name]
    counts = [getattr(profile, field) for field in COUNTS]

    assert profile.name
    assert all(math.isfinite(getattr(profile, field)) and getattr(profile, field) >= 0 for field in TIMES)
    assert all(isinstance(count, int) and count > 0 for count in counts)
    assert profile.chunk_tokens <= profile.kv_tokens


@pytest.mark.parametrize("name", sorted(PROFILES.keys() - {"instant"}))
def test_every_step_takes_time(name: str) -> None:
    profile = PROFILES[name]

    assert min(profile.prefill_base_ms, profile.prefill_ms_per_token, profile.decode_base_ms) > 0
    assert profile.load_ms > profile.swap_ms > 0  # storage is slower than host memory


def test_instant_takes_none() -> None:
    assert {getattr(PROFILES["instant"], field) for field in TIMES} == {0.0}


def test_each_is_found_by_its_name() -> None:
    assert {name: profile_of(name).name for name in PROFILES} == {name: name for name in PROFILES}
    assert {"a100-llama-8b", "h200-llama-8b", "instant"} <= PROFILES.keys()


@pytest.mark.parametrize("name", ["", "A100-llama-8b", "cpu"])
def test_an_unknown_name_is_told_those_there_are(name: str) -> None:
    with pytest.raises(ValueError, match="no profile") as caught:
        profile_of(name)

    assert repr(name) in str(caught.value)
    assert all(known in str(caught.value) for known in PROFILES)


def test_a_profile_cannot_be_changed_for_all() -> None:
    with pytest.raises(AttributeError):
        PROFILES["instant"].kv_tokens = 1  # type: ignore[misc]

    assert msgspec.structs.replace(PROFILES["instant"], kv_tokens=1).kv_tokens == 1


# From the formulas by hand: 8.03e9 parameters of 2 bytes, half of the FLOP/s, 0.8 of the bandwidth, 0.85 of the memory.
BY_HAND = {
    #                 ms a token, ms a pair, ms a decode step, ms a token of context, tokens
    "a100-llama-8b": (0.102949, 3.36082e-06, 11.34551, 8.03531e-05, 396_270),
    "h200-llama-8b": (0.032477, 1.06024e-06, 5.682292, 3.41333e-05, 791_854),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_hardware_follows_from_its_datasheet(name: str) -> None:
    profile = PROFILES[name]
    per_token, per_pair, step, per_context_token, kv_tokens = BY_HAND[name]

    assert profile.prefill_ms_per_token == pytest.approx(per_token, rel=1e-5)
    assert profile.attention_ms_per_token_pair == pytest.approx(per_pair, rel=1e-5)
    assert profile.decode_base_ms == pytest.approx(step, rel=1e-5)
    assert profile.decode_ms_per_context_token == pytest.approx(per_context_token, rel=1e-5)
    assert all(getattr(profile, field) > 0 for field in TIMES)
    assert profile.kv_tokens == pytest.approx(kv_tokens, rel=1e-5)


def test_the_newer_hardware_is_better_at_all() -> None:
    old, new = PROFILES["a100-llama-8b"], PROFILES["h200-llama-8b"]

    assert all(getattr(new, field) <= getattr(old, field) for field in TIMES)
    assert new.kv_tokens > old.kv_tokens
