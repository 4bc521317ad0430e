"""Whether something gives up the GIL while it works."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def turns_of_others(work: Callable[[], object]) -> int:
    """How often another thread came to its turn while `work` was running.

    Threads that hold the GIL hand it over after the switch interval only. With one of an hour,
    whatever is counted was counted while it had been given up.
    """
    counted = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal counted
        while not stop.is_set():
            counted += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=count)
    thread.start()
    try:
        sys.setswitchinterval(3600)
        before = counted
        work()
        return counted - before
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
