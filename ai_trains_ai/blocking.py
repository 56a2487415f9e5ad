"""Run a coroutine to its end from ordinary code, also under a running event loop (a notebook cell)."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def run_blocking(coroutine: Coroutine[Any, Any, T], drain: Callable[[], bool] | None = None) -> T:
    """The coroutine's result. Under a running loop it gets a thread with a loop of its own; asyncio stays unpatched.

    Ctrl-C there calls ``drain`` in that loop; a second one, or the first when ``drain`` has nothing to drain, cancels
    the coroutine.

    Raises:
        KeyboardInterrupt: the coroutine was cancelled by Ctrl-C.
    """
    if not _loop_runs():  # asked apart, so that errors of the coroutine don't drag "no running event loop" along
        try:
            return asyncio.run(coroutine)
        except asyncio.CancelledError:  # nobody else could have cancelled it
            raise KeyboardInterrupt from None
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

    def stop(presses: int) -> None:
        if presses > 1 or drain is None or not drain():
            for task in main:
                task.cancel()

    thread = threading.Thread(target=work, name="ai-trains-ai")

    def on_press(presses: int) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it is over
            loop.call_soon_threadsafe(stop, presses)

    with _ctrl_c(on_press):
        thread.start()
        thread.join()
    if failure and isinstance(failure[0], asyncio.CancelledError):
        raise KeyboardInterrupt
    if failure:
        raise failure[0]
    return result[0]


def _loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def _ctrl_c(on_press: Callable[[int], None]) -> Iterator[None]:
    """Hand Ctrl-C to ``on_press`` with the number of presses; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    presses = 0

    def pressed(number: int, frame: object) -> None:
        nonlocal presses
        presses += 1
        on_press(presses)

    # the running loop's own handler would only cancel the task that waits here
    before = signal.signal(signal.SIGINT, pressed)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)  # None: it was set in C
