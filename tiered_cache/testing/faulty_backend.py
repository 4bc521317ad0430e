"""A backend that fails as a test says, for tests of what stands above backends.

    kept = MemoryBackend()
    backend = FaultyBackend(
        kept,
        Fault("read", keys=[third], result=ReadResult.MISSING),
        Fault("read", keys=[fourth], change=flipped(600)),
        Fault("write", call=3, error=OSError("no such device")),
        Fault("write", gate=gate, at="inside", stubborn=True),
    )

Faults are looked up at each call: add to `backend.faults` and take away as the test goes on. Delays
are on the loop's clock and gates on the loop, so all of it replays on a `DeterministicLoop`.

It also holds its caller to the contract (`violations`): who lends buffers leaves them alone.

Owns: the script, and the look at lent buffers. Refuses to know: where the wrapped backend keeps
what it is given.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar

import numpy as np

from tiered_cache.errors import BackendError
from tiered_cache.storage.backend import (
    KEY_BYTES,
    SCOPE_BYTES,
    ReadResult,
    StorageBackend,
    ignore_arrivals,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
    from typing import Self

    from tiered_cache.storage.backend import (
        BackendContext,
        BackendStats,
        ObjectInfo,
        ObjectKey,
        WriteResult,
    )

T = TypeVar("T")

Operation: TypeAlias = Literal["open", "contains", "read", "write", "delete", "clear", "aclose"]
Moment: TypeAlias = Literal["before", "inside", "after"]

JUNK: Final = 0xEE
"""What buffers are filled with whose row was not read."""


class CallGate:
    """A place at which calls wait until the test opens it. Of one event loop.

    Attributes:
        num_reached, num_waiting: how many calls have come, and how many of them stand here.
    """

    def __init__(self) -> None:
        self.num_reached = 0
        self.num_waiting = 0
        self._arrived = asyncio.Event()
        self._opened = asyncio.Event()

    async def wait(self) -> None:
        """What a call does."""
        self.num_reached += 1
        self.num_waiting += 1
        self._arrived.set()
        try:
            await self._opened.wait()
        finally:
            self.num_waiting -= 1

    async def reached(self, num_calls: int = 1) -> None:
        """Until so many calls have come, in all."""
        while self.num_reached < num_calls:
            self._arrived.clear()
            await self._arrived.wait()

    def open(self) -> None:
        """Let through who waits, and all who come later."""
        self._opened.set()


@dataclass(slots=True, eq=False)
class Fault:
    """Which calls go wrong, and how.

    Which: those of `op`, with one of `keys` (object keys or page keys; None: any); of these the
    first `times` (None: all). `call`: only this one, counted from 1 over all calls of `op`.

    How a call goes on, at the moment `at` (`inside`: half of its keys are done), in this order:

    * `gate`: it waits until the test opens that.
    * `delay`: seconds.
    * `error`: is raised. `at="after"`: it is done, and the answer gets lost.

    How its keys go on, of `keys` or all:

    * `result`: this is the answer, and the wrapped backend is not asked; the buffer of a read is
      filled with junk. For lies, too.
    * `change`: gets the bytes of a row and gives those that are read, or kept, instead. Another
      length is a short value.

    `answer`: gets the whole answer, and gives another.

    `stubborn`: the call cannot be stopped, as a thread cannot: cancelled, it goes on to its end,
    buffers and all, and raises `CancelledError` then.

    Attributes:
        num_met: how many calls it has met.
    """

    op: Operation
    keys: Collection[bytes] | None = None
    call: int | None = None
    times: int | None = None
    at: Moment = "before"
    gate: CallGate | None = None
    delay: float = 0.0
    error: BaseException | type[BaseException] | None = None
    result: Any = None
    change: Callable[[bytes], bytes] | None = None
    answer: Callable[[Any], Any] | None = None
    stubborn: bool = False
    num_met: int = field(default=0, init=False)

    def names(self, key: bytes) -> bool:
        return self.keys is None or key in self.keys or key[SCOPE_BYTES:] in self.keys


def flipped(at: int) -> Callable[[bytes], bytes]:
    """A change: one bit of this byte is wrong."""
    return lambda row: row[:at] + bytes([row[at] ^ 1]) + row[at + 1 :]


def torn(at: int) -> Callable[[bytes], bytes]:
    """A change: from this byte on there are zeros."""
    return lambda row: row[:at] + bytes(len(row) - at)


def short(num_bytes: int) -> Callable[[bytes], bytes]:
    """A change: there are no more than so many bytes."""
    return lambda row: row[:num_bytes]


@dataclass(slots=True, eq=False)
class Call:
    """One call, as it came. `rows`: the buffers that are lent to it, while it is under way."""

    op: Operation
    keys: tuple[ObjectKey, ...] = ()
    rows: tuple[memoryview, ...] = ()
    faults: tuple[Fault, ...] = ()

    async def reach(self, moment: Moment) -> None:
        for fault in self.faults:
            if fault.at != moment:
                continue
            if fault.gate is not None:
                await fault.gate.wait()
            if fault.delay:
                await asyncio.sleep(fault.delay)
            if fault.error is not None:
                raise fault.error

    def result(self, index: int) -> Any:
        """What is answered for a key without asking; None: ask."""
        for fault in self.faults:
            if fault.result is not None and (not self.keys or fault.names(self.keys[index])):
                return fault.result
        return None

    def changes(self, index: int) -> list[Callable[[bytes], bytes]]:
        """What is done to a row."""
        return [
            fault.change
            for fault in self.faults
            if fault.change is not None and fault.names(self.keys[index])
        ]

    def answer(self, answer: T) -> T:
        for fault in self.faults:
            if fault.answer is not None:
                answer = fault.answer(answer)
        return answer


class FaultyBackend(StorageBackend):
    """See the module.

    Attributes:
        faults: the script.
        calls: what came, in order. `num_calls`: how many of each operation.
        under_way: calls that have not ended.
        violations: how the caller has broken the contract, in words. Each is raised too, as
            `AssertionError`, which a caller that contains its backend's errors will contain.
    """

    can_scan = True  # if the wrapped one can

    def __init__(self, backend: StorageBackend, *faults: Fault) -> None:
        self.backend = backend
        self.faults = list(faults)
        self.calls: list[Call] = []
        self.num_calls: Counter[Operation] = Counter()
        self.under_way: list[Call] = []
        self.violations: list[str] = []
        self._is_closed = False

    @classmethod
    async def open(cls, options: Any, context: BackendContext) -> Self:
        raise BackendError("a FaultyBackend wraps an open backend: make one, and give opened_as()")

    def opened_as(self) -> type[StorageBackend]:
        """A class whose `open` gives this instance: for who opens backends by class."""
        faulty = self

        class Opened(FaultyBackend):
            Options = type(faulty.backend).Options

            @classmethod
            async def open(cls, options: Any, context: BackendContext) -> Any:
                async def opened() -> FaultyBackend:
                    return faulty

                return await faulty._run(Call("open"), opened)

        return Opened

    # --- the contract -----------------------------------------------------------------------------

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        call = Call("contains", tuple(keys))

        async def part(asked: Sequence[int]) -> list[bool]:
            return await self.backend.contains([call.keys[at] for at in asked])

        return await self._run(call, lambda: self._by_key(call, part))

    async def read(
        self,
        keys: Sequence[ObjectKey],
        rows: Sequence[memoryview],
        arrived: Callable[[int, int], None] = ignore_arrivals,
    ) -> list[ReadResult]:
        call = Call("read", tuple(keys), tuple(rows))

        async def part(asked: Sequence[int]) -> list[ReadResult]:
            def tell(index: int, stop: int) -> None:
                if not call.changes(asked[index]):  # what is changed afterwards has not come yet
                    arrived(asked[index], stop)

            lent = [call.rows[at] for at in asked]
            results = await self.backend.read([call.keys[at] for at in asked], lent, tell)
            for index, (at, row) in enumerate(zip(asked, lent, strict=True)):
                if results[index] is ReadResult.READ and call.changes(at):
                    changed = _changed(call, at)[: len(row)]
                    row[: len(changed)] = changed
                    if len(changed) < len(row):
                        results[index] = ReadResult.CORRUPT
            return results

        return await self._run(call, lambda: self._by_key(call, part))

    async def write(
        self, keys: Sequence[ObjectKey], rows: Sequence[memoryview]
    ) -> list[WriteResult]:
        call = Call("write", tuple(keys), tuple(rows))

        async def part(asked: Sequence[int]) -> list[WriteResult]:
            kept = [_changed(call, at) if call.changes(at) else call.rows[at] for at in asked]
            return await self.backend.write([call.keys[at] for at in asked], kept)

        return await self._run(call, lambda: self._by_key(call, part))

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        call = Call("delete", tuple(keys))

        async def part(asked: Sequence[int]) -> list[None]:
            await self.backend.delete([call.keys[at] for at in asked])
            return [None] * len(asked)

        await self._run(call, lambda: self._by_key(call, part))

    async def clear(self, scope: bytes) -> int:
        return await self._run(Call("clear"), lambda: self.backend.clear(scope))

    def scan(self, scope: bytes | None = None) -> AsyncIterator[Sequence[ObjectInfo]]:
        return self.backend.scan(scope)

    async def register_memory(self, view: memoryview) -> None:
        await self.backend.register_memory(view)

    def stats(self) -> BackendStats:
        return self.backend.stats()

    async def aclose(self) -> None:
        if self.under_way:
            self._violated(f"closed while {[call.op for call in self.under_way]} are under way")
        await self._run(Call("aclose"), self.backend.aclose)
        self._is_closed = True

    # --- a call -----------------------------------------------------------------------------------

    async def _run(self, call: Call, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self._look_at(call)
        self.calls.append(call)
        self.num_calls[call.op] += 1
        call.faults = tuple(self._meet(call))
        self.under_way.append(call)
        before = _digest(call) if call.op == "write" else b""

        async def run() -> T:
            await call.reach("before")
            if not call.keys and (result := call.result(0)) is not None:
                return call.answer(result)  # type: ignore[no-any-return]
            answer = await work()
            lent = _digest(call) if call.op == "read" else before
            await call.reach("after")
            if call.rows and _digest(call) != lent:
                self._violated(f"a row was changed while it was lent to {call.op}")
            return call.answer(answer)

        try:
            if any(fault.stubborn for fault in call.faults):
                return await _to_its_end(run())
            return await run()
        finally:
            self.under_way.remove(call)
            call.rows = ()  # they belong to the caller again

    async def _by_key(
        self, call: Call, part: Callable[[Sequence[int]], Coroutine[Any, Any, list[T]]]
    ) -> list[T]:
        """Ask for the keys that the script has no answer to: at once, or in two halves if something
        happens between them."""
        answers = [call.result(at) for at in range(len(call.keys))]
        asked = [at for at, answer in enumerate(answers) if answer is None]
        if call.op == "read":
            for at, row in enumerate(call.rows):
                if answers[at] is not None:
                    row[:] = bytes([JUNK]) * len(row)
        is_halved = any(fault.at == "inside" for fault in call.faults)
        half = len(asked) // 2 if is_halved else len(asked)
        found = await part(asked[:half]) if half or not is_halved else []
        if is_halved:
            await call.reach("inside")
            found += await part(asked[half:])
        for at, answer in zip(asked, found, strict=True):
            answers[at] = answer
        return answers

    def _meet(self, call: Call) -> list[Fault]:
        met = []
        for fault in self.faults:
            if (
                fault.op == call.op
                and fault.call in (None, self.num_calls[call.op])
                and (fault.times is None or fault.num_met < fault.times)
                and (fault.keys is None or any(map(fault.names, call.keys)))
            ):
                fault.num_met += 1
                met.append(fault)
        return met

    # --- what the caller owes ---------------------------------------------------------------------

    def _look_at(self, call: Call) -> None:
        if self._is_closed and call.op not in ("open", "aclose"):
            self._violated(f"{call.op} after aclose")
        if any(len(key) != KEY_BYTES for key in call.keys):
            self._violated(f"{call.op} with a key that is not of {KEY_BYTES} bytes")
        if call.op not in ("read", "write"):
            return
        if len(call.rows) != len(call.keys):
            self._violated(f"{call.op} of {len(call.keys)} keys with {len(call.rows)} rows")
        if any(row.format != "B" or not row.c_contiguous for row in call.rows):
            self._violated(f"{call.op} with a row that is not plain bytes")
        self._look_for_overlap(call)

    def _look_for_overlap(self, call: Call) -> None:
        """Who reads into a buffer has it alone."""
        lent = [(*_span(row), other.op) for other in self.under_way for row in other.rows]
        for row in call.rows:
            start, stop = _span(row)
            for at, end, op in lent:
                if start < end and at < stop and "read" in (op, call.op):
                    self._violated(f"a row is lent to {op} and to {call.op} at once")
            lent.append((start, stop, call.op))

    def _violated(self, words: str) -> None:
        self.violations.append(words)
        raise AssertionError(words)


def _span(row: memoryview) -> tuple[int, int]:
    """The addresses that a buffer has."""
    start: int = np.frombuffer(row, np.uint8).__array_interface__["data"][0]
    return start, start + row.nbytes


def _changed(call: Call, index: int) -> memoryview:
    row = bytes(call.rows[index])
    for change in call.changes(index):
        row = change(row)
    return memoryview(row)


def _digest(call: Call) -> bytes:
    seen = hashlib.blake2b(digest_size=16)
    for row in call.rows:
        seen.update(row)
    return seen.digest()


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Await it however often the caller is cancelled."""
    task = asyncio.create_task(work, name="stubborn-call")
    cancelled: BaseException | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # nobody else will look
        raise cancelled
    return task.result()
