"""Whatever is given as a configuration, all that comes out is a `Config` or a `ConfigError`."""

from __future__ import annotations

import contextlib
import datetime as dt
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tiered_cache.build import size_stack, storage_parts
from tiered_cache.cli.check import check_config
from tiered_cache.cli.plan import show_plan
from tiered_cache.config import load_config
from tiered_cache.errors import ConfigError, ConfigProblem

POOL: Final = {"name": "draft", "num_layers": 1, "row_shape": [4], "dtype": "int8"}
MODEL: Final = {
    "dtype": "float32",
    "num_layers": 2,
    "num_kv_heads": 1,
    "head_dim": 4,
    "extra_pools": [POOL],
}
STORED: Final = {
    "model": {**MODEL, "id": "some/model", "revision": "r7"},
    "host": {"tokens": 64},
    "storage": {"backend": "memory"},
}
MODEL_YAML: Final = "model: {dtype: float32, num_layers: 2, num_kv_heads: 1, head_dim: 4}\n"
NO_HEADS: Final = {key: MODEL[key] for key in ("dtype", "num_layers")}

NUMBERS: Final[dict[str, dict[str, Any]]] = {
    "page_size": {},
    "run_threads": {},
    "device.size": {},
    "device.tokens": {},
    "host.size": {},
    "host.tokens": {},
    "host.load_back_threshold": {"host": {"tokens": 64}},
    "model.num_layers": {},
    "model.num_kv_heads": {},
    "model.head_dim": {},
    "model.v_head_dim": {},
    "model.kv_lora_rank": {"model": {**NO_HEADS, "qk_rope_head_dim": 8}},
    "model.qk_rope_head_dim": {"model": {**NO_HEADS, "kv_lora_rank": 8}},
    "model.extra_pools[0].num_layers": {},
    "model.extra_pools[0].layers[0]": {},
    "model.extra_pools[0].row_shape[0]": {},
    "model.extra_pools[0].tokens_per_row": {},
    "storage.timeout": {},
    "storage.max_concurrency": {},
    "storage.prefetch.threshold": {},
    "storage.prefetch.timeout_base": {},
    "storage.prefetch.timeout_per_ki_token": {},
    "storage.prefetch.result_ttl": {},
    "storage.backup.max_pending": {},
    "storage.breaker.failures": {},
    "storage.breaker.retry_after": {},
    "storage.breaker.max_retry_after": {
        "storage": {"backend": "memory", "breaker": {"retry_after": 1e-9}}
    },
    "storage.breaker.slow": {},
}
"""Every setting that is a number, with what must stand around it."""

SECONDS: Final = (
    *("storage.timeout", "storage.prefetch.timeout_base", "storage.prefetch.timeout_per_ki_token"),
    *("storage.prefetch.result_ttl", "storage.breaker.retry_after"),
    *("storage.breaker.max_retry_after", "storage.breaker.slow"),
)
"""Those that may have a fraction."""

ABSURD: Final = [10**30, 10**400, 10**5000, 0xF << 40_000]
NO_NUMBERS: Final = [
    *(-1, -(10**400), 1.0, math.inf, math.nan, True, "", "x", "9" * 400, b"1", None, [], {}),
    *([[]], {"a": 1}, {1: 2}, {10**5000: 1}, {None: []}, dt.date(2026, 1, 1), object()),
    *(int, "\ud800", "\x00", 1j, {1, 2}),
]


def settings_with(key: str, value: object) -> dict[str, Any]:
    """Settings that are fine but for `key`."""
    pool = dict(POOL)
    around = {**(STORED if key.startswith("storage") else {}), **NUMBERS.get(key, {})}
    result: dict[str, Any] = {"model": {**MODEL, "extra_pools": [pool]}, **around}
    name = key.rpartition(".")[2]
    if key.startswith("storage."):
        section = result["storage"] = dict(result["storage"])
        for part in key.split(".")[1:-1]:
            section[part] = section = dict(section.get(part, {}))
        section[name] = value
    elif "extra_pools" in key:
        pool[name.removesuffix("[0]")] = [value] if name.endswith("[0]") else value
        if name == "layers[0]":
            del pool["num_layers"]
    elif "." in key:
        section = key.partition(".")[0]
        result[section] = {**result.get(section, {}), name: value}
    else:
        result[key] = value
    return result


def refused(source: Any, *arguments: Any) -> list[ConfigProblem]:
    """What is wrong, found by loading or by sizing: each problem says what and where."""
    with pytest.raises(ConfigError) as caught:
        size_stack(load_config(source, *arguments))
    for problem in caught.value.problems:
        assert problem.message
        assert len(str(problem)) < 600
    return caught.value.problems


def is_refused_at(key: str, source: Any, *arguments: Any) -> None:
    found = refused(source, *arguments)
    named = {problem.key for problem in found}
    assert any(name.startswith(key) for name in named), named


@pytest.mark.parametrize("value", ABSURD, ids=["30", "400", "5000", "bits"])
@pytest.mark.parametrize("key", NUMBERS)
def test_absurd_numbers_are_refused_with_the_bound(key: str, value: int) -> None:
    """No overflow, however many digits; the message says how much is allowed."""
    (problem,) = refused(settings_with(key, value), {}, {})
    assert problem.key == key
    assert "or less" in problem.message


@pytest.mark.parametrize("key", NUMBERS)
def test_what_is_no_number_is_refused_at_its_key(key: str) -> None:
    """Any type of Python, as an argument; only an optional setting may be None."""
    for value in NO_NUMBERS:
        source = settings_with(key, value)
        if value is None and key in ("device.size", "device.tokens", "model.v_head_dim"):
            size_stack(load_config(source, {}, {}))
        elif type(value) is float and value == 1.0 and key in SECONDS:
            assert load_config(source, {}, {}).storage
        else:
            # A host tier without tokens lacks a size.
            is_refused_at("host" if value is None and "host" in key else key, source, {}, {})


STATE: Final = {"name": "conv", "row_shape": [4], "dtype": "int8"}
HYBRID: Final = {
    **MODEL,
    "num_layers": 3,
    "extra_pools": [],
    "layer_types": ["full_attention", "sliding_attention", "linear_attention"],
    "sliding_window": [8],
    "states": [STATE],
}


@pytest.mark.parametrize("key", ["layer_types", "sliding_window", "states", "row_shape", "ratio"])
@pytest.mark.parametrize("inside", [False, True])
def test_what_is_no_description_of_layers_is_refused_at_its_key(key: str, inside: bool) -> None:
    """In the place of the whole, or of one item."""
    for value in (*ABSURD, *NO_NUMBERS):
        item = value
        if inside:
            item = {"swa": value} if key == "ratio" else [value]
        source: dict[str, Any] = {"model": HYBRID, "device": {"tokens": 64}}
        at = f"model.{key}"
        if key == "ratio":
            source["device"] = {"tokens": 64, "ratio": item}
            at = "device.ratio"
        elif key == "row_shape":
            source["model"] = {**HYBRID, "states": [{**STATE, "row_shape": item}]}
            at = "model.states[0].row_shape"
        else:
            source["model"] = {**HYBRID, key: item}
        is_ratio = type(value) is float and value == 1.0
        if key == "ratio" and (item == {} or (inside and is_ratio)):
            size_stack(load_config(source, {}, {}))
        elif item == {1, 2} and key == "row_shape":
            continue  # any collection of numbers is a shape
        elif item is None:
            is_refused_at("model" if key != "ratio" else at, source, {}, {})
        else:
            is_refused_at(at, source, {}, {})


@pytest.mark.parametrize(
    "size",
    [
        "9" * 101 + "B",
        "9" * 400 + "GiB",
        "9" * 5000 + "GiB",
        "1." + "0" * 5000 + "GiB",
        "9" * 5000,
        "9" * 5000 + "G",
        "1025TiB",
        "0B",
        "0.4B",
        "1e9B",
        "٣GiB",
        "inf",
        "0x10B",
        "1_000B",
        "1,5GiB",
        "GiB",
    ],
    ids=lambda size: f"{size[:8]}-{len(size)}",
)
def test_sizes_that_are_none(size: str) -> None:
    """Digits without end, other alphabets, other notations."""
    (problem,) = refused({"model": MODEL, "device": {"size": size}}, {}, {})
    assert problem.key == "device.size"


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        ("900719925474099.3B", 900_719_925_474_099),
        ("900719925474099.7kB", None),
        ("999999999.999999999TB", None),
        ("1023.999999999999999TiB", (1 << 50) - 1),
        ("1024TiB", 1 << 50),
        ("562949953421313B", (1 << 49) + 1),
    ],
)
def test_sizes_are_exact(size: str, num_bytes: int | None) -> None:
    """No number goes through a float on its way; more than 1,024 TiB is too much."""
    source = {"model": MODEL, "device": {"size": size}}
    if num_bytes is None:
        with pytest.raises(ConfigError, match="must be 1024TiB or less"):
            load_config(source, {}, {})
    else:
        assert load_config(source, {}, {}).device.size == num_bytes


def test_what_is_absurd_only_as_a_product_is_refused() -> None:
    """Each number is allowed; a page, or the tier, is not."""
    huge = {**MODEL, "num_layers": 1000, "num_kv_heads": 1 << 20, "head_dim": 1 << 20}
    (problem,) = refused({"model": huge, "page_size": 65_536}, {}, {})
    assert problem.key == "model"
    assert "1024TiB" in str(problem)
    tokens = {"tokens": 10**14}
    (problem,) = refused({"model": MODEL, "device": tokens, "page_size": 65_536}, {}, {})
    assert problem.key == "device.tokens"
    assert problem.message == "comes to 6,799,999,998,885,888 bytes"
    shape = {**POOL, "row_shape": [1 << 20] * 8}
    (problem,) = refused({"model": {**MODEL, "extra_pools": [shape]}}, {}, {})
    assert problem.key == "model"
    long = {**POOL, "row_shape": [1] * 9}
    (problem,) = refused({"model": {**MODEL, "extra_pools": [long]}}, {}, {})
    assert problem.key == "model.extra_pools[0].row_shape"


# --- Arguments of another type ------------------------------------------------------------------


@pytest.mark.parametrize("source", [None, 5, 1.5, True, [], [MODEL], b"cache.yaml", object(), int])
def test_a_source_of_another_type_is_a_config_error(source: Any) -> None:
    """Only a path or a mapping can be settings."""
    (problem,) = refused(source, {}, {})
    assert problem.key == "source"
    assert "load_config('cache.yaml')" in (problem.suggestion or "")


@pytest.mark.parametrize("value", [5, "x", [1], b"", object()])
def test_overrides_and_environ_of_another_type_too(value: Any) -> None:
    """The argument is named."""
    found = refused({"model": MODEL}, value, value)
    assert [problem.key for problem in found] == ["overrides", "environ"]


def test_settings_that_contain_themselves_are_refused() -> None:
    """A mapping made in Python has no end when it is its own value."""
    endless: dict[str, Any] = {}
    endless["device"] = endless
    is_refused_at("device", {"model": MODEL, **endless}, {}, {})
    is_refused_at("device", {"model": MODEL}, endless, {})
    items: list[Any] = []
    items.append(items)
    is_refused_at("model", {"model": {**MODEL, "extra_pools": items}}, {}, {})


# --- Files --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "~",
        "{}",
        "[]",
        "5",
        "page_size: 16\x00",
        "\x00" * 100,
        "device:\n\ttokens: 5\n",
        "\t",
        "[" * 5000,
        "{a: " * 5000,
        "- " * 5000,
        "a: &a [*a]",
        "a: *b",
        "%YAML 9.9\n---\n{}",
        "page_size: !!int ''",
        "page_size: !!int x",
        "page_size: !!float '-'",
        "page_size: !!bool x",
        "page_size: !!timestamp x",
        "page_size: !!binary 'é'",
        "page_size: 2026-99-99",
        f"page_size: {'9' * 5000}",
        f"page_size: 0x{'f' * 5000}",
        f"device: {{size: {'9' * 400}}}",
        f"device: {{size: {'9' * 400}GiB}}",
        f"device: {{type: 'cuda:{'9' * 5000}'}}",
        'model: {id: "\\ud800"}',
        "'': {'': ''}",
        "? [a]\n: b",
        "x" * 300_000,
    ],
    ids=lambda text: f"{text[:24]!r}-{len(text)}",
)
@pytest.mark.parametrize("prefix", ["", MODEL_YAML], ids=["alone", "after a model"])
def test_no_text_breaks_the_commands(tmp_path: Path, text: str, prefix: str) -> None:
    """`load_config`, `check` and `plan` answer with a ConfigError that names the file."""
    path = tmp_path / "cache.yaml"
    path.write_text(prefix + text, errors="surrogatepass")
    if text == "" and prefix:
        load_config(path, {}, {})
        return
    console = Console(quiet=True)
    commands: list[Callable[[], object]] = [
        lambda: load_config(path, {}, {}),
        lambda: check_config(path, console),
        lambda: show_plan(path, console),
    ]
    for command in commands:
        with pytest.raises(ConfigError) as caught:
            command()
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("a\x00b", "embedded null byte"),
        ("a" * 300, "cannot be read"),
        (Path(), "is a directory"),
        (Path("/dev/zero"), "more than"),
        ("\udc80.yaml", "no such file"),
    ],
    ids=["null", "long", "directory", "endless", "surrogate"],
)
def test_paths_that_are_no_file(path: Any, message: str) -> None:
    """What the system says of a path, and what it never ends to say."""
    (problem,) = refused(path, {}, {})
    assert message in problem.message


@given(st.binary(max_size=200), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_a_file(tmp_path_factory: Any, contents: bytes, after_model: bool) -> None:
    """Random bytes, and random bytes after a good section."""
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes((MODEL_YAML.encode() if after_model else b"") + contents)
    with contextlib.suppress(ConfigError):
        size_stack(load_config(path, {}, {}))


PIECES = st.sampled_from(
    [*"{}[],:&*!|>%@`'\"#?-~ \n\t", "model", "device: ", "size: ", "8GiB", "&a ", "*a", "<<: ", "1"]
)


@given(st.lists(PIECES, max_size=40).map("".join))
@settings(max_examples=300, deadline=None)
def test_any_yaml_is_a_variable(text: str) -> None:
    """Malformed values of the environment name their variable."""
    for key in ("DEVICE", "PAGE_SIZE", "MODEL__EXTRA_POOLS", "X"):
        with contextlib.suppress(ConfigError):
            size_stack(load_config({"model": MODEL}, {}, {f"TIERED_CACHE_{key}": text}))


# --- The environment ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TIERED_CACHE_", "1"),
        ("TIERED_CACHE___", "1"),
        ("TIERED_CACHE_DEVICE__", "1"),
        ("TIERED_CACHE_DEVICE__SIZE__X", "1"),
        ("TIERED_CACHE_PAGE_SIZE", ""),
        ("TIERED_CACHE_PAGE_SIZE", "\x00"),
        ("TIERED_CACHE_PAGE_SIZE", "9" * 5000),
        ("TIERED_CACHE_PAGE_SIZE", "[" * 5000),
        ("TIERED_CACHE_PAGE_SIZE", 5),
        ("TIERED_CACHE_PAGE_SIZE", None),
        ("TIERED_CACHE_DEVICE", "tokens"),
        ("TIERED_CACHE_DEVICE__SIZE", "9" * 400 + "GiB"),
        ("TIERED_CACHE_MODE", "\udc80"),
        ("TIERED_CACHE_" + "A__" * 3000, "1"),
    ],
    ids=lambda part: f"{str(part)[:34]!r}",
)
def test_malformed_variables_are_named(name: str, value: Any) -> None:
    """The variable is the place, whatever its value is."""
    with pytest.raises(ConfigError) as caught:
        load_config({"model": MODEL}, {}, {name: value})
    assert all(problem.file == f"${name}" for problem in caught.value.problems)


# --- At random ----------------------------------------------------------------------------------

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    # What often fits, so that the search goes deeper.
    | st.sampled_from(["8GiB", "lru", "cpu", "float32", "on", 1, 16, 10**30, 10**400]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["size", "tokens", "type", "dtype", "num_layers", "layers", "row_shape", "name"]
            )
            | st.text(max_size=3)
            | st.integers(),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)


KEYS = [*NUMBERS, "model", "device", "host", "mode", "check", "storage", "storage.options"]


@given(key=st.sampled_from(KEYS), value=ANYTHING)
@settings(max_examples=500, deadline=None)
def test_anything_anywhere_is_accepted_or_a_config_error(key: str, value: object) -> None:
    """Random values of random types, at every key."""
    with contextlib.suppress(ConfigError):
        config = load_config(settings_with(key, value), {}, {})
        storage_parts(config, size_stack(config))


@given(ANYTHING | st.dictionaries(st.just("max_size"), ANYTHING))
@settings(max_examples=300, deadline=None)
def test_any_options_are_accepted_or_a_config_error(value: object) -> None:
    """By the schema, then by the backend's own model."""
    with contextlib.suppress(ConfigError):
        config = load_config(settings_with("storage.options", value), {}, {})
        storage_parts(config, size_stack(config))
