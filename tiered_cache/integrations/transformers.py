"""Hugging Face transformers on this cache (extra `transformers`).

Owns: the way of state between a transformers `DynamicCache` and the device pools, and `generate`, a
serving loop for one request. Refuses to know: tree, admission, eviction. It sees chunks and pools,
nothing behind them.

    runner = TransformersRunner(model, cache.pools)
    async with aclosing(generate(cache, runner, prompt, 64, eos=eos)) as tokens:
        async for token in tokens:
            ...

State goes into a transformers cache only by its public methods, and is copied, never aliased:
transformers grows its tensors in place of the old ones or writes over them, and pages of the pools
are shared between requests.

What is supported, in any mixture (`LAYER_PARTS`): full attention, sliding windows and chunks,
linear attention (recurrent states, short convolutions), and layers with both. Keys and values of
MHA and GQA go to the pools `k` and `v` that hold the layer (`swa.k` and `swa.v`, where windows are
apart). With multi-head latent attention (DeepSeek-V3) transformers keeps what the model compresses:
the latent in `keys` `[1, 1, S, kv_lora_rank]`, the rotated key in `values` `[1, 1, S,
qk_rope_head_dim]`; both lie side by side in the pool `latent`. Of a layer with a window, no more is
brought than the window. States go to the pools `conv` and `temporal`. Other layers are refused by
name.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from tiered_cache.config import model_from_hf
from tiered_cache.config.hf_states import layer_states
from tiered_cache.errors import ConfigError, IntegrityError, LoadFailed

try:
    from transformers import DynamicCache
    from transformers.cache_utils import (
        DummyLayer,
        DynamicLayer,
        DynamicSlidingWindowLayer,
        LinearAttentionAndFullAttentionLayer,
        LinearAttentionLayer,
    )
except ImportError as error:  # the extra is missing: say so instead of naming an inner module
    raise ImportError(
        "this integration needs transformers 5.24 or newer. "
        "Run: pip install 'tiered-cache[transformers]'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from transformers import PreTrainedConfig, PreTrainedModel

    from tiered_cache.cache import UnifiedRadixCache
    from tiered_cache.chunk import Chunk
    from tiered_cache.config import ModelConfig
    from tiered_cache.lease import Lease
    from tiered_cache.pools.device import DevicePools
    from tiered_cache.pools.spec import PoolSpec

__all__ = ["TransformersRunner", "generate", "greedy", "model_from_hf"]

ONE_AT_A_TIME: Final = frozenset({"jamba", "mamba", "falcon_mamba"})
"""Model types of which transformers 5.24 computes several tokens wrongly when there are tokens
before them: they are computed one by one then."""

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
        live_limit: at most so many live caches (the least recently used goes first). What is beyond
            costs a copy of the prefix from the pools, nothing else. `generate` forgets its own;
            with `lease.run` call `forget(lease.id)` at the end, or leave it to this limit.

    Raises:
        ConfigError: a layer of the model keeps what this integration cannot carry, or the pools do
            not fit the model.
    """

    def __init__(
        self, model: PreTrainedModel, pools: DevicePools, *, live_limit: int = LIVE_LIMIT
    ) -> None:
        if live_limit < 0:
            raise ValueError(f"live_limit must not be negative: {live_limit}")
        self.model = model
        self._config: Any = model.config
        check_layers(self._config)
        self._parts = _layer_parts(model, pools)
        self._one_at_a_time = self._config.model_type in ONE_AT_A_TIME
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
            output = self._forward(chunk, live.cache)
            place = _Place(chunk, self.model.device)
            for layer, parts in zip(live.cache.layers, self._parts, strict=True):
                for part in parts:
                    part.write(layer, place)
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

    def _forward(self, chunk: Chunk, cache: DynamicCache) -> Any:
        device = self.model.device
        tokens = torch.tensor(chunk.tokens, device=device)  # a copy: chunks are read-only
        # Explicit positions: some models would count from 0 again.
        positions = torch.arange(chunk.start, chunk.stop, device=device)
        step = 1 if self._one_at_a_time and chunk.start else len(chunk)
        parts = zip(torch.split(tokens, step), torch.split(positions, step), strict=True)
        for ids, places in parts:
            output = self.model(
                input_ids=ids[None],
                position_ids=places[None],
                cache=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        return output

    def _attach(self, chunk: Chunk) -> _Live:
        cache = DynamicCache(config=self._config)
        place = _Place(chunk, self.model.device)
        for at, (layer, parts) in enumerate(zip(cache.layers, self._parts, strict=True)):
            if chunk.start:
                chunk.lease.layers.wait(at)
            for part in parts:
                part.read(layer, place)
        return _Live(cache, chunk.start, _num_reused(chunk))

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
    """Refuses a model whose transformers cache has layers that cannot be carried.

    Raises:
        ConfigError: names the layers and their class.
    """
    others: dict[str, list[int]] = {}
    for at, layer in enumerate(DynamicCache(config=config).layers):
        # Exactly these classes: a subclass keeps more than they do.
        if type(layer) not in LAYER_PARTS or getattr(layer, "number_of_states", 1) != 1:
            others.setdefault(type(layer).__name__, []).append(at)
    if others:
        found = "; ".join(
            f"{name} at layers {', '.join(map(str, layers))}" for name, layers in others.items()
        )
        raise ConfigError(
            f"{type(config).__name__} (model type {config.model_type!r}) has cache layers that "
            f"cannot be carried yet: {found}. This integration carries "
            f"{', '.join(layer.__name__ for layer in LAYER_PARTS)}"
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


class _Place:
    """Where the state of a chunk's lease lies, from the thread of the chunk's run."""

    def __init__(self, chunk: Chunk, device: torch.device) -> None:
        self.chunk = chunk
        self._device = device
        self._slots: dict[tuple[str, int, int], torch.Tensor] = {}
        self._states: dict[str, torch.Tensor] = {}

    def before(self, component: str, num_tokens: int | None) -> torch.Tensor:
        """Slots of the last `num_tokens` tokens before the chunk; None: of all."""
        stop = self.chunk.start
        return self._of(component, 0 if num_tokens is None else max(0, stop - num_tokens), stop)

    def own(self, component: str) -> torch.Tensor:
        """Slots of the chunk's tokens."""
        return self._of(component, self.chunk.start, self.chunk.stop)

    def state(self, component: str) -> torch.Tensor:
        """The slot with the state at the chunk's start, which becomes the one at its stop."""
        found = self._states.get(component)
        if found is None:
            slot = self.chunk.state_slots[component]
            found = self._states[component] = torch.tensor([slot], device=self._device)
        return found

    def _of(self, component: str, start: int, stop: int) -> torch.Tensor:
        """The layers of a component share them."""
        found = self._slots.get((component, start, stop))
        if found is None:
            slots = self.chunk.slots(component, start, stop)
            if len(slots) and slots.min() < 0:
                raise IntegrityError(f"{self.chunk!r}: not all of {component} [{start}, {stop})")
            found = torch.from_numpy(slots).to(self._device)
            self._slots[component, start, stop] = found
        return found


class _LayerPart(Protocol):
    """One kind of state of one layer, and the pools where it lies."""

    def read(self, layer: Any, place: _Place) -> None:
        """Pools → a new layer: what it holds when the chunk begins."""

    def write(self, layer: Any, place: _Place) -> None:
        """The layer, which has computed the chunk → pools."""


class _KeyValues:
    """Pools `k` and `v`: rows `[heads, dim]`; in transformers `[1, heads, S, dim]`."""

    def __init__(self, component: str, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._component, self._keys, self._values = component, keys, values

    def read(self, layer: Any, place: _Place) -> None:
        window = layer.sliding_window - 1 if layer.is_sliding else None
        slots = place.before(self._component, window)
        if layer.is_sliding:
            # Else it forgets, before it is written, what a chunk longer than the window has.
            layer.activate_past_recording()
        if len(slots):
            layer.update(
                _heads_first(self._keys.index_select(0, slots)),
                _heads_first(self._values.index_select(0, slots)),
            )
        if layer.is_sliding:
            layer.cumulative_length = place.chunk.start

    def write(self, layer: Any, place: _Place) -> None:
        slots = place.own(self._component)
        _write(self._keys, slots, layer.keys[0, :, -len(slots) :].transpose(0, 1))
        _write(self._values, slots, layer.values[0, :, -len(slots) :].transpose(0, 1))
        if layer.is_sliding:
            layer.crop(0)  # to the window


class _Latent:
    """Pool `latent`: rows `[kv_lora_rank + rope_dim]`, which transformers keeps apart."""

    def __init__(self, component: str, latents: torch.Tensor, rank: int) -> None:
        self._component, self._latents, self._rank = component, latents, rank

    def read(self, layer: Any, place: _Place) -> None:
        slots = place.before(self._component, None)
        if len(slots):
            rows = self._latents.index_select(0, slots)[None, None]
            layer.update(rows[..., : self._rank].contiguous(), rows[..., self._rank :].contiguous())

    def write(self, layer: Any, place: _Place) -> None:
        if layer.keys.shape[1] != 1 or layer.keys.shape[-1] != self._rank:
            raise ConfigError(
                f"this model's transformers cache has keys {tuple(layer.keys.shape)}, not the "
                f"latent [1, 1, S, {self._rank}] of the pool: it needs pools k and v"
            )
        slots = place.own(self._component)
        keys, values = layer.keys[0, 0, -len(slots) :], layer.values[0, 0, -len(slots) :]
        _write(self._latents, slots, torch.cat((keys, values), dim=-1))


class _States:
    """Pools `conv` and `temporal`, those that the model has: a row is one state, `[1, ...]` in
    transformers."""

    def __init__(self, component: str, pools: Mapping[str, torch.Tensor]) -> None:
        self._component, self._pools = component, pools

    def read(self, layer: Any, place: _Place) -> None:
        if place.chunk.start:
            for name, pool in self._pools.items():
                update = getattr(layer, f"update_{STATES[name]}_state")
                update(pool.index_select(0, place.state(self._component)))

    def write(self, layer: Any, place: _Place) -> None:
        for name, their_name in STATES.items():
            state = getattr(layer, f"{their_name}_states")[0]
            if (state is not None) != (name in self._pools):
                raise ConfigError(
                    f"the model's linear layers keep {'no' if state is None else 'a'} {their_name} "
                    f"state; there are pools {', '.join(self._pools)}"
                )
            if state is not None:
                _write(self._pools[name], place.state(self._component), state)


STATES: Final = {"conv": "conv", "temporal": "recurrent"}
"""What linear layers keep: by pool, how transformers calls it."""

LAYER_PARTS: Final[Mapping[type, tuple[str, ...]]] = {
    DynamicLayer: ("attention",),
    DynamicSlidingWindowLayer: ("attention",),
    LinearAttentionLayer: ("states",),
    LinearAttentionAndFullAttentionLayer: ("attention", "states"),
    DummyLayer: (),
}
"""What a layer of a transformers cache keeps. Chunked attention is a sliding window to the cache,
and short convolutions are linear layers."""


def _layer_parts(model: PreTrainedModel, pools: DevicePools) -> list[list[_LayerPart]]:
    """Of each layer, what it keeps, with the pools that are to hold it.

    Raises:
        ConfigError: there is no such pool, or it is not what the model needs.
    """
    finder = _PoolFinder(model, pools)
    layers = DynamicCache(config=model.config).layers
    found = [
        [finder.part(kind, at) for kind in LAYER_PARTS[type(layer)]]
        for at, layer in enumerate(layers)
    ]
    finder.check_nothing_else()
    return found


_Row = tuple[tuple[int, ...], str]
"""Shape and type."""


class _PoolFinder:
    """Pools by what they hold of a layer: `k` is the pool of that name, or of a component's, like
    `swa.k`, that has the layer."""

    def __init__(self, model: PreTrainedModel, pools: DevicePools) -> None:
        self._model = model
        self._pools = pools
        self._used: dict[str, set[int]] = {}

    def part(self, kind: str, at: int) -> _LayerPart:
        if kind == "states":
            return _States(*self._find(self._state_rows, at))
        known = self._attention
        component, tensors = self._find(_attention_rows(known, at), at)
        if known.kv_lora_rank is not None:
            return _Latent(component, tensors["latent"], known.kv_lora_rank)
        return _KeyValues(component, tensors["k"], tensors["v"])

    @functools.cached_property
    def _attention(self) -> ModelConfig:
        return model_from_hf(self._model.config, dtype=self._model.dtype)

    @functools.cached_property
    def _state_rows(self) -> dict[str, _Row]:
        """Not out of `model_from_hf`: there are models, and strategies, without any attention."""
        config: Any = self._model.config
        text = config.get_text_config(decoder=True)
        states = layer_states(text, str(self._model.dtype).removeprefix("torch."))
        if states is None:
            raise ConfigError(
                f"the states of the linear layers of {type(text).__name__} are unknown"
            )
        return {state["name"]: (state["row_shape"], state["dtype"]) for state in states}

    def _find(self, rows: Mapping[str, _Row], at: int) -> tuple[str, dict[str, torch.Tensor]]:
        """The component and the tensors of the pools that hold these rows of a layer."""
        specs = {name: self._spec(name, at) for name in rows}
        components = {spec.component for spec in specs.values()}
        if len(components) > 1:
            raise ConfigError(f"layer {at} is in pools of several components: {sorted(components)}")
        return components.pop(), {
            name: self._tensor(spec, rows[name], at) for name, spec in specs.items()
        }

    def _spec(self, name: str, at: int) -> PoolSpec:
        for spec in self._pools.specs:
            if at in spec.layers and spec.name in (name, f"{spec.component}.{name}"):
                return spec
        there = ", ".join(spec.name for spec in self._pools.specs if at in spec.layers)
        raise ConfigError(
            f"the model needs a pool {name} for its layer {at}; there {'are' if there else 'is'} "
            f"{there or 'none'}"
        )

    def _tensor(self, spec: PoolSpec, row: _Row, at: int) -> torch.Tensor:
        self._used.setdefault(spec.name, set()).add(at)
        shape, dtype = row
        if tuple(spec.row_shape) != shape:
            raise ConfigError(
                f"pool {spec.name!r} has rows {tuple(spec.row_shape)}; the model has rows {shape}"
            )
        tensor, device = self._pools.layer(spec.name, at), self._model.device
        if spec.dtype != dtype or tensor.device != device:
            raise ConfigError(
                f"pool {spec.name!r} is {spec.dtype} on {tensor.device}, the model {dtype} "
                f"on {device}: set model.dtype and device.type to the model's"
            )
        return tensor

    def check_nothing_else(self) -> None:
        """A pool that holds other layers, too, is another model's."""
        for spec in self._pools.specs:
            used = self._used.get(spec.name)
            if used is not None and used != set(spec.layers):
                raise ConfigError(
                    f"pool {spec.name!r} is for {len(spec.layers)} layers, the model has "
                    f"{len(used)} of this kind"
                )


def _attention_rows(known: ModelConfig, at: int) -> dict[str, _Row]:
    if known.kv_lora_rank is not None:
        return {"latent": ((known.kv_lora_rank + (known.qk_rope_head_dim or 0),), known.dtype)}
    heads, size = known.num_kv_heads, known.head_dim
    if at in known.layers_with("window"):
        heads, size = known.sliding_num_kv_heads or heads, known.sliding_head_dim or size
    assert heads is not None  # the schema requires both
    assert size is not None
    values = known.v_head_dim or size
    return {"k": ((heads, size), known.dtype), "v": ((heads, values), known.dtype)}


def _heads_first(rows: torch.Tensor) -> torch.Tensor:
    """[S, heads, dim] → [1, heads, S, dim], in memory too: kernels may depend on strides."""
    return rows.transpose(0, 1).contiguous()[None]


def _write(pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Refuses rows of another shape or type, which indexing would broadcast or convert."""
    if rows.shape != (len(slots), *pool.shape[1:]) or rows.dtype != pool.dtype:
        raise ConfigError(
            f"the model made state of shape {tuple(rows.shape)} and type {rows.dtype}, the pool "
            f"takes {(len(slots), *pool.shape[1:])} and {pool.dtype}"
        )
    pool.index_copy_(0, slots, rows)
