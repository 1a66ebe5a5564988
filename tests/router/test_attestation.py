"""A source whose hashes are what we would compute is attested; another is set aside, and both values are named."""

from __future__ import annotations

import hashlib
import struct
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.attestation import Attestor, HashForm
from router.cursor import SeqPayload
from router.events import decode_batch
from router.hashing import Namespace, block_hashes
from router.ids import DpRank, Incarnation, LoraId, SourceId, WorkerId
from router.ingest import EventIngest, SourceState

SOURCE = SourceId(WorkerId("w0"), Incarnation("i1"), DpRank(0))
PAGE, FORM, PAIRS = 4, HashForm(4), HashForm(4, bigram=True)
A1, A2, B1 = LoraId("a1" * 16), LoraId("a2" * 16), LoraId("b1" * 16)
ARRAY_FORM = ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"]
Wire = dict[str, Any]


def store(
    first: int, *, lora_id: LoraId | None = None, extra_key: str | None = None, form: HashForm = FORM, **fields: Any
) -> Wire:
    """A root store of two pages, as SGLang publishes it; the prompt counts up from `first`."""
    tokens = list(range(first, first + 2 * form.page_size + form.bigram))
    space = Namespace.of(extra_key=extra_key, lora_id=lora_id, cache_salt=fields.get("cache_salt"), dynamo=form.dynamo)
    return {
        "type": "BlockStored",
        "block_hashes": block_hashes(tokens, form.page_size, space, bigram=form.bigram),
        "parent_block_hash": None,
        "token_ids": [list(pair) for pair in pairwise(tokens)] if form.bigram else tokens,
        "block_size": form.page_size,
        "lora_id": None,
        "medium": "GPU",
        **fields,
    }


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.0, events, 0])


def hexadecimal(event: Wire) -> str:
    """The first hash of a store, as faults show it."""
    return f"{event['block_hashes'][0] % (1 << 64):016x}"


def attestor(*events: Any, form: HashForm = FORM, extra_keys: Any = (), **lora_ids: LoraId) -> Attestor:
    """One that holds adapters and has seen events, each in a batch of its own."""
    one = Attestor(form, extra_keys=extra_keys)
    one.expect(lora_ids)
    for event in events:
        one.look(batch(event))
    return one


def wants(one: Attestor, name: str | None = None) -> bool:
    return one.is_open and one.wants(decode_batch(batch(store(1, lora_name=name))).events)


def outcome(one: Attestor) -> tuple[int, bool, str]:
    return one.num_attested, wants(one), one.fault


ATTESTED, OPEN = (1, False, ""), (0, True, "")

# -- what matches ------------------------------------------------------------------------------------------------


def test_one_matching_root_block_attests_the_base_model_for_good() -> None:
    one = attestor()
    assert outcome(one) == OPEN
    one.look(batch(store(1)))
    assert outcome(one) == ATTESTED


def test_each_lora_id_is_attested_on_its_own() -> None:
    one = attestor(store(1), a=A1, b=B1)
    assert (outcome(one), wants(one, "a"), wants(one, "b")) == (ATTESTED, True, True)
    one.look(batch(store(1, lora_id=A1, lora_name="a"), store(1, lora_id=B1, lora_name="b")))
    assert (one.num_attested, wants(one, "a"), wants(one, "b")) == (3, False, False)
    for lora_id, wanted in ((A1, False), (A2, True)):
        one.expect({"a": lora_id})
        assert wants(one, "a") is wanted


def test_salt_is_read_from_the_event() -> None:
    assert outcome(attestor(store(1, cache_salt="s"))) == ATTESTED
    assert outcome(attestor(store(1, cache_salt="s") | {"cache_salt": "other"})) == OPEN


def test_extra_key_that_requests_have_used_explains_a_hash() -> None:
    keys: dict[str, None] = {}
    one = attestor(store(1, extra_key="k"), extra_keys=keys.keys())
    assert (outcome(one), one.num_unexplained) == (OPEN, 1)
    keys["k"] = None
    one.look(batch(store(1, extra_key="k")))
    assert outcome(one) == ATTESTED
    both = store(1, extra_key="k", lora_id=A1, lora_name="a")
    assert outcome(attestor(store(1), both, a=A1, extra_keys=["j", "k"])) == (2, False, "")


def test_late_store_of_a_former_lora_id_of_that_name_is_explained() -> None:
    one = attestor(store(1), a=A1)
    one.expect({"a": A2})
    one.look(batch(store(1, lora_id=A1, lora_name="a")))
    assert outcome(one) == (2, False, "")


def test_store_without_a_name_may_be_of_any_known_adapter_and_one_with_a_name_of_that_only() -> None:
    assert outcome(attestor(store(1, lora_id=A1), a=A1))[0] == 1
    assert outcome(attestor(store(1, lora_id=A1))) == OPEN
    assert outcome(attestor(store(1, lora_id=B1, lora_name="a"), a=A1, b=B1)) == OPEN


@pytest.mark.parametrize("known", [True, False], ids=["reported", "learned"])
def test_pairs_of_tokens_are_hashed_as_pairs(known: bool) -> None:
    event = store(1, form=PAIRS)
    raw = struct.pack("<8I", 1, 2, 2, 3, 3, 4, 4, 5)
    assert event["block_hashes"][0] % (1 << 64) == int.from_bytes(hashlib.sha256(raw).digest()[:8], "big")
    one = attestor(event, form=PAIRS if known else HashForm(0))
    assert (outcome(one), one.form) == (ATTESTED, PAIRS)


def test_events_in_array_form_and_hashes_of_eight_bytes_are_read_too() -> None:
    event, wrong = store(1), store(1) | {"block_size": 8}
    assert outcome(attestor([event[name] for name in ARRAY_FORM])) == ATTESTED
    assert "page size 8" in attestor([wrong[name] for name in ARRAY_FORM]).fault
    as_bytes = [(value % (1 << 64)).to_bytes(8, "big") for value in event["block_hashes"]]
    assert outcome(attestor(event | {"block_hashes": as_bytes})) == ATTESTED


# -- what is a fault at once -------------------------------------------------------------------------------------

OF_PAIRS, OF_TOKENS = "pairs of token ids", "single token ids"
OTHER_FORMS = {
    "page size": (store(1, form=HashForm(8)), FORM, "its events say page size 8, it was registered with 4"),
    "pairs": (store(1, form=PAIRS), FORM, f"its events hold {OF_PAIRS}, it was registered with {OF_TOKENS}"),
    "single tokens": (store(1), PAIRS, f"its events hold {OF_TOKENS}, it was registered with {OF_PAIRS}"),
}


@pytest.mark.parametrize(("event", "form", "fault"), OTHER_FORMS.values(), ids=OTHER_FORMS)
def test_another_form_is_a_fault_at_once_that_nothing_lifts(event: Wire, form: HashForm, fault: str) -> None:
    one = attestor(event, form=form)
    assert one.fault == fault
    one.look(batch(store(1, form=form)))
    assert one.fault == fault


@pytest.mark.parametrize(("name", "salt"), [("a", None), (None, "s")])
def test_hash_that_is_not_namespaced_is_a_fault_at_once(name: str | None, salt: str | None) -> None:
    lora_id = A1 if name else None
    plain = store(1, lora_id=lora_id, cache_salt=salt, lora_name=name, form=HashForm(PAGE, dynamo=False))
    ours = store(1, lora_id=lora_id, cache_salt=salt)
    one = attestor(plain, a=A1)
    assert all(part in one.fault for part in (hexadecimal(plain), hexadecimal(ours), '"format": "dynamo"'))
    one.look(batch(ours | {"lora_name": name}))
    assert "isn't namespaced" in one.fault


@pytest.mark.parametrize("size", [1, PAGE, 64])
def test_page_size_that_nobody_reported_is_learned_from_the_first_store(size: int) -> None:
    form = HashForm(size)
    one = attestor(store(1, form=form), form=HashForm(0))
    assert (outcome(one), one.form) == (ATTESTED, form)
    one.expect({"a": A1})
    one.look(batch(store(1, form=HashForm(size + 1), lora_id=A1, lora_name="a")))
    assert one.fault == f"its events say page size {size + 1}, it was registered with {size}"


@pytest.mark.parametrize("size", [None, 0, -4])
def test_page_size_that_is_none_is_not_learned(size: int | None) -> None:
    one = attestor(store(1) | {"block_size": size}, form=HashForm(0))
    assert outcome(one) == OPEN
    one.look(batch(store(1)))
    assert (outcome(one), one.form) == (ATTESTED, FORM)


# -- what is a fault only when it comes again --------------------------------------------------------------------


def strange(first: int) -> Wire:
    """A store that nothing explains."""
    return store(first, extra_key="nobody knows it")


def test_three_different_unexplained_pages_are_a_fault_and_a_match_lifts_it() -> None:
    one = attestor(strange(1), strange(2))
    assert (outcome(one), one.num_unexplained) == (OPEN, 2)
    one.look(batch(strange(3)))
    assert all(part in one.fault for part in (hexadecimal(strange(3)), hexadecimal(store(3)), "page size 4", "3 times"))
    one.look(batch(store(4)))
    assert outcome(one) == ATTESTED


def test_the_same_unexplained_page_thrice_counts_once() -> None:
    one = attestor(*[strange(1)] * 3, strange(2), *[strange(1)] * 3)
    assert outcome(one) == OPEN


def test_fault_of_one_name_is_not_lifted_by_a_match_of_another() -> None:
    named = [strange(n) | {"lora_name": "a"} for n in (1, 2, 3)]
    one = attestor(*named, store(1), a=A1)
    assert (one.num_attested, f"adapter 'a' ({A1})" in one.fault) == (1, True)
    one.look(batch(store(9, lora_id=A1, lora_name="a")))
    assert outcome(one) == (2, False, "")


NO_EVIDENCE = {
    "a later block": strange(1) | {"parent_block_hash": 7},
    "no hashes": strange(1) | {"block_hashes": []},
    "no tokens": strange(1) | {"token_ids": []},
    "less than a page": strange(1) | {"token_ids": [1, 2]},
    "a name we don't know": strange(1) | {"lora_name": "x"},
    "such a name with a salt": strange(1) | {"lora_name": "x", "cache_salt": "s"},
    "a removal": {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"},
    "tokens and pairs": strange(1) | {"token_ids": [1, [2, 3], 4, 5]},
    "a token too large": strange(1) | {"token_ids": [1, 2, 3, 1 << 32]},
}


@pytest.mark.parametrize("event", NO_EVIDENCE.values(), ids=NO_EVIDENCE)
def test_what_proves_nothing_is_passed_over(event: Wire) -> None:
    one = attestor(*[event] * 4)
    assert (outcome(one), one.num_unexplained) == (OPEN, 0)


# -- what can't be read ------------------------------------------------------------------------------------------

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=3)
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)
FORMS = st.sampled_from([FORM, PAIRS, HashForm(0), HashForm(PAGE, dynamo=False)])
FIELDS = st.fixed_dictionaries({}, optional=dict.fromkeys([*ARRAY_FORM, "cache_salt", "lora_name"], ANYTHING))


@settings(deadline=None, max_examples=400, derandomize=True, database=None)
@given(FORMS, FIELDS, st.booleans(), ANYTHING)
def test_malformed_stores_never_raise(form: HashForm, fields: Wire, as_array: bool, other: Any) -> None:
    event = store(1) | fields
    one = attestor([event[name] for name in ARRAY_FORM] if as_array else event, other, form=form, a=A1)
    assert one.form.page_size >= 0
    one.look(batch(store(1)))


def followed(one: Attestor) -> EventIngest:
    ingest = EventIngest()
    ingest.add(SOURCE, one)
    assert ingest.replayed(SOURCE, [], now_s=1.0) == []
    return ingest


UNREADABLE = {
    "no UTF-8": b"\xa2\xff\xfe",
    "no time": b"\xc7\x05\xff" + bytes(5),
    "a map as key": b"\x81\x80\x01",
    "nesting": b"\x91" * 600 + b"\xc0",
}


@pytest.mark.parametrize("field", UNREADABLE.values(), ids=UNREADABLE)
def test_field_that_only_attestation_reads_never_raises(field: bytes) -> None:
    ingest = followed(attestor())
    payload = batch(store(1, color="mark-it-up")).replace(b"\xaamark-it-up", field)
    assert ingest.live(SOURCE, SeqPayload(0, payload), now_s=1.0) == []
    assert (ingest.state(SOURCE), ingest.index.num_blocks(SOURCE)) == (SourceState.EXACT, 2)


def test_source_that_is_not_attested_is_unverified_and_says_why_until_a_match() -> None:
    ingest = followed(attestor())
    for seq, state in enumerate([SourceState.EXACT, SourceState.EXACT, SourceState.UNVERIFIED]):
        assert ingest.live(SOURCE, SeqPayload(seq, batch(strange(seq))), now_s=1.0) == []
        assert ingest.state(SOURCE) is state
    assert hexadecimal(strange(2)) in ingest.fault(SOURCE)
    assert ingest.live(SOURCE, SeqPayload(3, batch(store(9))), now_s=1.0) == []
    assert (ingest.state(SOURCE), ingest.fault(SOURCE)) == (SourceState.EXACT, "")


@pytest.mark.parametrize(("event", "form", "fault"), OTHER_FORMS.values(), ids=OTHER_FORMS)
def test_source_of_another_form_is_unverified_after_its_first_store(event: Wire, form: HashForm, fault: str) -> None:
    ingest = followed(attestor(form=form))
    assert ingest.live(SOURCE, SeqPayload(0, batch(event)), now_s=1.0) == []
    assert (ingest.state(SOURCE), ingest.fault(SOURCE)) == (SourceState.UNVERIFIED, fault)
