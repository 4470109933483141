import asyncio

import pytest

from dartrl.testing.clock import ManualClock


async def test_sleepers_wake_in_order_of_their_due_times():
    clock = ManualClock(start=0.0)
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((name, clock.now()))

    async with asyncio.TaskGroup() as group:
        group.create_task(sleeper("late", 5.0))
        group.create_task(sleeper("early", 2.0))
        await clock.advance(1.0)
        assert woken == []
        await clock.advance(10.0)
    assert woken == [("early", 2.0), ("late", 5.0)]
    assert clock.now() == 11.0


async def test_timeout_ends_its_body_when_time_passes():
    clock = ManualClock()

    async def body() -> None:
        async with clock.timeout(3.0):
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await clock.advance(2.9)
    assert not task.done()
    await clock.advance(0.2)
    with pytest.raises(TimeoutError):
        await task


async def test_a_timeout_left_in_time_never_fires():
    clock = ManualClock()
    async with clock.timeout(3.0):
        pass
    await clock.advance(10.0)
