"""Hugging Face transformers on this cache (extra `transformers`): plain dynamic layers.

Owns: the way of state between a transformers `DynamicCache` and the device pools, and `generate`, a
serving loop for one request. Refuses to know: tree, admission, eviction. It sees chunks and pools,
nothing behind them.

    runner = TransformersRunner(model, cache.pools)
    async with aclosing(generate(cache, runner, prompt, 64, eos=eos)) as tokens:
        async for token in tokens:
            ...

State goes into a transformers cache only by its public `update`, and is copied, never aliased:
transformers grows its tensors in place of the old ones, and pages of the pools are shared between
requests.

What is supported: every layer a `DynamicLayer`. Keys and values of MHA and GQA go to the pools `k`
and `v`. With multi-head latent attention (DeepSeek-V3) transformers keeps what the model
compresses: the latent in `keys` `[1, 1, S, kv_lora_rank]`, the rotated key in `values` `[1, 1, S,
qk_rope_head_dim]`; both lie side by side in the pool `latent`. Sliding windows and linear attention
need components that this integration does not have yet: they are refused by name.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from tiered_cache.config import model_from_hf
from tiered_cache.errors import ConfigError, LoadFailed

try:
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer
except ImportError as error:  # the extra is missing: say so instead of naming an inner module
    raise ImportError(
        "this integration needs transformers 5.24 or newer. "
        "Run: pip install 'tiered-cache[transformers]'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Sequence
    from contextlib import AbstractAsyncContextManager

    from transformers import PreTrainedConfig, PreTrainedModel

    from tiered_cache.cache import UnifiedRadixCache
    from tiered_cache.chunk import Chunk
    from tiered_cache.layers import LayerWaits
    from tiered_cache.lease import Lease
    from tiered_cache.pools.device import DevicePools
    from tiered_cache.pools.spec import PoolSpec

__all__ = ["TransformersRunner", "generate", "greedy", "model_from_hf"]

LIVE_LIMIT: Final = 64
"""Live transformers caches kept by a runner; see `TransformersRunner`."""


class TransformersRunner:
    """Runs a transformers model on chunks: the `fn` of `lease.run(fn, chunk)`.

    Call it in the worker thread, through `lease.run` or `cache.run`. One call: bring the state of
    `[0, chunk.start)` into a transformers cache, compute `chunk.tokens`, write the state of
    `[start, stop)` into the chunk's slots, and return the last position's logits (float32, on the
    CPU, `[vocabulary]`). Of a lease that was granted `layerwise`, each layer's state is brought
    when it has arrived.

    Between two calls the transformers cache of a lease stays alive, so that decoding does not copy
    the whole prefix for every token. It is only a copy of what the pools hold: it is used when it
    ends exactly at `chunk.start` and the lease has taken nothing over from others since, and is
    otherwise thrown away and attached anew. So a jump (others published the tokens between), a
    `truncate`, or a run that was cancelled or raised needs no code of its own. It belongs to one
    lease and is never handed to another.

    Every run of a lease that writes state goes through the same runner; one that does not must
    `forget` the lease.

    Args:
        model: a causal language model of transformers, in eval mode, on the pools' device and in
            their dtype.
        pools: `cache.pools`.
        component: the component whose pages hold the state.
        live_limit: at most so many live caches (the least recently used goes first). What is beyond
            costs a copy of the prefix from the pools, nothing else. `generate` forgets its own;
            with `lease.run` call `forget(lease.id)` at the end, or leave it to this limit.

    Raises:
        ConfigError: a layer of the model is no plain dynamic layer, or the pools do not fit the
            model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pools: DevicePools,
        *,
        component: str = "full",
        live_limit: int = LIVE_LIMIT,
    ) -> None:
        if live_limit < 0:
            raise ValueError(f"live_limit must not be negative: {live_limit}")
        self.model = model
        self.component = component
        self._config: Any = model.config
        check_layers(self._config)
        self._state = _state_layout(model, pools, component)
        self._live: OrderedDict[int, _Live] = OrderedDict()
        self._live_limit = live_limit
        self._lock = threading.Lock()  # run_threads may be more than one

    def __call__(self, chunk: Chunk) -> torch.Tensor:
        """Logits after the chunk's last token: float32 `[vocabulary]`, on the CPU.

        Raises:
            LoadFailed: the lease is layer-wise, and its load has failed: ask for the next chunk.
        """
        with torch.inference_mode():
            # Taken out, not looked up: if anything below raises, nothing half-grown is left for the
            # next call.
            live = self._take(chunk.lease_id)
            if live is None or (live.length, live.num_reused) != (chunk.start, _num_reused(chunk)):
                live = self._attach(chunk)
            device = self.model.device
            tokens = torch.tensor(chunk.tokens, device=device)  # a copy: chunks are read-only
            # Explicit positions: some models would count from 0 again.
            positions = torch.arange(chunk.start, chunk.stop, device=device)
            output = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                cache=live.cache,
                use_cache=True,
                logits_to_keep=1,
            )
            self._state.write(live.cache, chunk.start, self._slots(chunk, chunk.start, chunk.stop))
            # The copy to the host also ends the writes above (same stream): on return the chunk's
            # state is there.
            logits: torch.Tensor = output.logits[0, -1].float().cpu()
            live.length = chunk.stop
            self._keep(chunk.lease_id, live)
            return logits

    def step(self, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        """One batch step, for `cache.run(leases, runner.step, chunks)`: logits per chunk, in order.

        Chunks run one after the other: padding them into one tensor would change the kernels' row
        counts, and with them the last bits of the logits.
        """
        return [self(chunk) for chunk in chunks]

    def forget(self, lease_id: int) -> None:
        """Drops what is kept for a lease, at its end. From any thread; unknown ids are fine."""
        self._take(lease_id)

    @property
    def num_live(self) -> int:
        """Transformers caches that are kept now."""
        return len(self._live)

    def _attach(self, chunk: Chunk) -> _Live:
        cache = DynamicCache(config=self._config)
        if chunk.start:
            self._state.read(cache, self._slots(chunk, 0, chunk.start), chunk.lease.layers)
        return _Live(cache, chunk.start, _num_reused(chunk))

    def _slots(self, chunk: Chunk, start: int, stop: int) -> torch.Tensor:
        return torch.from_numpy(chunk.slots(self.component, start, stop)).to(self.model.device)

    def _take(self, lease_id: int) -> _Live | None:
        with self._lock:
            return self._live.pop(lease_id, None)

    def _keep(self, lease_id: int, live: _Live) -> None:
        with self._lock:
            self._live[lease_id] = live
            while len(self._live) > self._live_limit:
                self._live.popitem(last=False)


def greedy(logits: torch.Tensor) -> int:
    """The most likely token."""
    return int(logits.argmax())


async def generate(
    cache: UnifiedRadixCache,
    runner: TransformersRunner,
    prompt_tokens: Any,
    max_new_tokens: int,
    *,
    chunk_tokens: int = 512,
    eos: int | Collection[int] | None = None,
    sample: Callable[[torch.Tensor], int] = greedy,
    turn: AbstractAsyncContextManager[Any] | None = None,
    on_lease: Callable[[Lease], None] | None = None,
    on_grant: Callable[[float], None] | None = None,
    on_first_token: Callable[[float], None] | None = None,
    on_chunk: Callable[[Chunk], None] | None = None,
    **lease_kwargs: Any,
) -> AsyncGenerator[int, None]:
    """Streams the answer to one prompt: the serving loop of the README as a generator.

    Prompt chunks are published as soon as they are computed, so that requests with the same
    beginning share them; the answer is published at the end. Closing the generator early (`aclose`,
    or leaving `contextlib.aclosing`) gives everything back that was not published; so do an error
    and a cancellation. A generator that is merely dropped is
    closed by the event loop some time later: prefer `aclosing`.

    Args:
        prompt_tokens: whatever `cache.lease` takes.
        max_new_tokens: at most so many tokens; room for them is reserved at admission.
        chunk_tokens: at most so many prompt tokens per run. Other requests take turns between runs.
        eos: token or tokens that end the answer; not yielded.
        sample: chooses a token from the logits (float32, `[vocabulary]`), on the event loop: keep
            it short.
        turn: an async context manager that can be entered again and again (an `asyncio.Lock`), held
            from the first prompt chunk to the first token and then for each token. A scheduler in
            one argument: with one lock for all requests a prompt is computed in one go. Without,
                the runs of all requests mix in order of arrival.
        on_lease: called when the lease is held and its prefix is on the device, loads from the host
            included (of a layer-wise lease: on its way).
        on_grant: called on the loop with the moment (`time.perf_counter()`) when the model begins
            with this request: its first run starts in the worker thread.
        on_first_token: called with the moment when the first token is known, before it is yielded.
        on_chunk: called for each chunk (prompt and answer) after it has been computed.
        lease_kwargs: passed to `cache.lease`: `extra_key`, `cache_salt`, `priority`, `timeout`,
            `load_timeout`, `layerwise`, ...

    Raises:
        CapacityError, AdmissionTimeout: from the lease.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    ends = frozenset(() if eos is None else (eos,) if isinstance(eos, int) else eos)
    turn = nullcontext() if turn is None else turn
    run = _announce_first_run(runner, on_grant)
    lease_id: int | None = None
    async with cache.lease(prompt_tokens, reserve=max_new_tokens, **lease_kwargs) as lease:
        if on_lease is not None:
            on_lease(lease)
        try:
            async with turn:
                logits: torch.Tensor | None = None
                while (chunk := await lease.next_chunk(chunk_tokens)) is not None:
                    lease_id = chunk.lease_id
                    try:
                        logits = await lease.run(run, chunk)
                    except LoadFailed:  # layer-wise only: what did not come is computed
                        continue
                    lease.commit(chunk)
                    if on_chunk is not None:
                        on_chunk(chunk)
            if logits is None:
                raise ValueError("the prompt is empty: there is nothing to continue")
            token = sample(logits)
            if on_first_token is not None:
                on_first_token(time.perf_counter())
            for num_new in range(1, max_new_tokens + 1):
                if token in ends:
                    break
                if num_new == max_new_tokens:
                    lease.finish()  # before the last token is out: the reader may not come back
                    yield token
                    return
                yield token
                async with turn:
                    chunk = lease.append(token)
                    logits = await lease.run(run, chunk)
                if on_chunk is not None:
                    on_chunk(chunk)
                token = sample(logits)
            lease.finish()
        finally:
            if lease_id is not None:
                runner.forget(lease_id)


def _announce_first_run(
    runner: TransformersRunner, on_grant: Callable[[float], None] | None
) -> Callable[[Chunk], torch.Tensor]:
    """The runner, telling the loop when it is called for the first time."""
    if on_grant is None:
        return runner
    import asyncio

    loop = asyncio.get_running_loop()
    announced = False

    def run(chunk: Chunk) -> torch.Tensor:
        nonlocal announced
        if not announced:
            announced = True
            loop.call_soon_threadsafe(on_grant, time.perf_counter())
        return runner(chunk)

    return run


def check_layers(config: PreTrainedConfig) -> None:
    """Refuses a model whose transformers cache has other layers than plain dynamic ones.

    Raises:
        ConfigError: names the layers and their class.
    """
    others: dict[str, list[int]] = {}
    for at, layer in enumerate(DynamicCache(config=config).layers):
        if (
            type(layer) is not DynamicLayer
        ):  # a subclass keeps more than keys and values of all tokens
            others.setdefault(type(layer).__name__, []).append(at)
    if others:
        found = "; ".join(
            f"{name} at layers {', '.join(map(str, layers))}" for name, layers in others.items()
        )
        raise ConfigError(
            f"{type(config).__name__} (model type {config.model_type!r}) has cache layers that "
            f"cannot be carried yet: {found}. This integration carries plain full attention "
            "(DynamicLayer) only"
        )


# --- Between a transformers cache and the pools ---------------------------------------------------


@dataclass(slots=True)
class _Live:
    """A transformers cache that holds the state of `[0, length)` of one lease.

    `num_reused`: tokens that the lease had taken over from others by then. Length alone would not
    tell drafts from what replaced them: tokens are truncated, others appended, and these found
    published by somebody else up to the same length.
    """

    cache: DynamicCache
    length: int
    num_reused: int


def _num_reused(chunk: Chunk) -> int:
    return chunk.lease.hits.total


class _StateLayout(Protocol):
    """How one kind of attention state lies in the pools."""

    def read(self, cache: DynamicCache, slots: torch.Tensor, layers: LayerWaits) -> None:
        """Pools → an empty cache: the rows at `slots`, in this order, on every layer, each when it
        has arrived.

        Raises:
            LoadFailed, StaleError: it will not.
        """

    def write(self, cache: DynamicCache, start: int, slots: torch.Tensor) -> None:
        """The cache's state from token `start` on → the pools, at `slots`."""


class _KeyValues:
    """Pools `k` and `v`: rows `[heads, dim]`; in transformers `[1, heads, S, dim]`."""

    def __init__(self, keys: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        self._keys, self._values = keys, values

    def read(self, cache: DynamicCache, slots: torch.Tensor, layers: LayerWaits) -> None:
        pools = zip(_layers(cache), self._keys, self._values, strict=True)
        for at, (layer, keys, values) in enumerate(pools):
            layers.wait(at)
            layer.update(
                _heads_first(keys.index_select(0, slots)),
                _heads_first(values.index_select(0, slots)),
            )

    def write(self, cache: DynamicCache, start: int, slots: torch.Tensor) -> None:
        for layer, keys, values in zip(_layers(cache), self._keys, self._values, strict=True):
            _write(keys, slots, layer.keys[0, :, start:].transpose(0, 1))
            _write(values, slots, layer.values[0, :, start:].transpose(0, 1))


class _Latent:
    """Pool `latent`: rows `[kv_lora_rank + rope_dim]`, which transformers keeps apart."""

    def __init__(self, latents: list[torch.Tensor], rank: int) -> None:
        self._latents, self._rank = latents, rank

    def read(self, cache: DynamicCache, slots: torch.Tensor, layers: LayerWaits) -> None:
        for at, (layer, latents) in enumerate(zip(_layers(cache), self._latents, strict=True)):
            layers.wait(at)
            rows = latents.index_select(0, slots)[None, None]
            layer.update(rows[..., : self._rank].contiguous(), rows[..., self._rank :].contiguous())

    def write(self, cache: DynamicCache, start: int, slots: torch.Tensor) -> None:
        for layer, latents in zip(_layers(cache), self._latents, strict=True):
            if layer.keys.shape[1] != 1 or layer.keys.shape[-1] != self._rank:
                raise ConfigError(
                    f"this model's transformers cache has keys {tuple(layer.keys.shape)}, not the "
                    f"latent [1, 1, S, {self._rank}] of the pool: it needs pools k and v"
                )
            _write(
                latents,
                slots,
                torch.cat((layer.keys[0, 0, start:], layer.values[0, 0, start:]), dim=-1),
            )


def _state_layout(model: PreTrainedModel, pools: DevicePools, component: str) -> _StateLayout:
    """Picks the layout by the pools there are, and checks that they fit the model."""
    config: Any = model.config.get_text_config(decoder=True)
    specs = {spec.name: spec for spec in pools.specs if spec.component == component}
    num_layers = len(DynamicCache(config=config).layers)

    def layers(name: str, row_shape: tuple[int, ...]) -> list[torch.Tensor]:
        _check_spec(specs[name], row_shape, num_layers)
        tensors = [pools.layer(name, layer) for layer in range(num_layers)]
        for tensor in tensors:
            if tensor.dtype != model.dtype or tensor.device != model.device:
                raise ConfigError(
                    f"pool {name!r} is {tensor.dtype} on {tensor.device}, the model {model.dtype} "
                    f"on {model.device}: set model.dtype and device.type to the model's"
                )
        return tensors

    rank = getattr(config, "kv_lora_rank", None)
    if rank and "latent" in specs:
        return _Latent(layers("latent", (rank + config.qk_rope_head_dim,)), rank)
    if not rank and {"k", "v"} <= specs.keys():
        num_heads = config.num_key_value_heads or config.num_attention_heads
        row_shape = (
            num_heads,
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        )
        return _KeyValues(layers("k", row_shape), layers("v", row_shape))
    raise ConfigError(
        f"the model needs {'a pool latent' if rank else 'pools k and v'} in component "
        f"{component!r}; there are {', '.join(sorted(specs)) or 'none'}"
    )


def _check_spec(spec: PoolSpec, row_shape: tuple[int, ...], num_layers: int) -> None:
    if tuple(spec.row_shape) != row_shape or tuple(spec.layers) != tuple(range(num_layers)):
        raise ConfigError(
            f"pool {spec.name!r} has rows {tuple(spec.row_shape)} on {len(spec.layers)} layers; "
            f"the model has rows {row_shape} on {num_layers} layers"
        )


def _layers(cache: DynamicCache) -> list[Any]:
    """Its layers. All are plain dynamic ones (`check_layers`); their type does not say so."""
    return cache.layers


def _heads_first(rows: torch.Tensor) -> torch.Tensor:
    """[S, heads, dim] → [1, heads, S, dim], in memory too: kernels may depend on strides."""
    return rows.transpose(0, 1).contiguous()[None]


def _write(pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Refuses rows of another shape, which indexing would broadcast."""
    if rows.shape != (len(slots), *pool.shape[1:]):
        raise ConfigError(
            f"the model made state of shape {tuple(rows.shape)}, "
            f"the pool takes {(len(slots), *pool.shape[1:])}"
        )
    pool.index_copy_(0, slots, rows)
