"""What a run says when nothing happens."""

from __future__ import annotations

import asyncio
import contextlib

from ai_trains_ai.events import Event, Stalled, StepStarted
from ai_trains_ai.loop.watchdog import Watchdog


class Bench:
    def __init__(self) -> None:
        self.now, self.events = 1_000.0, list[Event]()
        self.watchdog = Watchdog(lambda: self.now, self.events.append, 0.02)

    @property
    def said(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Stalled)]


async def watched(bench: Bench, seconds: float = 0.1) -> None:
    task = asyncio.create_task(bench.watchdog.run())
    await asyncio.sleep(seconds)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_it_names_who_waits_for_what() -> None:
    bench = Bench()
    with bench.watchdog.waiting("the end of its job", "s0001g0e3"):
        bench.now += 60
        with bench.watchdog.waiting("the end of its job", "s0001g0e4"), bench.watchdog.waiting("validation", "e5"):
            bench.now += 600
            await watched(bench)
    (text,) = bench.said
    assert "Nothing has happened for 11 min" in text
    assert "2 for the end of its job (longest s0001g0e3, 11 min)" in text
    assert "1 for validation (longest e5, 10 min)" in text


async def test_an_event_is_a_sign_of_life() -> None:
    bench = Bench()
    bench.now += 600
    bench.watchdog.emit(StepStarted(0, time=bench.now))
    await watched(bench)
    assert (bench.said, len(bench.events)) == ([], 1)


async def test_it_does_not_say_the_same_all_the_time() -> None:
    bench = Bench()
    bench.now += 10
    await watched(bench)
    bench.now += 5
    await watched(bench)
    assert len(bench.said) == 1


def test_who_has_stopped_waiting_is_not_named() -> None:
    bench = Bench()
    with bench.watchdog.waiting("validation", "e5"):
        pass
    assert "nothing that is known of" in bench.watchdog.text(100.0)
