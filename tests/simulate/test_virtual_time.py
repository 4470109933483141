import asyncio

import pytest

from dartrl.simulate.virtual_time import START, Deadlock, VirtualClock, run_virtual


def test_an_hour_passes_at_once_and_in_order():
    clock = VirtualClock()
    seen: list[tuple[str, float]] = []

    async def every(name: str, seconds: float, times: int) -> None:
        for _ in range(times):
            await clock.sleep(seconds)
            seen.append((name, clock.now() - START))

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(every("a", 1200.0, 3))
            group.create_task(every("b", 1000.0, 3))

    run_virtual(main())
    assert seen == [("b", 1000.0), ("a", 1200.0), ("b", 2000.0), ("a", 2400.0), ("b", 3000.0), ("a", 3600.0)]


def test_timeouts_run_in_virtual_time():
    clock = VirtualClock()

    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with clock.timeout(30.0):
                await asyncio.Event().wait()
        return clock.now() - START

    assert run_virtual(main()) == 30.0


def test_waiting_for_nothing_is_reported_instead_of_hanging():
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run_virtual(main())
