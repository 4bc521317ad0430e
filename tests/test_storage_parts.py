"""What storage is opened with: a backend, options that it accepts, and an identity per component
that no other state has."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import AfterValidator, Field
from rich.console import Console

from tiered_cache import build as parts_of
from tiered_cache.build import StorageParts, build, size_stack, storage_parts
from tiered_cache.cli.check import check_config
from tiered_cache.config import Config, ModelConfig, StorageConfig, load_config
from tiered_cache.errors import ConfigError
from tiered_cache.pools.spec import PoolSpec
from tiered_cache.storage import BackendOptions, record, registry
from tiered_cache.storage.record import SCOPE_BYTES, RecordFormat
from tiered_cache.strategies.base import ComponentSpec, StackPlan
from tiered_cache.strategies.registry import register_stack_strategy
from tiered_cache.types import ComponentId
from tiered_cache_memory import MemoryBackend, MemoryOptions

MODEL = {
    "id": "some/model",
    "revision": "r7",
    "dtype": "bfloat16",
    "num_layers": 2,
    "num_kv_heads": 1,
    "head_dim": 4,
}
LATENT = {
    **{key: MODEL[key] for key in ("id", "revision", "dtype", "num_layers")},
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
}
STORAGE: dict[str, Any] = {"backend": "memory"}
FULL, OTHER = ComponentId("full"), ComponentId("other")


def config(**sections: Any) -> Config:
    settings = {"model": MODEL, "device": {"tokens": 64}, "host": {"tokens": 64}}
    return load_config({**settings, "storage": STORAGE, **sections}, environ={})


def parts(given: Config | None = None, **ranks: int) -> StorageParts:
    given = given or config()
    result = storage_parts(given, size_stack(given), **ranks)
    assert result is not None
    return result


def identity(given: Config | None = None, **ranks: int) -> bytes:
    (record_format,) = parts(given, **ranks).formats
    return record_format.identity


def test_the_parts_of_a_storage_tier() -> None:
    """The backend's class, its validated options, a format for each component's rows."""
    given = config(storage={**STORAGE, "options": {"max_size": 5}})
    found = parts(given)
    assert found.backend is MemoryBackend
    assert found.options == MemoryOptions(max_size=5)
    assert found.settings == given.storage
    (record_format,) = found.formats
    # 512 of header room, two layers of k and v in slices of 128 bytes
    assert (record_format.component, record_format.row_bytes) == ("full", 4096)
    assert record_format.payload_end == 512 + 4 * 128
    assert len(record_format.scope) == SCOPE_BYTES


def test_build_has_them_unless_there_is_no_storage_or_no_cache() -> None:
    """`mode: off` reads and writes nothing."""
    found = build(config()).storage
    assert found is not None
    assert found.formats[0].identity == identity()
    assert build(config(mode="off")).storage is None
    assert build(config(storage=None)).storage is None
    without = config(storage=None)
    assert storage_parts(without, size_stack(without)) is None


def test_a_gap_between_slices_is_payload_and_what_follows_the_last_is_not() -> None:
    """Slices start at multiples of 64 bytes; the checksum covers the gaps, not the padding."""
    extra = {"name": "draft", "num_layers": 1, "row_shape": [3], "dtype": "int8"}
    (record_format,) = parts(config(model={**MODEL, "extra_pools": [extra]}, page_size=1)).formats
    assert record_format.payload_end == 512 + 4 * 64 + 3


# --- Identity -----------------------------------------------------------------------------------


POOL = {"name": "draft", "num_layers": 1, "row_shape": [8], "dtype": "int8"}


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {**MODEL, "dtype": "float16"}},
        {"model": {**MODEL, "id": "some/model-it"}},
        {"model": {**MODEL, "revision": "r8"}},
        {"model": {**MODEL, "num_layers": 3}},
        {"model": {**MODEL, "num_kv_heads": 4, "head_dim": 1}},
        {"model": {**MODEL, "num_layers": 1, "head_dim": 8}},
        {"model": {**MODEL, "head_dim": 3, "v_head_dim": 5}},
        {"model": {**MODEL, "dtype": "float8_e5m2", "head_dim": 8}},
        {"model": LATENT},
        {"model": {**MODEL, "extra_pools": [POOL]}},
        {"page_size": 8},
    ],
    ids=[
        "float16",
        "id",
        "revision",
        "layers",
        "heads",
        "wide",
        "v_head_dim",
        "fp8",
        "latent",
        "extra_pool",
        "page_size",
    ],
)
def test_another_model_or_layout_is_another_identity(sections: dict[str, Any]) -> None:
    """B84: also where the bytes are as many, such as bfloat16 and float16."""
    given = config(**sections)
    assert identity(given) != identity()
    assert parts(given).formats[0].scope != parts().formats[0].scope


@pytest.mark.parametrize(
    "change",
    [
        {"name": "sketch"},
        {"num_layers": None, "layers": [0]},
        {"row_shape": [2, 4]},
        {"dtype": "uint8"},
        {"tokens_per_row": 2, "row_shape": [16]},
        {"sharding": "replicated"},
    ],
    ids=str,
)
def test_a_fact_of_a_pool_is_a_fact_of_its_component(change: dict[str, Any]) -> None:
    """All of these have the same number of bytes."""
    one, other = (
        config(model={**MODEL, "extra_pools": [pool]}) for pool in (POOL, {**POOL, **change})
    )
    assert parts(one).formats[0].row_bytes == parts(other).formats[0].row_bytes
    assert identity(one) != identity(other)


def test_the_order_of_pools_is_a_fact() -> None:
    """Their slices stand in a row in this order."""
    second = {**POOL, "name": "second"}
    pools = [POOL, second]
    one = config(model={**MODEL, "extra_pools": pools})
    assert identity(one) != identity(config(model={**MODEL, "extra_pools": pools[::-1]}))


@pytest.mark.parametrize(
    "sections",
    [
        {"device": {"size": "1MiB", "eviction_policy": "lfu"}},
        {"host": {"size": "1MiB", "write_policy": "write_back"}},
        {"storage": {**STORAGE, "timeout": 1, "options": {"max_size": 10**9}}},
        {"run_threads": 2, "check": True},
        {"model": {**MODEL, "strategy": "plain"}},
    ],
    ids=lambda sections: ", ".join(sections),
)
def test_what_does_not_change_the_bytes_changes_no_identity(sections: dict[str, Any]) -> None:
    """Budgets and policies may be tuned over a storage that is full."""
    assert identity(config(**sections)) == identity()


@pytest.mark.parametrize(("module", "name", "value"), [
    (parts_of, "FORMAT_VERSION", record.FORMAT_VERSION + 1),
    (sys, "byteorder", "big" if sys.byteorder == "little" else "little"),
])  # fmt: skip
def test_format_and_byte_order_are_facts(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, value: Any
) -> None:
    """What another release or machine wrote is a miss."""
    before = identity()
    monkeypatch.setattr(module, name, value)
    assert identity() != before


def test_ranks_that_hold_different_bytes_have_different_objects() -> None:
    """Of keys and values each rank has its share: a rank, and how many there are, is a fact."""
    alone = identity(rank=0, world_size=1)
    assert alone == identity()
    both = [identity(rank=rank, world_size=2) for rank in (0, 1)]
    assert len({alone, *both, identity(rank=0, world_size=4)}) == 4


def test_ranks_that_hold_the_same_bytes_share_them() -> None:
    """Latents are replicated: whoever wrote them, on however many ranks, all can read them."""
    latent = config(model=LATENT)
    assert identity(latent, rank=1, world_size=2) == identity(latent, rank=3, world_size=4)
    assert identity(latent, rank=1, world_size=2) == identity(latent)
    mixed = config(model={**LATENT, "extra_pools": [POOL]})  # one pool's share is enough
    assert identity(mixed, rank=0, world_size=2) != identity(mixed, rank=1, world_size=2)


@pytest.mark.parametrize(("rank", "world_size"), [(1, 1), (-1, 2), (2, 2), (0, 0)])
def test_a_rank_that_does_not_exist_is_refused(rank: int, world_size: int) -> None:
    """A rank too many would read another's bytes."""
    with pytest.raises(ValueError, match=f"rank {rank} of {world_size}"):
        identity(rank=rank, world_size=world_size)


class TwoComponents:
    """A user's strategy: as plain, and a component with a state of its own."""

    name = "two"
    kinds = ("full", "full")

    def matches(self, model: ModelConfig) -> bool:
        return False

    def plan(self, model: ModelConfig, page_size: int) -> StackPlan:
        full, other = (
            ComponentSpec(of, kind) for of, kind in zip((FULL, OTHER), self.kinds, strict=True)
        )
        pools = (
            PoolSpec("k", FULL, (0, 1), (4,), "int8", page_size),
            PoolSpec("s", OTHER, (0, 1), (4,), "int8", page_size, "replicated"),
        )
        return StackPlan((full, other), pools)


@pytest.fixture
def two() -> Iterator[TwoComponents]:
    strategy = TwoComponents()
    unregister = register_stack_strategy(strategy)
    yield strategy
    unregister()


def test_components_have_identities_of_their_own(two: TwoComponents) -> None:
    """In dense order; a rank is a fact of those whose bytes it changes."""
    given = config(model={**MODEL, "strategy": "two"})
    first, second = parts(given).formats
    assert (first.component, second.component) == (FULL, OTHER)
    assert first.identity != second.identity
    on_rank = parts(given, rank=1, world_size=2).formats
    assert on_rank[0].identity != first.identity
    assert on_rank[1].identity == second.identity


def test_one_components_kind_is_a_fact_of_all(two: TwoComponents) -> None:
    """A set of components belongs together: with another set, the same pages restore another
    state."""
    given = config(model={**MODEL, "strategy": "two"})
    sizing = size_stack(given)
    before = [form.identity for form in parts(given).formats]
    two.kinds = ("full", "window")
    changed = two.plan(given.model, 16)
    sizing = parts_of.Sizing(changed, 16, sizing.num_pages, sizing.host_pages)
    after = storage_parts(given, sizing)
    assert after is not None
    assert not set(before) & {form.identity for form in after.formats}


GOLDEN = "54b2e9cd1161f8a79b0040d816c0da3c132878c3d7dafd7cee7523a86da11a5b"


@pytest.mark.skipif(sys.byteorder != "little", reason="the byte order is a fact")
def test_an_identity_is_the_same_in_every_process_and_release() -> None:
    """Written down: a change of this value makes all storage out there a miss, and must be meant
    (raise `FORMAT_VERSION`, or mend the facts)."""
    assert identity().hex() == GOLDEN
    script = "from tests.test_storage_parts import identity; print(identity().hex())"
    root = Path(__file__).parents[1]
    command = [sys.executable, "-R", "-c", script]
    printed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    assert printed.stdout.strip() == GOLDEN


def test_a_row_of_another_type_is_a_miss_though_its_bytes_are_as_many() -> None:
    """B84 at the level of bytes: sealed as bfloat16, read as float16."""
    (written,) = parts().formats
    (read,) = parts(config(model={**MODEL, "dtype": "float16"})).formats
    row, key = memoryview(bytearray(written.row_bytes)), bytes(32)
    written.seal(row, key)
    assert written.check(row, key) is None
    assert read.check(row, key) == "is of another model or layout"
    assert isinstance(read, RecordFormat)
    assert read.object_key(key) != written.object_key(key)


# --- Backends that are not there, options that are refused ---------------------------------------


def refused(given: Config) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parts(given)
    return [str(problem) for problem in caught.value.problems]


def test_a_backend_that_has_gone_since_is_refused() -> None:
    """A configuration made in Python is judged when it is used."""
    gone = StorageConfig.model_construct(backend="fiel", options={})
    given = config().model_copy(update={"storage": gone})
    (text,) = refused(given)
    assert text.startswith("storage.backend: no such backend is installed (did you mean file?")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("no_such_package:Backend", "cannot be imported: No module named 'no_such_package'"),
        ("tiered_cache_memory:NoBackend", "cannot be imported: module"),
        ("tiered_cache_memory:MemoryOptions", "which is not a StorageBackend"),
    ],
)
def test_a_backend_that_cannot_be_imported_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str, words: str
) -> None:
    """At its place, together with what else is wrong."""
    (own,) = registry.entry_points(group=registry.GROUP, name="redis")
    broken = EntryPoint("redis", value, registry.GROUP)._for(own.dist)
    monkeypatch.setattr(registry, "entry_points", lambda **_: EntryPoints([broken]))
    path = tmp_path / "cache.yaml"
    path.write_text(
        "model: {id: a, revision: b, dtype: int8, num_layers: 1, num_kv_heads: 1, head_dim: 4}\n"
        "host: {tokens: 64}\n"
        "storage:\n"
        "  backend: redis\n"
    )
    given = load_config(path, environ={})
    (text,) = refused(given)
    assert f"{path}:4:12: storage.backend: backend 'redis' " in text
    assert words in text
    assert "(python -m pip install 'tiered-cache[redis]')" in text
    with pytest.raises(ConfigError) as caught:
        build(given)
    assert {problem.key for problem in caught.value.problems} == {"device", "storage.backend"}


def _absolute(value: str) -> str:
    if not value.startswith("/"):
        raise ValueError(f"{value} is not absolute")
    return value


def _address(value: str) -> str:
    raise ValueError(f"nobody is called {value.partition('://')[2].partition('@')[0]}")


class Tls(BackendOptions):
    """A section inside a backend's options."""

    cert: str
    check: bool = True


class PickyOptions(BackendOptions):
    """One of each kind of setting."""

    path: Annotated[str, AfterValidator(_absolute)] = "/tmp"
    url: Annotated[str, AfterValidator(_address)] = ""
    limit: Annotated[int, Field(ge=1)] | None = None
    rate: Annotated[float, Field(gt=0)] = 1.0
    modes: list[int] = Field(default_factory=list)
    tls: Tls | None = None


class PickyBackend(MemoryBackend):
    """For what a backend's own model says."""

    Options = PickyOptions  # type: ignore[assignment]


@pytest.fixture
def picky(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Path]:
    """Writes a configuration whose `memory` backend has the options above."""
    monkeypatch.setattr(parts_of, "load_backend", lambda name: PickyBackend)

    def write(options: str) -> Path:
        path = tmp_path / "cache.yaml"
        path.write_text(
            "model: {id: a, revision: b, dtype: int8, num_layers: 1, num_kv_heads: 1, head_dim: 4}"
            f"\nhost: {{tokens: 64}}\nstorage:\n  backend: memory\n  options: {options}\n"
        )
        return path

    return write


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("{pth: /a}", "5:13: storage.options.pth: unknown key (did you mean path?)"),
        (
            "{where: /a}",
            "5:13: storage.options.where: unknown key (the keys here are path, url, limit, rate, "
            "modes, tls)",
        ),
        ("{rate: 1, limit: 0}", "5:29: storage.options.limit: must be 1 or more"),
        ("{rate: 0}", "5:19: storage.options.rate: must be more than 0"),
        ("{limit: abcdef}", "5:20: storage.options.limit: must be a whole number, not text"),
        ("{path: 5}", "5:19: storage.options.path: must be text, not a number (put it in quotes)"),
        ("{modes: [1, x]}", "5:24: storage.options.modes[1]: must be a whole number, not text"),
        ("{modes: 5}", "5:20: storage.options.modes: must be a list, not a number"),
        ("{tls: {check: true}}", "5:13: storage.options.tls.cert: is required"),
        ("{tls: {cert: a, tset: 1}}", "5:28: storage.options.tls.tset: unknown key"),
        ("{path: over/there}", "5:19: storage.options.path: Value error, … is not absolute"),
        (
            "{url: 'redis://alice:hunter2@host'}",
            "5:18: storage.options.url: Value error, nobody is called …",
        ),
    ],
)
def test_what_a_backend_refuses_is_said_at_its_place(
    picky: Callable[[str], Path], options: str, problem: str
) -> None:
    """When parts are made and by `check`; in our words where pydantic speaks, without the value
    where the backend does."""
    path = picky(options)
    assert refused(load_config(path, environ={})) == [f"{path}:{problem}"]
    with pytest.raises(ConfigError):
        check_config(path, Console(quiet=True))


def test_all_that_is_wrong_with_options_is_said_at_once(picky: Callable[[str], Path]) -> None:
    """The environment's by its variable, then in the order of the file."""
    path = picky("{limit: 0, rate: -1, paht: /a}")
    environ = {"TIERED_CACHE_STORAGE__OPTIONS__PATH": "secret"}
    texts = refused(load_config(path, environ=environ))
    assert [text.partition(": ")[2].partition(":")[0] for text in texts] == [
        "storage.options.path",
        "storage.options.limit",
        "storage.options.rate",
        "storage.options.paht",
    ]
    assert not any("secret" in text for text in texts)
    assert texts[0].startswith("$TIERED_CACHE_STORAGE__OPTIONS__PATH: storage.options.path")


def test_the_parts_do_not_show_the_options(picky: Callable[[str], Path]) -> None:
    """They are logged as easily as a configuration."""
    given = load_config(picky("{path: /secret/place}"), environ={})
    assert "secret" not in repr(parts(given))
