"""The DevTools pipe: framing, deadlines, crashes."""

from __future__ import annotations

import asyncio
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dartrl.envs.web.devtools import DevTools
from dartrl.errors import EnvironmentCrashed, EnvironmentFault, EnvironmentTimeout
from dartrl.launch.system_clock import SystemClock
from dartrl.testing.clock import ManualClock, settle


class Wire:
    """A DevTools client on one side of two pipes; the test is the browser on the other side."""

    def __init__(self, clock: ManualClock | SystemClock) -> None:
        self.client = DevTools(clock, timeout_seconds=5.0)

    async def __aenter__(self) -> Wire:
        self._commands, commands_in = os.pipe()
        replies_out, self._replies = os.pipe()
        await self.client.connect(replies_out, commands_in)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.client.close()
        for end in (self._commands, self._replies):
            if end is not None:
                os.close(end)

    def hang_up(self) -> None:
        os.close(self._replies)
        self._replies = None

    def sent(self) -> list[dict]:
        """What the client has written so far."""
        return [json.loads(part) for part in os.read(self._commands, 1 << 20).split(b"\0") if part]

    def reply(self, *messages: dict) -> None:
        os.write(self._replies, b"".join(json.dumps(message).encode() + b"\0" for message in messages))


async def test_replies_find_their_commands_in_any_order():
    async with Wire(SystemClock()) as wire:
        futures = [wire.client.send(f"Some.method{number}", {"number": number}, "page-1") for number in range(3)]
        await asyncio.sleep(0)
        sent = wire.sent()
        assert [(message["method"], message["sessionId"]) for message in sent] == [(f"Some.method{n}", "page-1") for n in range(3)]
        wire.reply(*({"id": message["id"], "result": message["params"]} for message in reversed(sent)))
        assert await wire.client.collect(futures, "three methods") == [{"number": 0}, {"number": 1}, {"number": 2}]


async def test_a_refused_command_says_why():
    async with Wire(SystemClock()) as wire:
        future = wire.client.send("No.such")
        await asyncio.sleep(0)
        wire.reply({"id": wire.sent()[0]["id"], "error": {"message": "'No.such' wasn't found"}})
        with pytest.raises(EnvironmentFault, match="wasn't found"):
            await future


async def test_silence_ends_at_the_deadline_and_names_the_command():
    clock = ManualClock()
    async with Wire(clock) as wire:
        waiting = asyncio.create_task(wire.client.command("Page.navigate"))
        await settle()
        await clock.advance(5.1)
        with pytest.raises(EnvironmentTimeout, match=r"Page.navigate within 5 s"):
            await waiting


async def test_a_late_reply_disturbs_nobody():
    clock = ManualClock()
    async with Wire(clock) as wire:
        waiting = asyncio.create_task(wire.client.command("Slow.one", timeout_seconds=1.0))
        await settle()
        await clock.advance(1.1)
        with pytest.raises(EnvironmentTimeout):
            await waiting
        future = wire.client.send("Next.one")
        await settle()
        first, second = wire.sent()
        wire.reply({"id": first["id"], "result": {"late": True}}, {"id": second["id"], "result": {"late": False}})
        assert await future == {"late": False}


async def test_a_closed_pipe_ends_every_wait_at_once():
    async with Wire(ManualClock()) as wire:
        waits = [asyncio.create_task(wire.client.command(method)) for method in ("A.a", "B.b")]
        await settle()
        wire.hang_up()
        for result in await asyncio.gather(*waits, return_exceptions=True):
            assert isinstance(result, EnvironmentCrashed)
        assert not wire.client.is_open
        with pytest.raises(EnvironmentCrashed, match="was not sent"):
            await wire.client.command("C.c")


async def test_a_crashed_page_ends_only_its_own_waits():
    async with Wire(ManualClock()) as wire:
        lost, kept = wire.client.send("A.a", session="page-1"), wire.client.send("A.a", session="page-2")
        await settle()
        wire.client.fail_session("page-1", "page crashed")
        with pytest.raises(EnvironmentCrashed, match="page crashed"):
            await lost
        wire.reply({"id": wire.sent()[1]["id"], "result": {}})
        assert await kept == {}


async def test_events_reach_the_handler_of_their_session():
    async with Wire(SystemClock()) as wire:
        seen: list[tuple[str, object]] = []
        wire.client.listen("page-1", lambda method, params: seen.append((method, params)))
        future = wire.client.send("A.a")
        await asyncio.sleep(0)
        event = {"method": "Page.loadEventFired", "params": {"timestamp": 1}}
        wire.reply(
            {**event, "sessionId": "page-1"}, {**event, "sessionId": "page-2"}, event, {"id": wire.sent()[0]["id"], "result": {}}
        )
        await future
        assert seen == [("Page.loadEventFired", {"timestamp": 1})]


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=40), max_size=8), st.lists(st.integers(1, 50), max_size=40))
def test_messages_survive_any_cut_of_the_stream(texts, cuts):
    client = DevTools(ManualClock(), timeout_seconds=1.0)
    seen: list[str] = []
    client.listen("page", lambda method, params: seen.append(params["text"]))
    stream = b"".join(
        json.dumps({"method": "E.e", "sessionId": "page", "params": {"text": text}}).encode() + b"\0" for text in texts
    )
    position = 0
    for cut in [*cuts, len(stream)]:
        client.data_received(stream[position : position + cut])
        position += cut
    assert seen == texts
