"""Run a coroutine to its end from ordinary code, also under a running event loop (a notebook cell)."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result. Under a running loop it gets a thread with a loop of its own; asyncio stays unpatched."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    result: list[T] = []
    failure: list[BaseException] = []
    loop = asyncio.new_event_loop()
    main: list[asyncio.Task[T]] = []

    def work() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:

                async def capture() -> T:
                    task = asyncio.current_task()
                    assert task is not None
                    main.append(task)
                    return await coroutine

                result.append(runner.run(capture(), context=contextvars.copy_context()))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work, name="ai-trains-ai")
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        if main:
            loop.call_soon_threadsafe(main[0].cancel)
        thread.join()
        raise
    if failure:
        raise failure[0]
    return result[0]
