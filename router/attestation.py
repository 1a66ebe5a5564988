"""Attestation: whether the hashes that a source publishes are those that we would compute.

For the base model and for each lora_id, the first root blocks that a source stores are hashed again from their
token_ids. A page size or token form that isn't what the worker said is a fault at once. A hash that nothing explains
is a fault when it has come for MAX_UNEXPLAINED different pages without a match: a client of another router may have
used an extra_key, which events don't tell. A later match lifts that fault. Called by EventIngest with batches that
hold something unattested; knows the index as little as the stream.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from router.events import ARRAY_FIELDS, Event, Stored
from router.hashing import Namespace, block_hashes
from router.ids import LoraId

MAX_UNEXPLAINED: Final = 3
"""Different pages without a match before a source is set aside."""
_WORD: Final = (1 << 64) - 1
#: what reading a store can raise: fields of other kinds, tokens that are none, a block without its tokens
_UNREADABLE: Final = (msgspec.MsgspecError, TypeError, OverflowError, IndexError, RecursionError)


class HashForm(NamedTuple):
    """How an engine makes block hashes, as far as it differs from engine to engine."""

    page_size: int
    """Tokens a block; 0 where nobody has said it: the first store tells."""
    bigram: bool = False
    """Whether pages hold pairs of tokens (speculative decoding)."""
    dynamo: bool = True
    """Whether hashes are namespaced (`"format": "dynamo"`)."""


class _Store(msgspec.Struct):
    """All of a store event that its hash depends on."""

    type: str
    block_hashes: list[int | bytes] = []
    parent_block_hash: int | bytes | None = None
    token_ids: list[int | tuple[int, int]] = []
    block_size: int | None = None
    cache_salt: str | None = None
    lora_name: str | None = None


class _Events(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]


_decode = msgspec.msgpack.Decoder(_Events).decode


@dataclass(slots=True)
class _Trial:
    """One name of whose present lora_id no block has matched yet."""

    lora_ids: list[LoraId | None]
    #: first-page hashes that nothing explained
    unexplained: set[int] = field(default_factory=set)
    fault: str = ""


class Attestor:
    """One source's. `is_open` is cheap to look at; everything else happens a few times in a source's life."""

    def __init__(
        self, form: HashForm, *, extra_keys: Collection[str] = (), max_unexplained: int = MAX_UNEXPLAINED
    ) -> None:
        """`extra_keys`: those that requests have used lately; a live view."""
        self._max_unexplained = max_unexplained
        self.form = form
        self._extra_keys = extra_keys
        #: by name (None: the base model); all and only names to be looked at
        self._trials: dict[str | None, _Trial] = {None: _Trial([None])}
        #: every lora_id that a name ever had here: blocks of a former one may come late
        self._lora_ids: dict[str, list[LoraId | None]] = {}
        #: a fault that nothing lifts
        self._verdict = ""
        #: nothing namespaced has matched yet; plain blocks of the base model are hashed alike in both formats
        self._format_open = form.dynamo
        #: why the source can't be predicted; empty while there is no reason
        self.fault = ""
        self.num_attested = 0
        #: stores that nothing explained, by now
        self.num_unexplained = 0

    @property
    def is_open(self) -> bool:
        """Whether anything is left to attest."""
        return bool(self._trials) or self._format_open

    @property
    def has_adapters(self) -> bool:
        """Whether the engine ever held one."""
        return bool(self._lora_ids)

    def expect(self, lora_ids: Mapping[str, LoraId]) -> None:
        """The adapters that the engine holds now, by name."""
        for name, lora_id in lora_ids.items():
            known = self._lora_ids.setdefault(name, [])
            if lora_id not in known:
                known.append(lora_id)
                self._trials[name] = _Trial(known)

    def wants(self, events: Sequence[Event]) -> bool:
        """Whether a batch holds something to attest."""
        trials = self._trials
        if trials and any(type(event) is Stored and event.lora_name in trials for event in events):
            return True
        first = events[0] if self._format_open and events else None  # one look a batch finds what is used at all
        return type(first) is Stored and first.cache_salt is not None

    def look(self, payload: bytes) -> None:
        """Attest what a batch that `wants` accepted holds. What can't be read is passed over."""
        try:
            events = _decode(payload).events
        except (msgspec.MsgspecError, RecursionError):
            return
        for event in events:
            try:
                stored = msgspec.convert(_as_map(event), _Store)
                if stored.type != "BlockStored" or not self._fits_form(stored):
                    continue
                if stored.lora_name in self._trials:
                    self._attest(self._trials[stored.lora_name], stored)
                elif self._format_open and stored.cache_salt and stored.lora_name is None:
                    self._attest(_Trial([None]), stored)
            except _UNREADABLE:
                continue
        self.fault = self._verdict or next((trial.fault for trial in self._trials.values() if trial.fault), "")

    def _fits_form(self, stored: _Store) -> bool:
        if not stored.token_ids:
            return False
        size, pairs = stored.block_size, isinstance(stored.token_ids[0], tuple)
        if not self.form.page_size and not (size and size > 0):
            return False
        if not self.form.page_size and size:
            self.form = HashForm(size, bigram=pairs, dynamo=self.form.dynamo)
        if size and size != self.form.page_size:
            self._verdict = f"its events say page size {size}, it was registered with {self.form.page_size}"
        elif pairs != self.form.bigram:
            forms = {False: "single token ids", True: "pairs of token ids"}
            self._verdict = f"its events hold {forms[pairs]}, it was registered with {forms[self.form.bigram]}"
        return not self._verdict

    def _attest(self, trial: _Trial, stored: _Store) -> None:
        if stored.parent_block_hash is not None or not stored.block_hashes:
            return
        published = _as_word(stored.block_hashes[0])
        expected = {self._hash(stored, key, lora_id) for lora_id in self._candidates(trial) for key in self._keys()}
        bare = self._hash(stored, None, None, dynamo=False)
        if published in expected:
            self.num_attested += 1
            self._trials.pop(stored.lora_name, None)
            self._format_open = self._format_open and published == bare
            return
        ours = self._hash(stored, None, trial.lora_ids[-1])
        whose = "the base model" if stored.lora_name is None else f"adapter {stored.lora_name!r} ({trial.lora_ids[-1]})"
        if self.form.dynamo and ours != published == bare:
            self._verdict = (
                f"its hash {published:016x} of a block of {whose} isn't namespaced, {ours:016x} would be: "
                'set "format": "dynamo" in its kv-events-config'
            )
            return
        self.num_unexplained += 1
        trial.unexplained.add(published)
        if len(trial.unexplained) >= self._max_unexplained:
            trial.fault = (
                f"its hash of a first block of {whose} is {published:016x}, ours {ours:016x}, at page size "
                f"{self.form.page_size}: another SGLang? (seen {len(trial.unexplained)} times, never a match)"
            )

    def _candidates(self, trial: _Trial) -> list[LoraId | None]:
        """lora_ids that a store may be of; one whose name the engine doesn't know looks like the base model's."""
        if trial.lora_ids != [None]:
            return trial.lora_ids
        return [None, *(lora_id for known in self._lora_ids.values() for lora_id in known)]

    def _keys(self) -> list[str | None]:
        return [None, *self._extra_keys]

    def _hash(
        self, stored: _Store, extra_key: str | None, lora_id: LoraId | None, *, dynamo: bool | None = None
    ) -> int:
        """Our hash of a root store's first block. `dynamo`: as the source's form, unless told otherwise."""
        form = self.form
        namespace = Namespace.of(
            extra_key=extra_key,
            lora_id=lora_id,
            cache_salt=stored.cache_salt,
            dynamo=form.dynamo if dynamo is None else dynamo,
        )
        page: list[Any] = stored.token_ids[: form.page_size]
        tokens = [*(pair[0] for pair in page), page[-1][1]] if form.bigram else page
        return block_hashes(tokens, form.page_size, namespace, bigram=form.bigram)[0] & _WORD


def _as_map(event: Any) -> Any:
    """An event in its array form as a map; others as they are."""
    if isinstance(event, list) and event:
        return {"type": event[0], **dict(zip(ARRAY_FIELDS.get(str(event[0]), ()), event[1:], strict=False))}
    return event


def _as_word(value: int | bytes) -> int:
    """A published hash, in any of its forms, as unsigned integer."""
    return int.from_bytes(value, "big") if isinstance(value, bytes) else value & _WORD
