"""A batch scheduler: several requests computed together, one run of the model per step.

A step takes one chunk per request, runs them in one `cache.run`, and extends every request by the
token it chose. When the cache has no room for all, `extend` names the youngest requests to let go:
they are suspended, which publishes what they have, and resume from there later.

The model is a tiny Llama with random weights, so that this runs in seconds.

    python examples/batch_step.py
"""

import asyncio

from tiered_cache import AdmissionTimeout, UnifiedRadixCache, load_config
from tiered_cache.integrations.transformers import TransformersRunner, greedy, model_from_hf
from tiered_cache.lease import Lease
from tiered_cache.testing.models import tiny_model

NEW_TOKENS = 24


class Request:
    """A prompt and what was generated for it."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt = prompt
        self.answer: list[int] = []

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.answer

    @property
    def done(self) -> bool:
        return len(self.answer) == NEW_TOKENS


async def serve(
    cache: UnifiedRadixCache, runner: TransformersRunner, requests: list[Request], at_once: int
) -> None:
    """Serves all requests, at most `at_once` together."""
    waiting = list(requests)
    running: dict[Lease, Request] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                try:  # a scheduler must not wait for room that only its own next step can make
                    lease = await cache.acquire(waiting[0].tokens, timeout=0)
                except AdmissionTimeout:
                    break
                running[lease] = waiting.pop(0)
                await prefill(lease, runner, running[lease])
            await step(cache, runner, running, waiting)
    finally:
        for lease in running:
            await lease.aclose()


async def prefill(lease: Lease, runner: TransformersRunner, request: Request) -> None:
    """The prompt, chunk by chunk; its last logits give the first new token."""
    while chunk := await lease.next_chunk(32):
        logits = await lease.run(runner, chunk)
        lease.commit(chunk)
    request.answer.append(greedy(logits))


async def step(
    cache: UnifiedRadixCache,
    runner: TransformersRunner,
    running: dict[Lease, Request],
    waiting: list[Request],
) -> None:
    """One token for every running request."""
    for lease, request in list(running.items()):
        if request.done:
            leave(lease, runner, running)
    # Each request's newest token is not part of its lease yet: all take theirs, or none.
    while victims := cache.extend(list(running), [r.answer[-1] for r in running.values()]):
        for lease in victims:
            request = running[lease]
            print(f"no room: {len(request.tokens)} tokens are let go for now")
            request.answer.pop()  # chosen again when it resumes
            waiting.insert(0, request)
            leave(lease, runner, running)
    if running:
        chunks = [lease.pending for lease in running]
        batch = await cache.run(list(running), runner.step, chunks)
        for request, logits in zip(running.values(), batch, strict=True):
            request.answer.append(greedy(logits))


def leave(lease: Lease, runner: TransformersRunner, running: dict[Lease, Request]) -> None:
    """Publishes what the request has, and gives back what it holds."""
    del running[lease]
    runner.forget(lease.id)
    lease.suspend()


async def main() -> None:
    model = tiny_model("llama")
    section = model_from_hf(model.config, dtype=model.dtype)
    prompts = [[*range(2, 34), first, 3, 5, 8] for first in range(100, 106)]

    async def run_all(at_once: int, device_tokens: int) -> list[Request]:
        config = load_config({"device": {"tokens": device_tokens}}, {"model": section})
        requests = [Request(prompt) for prompt in prompts]
        async with UnifiedRadixCache.open(config) as cache:
            await serve(cache, TransformersRunner(model, cache.pools), requests, at_once)
            print(f"{at_once} at once: hit rate {cache.stats().hit_rate:.0%}")
        return requests

    together = await run_all(at_once=4, device_tokens=128)  # too few for four: some are let go
    alone = await run_all(at_once=1, device_tokens=1024)
    same = [r.answer for r in together] == [r.answer for r in alone]
    print("same tokens as one by one" if same else "NOT the same tokens as one by one")


if __name__ == "__main__":
    asyncio.run(main())
