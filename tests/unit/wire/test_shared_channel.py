"""Front ends that share an engine over TCP: who is let in, whose requests are whose, who comes and goes."""

from __future__ import annotations

import asyncio
import logging
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import pytest

from headway.errors import EngineStartError, HeadwayError
from headway.front import prefills, ray_cluster
from headway.front.connection import EngineProcess
from headway.front.engine_client import EngineClient
from headway.front.placement import EngineSpec
from headway.front.ray_cluster import EngineActor
from headway.front.roles import Roles
from headway.front.supervision import Patience
from headway.sampling_params import SamplingParams
from headway.wire import channel as channel_module
from headway.wire import greeting
from headway.wire.channel import ChannelClosedError, EngineChannel
from headway.wire.engine_stats import EngineStats
from headway.wire.frames import BrokenFrameError, FrameReader, pack
from headway.wire.greeting import Hello, RefusedError, dial, greet
from headway.wire.messages import (
    AbortRequests,
    AddRequest,
    CacheNews,
    Delta,
    EngineReady,
    Heartbeat,
    ReportCache,
    Shutdown,
    Start,
    StartUpFailed,
    StepBatch,
    UnreadableRequest,
    Watch,
    decode_from_engine,
)
from headway.wire.newcomers import MAX_GREETINGS
from headway.wire.shared_channel import SharedChannel, identity
from tests.unit.engine_stats import engine_stats
from tests.unit.front.served import FACTORY, all_ready, expected, kill, read, started, text_of, until

SECRET = b"nobody knows"
READY = EngineReady("m", 100, 100, 10, 4, 4, 64, "cpu", "float32")
OPTIONS = {"model": "m", "num_threads": 3}


# ---- the greeting ---------------------------------------------------------------------------------------------------


def greeted(engine_secret: bytes, talk: Callable[[socket.socket], None]) -> BaseException | None:
    """What an engine thinks of whoever talks to it."""
    ours, theirs = socket.socketpair()
    outcome: list[BaseException | None] = []

    def engine() -> None:
        with ours:
            try:
                greet(ours, engine_secret, is_engine=True)
            except (HeadwayError, OSError) as error:
                outcome.append(error)
            else:
                outcome.append(None)

    thread = threading.Thread(target=engine)
    thread.start()
    with theirs:
        talk(theirs)
        thread.join(10)
    return outcome[0]


def test_another_secret_is_refused_and_both_ends_say_so() -> None:
    def talk(theirs: socket.socket) -> None:
        with pytest.raises(RefusedError, match="refuses: the other end has another secret"):
            greet(theirs, b"guess", is_engine=False)

    error = greeted(SECRET, talk)
    assert isinstance(error, RefusedError) and "another secret" in str(error)


def test_other_messages_are_refused_and_both_versions_named() -> None:
    def talk(theirs: socket.socket) -> None:
        theirs.sendall(pack(Hello("0.0.1", "0123456789abcdef", b"n" * 32)))
        theirs.settimeout(20)
        told = b""
        while b"0.0.1" not in told:
            told += (part := theirs.recv(4096))
            assert part, told

    error = greeted(SECRET, talk)
    assert isinstance(error, RefusedError) and "Headway 0.0.1, messages 0123456789abcdef" in str(error)


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff", b"\x02\x00\x00\x00{}", pack(Hello("1", "2", b"short")), b""],
)
def test_nonsense_is_refused(said: bytes) -> None:
    def talk(theirs: socket.socket) -> None:
        theirs.sendall(said)
        theirs.shutdown(socket.SHUT_WR)

    assert isinstance(greeted(SECRET, talk), RefusedError | OSError)


def test_who_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "GREETING_S", 0.05)
    assert isinstance(greeted(SECRET, lambda theirs: None), TimeoutError)


def test_a_proof_is_good_for_one_connection_only() -> None:
    """Who has listened cannot say again what was said: nonces differ."""
    said: list[bytes] = []

    def honest(theirs: socket.socket) -> None:
        class Recorder:
            def __getattr__(self, name: str) -> Any:
                return getattr(theirs, name)

            def sendall(self, data: bytes) -> None:
                said.append(data)
                theirs.sendall(data)

        greet(Recorder(), SECRET, is_engine=False)  # type: ignore[arg-type]

    assert greeted(SECRET, honest) is None
    error = greeted(SECRET, lambda theirs: theirs.sendall(b"".join(said)))
    assert isinstance(error, RefusedError) and "another secret" in str(error)


# ---- one channel of many --------------------------------------------------------------------------------------------


class Shared:
    """An engine's end, and front ends that the test plays."""

    def __init__(self, **options: Any) -> None:
        self.parent, theirs = socket.socketpair()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.channel = SharedChannel(
            EngineChannel(theirs),
            self.listener,
            secret=SECRET,
            options=identity(Start(OPTIONS)),
            ready=READY,
            **options,
        )

    def join(self, **options: Any) -> Peer:
        peer = Peer(dial("127.0.0.1", self.port, SECRET))
        peer.send(Start({**OPTIONS, "num_threads": 9}, **options))
        while not select.select([peer.connection], [], [], 0)[0]:
            assert self.channel.receive(timeout_s=0.02) == []
        assert peer.receive() == [READY]
        return peer

    def receive(self, num: int = 1) -> list[Any]:
        """So many messages, and what has come with them."""
        messages, until_s = [], time.monotonic() + 20
        while len(messages) < num:
            assert time.monotonic() < until_s, messages
            messages += self.channel.receive(timeout_s=0.02)
        return messages


class Peer:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._frames = FrameReader()

    def send(self, message: Any) -> None:
        self.connection.sendall(pack(message))

    def receive(self, num: int = 1) -> list[Any]:
        """So many messages, and what has come with them."""
        self.connection.settimeout(20)
        messages: list[Any] = []
        while len(messages) < num:
            data = self.connection.recv(2**16)
            messages += [decode_from_engine(payload) for payload in self._frames.feed(data)]
        return messages


@pytest.fixture
def shared() -> Iterator[Shared]:
    made = Shared()
    yield made
    made.channel.close()


def test_equal_ids_of_two_front_ends_are_two_requests(shared: Shared) -> None:
    first, second = shared.join(), shared.join()
    params, others = SamplingParams(max_tokens=3), SamplingParams(max_tokens=4)
    first.send(AddRequest("a", [1], params))
    second.send(AddRequest("a", [2], others))
    messages = shared.receive(2)
    assert sorted((m.request_id, m.prompt_token_ids, m.params.max_tokens) for m in messages) == [
        ("0/a", [1], 3),
        ("1/a", [2], 4),
    ]
    first.send(AddRequest("b", [1], None))  # the parameters of its own request before it, not of the other's
    (again,) = shared.receive()
    assert again.request_id == "0/b" and again.params.max_tokens == 3
    second.send(AbortRequests(["a"]))
    assert shared.receive() == [AbortRequests(["1/a"])]
    stats = engine_stats(num_running=2)
    shared.channel.send(StepBatch([Delta("0/a", text="x"), Delta("0/b", text="y")], stats, ["0/b"]))
    assert first.receive() == [StepBatch([Delta("a", text="x"), Delta("b", text="y")], stats, ["b"])]
    assert second.receive() == [StepBatch([], stats, [])]


def test_a_front_end_that_is_gone_takes_its_requests_along(shared: Shared) -> None:
    first, second = shared.join(), shared.join()
    for name in "ab":
        first.send(AddRequest(name, [1], SamplingParams()))
    second.send(AddRequest("c", [1], SamplingParams()))
    assert len(shared.receive(3)) == 3
    shared.channel.send(StepBatch([Delta("0/a", is_last=True)], EngineStats()))
    first.connection.close()
    assert shared.receive() == [AbortRequests(["0/b"])]
    shared.channel.send(StepBatch([Delta("1/c", text="z")], EngineStats()))
    assert second.receive(2)[-1].deltas == [Delta("c", text="z")]


def test_news_go_to_those_who_want_them(shared: Shared) -> None:
    first, second = shared.join(reports_cache=True), shared.join()
    news = CacheNews(0, [b"1"], [], is_whole=True)
    shared.channel.send(news)
    shared.channel.send(Heartbeat(0.0))
    assert first.receive(2) == [news, Heartbeat(0.0)] and second.receive() == [Heartbeat(0.0)]
    first.send(ReportCache())
    assert shared.receive() == [ReportCache()]
    first.send(Watch(on=True))
    second.send(Watch(on=True))
    assert shared.receive(2) == [Watch(on=True)] * 2
    second.send(Watch(on=False))
    assert shared.receive() == [Watch(on=True)]
    first.connection.close()
    assert shared.receive(2) == [AbortRequests([]), Watch(on=False)]


def test_an_engine_with_other_options_is_refused(shared: Shared, caplog: pytest.LogCaptureFixture) -> None:
    peer = Peer(dial("127.0.0.1", shared.port, SECRET))
    peer.send(Start({"model": "another"}))
    assert shared.receive() == [AbortRequests([])]
    assert peer.receive() == [StartUpFailed("The engine there was started with other options: ['model'].")]
    assert "wants another engine: model differ" in caplog.text


def test_one_of_two_leaves_with_its_requests_done_and_the_last_one_ends_the_engine(shared: Shared) -> None:
    first, second = shared.join(), shared.join()
    first.send(AddRequest("a", [1], SamplingParams()))
    first.send(Shutdown(5.0))
    (request,) = shared.receive()
    assert isinstance(request, AddRequest)  # the engine itself goes on
    shared.channel.send(StepBatch([Delta("0/a", is_last=True)], EngineStats()))
    assert shared.receive() == [AbortRequests([])]
    second.send(Shutdown(5.0))
    assert shared.receive() == [Shutdown(5.0)]


def test_an_engine_that_nobody_wants_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Shared()
    peer = shared.join()
    monkeypatch.setattr(shared.channel, "_linger_s", 0.05)
    for _ in range(6):
        assert shared.channel.receive(timeout_s=0.02) == [], "somebody is there"
    peer.connection.close()
    assert shared.receive(2) == [AbortRequests([]), Shutdown(0.0)]
    for _ in range(6):
        assert shared.channel.receive(timeout_s=0.02) == []
    shared.channel.close()


def test_who_speaks_nonsense_after_the_greeting_is_dropped_alone(shared: Shared) -> None:
    first, second = shared.join(), shared.join()
    first.connection.sendall(b"\xff" * 100)
    assert shared.receive() == [AbortRequests([])]
    bad = SamplingParams(max_tokens=3)
    second.send(["AddRequest", "bad", [1], {"max_tokens": "many"}])
    (unreadable,) = shared.receive()
    assert isinstance(unreadable, UnreadableRequest) and unreadable.request_id == "1/bad"
    second.send(AddRequest("good", [1], bad))
    (good,) = shared.receive()
    assert good.request_id == "1/good"
    second.send(AddRequest("before-start", [1], None))
    assert shared.receive()[0].request_id == "1/before-start"


def test_who_does_not_read_is_dropped_alone(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_UNSENT_BYTES", 10_000)
    slow, quick = shared.join(), shared.join()
    slow.send(AddRequest("a", [1], SamplingParams()))
    shared.receive()
    for _ in range(200):
        shared.channel.send(StepBatch([Delta("0/a", text="x" * 100_000)], EngineStats()))
        quick.connection.recv(2**20)
        if shared.channel._unreachable:
            break
    assert shared.receive() == [AbortRequests(["0/a"])]
    shared.channel.send(Heartbeat(0.0))
    while Heartbeat(0.0) not in quick.receive():
        pass


@pytest.mark.parametrize(("said", "error"), [(b"", ChannelClosedError), (b"\xff" * 8, BrokenFrameError)])
def test_a_parent_that_is_gone_or_speaks_nonsense_ends_everything(
    shared: Shared, said: bytes, error: type[Exception]
) -> None:
    shared.parent.sendall(said)
    shared.parent.close()
    with pytest.raises(error):
        shared.receive()


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return True
    return False


def test_many_who_say_nothing_do_not_keep_others_out(shared: Shared, caplog: pytest.LogCaptureFixture) -> None:
    """Long before their time for the greeting is over: those that came first give way."""
    silent = [socket.create_connection(("127.0.0.1", shared.port), timeout=5) for _ in range(MAX_GREETINGS + 4)]
    assert isinstance(shared.join(), Peer)
    for connection in silent[:5]:
        while connection.recv(4096):  # the engine's greeting, then the end
            pass
    assert is_open(silent[-1])
    assert len([record for record in caplog.records if "give way" in record.getMessage()]) == 1
    assert "is refused" not in caplog.text
    for connection in silent:
        connection.close()


# ---- front ends and a real engine process ---------------------------------------------------------------------------


class Actor(EngineActor):
    """Without a cluster."""

    has_ended = False

    def host(self) -> str:
        return "127.0.0.1"

    def _end(self) -> None:
        self.has_ended = True


class Process:
    returncode = None

    def __init__(self, actor: Actor, pid: int) -> None:
        self._actor, self.pid = actor, pid

    def kill(self) -> None:
        self._actor.kill(self.pid)

    async def wait(self) -> int:
        raise NotImplementedError


class ActorHome:
    is_shared = True
    num_gpus = 0

    def __init__(self, actor: Actor) -> None:
        self._actor = actor

    async def open(self, start: Start) -> tuple[socket.socket, EngineProcess]:
        if self._actor._process is None:  # as of an actor that is made by whoever comes first
            self._actor._start = {**self._actor._start, "options": start.options, "blocks": start.blocks}
        host, port, secret, pid = await asyncio.to_thread(self._actor.address)
        return await asyncio.to_thread(dial, host, port, secret.encode()), Process(self._actor, pid)


OPTIONS_OF_ACTORS = {"step_s": 0.002, "num_kv_blocks": 2048}


class Actors:
    """A cluster of this process."""

    def __init__(self, num: int) -> None:
        start = {"options": OPTIONS_OF_ACTORS, "log_level": "CRITICAL", "reports_cache": True}
        self.actors = [Actor(start, FACTORY) for _ in range(num)]

    def specs(self, spec: EngineSpec, num_replicas: int) -> list[EngineSpec]:
        return [replace(spec, home=ActorHome(actor)) for actor in self.actors[:num_replicas]]


def front_end(
    actors: Actors, *, roles: Roles | None = None, hang_s: float = 5.0
) -> AbstractAsyncContextManager[EngineClient]:
    own = {"resumes": True, "num_replicas": len(actors.actors), "roles": roles, "cluster": actors}
    return started(Patience(hang_timeout_s=hang_s), **own, **OPTIONS_OF_ACTORS)


async def test_two_front_ends_share_two_engines_that_are_killed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both get every token, once; what the engines hold is given back; the last to leave ends them."""
    monkeypatch.setattr(ray_cluster, "LINGER_S", 5.0)  # for an engine that is too slow to end by itself
    actors = Actors(2)
    async with front_end(actors, hang_s=1.5) as first:
        async with front_end(actors, hang_s=1.5) as second:
            clients = (first, second)
            reading = [
                asyncio.create_task(text_of(client, f"r{number}", 150 + 50 * number))
                for client in clients
                for number in range(8)
            ]
            await until(lambda: all(client.stats.batch.generation_tokens > 100 for client in clients))
            for number, kind in enumerate((signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL)):
                await until(lambda: all(replica.is_ready for client in clients for replica in client.replicas))
                num_restarts = first.num_restarts
                kill(first.replicas[number % 2], kind)
                await until(lambda before=num_restarts: first.num_restarts > before)
            assert await asyncio.gather(*reading) == [expected(150 + 50 * number) for number in range(8)] * 2
            assert first.num_resumed + second.num_resumed > 0
        assert not any(actor.has_ended for actor in actors.actors)
        await all_ready(first)
        pids = [replica.pid for replica in first.replicas]
        reading = [asyncio.create_task(text_of(first, f"s{number}", 100)) for number in range(8)]
        await first.restart(0.1)
        assert await asyncio.gather(*reading) == [expected(100)] * 8
        assert not {*pids} & {replica.pid for replica in first.replicas}
        await until(lambda: first.stats.batch.num_running == 0 and first.stats.blocks.num_used_blocks == 0)
    await until(lambda: all(actor.has_ended for actor in actors.actors))


def test_actors_without_an_engine_end_unless_they_are_asked_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "LINGER_S", 0.5)
    start = {"options": {}, "log_level": "CRITICAL"}
    wanted, unwanted = Actor(start, FACTORY), Actor(start, FACTORY)
    broken = Actor({**start, "options": {"refuse": "no"}}, FACTORY)
    for actor in (unwanted, wanted):
        actor.kill(actor.address()[-1])
        assert actor._process is not None
        actor._process.wait()
    pid = wanted.address()[-1]
    with pytest.raises(EngineStartError, match="no"):
        broken.address()
    until_s = time.monotonic() + 60
    while not (unwanted.has_ended and broken.has_ended):
        assert time.monotonic() < until_s
        time.sleep(0.05)
    assert wanted.address()[-1] == pid and not wanted.has_ended
    wanted.kill(pid)


async def test_a_front_end_that_loses_its_connection_comes_back_and_goes_on() -> None:
    actors = Actors(1)
    async with front_end(actors) as stays:
        async with front_end(actors) as dies:
            reading = asyncio.create_task(text_of(dies, "lost", 300))
            await until(lambda: stays.stats.batch.num_running == 1)
            dies.replicas[0]._connection._transport.abort()
            await until(lambda: dies.num_resumed == 1)  # it comes back by itself, and goes on
            assert await reading == expected(300)
        await until(lambda: stays.stats.batch.num_running == 0 and stays.stats.blocks.num_used_blocks == 0)
        assert await text_of(stays, "own", 20) == expected(20)


async def test_front_ends_share_engines_that_compute_prompts_and_those_that_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prefill and decode apart, blocks over TCP. A front end that takes it for an engine that answers is refused."""
    monkeypatch.setattr(prefills, "computes_elsewhere", lambda choice: True)

    async def ask(client: EngineClient, first: int) -> str:
        prompt = [first + number % 3 for number in range(401)]
        stream = client.submit(AddRequest(f"r{first}", prompt, SamplingParams(max_tokens=40, temperature=0.0)))
        return "".join(delta.text for delta in await read(stream))

    actors, turned = Actors(2), Actors(0)
    turned.actors = actors.actors[::-1]
    async with front_end(actors, roles=Roles(1, 1)) as first, front_end(actors, roles=Roles(1, 1)) as second:
        assert first.replicas[1].info.blocks_at == second.replicas[1].info.blocks_at
        assert first.replicas[1].info.blocks_at.startswith("tcp://")
        texts = await asyncio.gather(*(ask(client, number) for number, client in enumerate([first, second] * 6, 5)))
        assert len(set(texts)) == 1 and len(texts[0]) == 40
        for client in (first, second):
            assert client.prefill_outcomes["elsewhere"] == 6, client.prefill_outcomes
        assert first.replicas[0].stats.tiers.num_moved_in_blocks == 12 * 100, "in turns: there is room for five prompts"
        with pytest.raises(EngineStartError, match="other options: .*'role'"):
            async with front_end(turned, roles=Roles(1, 1)):
                pass


logging.getLogger("headway").setLevel(logging.INFO)
