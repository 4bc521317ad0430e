"""The settings: which keys there are, what they may be, what they mean.

Owns: names, types, defaults, and the checks within a section. Refuses to know: files, environment.

Pydantic gives up on a section's own checks when a single key is wrong. Here a section is checked as
a whole in any case (`Section.cross_check`), so that one look shows everything.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from importlib.metadata import entry_points
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, Self, TypeGuard

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from tiered_cache.config.marks import KeyPath, Marks, dotted, parse_path
from tiered_cache.errors import ConfigProblem

Dtype = Literal["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"]
EvictionPolicyName = Literal["lru", "lfu", "fifo", "mru", "filo", "priority", "slru"]
WritePolicyName = Literal["write_through", "write_through_selective", "write_back"]
PrefetchPolicyName = Literal["best_effort", "wait_complete", "timeout"]
StateKind = Literal["full", "window", "recurrent"]
"""What a layer keeps: of all tokens, of the last ones, or one state for all of them together."""

BUILT_IN_STRATEGIES: Final = ("plain", "swa", "mamba", "mamba_swa")
known_strategies: Final[set[str]] = set(BUILT_IN_STRATEGIES)
"""Names that `model.strategy` may take. The registry of strategies, a floor above, adds to them,
so that a misspelt name is reported together with all other mistakes of a file.
"""

BACKEND_GROUP: Final = "tiered_cache.backends"
"""The entry points that `storage.backend` names. Their names are read here; loading one is for a
floor above."""

SIZE_UNITS: Final = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}
SIZE_HINT: Final = "write 8GiB, 8GB or a number of bytes"

# Upper bounds. Nobody writes more on purpose, and below them all products fit into torch's int64.
MAX_BYTES: Final = 1 << 50
"""Of a tier, or of a page."""
MAX_BYTES_TEXT: Final = "1024TiB"
MAX_PAGE_SIZE: Final = 65_536
MAX_TOKENS: Final = 10**15
MAX_DIM: Final = 1 << 20
"""Elements along one dimension of a row."""
MAX_DIMS: Final = 8
MAX_LAYERS: Final = 1_000
MAX_THREADS: Final = 1_024
MAX_SECONDS: Final = 86_400
MAX_FAILURES: Final = 1_000_000
MAX_RATIO: Final = 1_000

LAYER_TYPES: Final[Mapping[str, tuple[StateKind, ...]]] = {
    "full_attention": ("full",),
    "sliding_attention": ("window",),
    "linear_attention": ("recurrent",),
    "hybrid": ("full", "recurrent"),
    "hybrid_sliding": ("window", "recurrent"),
    "none": (),
}
"""What `model.layer_types` may say of a layer, in the words of Hugging Face configs, with the state
that it keeps."""

LAYER_TYPE_ALIASES: Final = {
    "attention": "full_attention",
    "mamba": "linear_attention",
    "conv": "linear_attention",
    "mlp": "none",
    "moe": "none",
}
"""Words of single models for the same."""

DTYPE_ALIASES: Final = {
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


class CrossProblem(NamedTuple):
    """What is wrong between the settings of one section: the key to look at, why, what to do."""

    key: str
    message: str
    suggestion: str | None = None


class Section(BaseModel):
    """Base of every section: frozen, strict, and checked as a whole even when a key is wrong."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())

    @classmethod
    def cross_check(cls, given: Mapping[str, Any]) -> Iterator[CrossProblem]:
        """What is wrong between settings, judged by which are given (not None)."""
        yield from ()

    @model_validator(mode="wrap")
    @classmethod
    def _all_at_once(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, Mapping):
            return handler(data)
        given = {key: value for key, value in data.items() if value is not None}
        errors = [
            InitErrorDetails(
                type=PydanticCustomError(
                    "cross_check", "{message}", {"message": p.message, "suggestion": p.suggestion}
                ),
                loc=parse_path(p.key),
                input=None,
            )
            for p in cls.cross_check(given)
        ]
        try:
            section = handler(data)
        except ValidationError as error:
            errors += map(_again, error.errors(include_url=False))
        else:
            if not errors:
                return section
        raise ValidationError.from_exception_data(cls.__name__, errors)


def _again(details: ErrorDetails) -> InitErrorDetails:
    """An error that has been reported, in the form in which it can be raised once more."""
    return InitErrorDetails(
        type=PydanticCustomError(
            details["type"], "{message}", {"message": details["msg"], **details.get("ctx", {})}
        ),
        loc=details["loc"],
        input=details["input"],
    )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def parse_size(value: object) -> object:
    """`8GiB` or `1.5 GB` in bytes, exactly. What is not text is left for the schema to judge."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKMGT]?i?B)\s*", value)
    if match is None or match[2] not in SIZE_UNITS:
        raise PydanticCustomError("size", "is not a size", {"suggestion": _size_hint(value)})
    if len(match[1]) > 100:  # Python refuses to read thousands of digits
        raise PydanticCustomError(
            "size", "is not a size", {"suggestion": "write at most 100 digits"}
        )
    return int(Fraction(match[1]) * SIZE_UNITS[match[2]])


def _size_hint(text: str) -> str:
    """What to write instead. A number with a unit nearly right holds no secret: it is mended."""
    match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([kKmMgGtT])[iI]?[bB]?\s*", text)
    if match is None:
        return SIZE_HINT
    prefix = match[2].upper()
    decimal = "k" if prefix == "K" else prefix
    return f"write {match[1]}{prefix}iB or {match[1]}{decimal}B"


def _not_empty(value: tuple[Any, ...]) -> tuple[Any, ...]:
    if not value:
        raise PydanticCustomError("empty", "must not be empty")
    return value


def _few(value: tuple[int, ...]) -> tuple[int, ...]:
    if len(value) > MAX_DIMS:
        raise PydanticCustomError("long", f"must have {MAX_DIMS} dimensions or fewer")
    return value


def _as_list(value: object) -> object:
    """One number as a list of one."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    if not isinstance(value, list | tuple):
        raise PydanticCustomError("window", "must be a whole number, or a list of them")
    return value


def _in_floats_range(value: object) -> object:
    """An integer too large for a float, as the largest one: the bound is then the message."""
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return sys.float_info.max if value > 0 else -sys.float_info.max
    return value


SizeBytes = Annotated[int, BeforeValidator(parse_size), Field(gt=0, le=MAX_BYTES)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
PageSize = Annotated[int, Field(ge=1, le=MAX_PAGE_SIZE)]
Dim = Annotated[int, Field(ge=1, le=MAX_DIM)]
NumLayers = Annotated[int, Field(ge=1, le=MAX_LAYERS)]
LayerNumber = Annotated[int, Field(ge=0, lt=2 * MAX_LAYERS)]  # extra pools come after the model's
Threads = Annotated[int, Field(ge=1, le=MAX_THREADS)]
Seconds = Annotated[
    float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False), BeforeValidator(_in_floats_range)
]
PositiveSeconds = Annotated[
    float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False), BeforeValidator(_in_floats_range)
]
Ratio = Annotated[
    float, Field(gt=0, le=MAX_RATIO, allow_inf_nan=False), BeforeValidator(_in_floats_range)
]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), BeforeValidator(_in_floats_range)]
# Not strict: a YAML list is no Python tuple. The items are strict all the same.
Layers = Annotated[tuple[LayerNumber, ...], Field(strict=False), AfterValidator(_not_empty)]
Shape = Annotated[
    tuple[Dim, ...], Field(strict=False), AfterValidator(_not_empty), AfterValidator(_few)
]

LayerTypes = Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_not_empty)]
Windows = Annotated[
    tuple[Annotated[int, Field(ge=1, le=MAX_TOKENS)], ...],
    Field(strict=False),
    BeforeValidator(_as_list),
    AfterValidator(_not_empty),
]
Sharding = Literal["per_rank", "replicated"]
Ratios = dict[str, Ratio]
POOL_NAME: Final = r"^[A-Za-z_][A-Za-z0-9_.]*$"


class ExtraPool(Section):
    """State beside the model's own, kept for the same tokens: a draft model's KV, say.

    `num_layers`: how many layers have it; they are numbered on after the model's own. Or `layers`:
    their numbers. `row_shape`: elements of one row in one layer. `tokens_per_row`: above 1 for
    compressed state; divides `page_size`.
    """

    name: Annotated[str, Field(pattern=POOL_NAME)]
    num_layers: NumLayers | None = None
    layers: Layers | None = None
    row_shape: Shape
    dtype: Dtype
    tokens_per_row: PageSize = 1
    sharding: Sharding = "per_rank"

    @classmethod
    def cross_check(cls, given: Mapping[str, Any]) -> Iterator[CrossProblem]:
        if ("num_layers" in given) == ("layers" in given):
            both = "layers" in given
            yield CrossProblem(
                "layers" if both else "num_layers",
                "says the same as num_layers" if both else "is required",
                "keep one of num_layers and layers" if both else "write num_layers or layers",
            )
        layers = given.get("layers")
        numbers = [n for n in layers if isinstance(n, int)] if isinstance(layers, Sequence) else []
        if len(set(numbers)) != len(numbers):
            yield CrossProblem("layers", "names a layer twice", "name each layer once")


class LayerState(Section):
    """One of the states that a linear (recurrent) layer keeps: one row for all tokens so far.

    `row_shape`: elements of it in one layer, on this rank: of a convolution `[channels, kernel]`,
    of Mamba2 `[heads, head_dim, state_size]`, say. Every linear layer has all the states.
    """

    name: Annotated[str, Field(pattern=POOL_NAME)]
    row_shape: Shape
    dtype: Dtype
    sharding: Sharding = "per_rank"


class ModelConfig(Section):
    """What the cache must know of a model. Sizes are per rank: `num_kv_heads` is one rank's share.

    Either the keys of multi-head or grouped-query attention (`num_kv_heads`, `head_dim`, and
    `v_head_dim` where values have another size), or those of latent attention (`kv_lora_rank`,
    `qk_rope_head_dim`). They are those of full and of sliding attention alike, but for what
    `sliding_num_kv_heads` and `sliding_head_dim` say of the latter.
    """

    dtype: Dtype
    num_layers: NumLayers
    strategy: str | None = None
    """Which kind of state the model has; None: the first registered strategy that fits."""
    id: str | None = None
    revision: str | None = None
    num_kv_heads: Dim | None = None
    head_dim: Dim | None = None
    v_head_dim: Dim | None = None
    kv_lora_rank: Dim | None = None
    qk_rope_head_dim: Dim | None = None
    layer_types: LayerTypes | None = None
    """Of each layer, which state it keeps (`LAYER_TYPES`); None: full attention on all."""
    sliding_window: Windows | None = None
    """Tokens that layers with sliding attention see, the current one included: one number for all,
    or a list with one for each of these layers."""
    sliding_num_kv_heads: Dim | None = None
    sliding_head_dim: Dim | None = None
    """Where heads of layers with sliding attention are others than those of full attention."""
    states: Annotated[tuple[LayerState, ...], Field(strict=False)] = ()
    """What each linear layer keeps."""
    extra_pools: Annotated[tuple[ExtraPool, ...], Field(strict=False)] = ()

    HEADS: ClassVar = ("num_kv_heads", "head_dim")
    LATENT: ClassVar = ("kv_lora_rank", "qk_rope_head_dim")
    SLIDING_HEADS: ClassVar = ("sliding_num_kv_heads", "sliding_head_dim")

    @property
    def is_latent(self) -> bool:
        """Latent attention (MLA): one compressed vector per token instead of keys and values."""
        return self.kv_lora_rank is not None

    @property
    def has_attention(self) -> bool:
        """Whether the keys of either kind of attention are there."""
        return self.is_latent or (self.num_kv_heads is not None and self.head_dim is not None)

    @property
    def is_described(self) -> bool:
        """Whether these are there if a layer has attention."""
        return self.has_attention or not {"full", "window"} & self.state_kinds

    @property
    def state_kinds(self) -> frozenset[StateKind]:
        """All that some layer keeps."""
        types = self.layer_types or ("full_attention",)
        return frozenset(kind for name in types for kind in LAYER_TYPES.get(name, ()))

    def layers_with(self, kind: StateKind) -> tuple[int, ...]:
        """Numbers of the layers that keep this kind of state."""
        types = self.layer_types or ("full_attention",) * self.num_layers
        return tuple(at for at, name in enumerate(types) if kind in LAYER_TYPES.get(name, ()))

    @property
    def windows(self) -> dict[int, tuple[int, ...]]:
        """The layers that see each window, in tokens, the largest first."""
        layers, given = self.layers_with("window"), self.sliding_window
        if given is None:
            return {}
        of_layer = given * len(layers) if len(given) == 1 else given
        return {
            window: tuple(at for at, its in zip(layers, of_layer, strict=True) if its == window)
            for window in sorted(set(of_layer), reverse=True)
        }

    @field_validator("strategy")
    @classmethod
    def _strategy_is_known(cls, value: str | None) -> str | None:
        if value is not None and value not in known_strategies:
            raise PydanticCustomError(
                "strategy",
                "no such strategy",
                {"suggestion": one_of(value, sorted(known_strategies))},
            )
        return value

    @classmethod
    def cross_check(cls, given: Mapping[str, Any]) -> Iterator[CrossProblem]:
        users = known_strategies.difference(BUILT_IN_STRATEGIES)
        is_built_in = given.get("strategy") not in sorted(users)
        heads = [key for key in (*cls.HEADS, "v_head_dim", *cls.SLIDING_HEADS) if key in given]
        latent = [key for key in cls.LATENT if key in given]
        if latent and heads:
            yield CrossProblem(
                heads[0],
                f"means nothing beside {latent[0]}",
                "latent attention keeps one vector per token: take "
                f"{', '.join(heads)} out (or, for heads, {', '.join(latent)})",
            )
        elif not _attends(given):
            if useless := heads or latent:
                out = ", ".join(useless)
                hint = f"name the layers that have it in layer_types, or take {out} out"
                yield CrossProblem(useless[0], "means nothing: no layer has attention", hint)
        elif is_built_in:
            needed = cls.LATENT if latent else cls.HEADS
            for key in needed:
                if key not in given:
                    also = "" if latent or heads else f", or {' and '.join(cls.LATENT)} for MLA"
                    yield CrossProblem(key, "is required", f"write {' and '.join(needed)}{also}")
        if is_built_in:
            yield from _layer_problems(given)
        names: list[str] = []
        for key in ("states", "extra_pools"):
            for pool in _mappings(given.get(key)):
                if isinstance(name := pool.get("name"), str):
                    if name in names:
                        yield CrossProblem(key, "two pools have the same name", "rename one")
                    names.append(name)


def _attends(given: Mapping[str, Any]) -> bool:
    """Whether some layer has attention, as far as it is known what they keep."""
    types = given.get("layer_types") or ["full_attention"]
    if not isinstance(types, list | tuple):
        return True
    if not all(isinstance(name, str) and name in LAYER_TYPES for name in types):
        return True
    kinds = {kind for name in types for kind in LAYER_TYPES[name]}
    return not kinds or not kinds.isdisjoint({"full", "window"})


def _layer_problems(given: Mapping[str, Any]) -> Iterator[CrossProblem]:
    """What the kinds of layers and the keys that describe them say against each other."""
    types = given.get("layer_types", ["full_attention"])
    if not isinstance(types, list | tuple) or not all(isinstance(name, str) for name in types):
        return  # the schema says so
    unknown = {name: at for at, name in reversed([*enumerate(types)]) if name not in LAYER_TYPES}
    for name, at in unknown.items():
        suggestion = (
            f"{one_of(name, LAYER_TYPES)}; or bring a strategy with register_stack_strategy"
        )
        yield CrossProblem(f"layer_types[{at}]", "no strategy knows such a layer", suggestion)
    num_layers = given.get("num_layers")
    if "layer_types" in given and _is_count(num_layers) and 0 < len(types) != num_layers:
        yield CrossProblem(
            "layer_types",
            f"names {len(types):,} layers, where num_layers is {num_layers:,}",
            "name each layer once, in their order",
        )
    if not unknown and types:
        kinds = [kind for name in types for kind in LAYER_TYPES[name]]
        yield from _kind_problems(given, kinds)


def _kind_problems(given: Mapping[str, Any], kinds: Sequence[StateKind]) -> Iterator[CrossProblem]:
    """What is said of layers that there are not, and what is not said of those that there are."""
    if not kinds:
        yield CrossProblem("layer_types", "no layer keeps anything", "there is nothing to cache")
    for key, (kind, layers, example) in KEYS_OF_KINDS.items():
        is_given = key in given and given[key] not in ([], ())
        if kind in kinds and not is_given and example is not None:
            yield CrossProblem(key, f"is required beside {layers} layers", f"write {example}")
        elif kind not in kinds and is_given:
            yield CrossProblem(
                key,
                f"means nothing: no layer has {layers}",
                f"name the layers that have it in layer_types, or take {key} out",
            )
    windows, num_sliding = given.get("sliding_window"), kinds.count("window")
    few = num_sliding and isinstance(windows, list | tuple) and len(windows)
    if few and few not in (1, num_sliding):
        yield CrossProblem(
            "sliding_window",
            f"has {few:,} numbers for {num_sliding:,} layers",
            "write one number for all, or one for each layer with sliding attention",
        )


KEYS_OF_KINDS: Final[Mapping[str, tuple[StateKind, str, str | None]]] = {
    "sliding_window": ("window", "sliding_attention", "sliding_window: 4096"),
    "sliding_num_kv_heads": ("window", "sliding_attention", None),
    "sliding_head_dim": ("window", "sliding_attention", None),
    "states": (
        *("recurrent", "linear_attention"),
        "states: [{name: conv, row_shape: [8192, 4], dtype: bfloat16}]",
    ),
}
"""Keys about layers that keep one kind of state: that kind, a type of such layers, and an example
where the key is required."""


class DeviceConfig(Section):
    """The first tier. Budget by bytes or by tokens; neither, when the caller brings tensors."""

    type: Annotated[str, Field(pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$")] = "cpu"
    size: SizeBytes | None = None
    """Bytes for all pools together."""
    tokens: Tokens | None = None
    ratio: Ratios = Field(default_factory=dict)
    """Of each component but the first: how many ids it has per page of the first."""
    eviction_policy: EvictionPolicyName = "lru"
    max_pinned: Share = 0.25
    """How much of the tier pins may hold, from 0 to 1."""

    @classmethod
    def cross_check(cls, given: Mapping[str, Any]) -> Iterator[CrossProblem]:
        yield from _two_budgets(given)
        if given.get("ratio") and "size" not in given and "tokens" not in given:
            yield CrossProblem(
                "ratio", "means nothing without size or tokens", "write one of them, or take it out"
            )


class HostConfig(Section):
    """The second tier, in this machine's memory. Budget by bytes or by tokens, one of the two."""

    size: SizeBytes | None = None
    """Bytes of all rows together: state, header room and padding."""
    tokens: Tokens | None = None
    ratio: Ratios = Field(default_factory=dict)
    """As `device.ratio`."""
    write_policy: WritePolicyName = "write_through"
    """When the device's pages are copied here: at the first use, at the second
    (`write_through_selective`), or only when the device evicts them (`write_back`)."""
    eviction_policy: EvictionPolicyName = "lru"
    load_back_threshold: Tokens = 1
    """Tokens. A hit of fewer is computed again instead of loaded."""
    max_pinned: Share = 0.25
    """How much of the tier pins may hold, from 0 to 1."""

    @classmethod
    def cross_check(cls, given: Mapping[str, Any]) -> Iterator[CrossProblem]:
        yield from _two_budgets(given)
        if "size" not in given and "tokens" not in given:
            yield CrossProblem("size", "is required", "write size: 4GiB or tokens: 65536")


def _two_budgets(given: Mapping[str, Any]) -> Iterator[CrossProblem]:
    if "size" in given and "tokens" in given:
        yield CrossProblem("tokens", "says the same as size", "keep one of size and tokens")


class PrefetchConfig(Section):
    """How what storage has comes to the host before a lease needs it."""

    policy: PrefetchPolicyName = "timeout"
    """How long a lease waits for a prefetch: not at all (`best_effort`), to its end
    (`wait_complete`), or as long as `timeout_base` and `timeout_per_ki_token` say."""
    threshold: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 256
    """Tokens. Storage is not asked for fewer, and a hit of fewer is not read."""
    timeout_base: Seconds = 1.0
    timeout_per_ki_token: Seconds = 0.25
    """More seconds for each 1,024 tokens that are to come."""
    result_ttl: PositiveSeconds = 30.0
    """Seconds for which the host keeps what was read, whatever else needs its room, until somebody
    takes it."""


class BackupConfig(Section):
    """How the host's pages come to storage."""

    max_pending: SizeBytes = 256 << 20
    """Bytes of rows that wait to be written; what would exceed them is skipped, and counted."""


class BreakerConfig(Section):
    """When a backend that is unwell is left alone, and for how long."""

    failures: Annotated[int, Field(ge=1, le=MAX_FAILURES)] = 5
    """In a row, after which nothing is asked of it."""
    retry_after: PositiveSeconds = 1.0
    """Seconds before it is tried again; doubled at every try that fails."""
    max_retry_after: PositiveSeconds = 30.0
    slow: PositiveSeconds = 1.0
    """Seconds. A backend whose calls take longer on average is reported as degraded."""

    @classmethod
    def cross_check(cls, given: Mapping[str, Any]) -> Iterator[CrossProblem]:
        first, most = (
            given.get(key, cls.model_fields[key].default)
            for key in ("retry_after", "max_retry_after")
        )
        if _is_number(first) and _is_number(most) and most < first <= MAX_SECONDS:
            key = "max_retry_after" if "max_retry_after" in given else "retry_after"
            yield CrossProblem(
                key,
                "max_retry_after is less than retry_after",
                "write the same number or more for max_retry_after",
            )


class StorageConfig(Section):
    """The third tier: a backend that keeps rows beyond this process."""

    backend: str
    """A name among those that are installed, through an entry point."""
    options: dict[str, Any] = Field(default_factory=dict, repr=False)
    """The backend's own settings. Judged by its own model, once it is loaded; never shown, because
    an address may hold a password."""
    required: bool = False
    """Opening fails when the backend cannot be reached; else the cache goes on without it."""
    timeout: PositiveSeconds = 10.0
    """Seconds that one batch may take before it counts as failed."""
    max_concurrency: Threads = 8
    """Calls of the backend at the same time."""
    prefetch: PrefetchConfig = PrefetchConfig()
    backup: BackupConfig = BackupConfig()
    breaker: BreakerConfig = BreakerConfig()

    @field_validator("backend")
    @classmethod
    def _backend_is_installed(cls, value: str) -> str:
        names = installed_backends()
        if value not in names:
            raise PydanticCustomError(
                "backend", "no such backend is installed", {"suggestion": one_of(value, names)}
            )
        return value


def installed_backends() -> list[str]:
    """Names that `storage.backend` may take here. Loads nothing."""
    return sorted({point.name for point in entry_points(group=BACKEND_GROUP)})


class Config(Section):
    """All settings of a cache. Made by `load_config`; frozen."""

    model: ModelConfig
    page_size: PageSize = 16
    """Tokens per page."""
    device: DeviceConfig = DeviceConfig()
    host: HostConfig | None = None
    """None: no second tier."""
    storage: StorageConfig | None = None
    """None: no third tier."""
    mode: Literal["on", "off"] = "on"
    """`off`: nothing matches and nothing is kept, for comparing with and without."""
    run_threads: Threads = 1
    """Threads that run the user's model."""
    check: bool = False
    """Prove on every step that no page is freed twice; costs about half of the tree's speed."""

    _marks: Marks = PrivateAttr(default_factory=lambda: Marks())

    @field_validator("mode", mode="before")
    @classmethod
    def _mode_is_a_yaml_boolean(cls, value: object) -> object:
        # `on` and `off` without quotes are booleans in YAML 1.1.
        return ("on" if value else "off") if isinstance(value, bool) else value

    @classmethod
    def cross_check(cls, given: Mapping[str, Any]) -> Iterator[CrossProblem]:
        page_size = given.get("page_size", cls.model_fields["page_size"].default)
        for pool in _mappings(_mapping(given.get("model")).get("extra_pools")):
            per_row = pool.get("tokens_per_row", 1)
            if _is_page_size(page_size) and _is_page_size(per_row) and page_size % per_row:
                yield CrossProblem(
                    "page_size",
                    f"is not a multiple of an extra pool's tokens_per_row ({per_row})",
                    f"write a multiple of {per_row}",
                )
        if "storage" in given:
            if "host" not in given:
                yield CrossProblem(
                    "storage",
                    "needs a host section: pages come and go through it",
                    "write one, such as host: {size: 4GiB}",
                )
            model = _mapping(given.get("model"))
            for key, example in NEEDED_BY_STORAGE.items():
                if "model" in given and not model.get(key):
                    yield CrossProblem(
                        f"model.{key}",
                        "is required beside storage",
                        f"without it a fine-tune would read its parent's state: write {example}",
                    )

    @property
    def marks(self) -> Marks:
        """Where each setting was written."""
        return self._marks

    def problem(
        self, key: str | KeyPath, message: str, suggestion: str | None = None
    ) -> ConfigProblem:
        """A problem with the setting `key` ("device.size"), at the place where it was written."""
        path = parse_path(key) if isinstance(key, str) else key
        mark = self._marks.nearest(path)
        return ConfigProblem(message, dotted(path), mark.file, mark.line, mark.column, suggestion)


NEEDED_BY_STORAGE: Final = {
    "id": "the model's name, such as id: meta-llama/Llama-3.1-8B-Instruct",
    "revision": "what changes with the weights, such as revision: their commit or a digest of them",
}
"""What names a model's state among that of others, with an example."""


def _is_count(value: object, most: int = MAX_LAYERS) -> TypeGuard[int]:
    """What the schema lets pass as one; it says itself what is wrong with the rest."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _is_page_size(value: object) -> TypeGuard[int]:
    return _is_count(value, MAX_PAGE_SIZE)


def _mapping(value: object) -> Mapping[str, Any]:
    """A section as a mapping, as far as it is one: input that has not been validated yet."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    return value if isinstance(value, Mapping) else {}


def _mappings(value: object) -> list[Mapping[str, Any]]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return []
    return [_mapping(item) for item in value]


def one_of(given: object, choices: Iterable[str]) -> str:
    """What to write instead of something that is not among the choices."""
    names = list(choices)
    if not names:
        return "there is none"
    text = ALIASES.get(given, given).removeprefix("torch.") if isinstance(given, str) else ""
    close = difflib.get_close_matches(text.lower(), names, n=1)
    rest = f"one of {', '.join(names)}" if len(names) > 1 else names[0]
    return f"did you mean {close[0]}? It is {rest}" if close else f"write {rest}"


ALIASES: Final = {**DTYPE_ALIASES, **LAYER_TYPE_ALIASES}
