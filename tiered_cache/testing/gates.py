"""Gates for run functions, and an executor whose jobs a test starts and ends by hand.

With them an interleaving of the loop and the model's thread is written down instead of hoped for;
nothing here waits for a time to pass. Limits are there only so that a broken test ends.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

LIMIT_S: Final = 30.0


class GateError(RuntimeError):
    """A gate was never opened, or a job never came to where the test waits for it."""


class Gate:
    """A place at which a thread stops until the test opens it.

    Call it in the thread (any arguments; it returns the first), `await reached()` and `open()` it
    on the loop that it was made on.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reached = asyncio.Event()
        self._opened = threading.Event()
        self.num_passed = 0

    def __call__(self, *args: Any) -> Any:
        self._loop.call_soon_threadsafe(self._reached.set)
        if not self._opened.wait(LIMIT_S):
            raise GateError("the gate was never opened")
        self.num_passed += 1
        return args[0] if args else None

    async def reached(self) -> None:
        """Until a thread has come to the gate."""
        async with asyncio.timeout(LIMIT_S):
            await self._reached.wait()

    def open(self) -> None:
        """Let through who waits, and all who come later."""
        self._opened.set()


class ManualJob:
    """One submitted call: queued until `start`, running until `finish`.

    `start` runs the call in a thread of its own up to the executor's `pause`, or to its end if it
    has none. `finish` lets it run to its end and only then tells its future. Both return when that
    has happened, so the test and the call never run at once.
    """

    def __init__(self, executor: ManualExecutor, call: Callable[[], Any]) -> None:
        self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._executor = executor
        self._call = call
        self._stopped = threading.Event()
        self._resumed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_queued(self) -> bool:
        return self._thread is None and not self.future.cancelled()

    @property
    def is_running(self) -> bool:
        return self._thread is not None and not self.future.done()

    def start(self) -> bool:
        """Run up to the pause. False when the job was cancelled while queued: it never runs."""
        if self._thread is not None:
            raise GateError("this job was started before")
        if not self.future.set_running_or_notify_cancel():
            self._executor.jobs.remove(self)
            return False
        self._thread = threading.Thread(target=self._work, name="manual-job", daemon=True)
        self._thread.start()
        if not self._stopped.wait(LIMIT_S):
            raise GateError("the job neither paused nor ended")
        return True

    def finish(self) -> None:
        """Run to the end."""
        if self._thread is None:
            raise GateError("this job was not started")
        self._resumed.set()
        self._thread.join(LIMIT_S)
        if self._thread.is_alive():
            raise GateError("the job did not end")
        self._executor.jobs.remove(self)

    def _work(self) -> None:
        self._executor.current.job = self
        try:
            result = self._call()
        except BaseException as error:
            self._stop()
            self.future.set_exception(error)
        else:
            self._stop()
            self.future.set_result(result)

    def _stop(self) -> None:
        self._stopped.set()
        if not self._resumed.wait(LIMIT_S):
            raise GateError("the job was never finished")


class ManualExecutor(concurrent.futures.Executor):
    """Give it to `open(run_executor=…)`: nothing runs until the test says so.

    `start` and `finish` block the calling thread for as long as the call computes.

    Attributes:
        jobs: queued and running ones, oldest first.
    """

    def __init__(self) -> None:
        self.jobs: list[ManualJob] = []
        self.current = threading.local()

    def submit(
        self, fn: Callable[..., T], /, *args: Any, **kwargs: Any
    ) -> concurrent.futures.Future[T]:
        job = ManualJob(self, lambda: fn(*args, **kwargs))
        self.jobs.append(job)
        return job.future

    def pause(self, *_: Any) -> None:
        """Call it inside a job: `start` returns here, and `finish` goes on from here."""
        self.current.job._stop()

    @property
    def queued(self) -> list[ManualJob]:
        return [job for job in self.jobs if job.is_queued]

    @property
    def running(self) -> list[ManualJob]:
        return [job for job in self.jobs if job.is_running]

    def run_all(self) -> None:
        """Start and finish what is there, in order."""
        for job in tuple(self.jobs):
            if job.is_running or job.start():
                job.finish()
