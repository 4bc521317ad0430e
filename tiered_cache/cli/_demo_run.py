"""The demo's serving loop: chats as tasks over one cache, measured, their answers compared.

Owns: what a chat does, when moments are taken, what counts as the same answer. Refuses to know:
how it is shown.
"""

from __future__ import annotations

import asyncio
import gc
import time
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch

from tiered_cache.cache import UnifiedRadixCache
from tiered_cache.cli._demo_chats import HANDBOOK, question
from tiered_cache.errors import TieredCacheError
from tiered_cache.integrations.transformers import TransformersRunner, generate
from tiered_cache.testing.chat_models import load_chat_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tiered_cache.chunk import Chunk
    from tiered_cache.config import Config
    from tiered_cache.lease import Lease
    from tiered_cache.stats import CacheStats, PoolStats
    from tiered_cache.testing.chat_models import ChatModel, ModelRecord

NEAR_TIE: Final = 1e-3
"""Two tokens whose logits differ by less are equally right: the order of float32 sums decides."""

LONG: Final = 0.5
"""A host hit is of the long prefix when the host brought this share of the prompt or more."""

GRANT: Final = (
    "The model's grant: the moment when a request's first run starts in the model's thread. From "
    "there to its first token a request has the model to itself, with and without the cache, so "
    "time from the grant has no waiting for others in it; time from arrival has."
)

LOAD: Final = (
    "With its load: the time from a request's admission until its prefix was on the device is "
    "added."
)


READY: Final = (
    "With its prefetch and load: the time from asking for a lease until its prefix was on the "
    "device is added, storage → host → device. Requests are served one after another here, so "
    "there is no waiting for others in that either."
)

DECK: Final = (0, 0, 1, 0, 2, 1, 0, 0)
"""Whose eight chats in a row are, where there are three tiers. Who comes again at once finds the
device's copy, who comes after one other the host's, and who comes after two others storage's."""


def load_model(record: ModelRecord) -> ChatModel:
    """The model, warm, and what a server sets for its process; the library never does."""
    # One thread: two fight for two cores with the event loop and anything else that runs here.
    torch.set_num_threads(1)
    chat_model = load_chat_model(record)
    with torch.inference_mode():  # brings the weights into memory: no request's time
        chat_model.model(input_ids=torch.arange(512)[None], use_cache=False, logits_to_keep=1)
    # The gc policy for servers: what is there now is never scanned again.
    gc.collect()
    gc.freeze()
    return chat_model


@dataclass(frozen=True, slots=True)
class DemoSize:
    """How much is said: `chats` at once, each with `turns` questions, `new_tokens` per answer.

    The chats belong to `tenants` in turn. Tenants share nothing, so each has a system prompt of its
    own in the cache.

    `one_by_one`: requests are served one after another, first come, first served, and tenants come
    back after fewer or more others (`DECK`).
    """

    chats: int
    turns: int
    new_tokens: int
    chunk_tokens: int = 512
    tenants: int = 1
    one_by_one: bool = False

    @property
    def num_requests(self) -> int:
        return self.chats * self.turns

    def tenant(self, chat: int) -> int:
        """Whose a chat is, from 0."""
        if not self.one_by_one:
            return chat % self.tenants
        lap, card = divmod(chat, len(DECK))
        others = self.tenants - 1
        return 1 + (2 * lap + DECK[card] - 1) % others if DECK[card] and others else 0


@dataclass(slots=True)
class Request:
    """One question and its answer. Moments are in seconds of `time.perf_counter`."""

    chat: int
    turn: int
    prompt_len: int
    arrived: float
    granted: float = 0.0
    first_token: float = 0.0
    prefetch_s: float = 0.0
    """From asking for the lease until admission: what storage takes, where nobody else is
    served; waiting for others where they are."""
    load_s: float = 0.0
    """From admission until the prefix was on the device: next to nothing without a load."""
    num_from_host: int = 0
    num_from_storage: int = 0
    num_computed: int = 0
    """Prompt tokens that the model computed; the others came from a tier."""
    answer: list[int] = field(default_factory=list)

    @property
    def num_reused(self) -> int:
        return self.prompt_len - self.num_computed

    @property
    def num_from_device(self) -> int:
        return self.num_reused - self.num_from_host - self.num_from_storage

    @property
    def is_long_host_hit(self) -> bool:
        return self.num_from_host >= LONG * self.prompt_len

    @property
    def ttft_from_arrival_s(self) -> float:
        return self.first_token - self.arrived

    @property
    def ttft_from_grant_s(self) -> float:
        return self.first_token - self.granted

    @property
    def ttft_with_load_s(self) -> float:
        """What a user would have waited alone: the load, then the model."""
        return self.load_s + self.ttft_from_grant_s

    @property
    def ttft_with_prefetch_s(self) -> float:
        """The same where storage was asked first; for requests that are served one by one."""
        return self.prefetch_s + self.ttft_with_load_s


@dataclass(frozen=True, slots=True)
class Phase:
    """All requests of one run through all chats, by chat and turn, and what the cache counted."""

    requests: dict[tuple[int, int], Request]
    wall_s: float
    stats: CacheStats
    device_tokens: int

    @property
    def num_host_hits(self) -> int:
        return sum(request.num_from_host > 0 for request in self.requests.values())


async def run_phase(
    config: Config,
    chat_model: ChatModel,
    size: DemoSize,
    judge: Judge,
    on_tokens: Callable[[int], None],
    *,
    poison: bool = False,
) -> Phase:
    """Opens a cache, lets all chats talk at once, and closes it.

    `on_tokens(n)` is told about progress: it adds up to `num_requests × new_tokens`. `poison`: all
    memory of device and host is filled with NaN first, so that an answer out of anything that was
    not written since is no answer.
    """
    requests: dict[tuple[int, int], Request] = {}
    failed: BaseExceptionGroup[TieredCacheError] | None = None
    async with UnifiedRadixCache.open(config) as cache:
        if poison:
            _poison(cache)
        runner = TransformersRunner(chat_model.model, cache.pools)
        scheduler = (
            asyncio.Lock()
        )  # first come, first served: a prompt in one go, then token by token
        door = asyncio.Lock() if size.one_by_one else nullcontext()
        started = time.perf_counter()
        talk = _Talk(cache, runner, door, scheduler, chat_model, size, judge, on_tokens)
        try:
            async with asyncio.TaskGroup() as group:
                for chat in range(size.chats):
                    group.create_task(talk.run(chat, requests))
        except* TieredCacheError as errors:
            failed = errors
        if failed is not None:
            raise _first(failed)  # what one chat meets all meet: one is enough to be told
        wall_s = time.perf_counter() - started
        await cache.drain()
        stats = cache.stats()
        device_tokens = cache.page_size * base_capacity(stats.pools)
    return Phase(dict(sorted(requests.items())), wall_s, stats, device_tokens)


def base_capacity(pools: Mapping[str, PoolStats]) -> int:
    """Pages of the component that tokens are counted by: the first one. Others keep a part."""
    return next(iter(pools.values())).capacity


def _poison(cache: UnifiedRadixCache) -> None:
    for spec in cache.pools.specs:
        for layer in spec.layers:
            cache.pools.layer(spec.name, layer).fill_(float("nan"))
    for arena in cache.arenas:
        arena.rows[:] = 0xFF  # a NaN in every type of state


def _first(errors: BaseExceptionGroup[TieredCacheError]) -> TieredCacheError:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, TieredCacheError)
    return error


@dataclass(frozen=True, slots=True)
class _Talk:
    """What the chats of a phase share."""

    cache: UnifiedRadixCache
    runner: TransformersRunner
    door: AbstractAsyncContextManager[Any]
    scheduler: asyncio.Lock
    chat_model: ChatModel
    size: DemoSize
    judge: Judge
    on_tokens: Callable[[int], None]

    async def run(self, chat: int, requests: dict[tuple[int, int], Request]) -> None:
        """One chat: each prompt is all that was said before, as tokens, and a new question."""
        model = self.chat_model
        history = model.opening(HANDBOOK)
        for turn in range(self.size.turns):
            history += model.question(question(chat, turn), first=turn == 0)
            request = Request(chat, turn, len(history), arrived=time.perf_counter())
            requests[chat, turn] = request
            async with self.door:
                await self._answer(request, history)
            history += request.answer

    async def _answer(self, request: Request, prompt: list[int]) -> None:
        loop, tenant = asyncio.get_running_loop(), self.size.tenant(request.chat)
        asked = loop.time()

        def on_lease(lease: Lease) -> None:
            request.prefetch_s = lease.granted_at - asked
            request.load_s = loop.time() - lease.granted_at
            request.num_from_host = lease.hits.host
            request.num_from_storage = lease.hits.storage

        def on_grant(moment: float) -> None:
            request.granted = moment

        def on_first_token(moment: float) -> None:
            request.first_token = moment

        def on_chunk(chunk: Chunk) -> None:
            request.num_computed += max(0, min(chunk.stop, len(prompt)) - chunk.start)

        stream = generate(
            self.cache,
            self.runner,
            prompt,
            self.size.new_tokens,
            chunk_tokens=self.size.chunk_tokens,
            eos=self.chat_model.ends,
            sample=self.judge.chooser(request.chat, request.turn),
            turn=self.scheduler,
            cache_salt=f"tenant {tenant + 1}" if tenant else None,
            on_lease=on_lease,
            on_grant=on_grant,
            on_first_token=on_first_token,
            on_chunk=on_chunk,
        )
        async with aclosing(stream) as tokens:
            async for token in tokens:
                request.answer.append(token)
                self.on_tokens(1)
        self.on_tokens(self.size.new_tokens - len(request.answer))


# --- Comparing answers ----------------------------------------------------------------------------


class Choice(NamedTuple):
    """A token and by how much its logit leads the second best."""

    token: int
    margin: float


class Judge(Protocol):
    """Chooses tokens greedily, and remembers or compares what was chosen."""

    def chooser(self, chat: int, turn: int) -> Callable[[torch.Tensor], int]:
        """The `sample` function of one answer."""


class Reference:
    """The run without cache: remembers each choice and its margin."""

    def __init__(self) -> None:
        self.choices: dict[tuple[int, int], list[Choice]] = {}

    def chooser(self, chat: int, turn: int) -> Callable[[torch.Tensor], int]:
        choices = self.choices[chat, turn] = []

        def choose(logits: torch.Tensor) -> int:
            best = torch.topk(logits, 2)
            choice = Choice(int(best.indices[0]), float(best.values[0] - best.values[1]))
            choices.append(choice)
            return choice.token

        return choose


class Difference(NamedTuple):
    """A token of the run with cache that is not the reference's."""

    chat: int
    turn: int
    position: int
    expected: Choice
    found: int


class Comparison:
    """The run with cache: compares each token with the reference's.

    After a near-tie the reference's token is taken, so that the rest of the chat stays comparable.
    After a real difference nothing more of that chat can be compared: it says other things now.
    """

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self.num_compared = 0
        self.near_ties: list[Difference] = []
        self.differences: list[Difference] = []

    @property
    def same(self) -> bool:
        """No difference, and near-ties in at most 1 % of the tokens (one always passes)."""
        return not self.differences and len(self.near_ties) <= max(1, self.num_compared // 100)

    def chooser(self, chat: int, turn: int) -> Callable[[torch.Tensor], int]:
        expected = iter(self._reference.choices[chat, turn])

        def choose(logits: torch.Tensor) -> int:
            token = int(logits.argmax())
            if any(difference.chat == chat for difference in self.differences):
                return token
            position, choice = next(positions), next(expected)
            self.num_compared += 1
            if token == choice.token:
                return token
            difference = Difference(chat, turn, position, choice, token)
            if choice.margin < NEAR_TIE:
                self.near_ties.append(difference)
                return choice.token
            self.differences.append(difference)
            return token

        positions = iter(range(len(self._reference.choices[chat, turn])))
        return choose
