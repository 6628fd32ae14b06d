"""Runs the coroutines that served functions return: `async def` functions that other workers have called.

All coroutines of a process run on one thread with an asyncio event loop. The thread starts with the first coroutine and
ends with `shutdown`. Any thread may call these functions.
"""

import asyncio
import contextlib
import functools
import logging
import os
import threading
import traceback
import types
from collections.abc import Coroutine, Generator
from typing import Any

import torch

from torchrpc import _C

from .._errors import CancelledError, RemoteException, ShutdownError
from .._values.exceptions import text_of

logger = logging.getLogger(__name__)

# Seconds in which coroutines that were cancelled, because their worker ends, may clean up.
_CANCEL_S = 5.0


class _EventLoopThread:
    """A thread that runs an event loop until `stop`."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        run = functools.partial(_C._LentThread().run, self._run)
        self.thread = threading.Thread(target=run, name="torchrpc-asyncio", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            self.loop.run_until_complete(self._cancel_all())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_S)

    def stop(self, limit_s: float) -> None:
        """Cancel the coroutines that still run, and end the thread. Waits `limit_s` seconds at most."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(min(2 * _CANCEL_S, limit_s))
        if self.thread.is_alive():
            logger.warning("A coroutine that another worker has called does not end, and is left behind.")


_tasks: set["asyncio.Task[None]"] = set()  # keeps the tasks alive; the event loop alone does not
_lock = threading.Lock()
_event_loop: _EventLoopThread | None = None


def _start() -> asyncio.AbstractEventLoop:
    global _event_loop
    with _lock:
        if _event_loop is None:
            _event_loop = _EventLoopThread()
        return _event_loop.loop


def stop_event_loop(limit_s: float) -> None:
    """End the thread of the event loop, if there is one; wait `limit_s` seconds at most. Not to be called on it."""
    global _event_loop
    with _lock:
        running, _event_loop = _event_loop, None
    if running is not None:
        running.stop(limit_s)


def _forget_in_child() -> None:
    """Reset the state in a forked child, which has no event loop thread."""
    global _event_loop, _lock
    _lock, _event_loop = threading.Lock(), None


os.register_at_fork(after_in_child=_forget_in_child)


def on_event_loop() -> bool:
    """Whether this thread runs the event loop."""
    return _event_loop is not None and _event_loop.thread is threading.current_thread()


@types.coroutine
def _in_steps(coroutine: Coroutine[Any, Any, Any], call: _C._ServedCall) -> Generator[Any, Any, Any]:
    """Run each step of the coroutine with the autograd context, the deadline and the grad mode of its own call.

    These three are state of the thread, and the steps of many calls alternate on it.
    """
    step, value = coroutine.send, None
    while True:
        try:
            awaited = call.run(step, value)
        except StopIteration as end:
            return end.value
        try:
            step, value = coroutine.send, (yield awaited)
        except BaseException as exc:  # a cancellation, for example
            step, value = coroutine.throw, exc


def _below_this_module(frames: types.TracebackType | None) -> types.TracebackType | None:
    while frames and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


def _cancellation() -> Exception:
    """Return the error of a call whose coroutine was cancelled, but not by its caller."""
    if _event_loop is None:
        return ShutdownError("The coroutine was cancelled, because its worker ends.")
    return CancelledError("The coroutine was cancelled by code of this worker, or awaited a task that was cancelled.")


def _exit(exc: BaseException) -> RemoteException:
    """Return what the caller gets instead of an exception that would end the process."""
    text, trace = text_of(exc), "".join(traceback.format_tb(_below_this_module(exc.__traceback__)))
    name = f"{type(exc).__module__}.{type(exc).__qualname__}"
    return RemoteException(f"{type(exc).__name__}: {text}", type_name=name, message=text, traceback=trace)


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> "torch.futures.Future[Any]":
    """Run the coroutine on the event loop, and return a future of its result.

    Called on the thread that serves the call, so that the coroutine goes on in the call's autograd context.
    """
    future: torch.futures.Future[Any] = torch.futures.Future()
    call = _C._ServedCall()

    async def run() -> None:
        try:
            result = await _in_steps(coroutine, call)
        except asyncio.CancelledError:
            if call.is_cancelled():
                future.set_exception(CancelledError("The call was cancelled by its caller."))
            else:
                future.set_exception(_cancellation())
            raise
        except Exception as exc:
            # By the type: the state of an exception that another worker has sent may have any attribute.
            future.set_exception(BaseException.with_traceback(exc, _below_this_module(exc.__traceback__)))
        except BaseException as exc:  # sys.exit(), which would end the event loop's thread
            future.set_exception(_exit(exc))
        else:
            future.set_result(result)

    def start() -> None:
        task = loop.create_task(run())
        _tasks.add(task)
        task.add_done_callback(_tasks.discard)

        def cancel() -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has been closed, so the task has ended
                loop.call_soon_threadsafe(task.cancel)

        call.on_cancelled(cancel)

    loop = _start()
    try:
        loop.call_soon_threadsafe(start)
    except RuntimeError:  # the loop has been closed meanwhile
        coroutine.close()
        raise ShutdownError("This worker shuts down, so it starts no coroutine any more.") from None
    return future
