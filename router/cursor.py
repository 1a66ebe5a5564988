"""Position in one source's event stream: what to apply, what to skip, what to ask for again. Never splices.

Sans-IO: batches in, (seq, payload) pairs to apply in order out, and a wish for a replay or a snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

MAX_WAITING: Final = 10_000
"""Batches kept while a gap is being filled, SGLang's own default replay buffer; more asks for a snapshot."""
MAX_WAITING_BYTES: Final = 64 * 1024 * 1024
"""Their payloads together: a batch of long prompts carries all their token ids."""


class SeqPayload(NamedTuple):
    """One batch as it came: sequence number and undecoded payload."""

    seq: int
    payload: bytes


class Wish(StrEnum):
    """What a cursor needs from outside to go on."""

    REPLAY = "replay"
    SNAPSHOT = "snapshot"


@dataclass(slots=True)
class Advance:
    """Outcome of one step: batches to apply now, in order, and what to ask for."""

    apply: list[SeqPayload] = field(default_factory=list)
    wish: Wish | None = None


class Cursor:
    """Starts by wishing a replay from 0: whoever subscribes knows nothing of what came before."""

    def __init__(self) -> None:
        #: sequence number of the next batch to apply; all below are applied. -1: whichever comes first (see `adopted`)
        self.next_seq = 0
        #: what was asked for and didn't come yet; nothing is applied meanwhile
        self.pending: Wish | None = Wish.REPLAY
        self.duplicates = 0
        self.gaps = 0
        #: at the last jump, the furthest that next_seq has been; a late snapshot can lie before it
        self._reached = 0
        #: live batches ahead of next_seq, by seq, and the size of their payloads
        self._waiting: dict[int, bytes] = {}
        self._waiting_bytes = 0
        #: batches that the replay being answered has brought so far
        self._replayed = 0
        #: last seq announced by the worker and not seen here, to tell "on its way" from "lost"
        self._announced: int | None = None

    def accept(self, seq: int) -> bool:
        """Whether a live batch is the next one and nothing is pending: it is to be applied, and counts as such."""
        if seq != self.next_seq or self.pending is not None:
            return False
        self.next_seq = seq + 1
        return True

    def live(self, batch: SeqPayload) -> Advance:
        """A batch came over the subscription."""
        if self.next_seq < 0:
            self.next_seq = batch.seq
        if batch.seq < self.next_seq:
            self.duplicates += 1
            return Advance()
        if self.accept(batch.seq):
            return Advance([batch])
        self._keep(batch)
        if len(self._waiting) > MAX_WAITING or self._waiting_bytes > MAX_WAITING_BYTES:
            self._drop_waiting()
            return self._ask(Wish.SNAPSHOT)
        if self.pending is None:
            self.gaps += 1
            return self._ask(Wish.REPLAY)
        return Advance()

    def replaying(self, batches: list[SeqPayload]) -> Advance:
        """A part of the answer to a replay wish; seqs ascend."""
        advance = Advance()
        if self.pending is not Wish.REPLAY:
            return advance
        for batch in batches:
            if batch.seq < self.next_seq:
                self.duplicates += 1
            elif batch.seq == self.next_seq:
                advance.apply.append(batch)
                self._forget(batch.seq)
                self.next_seq += 1
            else:
                self._keep(batch)
        self._replayed += len(advance.apply)
        return advance

    def replayed(self) -> Advance:
        """The answer to a replay wish is whole. A hole in what came (a full socket drops messages) is asked for again;
        a hole at its start is out of the engine's reach: snapshot."""
        if self.pending is not Wish.REPLAY:
            return Advance()
        self.pending = None
        return self._drain(Advance())

    def failed(self) -> Advance:
        """The replay couldn't be had, or what was applied can't be trusted."""
        return self._ask(Wish.SNAPSHOT)

    def lost(self, seq: int) -> Advance:
        """The batch and all behind could not be applied after all."""
        self._reached = max(self._reached, self.next_seq)
        self.next_seq = seq
        return self._ask(Wish.SNAPSHOT)

    def retried(self) -> Advance:
        """Start over with a replay, from wherever we are: it may have become possible."""
        return self._ask(Wish.REPLAY)

    def adopted(self) -> Advance:
        """Nobody can tell what is missing: go on with the first batch that is there, or that comes next.

        What it then means to have applied all since is the caller's to judge.
        """
        self.pending = None
        self.next_seq = min(self._waiting, default=-1)
        return self._drain(Advance())

    def doubted(self) -> Advance:
        """The connection was lost: apply nothing until a replay has shown who is there."""
        return self._ask(Wish.REPLAY) if self.pending is None else Advance()

    def restarted(self) -> Advance:
        """All that was applied is given up; from the first batch on again."""
        self.next_seq = 0
        self._reached = 0
        self._drop_waiting()
        return self._ask(Wish.REPLAY)

    def jumped(self, last_seq: int) -> Advance:
        """A snapshot that includes all batches up to `last_seq` (-1: none) has been applied."""
        self._reached = max(self._reached, self.next_seq)
        self.next_seq = last_seq + 1
        self.pending = None
        for seq in [seq for seq in self._waiting if seq <= last_seq]:
            self._forget(seq)
        if self.next_seq >= self._reached and (not self._waiting or self.next_seq in self._waiting):
            return self._drain(Advance())
        return self._ask(Wish.REPLAY)

    def announced(self, last_seq: int) -> Advance:
        """The worker says it has published `last_seq`; twice the same unseen one means it was lost."""
        if last_seq < self.next_seq or self.pending is not None or self.next_seq < 0:
            self._announced = None
            return Advance()
        if self._announced is None or last_seq < self._announced:
            self._announced = last_seq
            return Advance()
        if self._announced < self.next_seq:
            self._announced = last_seq
            return Advance()
        self._announced = None
        self.gaps += 1
        return self._ask(Wish.REPLAY)

    def _drain(self, advance: Advance) -> Advance:
        while (payload := self._forget(self.next_seq)) is not None:
            advance.apply.append(SeqPayload(self.next_seq, payload))
            self.next_seq += 1
        if self._waiting:  # what the replay lacked lies between
            advance.wish = self._ask(Wish.REPLAY if advance.apply or self._replayed else Wish.SNAPSHOT).wish
        return advance

    def _keep(self, batch: SeqPayload) -> None:
        if batch.seq not in self._waiting:
            self._waiting[batch.seq] = batch.payload
            self._waiting_bytes += len(batch.payload)

    def _forget(self, seq: int) -> bytes | None:
        payload = self._waiting.pop(seq, None)
        if payload is not None:
            self._waiting_bytes -= len(payload)
        return payload

    def _drop_waiting(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0

    def _ask(self, wish: Wish) -> Advance:
        self.pending = wish
        self._replayed = 0
        return Advance(wish=wish)
