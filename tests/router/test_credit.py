"""Stories about clients that read slowly, not at all, or are gone."""

from router.delivery import PROBE_S
from router.ledger import CREDIT_LOST_S, CREDIT_PARK_S
from router.request import WINDOW_BYTES
from tests.router.scene import Scene
from wire.codec import pack
from wire.messages import Cancel, Credit, Finished, Notice, Park, Resume, Tokens, Usage

W = b"cpu0-1-a"


class Reader:
    """A client that takes in what it was sent only when told to."""

    def __init__(self, scene: Scene, request_id: str = "r", client: bytes = b"ann") -> None:
        self.scene, self.request_id, self.client = scene, request_id, client
        self.tokens: list[int] = []
        self.consumed_bytes = 0
        self.last: Finished | None = None

    def unread_bytes(self) -> int:
        return sum(len(pack(m)) for m in self.scene.said[self.client] if m.request_id == self.request_id)

    def read(self) -> None:
        """Take in everything, and say so."""
        for message in self.scene.heard(self.client):
            self.consumed_bytes += len(pack(message))
            match message:
                case Tokens(offset=offset, tokens=tokens):
                    assert offset == len(self.tokens)
                    self.tokens += tokens
                case Finished():
                    assert self.last is None
                    self.last = message
        if self.last is None:
            self.scene.client(self.client, Credit(self.request_id, self.consumed_bytes))


def stream_until_blocked(scene: Scene, count: int = 3000) -> list[int]:
    tokens = [100_000 + number for number in range(count)]
    scene.ask("r", max_tokens=count)
    for offset, token in enumerate(tokens):
        scene.tokens("r", offset, [token])
    return tokens


def test_a_client_that_does_not_read_gets_no_more_than_the_window():
    scene = Scene()
    scene.hello()
    tokens = stream_until_blocked(scene)
    reader = Reader(scene)
    assert WINDOW_BYTES <= reader.unread_bytes() < WINDOW_BYTES + 200
    while len(reader.tokens) < len(tokens):
        before = len(reader.tokens)
        reader.read()
        assert len(reader.tokens) > before
    assert reader.tokens == tokens


def test_after_two_seconds_it_is_parked_and_with_its_credit_it_goes_on():
    scene = Scene()
    scene.hello()
    stream_until_blocked(scene)
    scene.heard(W)
    scene.wait(CREDIT_PARK_S + 0.5)
    assert scene.heard(W) == [Park("r", "credit")]
    scene.wait(3)
    assert scene.heard(W) == []
    Reader(scene).read()
    assert scene.heard(W) == [Resume("r", "credit")]


def test_a_client_that_reads_a_little_is_not_parked():
    scene = Scene()
    scene.hello()
    stream_until_blocked(scene, 50_000)
    scene.heard(W)
    for consumed in range(100, 1100, 100):
        scene.wait(1)
        scene.client(b"ann", Credit("r", consumed))
    assert scene.heard(W, Park) == []


def test_after_a_minute_without_any_progress_the_stream_ends():
    scene = Scene()
    scene.hello()
    stream_until_blocked(scene)
    scene.wait(CREDIT_LOST_S - 1)
    assert scene.heard(b"ann", Finished) == []
    scene.wait(2)
    (last,) = scene.heard(b"ann", Finished)
    assert (last.reason, last.code) == ("error", "slow_client")
    scene.finished("r", "cancelled", completion=3000)
    scene.assert_empty()


def test_a_parked_slow_client_with_nothing_left_to_read_ends_too():
    scene = Scene()
    scene.hello()
    tokens = stream_until_blocked(scene, 1800)
    scene.wait(CREDIT_PARK_S + 0.5)
    scene.client(b"ann", Credit("r", 100))  # room for one message more: all that waits, in one chunk
    request = scene.ledger.requests["r"]
    assert (request.sent, request.has_credit, request.credit_held) == (len(tokens), False, True)
    scene.wait(CREDIT_LOST_S + 1)
    assert [m.code for m in scene.heard(b"ann", Finished)] == ["slow_client"]


def test_the_last_word_waits_behind_the_tokens_but_the_seat_is_free():
    scene = Scene()
    scene.hello(slots=1)
    tokens = stream_until_blocked(scene)
    scene.ask("next", client=b"bob")
    scene.finished("r", "stop", completion=len(tokens))
    assert scene.submitted_ids() == ["r", "next"]
    reader = Reader(scene)
    while reader.last is None:
        reader.read()
    assert reader.tokens == tokens
    assert reader.last == Finished("r", "stop", Usage(3, len(tokens)))


def test_a_blocked_client_that_cancels_gets_its_last_word_at_once():
    scene = Scene()
    scene.hello()
    stream_until_blocked(scene)
    scene.finished("r", "cancelled", completion=3000)  # the worker took us for gone: not asked for
    assert scene.heard(b"ann", Finished) == []
    scene.client(b"ann", Cancel("r"))
    scene.finished("r", "cancelled", completion=3000)
    assert [m.reason for m in scene.heard(b"ann", Finished)] == ["cancelled"]
    scene.assert_empty()


def test_a_blocked_client_whose_cancel_comes_too_late_gets_its_last_word_at_once():
    scene = Scene()
    scene.hello()
    tokens = stream_until_blocked(scene)
    scene.client(b"ann", Cancel("r"))
    scene.finished("r", "stop", completion=len(tokens))  # it had ended when it heard that
    assert [m.reason for m in scene.heard(b"ann", Finished)] == ["cancelled"]  # ann gives no more credit
    scene.assert_empty()


def test_a_cancel_that_comes_too_late_hides_no_end_that_can_be_told():
    scene = Scene()
    scene.hello()
    scene.ask("r")
    scene.tokens("r", 0, [1])
    scene.client(b"ann", Cancel("r"))
    scene.finished("r", "stop", completion=1)
    assert [m.reason for m in scene.heard(b"ann", Finished)] == ["stop"]


def test_credit_for_more_than_was_sent_or_of_somebody_elses_stream_buys_nothing():
    scene = Scene()
    scene.hello()
    scene.ask("r")
    scene.client(b"ann", Credit("r", 2**50))
    scene.client(b"bob", Credit("r", 2**50))
    for offset in range(3000):
        scene.tokens("r", offset, [100_000])
    assert Reader(scene).unread_bytes() < WINDOW_BYTES + 200
    scene.client(b"ann", Credit("r", 0))
    assert Reader(scene).unread_bytes() < WINDOW_BYTES + 200


def test_notices_cost_a_blocked_client_nothing():
    scene = Scene()
    scene.hello()
    stream_until_blocked(scene)
    before = Reader(scene).unread_bytes()
    for _ in range(1000):
        scene.worker(W, Notice("r", "parked"))
        scene.worker(W, Notice("r", "resumed"))
    assert Reader(scene).unread_bytes() == before


def test_a_replayed_stream_whose_client_does_not_read_stays_in_the_queue():
    scene = Scene()
    scene.hello()
    tokens = stream_until_blocked(scene)
    scene.wait(CREDIT_PARK_S + 0.5)
    scene.lose_worker()
    scene.hello(b"cpu0-2-b")
    assert scene.submits(b"cpu0-2-b") == []
    Reader(scene).read()
    assert scene.submits(b"cpu0-2-b")[0].delivered == tokens


def test_a_quiet_client_is_probed_and_a_busy_one_is_not():
    scene = Scene()
    scene.ask("queued")
    scene.wait(3.5 * PROBE_S, alive=())
    assert scene.probes[b"ann"] == 3
    assert Reader(scene, "queued").unread_bytes() == scene.ledger.requests["queued"].sent_bytes  # probes are free
    scene.hello()
    scene.probes.clear()
    for offset in range(20):
        scene.now += 0.2
        scene.tokens("queued", offset, [1])
        scene._note(scene.ledger.tick(scene.now))
    assert scene.probes[b"ann"] == 0


def test_a_router_that_stood_still_does_not_blame_its_clients():
    scene = Scene()
    scene.hello()
    stream_until_blocked(scene)
    scene.wait(0.5)
    scene.stall(100)
    assert scene.heard(b"ann", Finished) == []
    assert scene.heard(W, Park) == []
