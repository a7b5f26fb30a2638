"""The protocol without a socket: whatever comes, cut anywhere, makes news or ends the connection, and nothing else."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
from played import Played, ended, event, failed, framed, hello

from trellis import (
    CancelledError,
    ConnectionLostError,
    DaemonError,
    HandshakeError,
    RequestError,
    Started,
    Text,
    UnknownEvent,
    UnknownProgramError,
    VersionError,
    _codec,
    _wire,
)
from trellis.protocol import Component, Ended, Greeted, Happened, Launch, Lost, Protocol

N_BYTES = 600_000


def news_of(protocol: Protocol) -> list[Any]:
    return list(protocol.news())


def greeted(codec: Any = None) -> Protocol:
    protocol = Protocol(codec)
    assert protocol.data_to_send().startswith(b"\x89TRELLIS\x02\x00\x03\x00\x00\x00\x10\x00")
    protocol.receive_data(hello())
    assert news_of(protocol) == [Greeted(3, "played")]
    return protocol


def start(component: Component) -> dict[str, Any]:
    return {"type": "start", "program": component.wire(), "arguments": [], "credit_bytes": 1}


def conversation() -> bytes:
    causes = {"n_rows_sat_out": 4, "of another version": [1.5, None, {"x": b"y"}]}
    end = {**ended(1), "usage": {"n_tokens": 3, **causes}}
    return hello() + framed(
        event(1, "progress", stage="compile", done=1, total=2),
        event(1, "started", guest_id=9),
        event(1, "text", text="é" * 300),
        event(1, "tokens", tokens=[1, 70_000]),
        event(1, "json", json='{"a": 1}'),
        event(1, "log", level="warn", line="so"),
        event(1, "recorded", bytes=b"\0\xff"),
        event(1, "of another version", more=1),
        {"type": "of another version"},
        end,
        failed(2, "budget_exceeded", name="n_pages", value="9", limit=8),
    )


def talk(codec: Any, pieces: list[bytes]) -> list[Any]:
    protocol = Protocol(codec)
    protocol.launch(Launch({"type": "start"}))
    protocol.request({"type": "info"})
    news = []
    for piece in pieces:
        protocol.receive_data(piece)
        news += news_of(protocol)
    return news


def told(news: list[Any]) -> list[str]:
    return [repr(item) for item in news]


def test_bytes_say_the_same_however_they_are_cut(codec: _codec.Codec) -> None:
    whole = conversation()
    news = talk(codec, [whole])
    assert [type(item) for item in news] == [Greeted, *[Happened] * 8, Ended, Ended]
    assert news[8].event == UnknownEvent("of another version")
    assert news[9].usage.n_tokens == 3 and news[9].usage.causes.n_rows_sat_out == 4
    assert (news[10].error.code, news[10].error.limit, news[10].error.value) == ("budget_exceeded", 8, "9")
    assert told(talk(codec, [whole[at : at + 1] for at in range(len(whole))])) == told(news)
    chance = random.Random(7)
    for _ in range(300):
        cuts = sorted(chance.sample(range(len(whole)), chance.randrange(1, 12)))
        pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)])]
        assert told(talk(codec, pieces)) == told(news)


def test_garbage_ends_the_connection_and_nothing_else() -> None:
    pytest.importorskip("msgspec")
    whole = conversation()
    codecs = [_codec.by_msgpack(), _codec.by_msgspec()]
    chance = random.Random(11)
    n_lost = 0
    for _ in range(4_000):
        garbage = bytearray(whole)
        for _ in range(chance.randrange(1, 6)):
            at = chance.randrange(len(garbage))
            if chance.random() < 0.5:
                garbage[at] = chance.randrange(256)
            else:
                garbage[at:at] = (
                    chance.randbytes(chance.randrange(1, 8)) if chance.random() < 0.5 else b"\xc1"
                )
        at = chance.randrange(len(garbage))
        pieces = [bytes(garbage[:at]), bytes(garbage[at:])]
        one, other = (talk(codec, pieces) for codec in codecs)
        # The two say the same of what is broken, in words of their own.
        kinds = [[(type(item), getattr(item, "event", None)) for item in news] for news in (one, other)]
        assert kinds[0] == kinds[1], pieces
        if one and isinstance(one[-1], Lost):
            n_lost += 1
            assert isinstance(one[-1].error, (ConnectionLostError, HandshakeError))
            assert not one[-1].error.is_retryable
    assert n_lost > 1_000


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        b"\x01",
        b"\xd4\x01\x01",
        b"\xd6\xff\0\0\0\0",
        b"\x81\x01\x01",
        b"\xa2\xff\xff",
        b"\xc0\xc0",
        b"",
    ],
)
def test_what_is_no_message_is_refused_by_both(codec: _codec.Codec, payload: bytes) -> None:
    protocol = greeted(codec)
    protocol.receive_data(_wire.frame(payload))
    (lost,) = news_of(protocol)
    assert isinstance(lost, Lost) and isinstance(lost.error, ConnectionLostError)
    assert "not a message of the protocol" in str(lost.error)


def test_values_lie_no_deeper_than_they_may(codec: _codec.Codec) -> None:
    deep: Any = None
    for _ in range(31):
        deep = [deep]
    protocol = greeted(codec)
    protocol.receive_data(framed({"type": "of another version", "deep": deep}))
    assert news_of(protocol) == []
    protocol.receive_data(_wire.frame(b"\x82\xa4type\xa1x\xa1y" + b"\x91" * 200_000 + b"\xc0"))
    (lost,) = news_of(protocol)
    assert isinstance(lost, Lost)


def test_another_version_is_a_clear_error() -> None:
    for theirs, older in (((4, 9), "this client"), ((1, 1), "the daemon")):
        protocol = Protocol()
        protocol.receive_data(hello(*theirs, build="trellis 9.9"))
        (lost,) = news_of(protocol)
        assert isinstance(lost, Lost) and isinstance(lost.error, VersionError)
        assert (lost.error.ours, lost.error.theirs) == ((2, 3), theirs)
        assert str(lost.error).endswith(f"{older} is too old") and "trellis 9.9" in str(lost.error)
    protocol = Protocol()
    protocol.receive_data(hello(2, 2))
    assert news_of(protocol) == [Greeted(2, "played")]


def test_another_protocol_is_seen_at_once() -> None:
    for begun in (b"H", b"HTTP/1.1 400 Bad Request\r\n", b"\x89TRELLIX"):
        protocol = Protocol()
        protocol.receive_data(begun)
        (lost,) = news_of(protocol)
        assert isinstance(lost, Lost) and type(lost.error) is HandshakeError
    for bad in (_wire.Hello(3, 2, 1 << 20, "x"), _wire.Hello(2, 3, 100, "x")):
        protocol = Protocol()
        protocol.receive_data(bad.encode())
        (lost,) = news_of(protocol)
        assert isinstance(lost, Lost) and type(lost.error) is HandshakeError


def test_a_frame_may_be_so_large_and_no_larger() -> None:
    protocol = greeted()
    protocol.receive_data((_wire.FRAME_BYTES_MAX + 1).to_bytes(4, "little"))
    (lost,) = news_of(protocol)
    assert isinstance(lost, Lost) and "over the limit of 1048576" in str(lost.error)


def test_a_request_that_fits_in_no_frame_is_refused_with_both_numbers() -> None:
    protocol = greeted()
    with pytest.raises(RequestError) as refused:
        protocol.request({"type": "message", "to": 1, "text": "x" * _wire.FRAME_BYTES_MAX})
    assert refused.value.limit == _wire.FRAME_BYTES_MAX < refused.value.n_bytes
    assert protocol.data_to_send() == b""
    # Its id is used up.
    assert protocol.request({"type": "info"}) == 2


def test_how_a_connection_is_lost_says_whether_to_try_again() -> None:
    def lost(data: bytes, error: Any = None) -> ConnectionLostError:
        protocol = greeted()
        keys = [protocol.request({"type": "info"}), protocol.launch(Launch({"type": "start"}))]
        protocol.receive_data(data)
        protocol.receive_eof(error)
        *ends, last = news_of(protocol)
        # Each request hears of it, by an error of its own.
        assert [end.key for end in ends] == keys
        assert len({id(item.error) for item in (*ends, last)}) == 3
        assert {str(end.error) for end in ends} == {str(last.error)}
        with pytest.raises(ConnectionLostError):
            protocol.request({"type": "info"})
        assert isinstance(last.error, ConnectionLostError)
        return last.error

    fault = {"type": "fault", "error": {"code": "shutting_down", "message": "bye"}}
    assert lost(b"").is_retryable
    assert lost(b"\0\0").is_retryable
    assert lost(b"", ConnectionResetError("reset")).is_retryable
    going = lost(framed(fault))
    assert going.is_retryable and isinstance(going.cause, DaemonError) and going.cause.code == "shutting_down"
    assert not lost(framed({"type": "fault", "error": {"code": "protocol"}})).is_retryable
    assert not lost(b"\xff\xff\xff\xff").is_retryable


def turn(protocol: Protocol, daemon: Played) -> bool:
    """One piece of what the client sends, and the answers to it; whether there was any."""
    data = protocol.data_to_send()
    if data:
        protocol.receive_data(framed(*daemon.receive(data)))
    return bool(data)


def test_a_component_is_uploaded_once_in_chunks() -> None:
    protocol, daemon = greeted(), Played()
    daemon.receive(hello())
    component = Component(bytes(range(256)) * (N_BYTES // 256))
    keys = [protocol.launch(Launch(start(component), component)) for _ in range(2)]
    while turn(protocol, daemon):
        pass
    news = news_of(protocol)
    started = [item.key for item in news if isinstance(item, Happened) and isinstance(item.event, Started)]
    assert sorted(started) == keys
    assert daemon.held == {component.hash: component.data}
    again = protocol.launch(Launch(start(component), component))
    while turn(protocol, daemon):
        pass
    (only,) = news_of(protocol)
    assert only.key == again and isinstance(only.event, Started)


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_guest_is_given_up_at_every_moment(is_forgotten: bool) -> None:
    component = Component(b"\7" * N_BYTES)
    n_turns = 0
    while True:
        protocol, daemon = greeted(), Played()
        daemon.receive(hello())
        call = {**start(component), "program": {"type": "named", "name": "x"}}
        key = protocol.launch(Launch(call, fallback=component))
        for _ in range(n_turns):
            turn(protocol, daemon)
        before = news_of(protocol)
        protocol.forget(key) if is_forgotten else protocol.cancel(key)
        while turn(protocol, daemon):
            pass
        news = news_of(protocol)
        assert not daemon.open and not protocol.is_open(key), f"after {n_turns} turns"
        if is_forgotten:
            assert not [item for item in news if isinstance(item, (Happened, Ended))]
        else:
            assert isinstance(news[-1], Ended) and isinstance(news[-1].error, CancelledError), f"{n_turns}"
        if any(isinstance(item, Happened) and isinstance(item.event, Started) for item in before):
            break
        n_turns += 1
    assert n_turns >= 5


def test_a_name_that_is_not_known_falls_back_once() -> None:
    protocol, daemon = greeted(), Played()
    daemon.receive(hello())
    component = Component(b"wasm")
    protocol.launch(
        Launch({**start(component), "program": {"type": "named", "name": "x"}}, fallback=component)
    )
    while turn(protocol, daemon):
        pass
    assert isinstance(news_of(protocol)[-1].event, Started)
    protocol.launch(Launch({**start(component), "program": {"type": "named", "name": "x"}}))
    while turn(protocol, daemon):
        pass
    (end,) = news_of(protocol)
    assert isinstance(end, Ended) and isinstance(end.error, UnknownProgramError)


def test_what_comes_for_no_request_is_passed_over() -> None:
    protocol = greeted()
    protocol.receive_data(framed(event(5, "text", text="x"), ended(5)))
    assert news_of(protocol) == []
    key = protocol.request({"type": "info"})
    protocol.forget(key)
    protocol.receive_data(framed(event(key, "text", text="x"), failed(key, "cancelled")))
    assert news_of(protocol) == []


def test_errors_go_to_other_processes_with_all_that_they_say() -> None:
    protocol = greeted()
    key = protocol.request({"type": "info"})
    protocol.receive_data(framed(failed(key, "model_does_not_fit", name="tiny", value="9", limit=8)))
    (end,) = news_of(protocol)
    assert isinstance(end, Ended) and isinstance(end.error, DaemonError)
    again = pickle.loads(pickle.dumps(end.error))
    assert type(again) is type(end.error) and vars(again) == vars(end.error) and str(again) == "no"
    for error in (
        RequestError(9, 8),
        VersionError((2, 3), (4, 5), "x"),
        ConnectionLostError("x", cause=again),
    ):
        copied = pickle.loads(pickle.dumps(error))
        assert (str(copied), copied.is_retryable) == (str(error), error.is_retryable)


def test_text_events_are_texts() -> None:
    protocol = greeted()
    key = protocol.launch(Launch({"type": "start"}))
    protocol.receive_data(framed(event(key, "text", text="so")))
    assert news_of(protocol) == [Happened(key, Text("so"))]
    protocol.receive_data(framed(event(key, "text", text=7)))
    assert isinstance(news_of(protocol)[-1], Lost)
