"""A cursor applies every batch once and in order, whatever is lost, doubled, late or replayed; else it asks."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router import cursor as cursor_module
from router.cursor import Advance, Cursor, SeqPayload, Wish


def batch(seq: int) -> SeqPayload:
    return SeqPayload(seq, b"%d" % seq)


def batches(*seqs: int) -> list[SeqPayload]:
    return [batch(seq) for seq in seqs]


def replay(cursor: Cursor, answer: list[SeqPayload]) -> Advance:
    """A whole answer to a replay wish, in two parts."""
    half = len(answer) // 2
    parts = [cursor.replaying(answer[:half]), cursor.replaying(answer[half:]), cursor.replayed()]
    assert [part.wish for part in parts[:2]] == [None, None]
    return Advance([batch for part in parts for batch in part.apply], parts[-1].wish)


def synced(next_seq: int = 0) -> Cursor:
    """A cursor that has applied all batches below `next_seq`."""
    cursor = Cursor()
    assert replay(cursor, batches(*range(next_seq))) == Advance(batches(*range(next_seq)))
    return cursor


def test_new_cursor_wants_a_replay_from_the_beginning_and_applies_nothing_before() -> None:
    cursor = Cursor()
    assert (cursor.pending, cursor.next_seq) == (Wish.REPLAY, 0)
    assert cursor.live(batch(2)) == Advance()
    assert replay(cursor, batches(0, 1)) == Advance(batches(0, 1, 2))
    assert cursor.pending is None


def test_live_batches_in_order_apply_at_once() -> None:
    cursor = synced(2)
    assert [cursor.live(batch(seq)) for seq in (2, 3)] == [Advance(batches(2)), Advance(batches(3))]


def test_duplicate_is_counted_and_changes_nothing() -> None:
    cursor = synced(2)
    assert (cursor.live(batch(1)), cursor.duplicates, cursor.next_seq) == (Advance(), 1, 2)


def test_gap_asks_for_one_replay_from_next_seq_and_holds_back() -> None:
    cursor = synced(2)
    assert [cursor.live(batch(seq)) for seq in (3, 4)] == [Advance(wish=Wish.REPLAY), Advance()]
    assert (cursor.next_seq, cursor.gaps, cursor.pending) == (2, 1, Wish.REPLAY)


def test_late_batch_of_the_gap_waits_for_the_replay() -> None:
    cursor = synced(2)
    cursor.live(batch(3))
    assert cursor.live(batch(2)) == Advance()
    assert replay(cursor, []) == Advance(batches(2, 3))


def test_replay_fills_the_gap_and_what_waited_follows() -> None:
    cursor = synced(2)
    cursor.live(batch(3))
    assert replay(cursor, batches(2)) == Advance(batches(2, 3))
    assert (cursor.pending, cursor.next_seq) == (None, 4)


def test_replay_that_overruns_the_live_head_applies_each_batch_once() -> None:
    cursor = synced(2)
    for seq in (3, 4):
        cursor.live(batch(seq))
    assert replay(cursor, batches(1, 2, 3, 4, 5, 6)) == Advance(batches(2, 3, 4, 5, 6))
    assert [cursor.live(batch(seq)) for seq in (5, 6, 7)] == [Advance(), Advance(), Advance(batches(7))]
    assert cursor.duplicates == 3


def test_hole_before_a_replay_is_never_spliced_but_wants_a_snapshot() -> None:
    cursor = synced(2)
    cursor.live(batch(9))
    assert replay(cursor, batches(8, 9)) == Advance(wish=Wish.SNAPSHOT)
    assert (cursor.next_seq, cursor.pending) == (2, Wish.SNAPSHOT)


def test_hole_inside_a_replay_is_asked_for_again_while_that_brings_anything() -> None:
    cursor = synced(2)
    cursor.live(batch(6))
    assert replay(cursor, batches(2, 4, 5)) == Advance(batches(2), Wish.REPLAY)
    assert replay(cursor, batches(4, 5)) == Advance(wish=Wish.SNAPSHOT)


def test_adopting_goes_on_with_the_first_batch_there_is() -> None:
    cursor = synced(2)
    for seq in (7, 8, 11):
        cursor.live(batch(seq))
    cursor.failed()
    assert cursor.adopted() == Advance(batches(7, 8), Wish.REPLAY)
    assert (cursor.next_seq, replay(cursor, batches(9, 10))) == (9, Advance(batches(9, 10, 11)))


def test_adopting_nothing_takes_whatever_comes_first() -> None:
    cursor = synced(2)
    cursor.failed()
    assert (cursor.adopted(), cursor.pending, cursor.announced(40), cursor.announced(40)) == (
        Advance(),
        None,
        Advance(),
        Advance(),
    )
    assert [cursor.live(batch(seq)) for seq in (41, 42)] == [Advance(batches(41)), Advance(batches(42))]
    assert cursor.live(batch(40)) == Advance()


def test_doubt_applies_nothing_until_a_replay_has_come() -> None:
    cursor = synced(2)
    assert [cursor.doubted(), cursor.live(batch(2)), cursor.doubted()] == [
        Advance(wish=Wish.REPLAY),
        Advance(),
        Advance(),
    ]
    assert replay(cursor, []) == Advance(batches(2))


def test_starting_over_takes_everything_again() -> None:
    cursor = synced(3)
    cursor.live(batch(7))
    assert cursor.restarted() == Advance(wish=Wish.REPLAY)
    assert replay(cursor, batches(0, 1, 2, 3)) == Advance(batches(0, 1, 2, 3))
    assert (cursor.pending, cursor.next_seq) == (None, 4)


def test_bytes_that_wait_are_bounded_too() -> None:
    cursor = synced(0)
    large = bytes(cursor_module.MAX_WAITING_BYTES // 2)
    wishes = [cursor.live(SeqPayload(seq, large)).wish for seq in (1, 2, 3)]
    assert wishes == [Wish.REPLAY, None, Wish.SNAPSHOT]


def test_replay_nobody_waits_for_is_ignored() -> None:
    cursor = synced(2)
    assert replay(cursor, batches(2, 3)) == Advance()
    cursor.failed()
    assert (replay(cursor, batches(2, 3)), cursor.pending, cursor.next_seq) == (Advance(), Wish.SNAPSHOT, 2)


def test_failed_replay_wants_a_snapshot_and_a_retry_a_replay() -> None:
    cursor = synced(2)
    assert [cursor.failed(), cursor.retried()] == [Advance(wish=Wish.SNAPSHOT), Advance(wish=Wish.REPLAY)]


def test_snapshot_jumps_and_what_waited_behind_it_follows() -> None:
    cursor = synced(2)
    for seq in (5, 8, 9):
        cursor.live(batch(seq))
    cursor.failed()
    assert cursor.jumped(7) == Advance(batches(8, 9))
    assert (cursor.pending, cursor.next_seq) == (None, 10)


def test_snapshot_before_what_waited_asks_for_the_rest() -> None:
    cursor = synced(2)
    cursor.live(batch(9))
    cursor.failed()
    assert cursor.jumped(6) == Advance(wish=Wish.REPLAY)
    assert replay(cursor, batches(7, 8)) == Advance(batches(7, 8, 9))


def test_snapshot_of_an_empty_stream_starts_at_zero() -> None:
    cursor = Cursor()
    cursor.failed()
    assert (cursor.jumped(-1), cursor.next_seq, cursor.pending) == (Advance(), 0, None)


def test_snapshot_older_than_what_was_applied_asks_for_the_rest_again() -> None:
    cursor = synced(9)
    cursor.failed()
    assert cursor.jumped(5) == Advance(wish=Wish.REPLAY)
    assert replay(cursor, batches(6, 7, 8)) == Advance(batches(6, 7, 8))


def test_late_snapshots_one_after_the_other_do_not_content_the_cursor() -> None:
    cursor = synced(9)
    assert [cursor.jumped(5), cursor.jumped(5)] == [Advance(wish=Wish.REPLAY)] * 2


def test_unseen_seq_announced_twice_is_lost_and_replayed() -> None:
    cursor = synced(2)
    assert [cursor.announced(3), cursor.announced(3)] == [Advance(), Advance(wish=Wish.REPLAY)]
    assert cursor.gaps == 1


def test_batch_on_its_way_is_not_lost() -> None:
    cursor = synced(2)
    assert [cursor.announced(2), cursor.live(batch(2)), cursor.announced(2)] == [
        Advance(),
        Advance(batches(2)),
        Advance(),
    ]
    assert [cursor.announced(3), cursor.live(batch(3)), cursor.announced(4)] == [
        Advance(),
        Advance(batches(3)),
        Advance(),
    ]
    assert cursor.pending is None


def test_stream_that_moves_on_while_one_stays_lost_is_noticed() -> None:
    cursor = synced(2)
    assert [cursor.announced(2), cursor.announced(40)] == [Advance(), Advance(wish=Wish.REPLAY)]


def test_announcement_while_asking_adds_no_wish() -> None:
    cursor = Cursor()
    assert [cursor.announced(5), cursor.announced(5)] == [Advance(), Advance()]


def test_endless_wait_is_bounded_by_a_snapshot() -> None:
    cursor = synced(0)
    limit = cursor_module.MAX_WAITING
    assert cursor.live(batch(1)) == Advance(wish=Wish.REPLAY)
    assert [cursor.live(batch(seq)).wish for seq in range(2, limit + 2)] == [None] * (limit - 1) + [Wish.SNAPSHOT]
    assert cursor.jumped(limit) == Advance()
    assert cursor.live(batch(limit + 2)) == Advance(wish=Wish.REPLAY)


class LossyStream(RuleBasedStateMachine):
    """A publisher with a bounded replay ring, a mirror that lags, and a network that drops, doubles and reorders."""

    @initialize(ring=st.integers(1, 6))
    def start(self, ring: int) -> None:
        self.cursor = Cursor()
        self.ring = ring
        self.published = 0
        self.wishes = [Wish.REPLAY]
        #: seq of the next batch that state lacks, as one sees who only applies
        self.position = 0
        #: the furthest that `position` has been
        self.reached = 0

    def take(self, advance: Advance) -> None:
        for seq, payload in advance.apply:
            assert (seq, payload) == (self.position, b"%d" % self.position)
            self.position += 1
        self.reached = max(self.reached, self.position)
        if advance.wish is not None:
            self.wishes.append(advance.wish)

    @rule(arrivals=st.sampled_from([0, 1, 1, 1, 2]))
    def publish(self, arrivals: int) -> None:
        self.published += 1
        for _ in range(arrivals):
            self.take(self.cursor.live(batch(self.published - 1)))

    @precondition(lambda self: self.published)
    @rule(age=st.integers(1, 8))
    def arrive_late(self, age: int) -> None:
        self.take(self.cursor.live(batch(max(0, self.published - age))))

    @rule(arrives=st.booleans(), from_seq=st.integers(0, 8))
    def answer_replay(self, arrives: bool, from_seq: int) -> None:
        """Of what was asked for, or of an earlier question whose answer comes late."""
        first = max(min(from_seq, self.position), self.published - self.ring)
        answer = batches(*range(first, self.published))
        self.take(replay(self.cursor, answer) if arrives else self.cursor.failed())

    @rule(lag=st.integers(0, 4))
    def answer_snapshot(self, lag: int) -> None:
        self.snapshot(max(-1, self.published - 1 - lag))

    @rule()
    def retry(self) -> None:
        self.take(self.cursor.retried())

    @rule()
    def announce(self) -> None:
        if self.published:
            self.take(self.cursor.announced(self.published - 1))

    def snapshot(self, last_seq: int) -> None:
        self.position = last_seq + 1
        self.take(self.cursor.jumped(last_seq))

    @invariant()
    def cursor_knows_the_position(self) -> None:
        assert self.cursor.next_seq == self.position <= self.published

    @invariant()
    def content_cursor_is_nowhere_behind_itself(self) -> None:
        assert self.cursor.pending is not None or self.position == self.reached

    @invariant()
    def wish_is_never_forgotten(self) -> None:
        assert self.cursor.pending is None or self.cursor.pending is self.wishes[-1]

    def teardown(self) -> None:
        """In silence, announcements and honest answers bring the cursor home."""
        for _ in range(6):
            if self.cursor.pending is Wish.REPLAY:
                first = max(self.position, self.published - self.ring)
                self.take(replay(self.cursor, batches(*range(first, self.published))))
            elif self.cursor.pending is Wish.SNAPSHOT:
                self.snapshot(self.published - 1)
            elif self.published:
                self.take(self.cursor.announced(self.published - 1))
        assert (self.cursor.pending, self.cursor.next_seq) == (None, self.published)


TestLossyStream = LossyStream.TestCase
TestLossyStream.settings = settings(
    deadline=None, max_examples=100, stateful_step_count=30, derandomize=True, database=None
)
