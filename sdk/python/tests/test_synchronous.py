"""The client without asyncio: in threads, in a notebook's loop, under Ctrl-C, and after it was closed."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Callable

import pytest
from conftest import PATIENCE_S, Daemon

from trellis import (
    Client,
    ClosedError,
    GuestEndedError,
    GuestFailedError,
    Program,
    Progress,
    Started,
    StoppedError,
    TakenOverError,
    Text,
    TimedOutError,
    Tokens,
    UnknownGuestError,
)


def until(holds: Callable[[], bool]) -> None:
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() - begun < PATIENCE_S
        time.sleep(0.005)


def is_listed(client: Client, guest_id: int) -> bool:
    return guest_id in [guest.guest_id for guest in client.ps()]


def test_every_call_has_its_answer(shared: Daemon, hostile: Program, codec: Any) -> None:
    with Client.connect(shared.socket, timeout=30) as client:
        assert client.timeout == 30 and client.socket == shared.socket
        assert client.daemon_build == client.info().build
        assert [model.name for model in client.models()] == ["tiny"]
        assert any(limit.name == "limits.cpu_ms" for limit in client.limits())
        assert "# HELP" in client.metrics() and client.reload().changed == []
        assert client.logs(2).next <= client.logs_from(0).end
        told: list[tuple[int, int, threading.Thread]] = []

        def hear(done: int, total: int) -> None:
            # A call from a hearer is a call like any other.
            assert client.info().pid > 0
            told.append((done, total, threading.current_thread()))

        assert client.fit_model("draft").fits
        assert client.load_model("draft", progress=hear) == "draft"
        assert told and all(thread is threading.current_thread() for _, _, thread in told)
        assert client.unload_model("draft", 0) == "tiny"
        output = client.run(hostile, "tokens", "4", "<|begin_of_text|>Once", seed=7)
        assert len(output.tokens) == 4 and output.usage is not None
        events = list(client.start(hostile, "tokens", "4", "<|begin_of_text|>Once", seed=7))
        assert [event.tokens[0] for event in events if isinstance(event, Tokens)] == output.tokens
        with pytest.raises(GuestFailedError):
            client.run(hostile, "error")
        with pytest.raises(UnknownGuestError):
            client.stop(10**9)


def test_messages_lines_and_time_outs(shared: Daemon, hostile: Program, codec: Any) -> None:
    with Client.connect(shared.socket) as client:
        with client.start(hostile, "echo") as guest:
            assert guest.started() == guest.guest_id
            with pytest.raises(TimedOutError):
                while guest.next(timeout=0.05) is not None:
                    pass
            guest.send("one")
            assert guest.next() == Text("one")
            guest.send_lines(["two\n", "three"])
            assert list(guest.texts()) == ["two", "three"]
            assert guest.is_over and guest.usage is not None
            with pytest.raises(GuestEndedError):
                guest.send("late")
        guest = client.start(hostile, "echo")
        with pytest.raises(TimedOutError):
            guest.text(timeout=0.1)
        assert guest.is_over
        guest = client.start(hostile, "drip")
        guest.started()
        guest.cancel()
        with pytest.raises(Exception, match="cancelled"):
            guest.wait()
        guest = client.start(hostile, "say", "so")
        while not isinstance(event := guest.next(), Text):
            assert isinstance(event, (Progress, Started))
        assert guest.collect().text == "\ufffd" and event.text == "so"


def test_leaving_a_loop_stops_the_guest(shared: Daemon, hostile: Program) -> None:
    with Client.connect(shared.socket) as client:

        def loop() -> int:
            guest = client.start(hostile, "drip")
            for _ in guest.texts():
                break
            assert guest.guest_id is not None and guest.is_over
            return guest.guest_id

        def block() -> int:
            with client.start(hostile, "drip") as guest:
                return guest.started()

        def error() -> int:
            guest = client.start(hostile, "drip")
            with pytest.raises(ZeroDivisionError):
                for _ in guest:
                    raise ZeroDivisionError
            return guest.started()

        def forgotten() -> int:
            return client.start(hostile, "drip").started()

        for leave in (loop, block, error, forgotten):
            guest_id = leave()
            gc.collect()
            until(lambda guest_id=guest_id: not is_listed(client, guest_id))  # type: ignore[misc]


def test_a_notebook_whose_loop_runs_is_no_hindrance(shared: Daemon, hostile: Program) -> None:
    async def cell() -> str:
        with Client.connect(shared.socket) as client:
            return "".join(client.start(hostile, "say", "in a cell").texts())

    assert asyncio.run(cell()).startswith("in a cell")


def test_threads_share_a_client(shared: Daemon, hostile: Program) -> None:
    with Client.connect(shared.socket) as client:
        texts: dict[int, str] = {}

        def work(number: int) -> None:
            guest = client.start(hostile, "echo")
            guest.send_lines([str(number)] * 3)
            texts[number] = guest.text()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert texts == {number: str(number) * 3 for number in range(32)}


def test_threads_share_the_events_of_a_guest(shared: Daemon, hostile: Program) -> None:
    with Client.connect(shared.socket) as client:
        guest = client.start(hostile, "tokens", "60", "<|begin_of_text|>Once", seed=7)
        tokens: list[int] = []
        early: list[bool] = []

        def read() -> None:
            while (event := guest.next(timeout=PATIENCE_S)) is not None:
                if isinstance(event, Tokens):
                    tokens.extend(event.tokens)
            early.append(not guest.is_over)

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # None of them takes what another one has read for the end.
        assert early == [False] * 4
        alone = client.run(hostile, "tokens", "60", "<|begin_of_text|>Once", seed=7)
        assert sorted(tokens) == sorted(alone.tokens)
        with client.start(hostile, "wait-for-messages") as silent:
            silent.started()
            waiting = threading.Thread(target=lambda: list(silent))
            waiting.start()
            # Who waits for its turn does so for as long as it was told.
            with pytest.raises(TimedOutError):
                while silent.next(timeout=0.05) is not None:
                    pass
            silent.close()
            waiting.join(PATIENCE_S)
            assert not waiting.is_alive() and silent.next() is None


def test_control_c_stops_what_is_waited_for(shared: Daemon, hostile: Program) -> None:
    with Client.connect(shared.socket) as client:
        guest = client.start(hostile, "wait-for-messages")
        guest_id = guest.started()
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            guest.text()
        until(lambda: not is_listed(client, guest_id))


def test_a_client_that_is_closed_says_so(shared: Daemon, hostile: Program) -> None:
    client = Client.connect(shared.socket)
    guest = client.start(hostile, "wait-for-messages")
    guest.started()
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            guest.wait()
        except BaseException as error:
            ended.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.05)
    client.close()
    client.close()
    waiting.join(PATIENCE_S)
    assert [type(error) for error in ended] == [ClosedError]
    for call in (client.ps, guest.next, lambda: guest.send("x")):
        with pytest.raises(ClosedError):
            call()
    assert not [thread for thread in threading.enumerate() if thread.name == "trellis"]


def test_a_client_that_nobody_has_any_more_leaves_nothing(shared: Daemon, hostile: Program) -> None:
    watching = Client.connect(shared.socket)
    guest = Client.connect(shared.socket).start(hostile, "wait-for-messages")
    # The guest alone keeps its connection.
    guest_id = guest.started()
    gc.collect()
    assert is_listed(watching, guest_id)
    del guest
    gc.collect()
    until(lambda: not is_listed(watching, guest_id))
    watching.close()
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "trellis"])


def test_a_program_that_closes_nothing_ends_all_the_same(shared: Daemon) -> None:
    program = f"from trellis import Client; c = Client.connect({str(shared.socket)!r}); print(c.info().state)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "ready\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_is_told_that_the_client_is_not_its_own(shared: Daemon) -> None:
    with Client.connect(shared.socket) as client:
        child = os.fork()
        if child == 0:
            try:
                client.ps()
            except ClosedError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert client.info().pid > 0


def test_detached_guests_are_read_and_stopped(shared: Daemon, hostile: Program) -> None:
    with Client.connect(shared.socket) as client:
        told: list[Any] = []
        guest_id = client.start_detached(hostile, "echo", progress=told.append)
        with client.attach(guest_id) as first:
            first.send("one")
            assert first.next() == Text("one") and first.next_number == 1
            assert (first.guest_id, first.daemon) == (guest_id, first.daemon)
            second = client.attach(guest_id, 0)
            with pytest.raises(TakenOverError):
                first.next()
            assert second.next() == Text("one")
            second.acknowledge()
            second.close()
        resumed = client.resume(guest_id, 1)
        client.attach(guest_id, 1).close()
        reading = client.attach(guest_id, 1)
        reading.send_lines(["two"])
        assert reading.text() == "two"
        assert resumed.guest_id == guest_id and resumed.next_number == 1
        with pytest.raises(UnknownGuestError):
            resumed.text()
        guest_id = client.start_detached(hostile, "echo")
        with client.resume(guest_id) as resumed:
            resumed.send("three")
            assert resumed.next() == Text("three") and resumed.next_number == 1
            resumed.end_messages()
            assert resumed.text() == "" and resumed.usage is not None
        guest_id = client.start_detached(hostile, "drip")
        reading = client.attach(guest_id)
        client.stop(guest_id)
        with pytest.raises(StoppedError):
            reading.wait()
