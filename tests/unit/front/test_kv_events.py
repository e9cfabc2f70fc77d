"""Events of the prefix caches for gateways: vLLM's bytes, and an index that a subscriber builds from them alone."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from headway.core.kv.cache_report import BlockContent, CacheReport
from headway.core.request_options import RequestOptions
from headway.engine.llm_engine import LLMEngine
from headway.engine_process.engine_loop import EngineLoop
from headway.errors import ConfigError
from headway.front.deployment import Deployment
from headway.front.engine_client import EngineClient
from headway.front.kv_event_format import EventBatch, KVEventFeed, stored_events
from headway.front.kv_events_config import KVEventsConfig
from headway.sampling_params import SamplingParams
from headway.wire.channel import ChannelClosedError
from headway.wire.frames import pack
from headway.wire.messages import AbortRequests, AddRequest, CacheNews, ReportCache, decode_from_engine
from tests.unit.engine_process.small_engine import create_engine
from tests.unit.server.fake_engine import engine_ready

zmq = pytest.importorskip("zmq", reason="the extra 'gateway' is not installed")
from headway.front.kv_event_publisher import KVEventPublisher, ReplayBuffer  # noqa: E402

BLOCK_SIZE = 4
TOPIC = "kv@pod-1@small"
A, B, C, D = (bytes([letter]) * 32 for letter in b"abcd")


def content(parent: bytes | None, first_token: int, salt: str | None = None) -> BlockContent:
    return BlockContent(parent, struct.pack("4i", *range(first_token, first_token + 4)), salt)


def test_events_are_laid_out_as_vllms_subscribers_read_them() -> None:
    """Positions and names as vLLM publishes and llm-d reads them: tag, block_hashes, parent_block_hash, token_ids,
    block_size, lora_id, medium, lora_name, extra_keys."""
    batches: list[EventBatch] = []
    feed = feed_to(batches.append, num_replicas=2)
    report = CacheReport(
        1, [A, B, C, D], [A], contents=[content(None, 1, "s"), content(A, 5), content(A, 9), content(C, 70_000)]
    )
    feed.take(1, report)
    ts, events, rank = msgspec.msgpack.decode(msgspec.msgpack.encode(batches[-1]))
    assert (ts, rank) == (5.0, 1)
    assert events == [
        ["BlockRemoved", [A], "GPU"],
        ["BlockStored", [A, B], None, [1, 2, 3, 4, 5, 6, 7, 8], 4, None, "GPU", None, [["s"], None]],
        ["BlockStored", [C, D], A, [9, 10, 11, 12, 70_000, 70_001, 70_002, 70_003], 4, None, "GPU", None, None],
    ]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batches[0])) == [5.0, [["AllBlocksCleared"]], 0]


def feed_to(take: Callable[[EventBatch], Any], *, num_replicas: int = 1, asked: list[int] | None = None) -> KVEventFeed:
    return KVEventFeed(
        num_replicas,
        block_size=lambda place: BLOCK_SIZE,
        offer=lambda batch: take(batch) is not False,
        ask_again=([] if asked is None else asked).append,
        now=lambda: 5.0,
    )


def test_a_lost_cache_clears_its_own_blocks_only() -> None:
    """A gateway may know one cache per address, for which AllBlocksCleared would mean all replicas."""
    for num_replicas, expected in ((1, [["AllBlocksCleared"]]), (2, [["BlockRemoved", [A, B], "GPU"]])):
        batches: list[EventBatch] = []
        feed = feed_to(batches.append, num_replicas=num_replicas)
        feed.take(0, CacheReport(0, [A, B], is_whole=True, contents=[content(None, 1), content(A, 5)]))
        feed.clear(0)
        assert msgspec.to_builtins(batches[-1].events, builtin_types=(bytes,)) == expected
        num_before = len(batches)
        feed.clear(0)
        assert len(batches) == num_before, "what holds nothing has nothing to clear"


def test_what_cannot_be_taken_is_published_again_as_a_whole() -> None:
    index, room, asked = Subscriber(checks_hashes=False), [True], list[int]()

    def offer(batch: EventBatch) -> bool:
        if room[0]:
            index.apply(msgspec.msgpack.encode(batch))
        return room[0]

    feed = feed_to(offer, asked=asked)
    feed.take(0, CacheReport(0, [A], contents=[content(None, 1)]))
    room[0] = False
    feed.take(0, CacheReport(1, [B], [A], contents=[content(None, 5)]))
    feed.take(0, CacheReport(2, [C], contents=[content(B, 9)]))
    assert asked == [0], "once is enough"
    feed.clear(0)
    feed.take(0, CacheReport(3, [B, C], is_whole=True, contents=[content(None, 5), content(B, 9)]))
    assert asked == [0, 0] and index.hashes == {0: {A}}
    room[0] = True
    feed.clear(0)
    feed.take(0, CacheReport(4, [B, C], is_whole=True, contents=[content(None, 5), content(B, 9)]))
    assert index.hashes == {0: {B, C}}


def test_runs_end_where_the_next_block_does_not_follow() -> None:
    contents = [content(None, 1), content(None, 5), content(B, 9), content(A, 13)]
    runs = [event.block_hashes for event in stored_events([A, B, C, D], contents, BLOCK_SIZE)]
    assert runs == [[A], [B, C], [D]]
    assert list(stored_events([], [], BLOCK_SIZE)) == []


# ---- a subscriber, written from vLLM's format alone ------------------------------------------------------------------


class Subscriber:
    """What each rank holds, by what was published. It checks that blocks follow known ones, and their tokens."""

    def __init__(self, *, checks_hashes: bool = True) -> None:
        """`checks_hashes`: they must be those of the tokens."""
        self.hashes: dict[int, set[bytes]] = {}
        self._checks_hashes = checks_hashes
        self.next_number = 0

    def receive(self, frames: list[bytes]) -> bool:
        """Apply a message. Returns False if some before it are missing."""
        topic, number_bytes, payload = frames
        assert topic == TOPIC.encode() and len(number_bytes) == 8
        number = int.from_bytes(number_bytes, "big")
        if number > self.next_number:
            return False
        if number == self.next_number:  # else it came by replay already
            self.apply(payload)
            self.next_number += 1
        return True

    def apply(self, payload: bytes) -> None:
        _, events, rank = msgspec.msgpack.decode(payload)
        held = self.hashes.setdefault(rank, set())
        for name, *fields in events:
            if name == "AllBlocksCleared":
                held.clear()
            elif name == "BlockRemoved":
                assert set(fields[0]) <= held, "a block is removed that was never stored"
                held.difference_update(fields[0])
            else:
                assert name == "BlockStored"
                self._store(held, *fields)

    def _store(
        self,
        held: set[bytes],
        block_hashes: list[bytes],
        parent: bytes | None,
        token_ids: list[int],
        block_size: int,
        lora_id: int | None = None,
        medium: str | None = None,
        lora_name: str | None = None,
        extra_keys: list[list[str] | None] | None = None,
    ) -> None:
        assert parent is None or parent in held, "a block follows one that is not there"
        assert len(token_ids) == block_size * len(block_hashes) and medium == "GPU"
        for place, block_hash in enumerate(block_hashes):
            assert block_hash not in held
            held.add(block_hash)
            if self._checks_hashes:
                tokens = token_ids[place * block_size :][:block_size]
                assert block_hash == self._digest(parent, tokens, extra_keys, place)
            parent = block_hash

    def _digest(
        self, parent: bytes | None, tokens: list[int], extra_keys: list[list[str] | None] | None, place: int
    ) -> bytes:
        """As docs/many_machines.md has it: so the tokens are those of the block."""
        keys = None if extra_keys is None else extra_keys[place]
        if parent is None:
            salt = "" if keys is None else keys[0]
            parent = hashlib.blake2b(salt.encode(), digest_size=32, person=b"headway-root").digest()
        else:
            assert keys is None, "only the first block of a chain has a salt"
        return hashlib.blake2b(parent + struct.pack(f"<{len(tokens)}i", *tokens), digest_size=32).digest()


class PlayedChannel:
    """A front end that sends requests and aborts at random, and hands reports of the cache to a client."""

    def __init__(self, turns: Iterator[list[Any]], on_news: Callable[[CacheNews], None]) -> None:
        self._turns = turns
        self._on_news = on_news

    def receive(self, *, timeout_s: float) -> list[Any]:
        turn = next(self._turns, None)
        if turn is None and timeout_s > 0:  # the engine is idle
            raise ChannelClosedError
        return turn or []

    def send(self, message: Any) -> None:
        if isinstance(message, CacheNews):
            news = decode_from_engine(pack(message)[4:])
            assert isinstance(news, CacheNews)
            self._on_news(news)

    def wake(self) -> None: ...


def requests(number: int, chance: random.Random) -> Iterator[list[Any]]:
    """Prompts that begin alike, with three salts or none, of lengths that leave tails; some are aborted."""
    stems = [[chance.randrange(200) for _ in range(chance.randrange(1, 60))] for _ in range(12)]
    for start in range(0, number, 5):
        turn: list[Any] = []
        for place in range(start, start + 5):
            stem = chance.choice(stems)
            prompt = stem[: chance.randrange(1, len(stem) + 1)] + [
                chance.randrange(200) for _ in range(chance.randrange(9))
            ]
            options = RequestOptions(cache_salt=chance.choice([None, None, "", "mine", "yours"]))
            turn.append(AddRequest(f"r{place}", prompt, SamplingParams(max_tokens=chance.randrange(1, 12)), options))
        if chance.random() < 0.1:
            turn.append(AbortRequests([f"r{start + chance.randrange(5)}"]))
        yield turn
        yield from ([] for _ in range(chance.randrange(8)))
        if chance.random() < 0.02:
            yield [ReportCache()]


def full_blocks(engine: LLMEngine) -> set[bytes]:
    cache = engine.core.scheduler.kv_cache.prefix_cache
    assert cache is not None
    return {block.digest for block in cache if block.tail is None}


@pytest.fixture
def publisher() -> Iterator[KVEventPublisher]:
    config = KVEventsConfig.parse('{"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}')
    with_socket = KVEventPublisher(config, topic=TOPIC)
    yield with_socket
    with_socket.close()


@pytest.fixture
def context() -> Iterator[Any]:
    with zmq.Context() as made:
        yield made
        made.destroy(linger=0)


def connected(context: Any, kind: int, address: str, **options: int) -> Any:
    socket = context.socket(kind)
    socket.rcvtimeo = 20_000
    for name, value in options.items():
        setattr(socket, name, value)
    socket.connect(address)
    return socket


def subscribed(context: Any, publisher: KVEventPublisher, **options: int) -> tuple[Any, str, int]:
    """A subscriber's socket that is known to be connected, the address for replays, and how many empty batches it took
    to know."""
    endpoint, replay_endpoint = publisher.endpoints
    socket = connected(context, zmq.SUB, endpoint, **options)
    socket.subscribe(TOPIC)
    num_offered = 0
    while not socket.poll(10):  # a subscriber that comes late misses what was published before
        assert publisher.offer(EventBatch(0.0, [], 0))
        num_offered += 1
    return socket, replay_endpoint, num_offered


def replay(context: Any, address: str, start: int) -> list[list[bytes]]:
    """All messages of a replay but its end."""
    socket = connected(context, zmq.DEALER, address)
    socket.send_multipart([b"", start.to_bytes(8, "big")])
    messages = []
    while (frames := socket.recv_multipart()[1:])[1] != b"\xff" * 8:
        messages.append(frames)
    assert frames[0] == frames[2] == b""
    socket.close(linger=0)
    return messages


async def test_a_subscriber_rebuilds_the_index_over_a_thousand_requests_and_after_gaps_by_replay(
    publisher: KVEventPublisher, context: Any
) -> None:
    engine, chance = create_engine({"num_kv_blocks": 96}), random.Random(7)
    client = EngineClient(Deployment(num_replicas=1, reports_tokens=True))
    replica = client.replicas[0]
    replica.info = engine_ready(block_size=BLOCK_SIZE)
    socket, replay_address, _ = subscribed(context, publisher)
    client.publish_caches(publisher.offer)
    channel = PlayedChannel(requests(1000, chance), lambda news: client.receive(replica, news))
    loop = EngineLoop(engine, channel, reports_cache=True, reports_tokens=True)
    with pytest.raises(ChannelClosedError):
        loop.run()
    assert publisher.offer(EventBatch(0.0, [], 99)), "a mark at the end"
    stats = engine.core.scheduler.kv_cache.prefix_cache.stats  # type: ignore[union-attr]
    assert stats.num_evicted_blocks > 1000, "much was evicted"
    subscriber, num_replays = Subscriber(), 0
    while 99 not in subscriber.hashes:
        frames = socket.recv_multipart()
        if chance.random() < 0.02:
            continue  # it is lost on its way
        if not subscriber.receive(frames):
            num_replays += 1
            for missed in replay(context, replay_address, subscriber.next_number):
                assert subscriber.receive(missed)
    assert num_replays > 0
    assert subscriber.hashes[0] == full_blocks(engine)
    engine.check_invariants()
    await client.shutdown()
    late = Subscriber()
    for missed in replay(context, replay_address, 0):
        assert late.receive(missed)
    assert late.hashes == subscriber.hashes, "one that comes later has the same by replay alone"
    socket.close()


def test_a_slow_subscriber_delays_no_other_and_gets_the_rest_by_replay(context: Any) -> None:
    config = KVEventsConfig.parse(
        '{"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*", "hwm": 4, "buffer_steps": 5000}'
    )
    publisher = KVEventPublisher(config, topic=TOPIC)
    try:
        socket, replay_address, num_before = subscribed(context, publisher, rcvhwm=4, rcvbuf=2**16)
        (event,) = stored_events([A], [BlockContent(None, struct.pack("2000i", *[70_000] * 2000))], 2000)
        num_offered = 1200  # of 10 kB each: far more than the system's buffers hold
        for _ in range(num_offered):
            assert publisher.offer(EventBatch(0.0, [event], 0))
        last = num_before + num_offered - 1
        while not replay(context, replay_address, last):
            pass
        numbers = [int.from_bytes(frames[1], "big") for frames in replay(context, replay_address, 0)]
        assert numbers == list(range(last + 1))
        got = []
        while not got or (got[-1] < last and socket.poll(200)):
            got.append(int.from_bytes(socket.recv_multipart()[1], "big"))
        assert len(got) < len(numbers), "some were dropped"
        socket.close()
    finally:
        publisher.close()


def test_replays_keep_a_number_and_a_size() -> None:
    for max_steps, max_bytes, kept in ((3, 1000, 3), (100, 25, 2), (100, 5, 0)):
        buffer = ReplayBuffer(max_steps=max_steps, max_bytes=max_bytes)
        assert buffer.from_number(0) is None
        assert [buffer.append(b"%010d" % number) for number in range(8)] == list(range(8))
        oldest = buffer.from_number(0)
        assert oldest == (None if not kept else (8 - kept, b"%010d" % (8 - kept)))
        assert buffer.from_number(8) is None and buffer.from_number(2**64 - 1) is None
        assert not kept or buffer.from_number(7) == (7, b"0000000007")


def test_wrong_requests_for_replays_do_no_harm(publisher: KVEventPublisher, context: Any) -> None:
    _, address = publisher.endpoints
    rude = connected(context, zmq.DEALER, address)
    for frames in ([b""], [b"", b"1234567"], [b"x", b"12345678"], [b"", b"12345678", b""], [b"x" * 100_000]):
        rude.send_multipart(frames)
    assert publisher.offer(EventBatch(0.0, [], 3))
    while not (messages := replay(context, address, 0)):
        pass
    assert [frames[0] for frames in messages] == [TOPIC.encode()]
    rude.close(linger=0)


def test_too_many_batches_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVEventPublisher, "_publish", lambda self: None)
    publisher = KVEventPublisher(
        KVEventsConfig.parse('{"endpoint": "tcp://127.0.0.1:*", "max_queue_size": 2}'), topic=TOPIC
    )
    taken = [publisher.offer(EventBatch(0.0, [], 0)) for _ in range(4)]
    monkeypatch.undo()
    publisher.close()
    assert taken == [True, True, False, False]


# ---- the option -----------------------------------------------------------------------------------------------------


def test_the_option_is_vllms() -> None:
    given = (
        '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": null, '
        '"buffer_steps": 100, "hwm": 10, "max_queue_size": 5, "topic": "kv@1.2.3.4@m"}'
    )
    config = KVEventsConfig.parse(given)
    assert config.is_on and config.topic == "kv@1.2.3.4@m" and config.buffer_steps == 100
    assert KVEventsConfig.parse("{}") == KVEventsConfig()
    assert not KVEventsConfig.parse('{"enable_kv_cache_events": false}').is_on
    assert not KVEventsConfig.parse('{"publisher": "null"}').is_on


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tcp://*:5557", "must be a JSON object"),
        ("[]", "must be a JSON object"),
        ('{"endpont": "tcp://*:5557"}', "no field 'endpont'.*'endpoint'"),
        ('{"hwm": "many"}', "hwm"),
        ('{"hwm": 0}', "'hwm' must be from 1"),
        ('{"publisher": "kafka"}', "publisher"),
        ('{"endpoint": "5557"}', "'endpoint' must be an address"),
        ('{"replay_endpoint": "http://a"}', "'replay_endpoint' must be an address"),
    ],
)
def test_wrong_options_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        KVEventsConfig.parse(text)


@pytest.mark.parametrize(
    ("endpoint", "listens"),
    [
        *(("tcp://*:5557", True), ("tcp://[::]:5557", True), ("ipc:///run/kv", True), ("@tcp://127.0.0.1:5557", True)),
        *(("tcp://127.0.0.1:5557", False), ("tcp://gateway:5557", False)),
    ],
)
def test_who_listens(endpoint: str, listens: bool) -> None:
    config = KVEventsConfig.parse(f'{{"endpoint": "{endpoint}"}}')
    assert config.listens == listens and config.address == endpoint.removeprefix("@")


def test_a_subscriber_that_listens_is_connected_to(context: Any) -> None:
    socket = context.socket(zmq.SUB)
    socket.rcvtimeo = 20_000
    socket.subscribe("")
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    publisher = KVEventPublisher(KVEventsConfig(endpoint=f"tcp://127.0.0.1:{port}"), topic=TOPIC)
    while not socket.poll(10):
        publisher.offer(EventBatch(0.0, [], 0))
    assert socket.recv_multipart()[0] == TOPIC.encode()
    publisher.close()
    socket.close()


def test_an_address_in_use_is_said(publisher: KVEventPublisher) -> None:
    endpoint, _ = publisher.endpoints
    with pytest.raises(ConfigError, match="'replay_endpoint' .* cannot be used: Address already in use"):
        KVEventPublisher(KVEventsConfig(endpoint="tcp://127.0.0.1:*", replay_endpoint=endpoint), topic=TOPIC)
    with pytest.raises(ConfigError, match="'endpoint' .* cannot be used: Address already in use"):
        KVEventPublisher(KVEventsConfig(endpoint="@" + endpoint), topic=TOPIC)
