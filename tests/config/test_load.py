"""Settings come from file, environment and arguments; all mistakes are named at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tiered_cache.config import (
    BackupConfig,
    BreakerConfig,
    Config,
    HostConfig,
    ModelConfig,
    PrefetchConfig,
    StorageConfig,
    load_config,
)
from tiered_cache.config.schema import BACKEND_GROUP, installed_backends
from tiered_cache.errors import ConfigError, ConfigProblem
from tiered_cache.storage import registry

MODEL = {"dtype": "float32", "num_layers": 2, "num_kv_heads": 1, "head_dim": 4}
MODEL_YAML = "model: {dtype: float32, num_layers: 2, num_kv_heads: 1, head_dim: 4}\n"


def load(source: Any, overrides: Any = None, environ: dict[str, str] | None = None) -> Config:
    return load_config(source, overrides, environ or {})


def problems(source: Any, environ: dict[str, str] | None = None) -> dict[str, ConfigProblem]:
    with pytest.raises(ConfigError) as caught:
        load(source, environ=environ)
    return {problem.key: problem for problem in caught.value.problems}


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str, name: str = "cache.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


# --- Order --------------------------------------------------------------------------------------


def test_what_is_not_written_has_a_default(write: Any) -> None:
    """A file with the model only is a whole configuration."""
    config = load(write(MODEL_YAML))
    assert (config.page_size, config.mode, config.run_threads, config.check) == (16, "on", 1, False)
    assert (config.device.type, config.device.eviction_policy) == ("cpu", "lru")
    assert config.device.size is None
    assert config.device.tokens is None
    assert config.host is None


def test_a_host_section_turns_the_second_tier_on(write: Any) -> None:
    """Its size is all that must be written; null takes it out again."""
    path = write(f"{MODEL_YAML}host: {{size: 4GiB}}\n")
    host = load(path).host
    assert host == HostConfig(size=4 << 30)
    assert (host.write_policy, host.eviction_policy) == ("write_through", "lru")
    assert host.load_back_threshold == 1
    assert load(path, environ={"TIERED_CACHE_HOST": "null"}).host is None
    assert load(path, {"host": None}).host is None
    assert load(path, {"mode": "off"}).host == host


def test_default_file_environment_argument_in_this_order(write: Any) -> None:
    """Each layer overrides the one before it, key by key, and leaves the other keys alone."""
    path = write(MODEL_YAML + "page_size: 32\ndevice: {tokens: 64, eviction_policy: lfu}\n")
    environ = {"TIERED_CACHE_DEVICE__TOKENS": "128", "TIERED_CACHE_PAGE_SIZE": "8"}
    config = load(path, {"page_size": 4}, environ)
    assert (config.page_size, config.device.tokens) == (4, 128)
    assert config.device.eviction_policy == "lfu"


def test_environment_values_are_yaml() -> None:
    """Booleans, sizes and nested lists can be given in a variable."""
    pool = "[{name: draft, num_layers: 1, row_shape: [2], dtype: int8}]"
    environ = {
        "TIERED_CACHE_CHECK": "true",
        "TIERED_CACHE_MODE": "off",
        "TIERED_CACHE_DEVICE__SIZE": "1MiB",
        "TIERED_CACHE_MODEL__EXTRA_POOLS": pool,
        "UNRELATED": "x",
    }
    config = load({"model": MODEL}, environ=environ)
    assert (config.check, config.mode, config.device.size) == (True, "off", 1 << 20)
    assert config.model.extra_pools[0].row_shape == (2,)


def test_a_section_object_replaces_its_section() -> None:
    """A model filled from elsewhere does not inherit keys of the file's model."""
    latent = {"dtype": "bfloat16", "num_layers": 3, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
    config = load({"model": latent}, {"model": ModelConfig(**MODEL)})
    assert config.model == ModelConfig(**MODEL)


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an argument, the variables of the process count."""
    monkeypatch.setenv("TIERED_CACHE_PAGE_SIZE", "64")
    assert load_config({"model": MODEL}).page_size == 64


def test_the_source_and_the_overrides_are_left_alone() -> None:
    """Loading writes into neither of its arguments."""
    source, overrides = {"model": dict(MODEL), "device": {"tokens": 64}}, {"device": {"tokens": 32}}
    load(source, overrides, {"TIERED_CACHE_MODEL__HEAD_DIM": "8"})
    assert source == {"model": MODEL, "device": {"tokens": 64}}
    assert overrides == {"device": {"tokens": 32}}


def test_equal_settings_are_equal_wherever_they_were_written(write: Any) -> None:
    """A configuration is compared by what it says."""
    assert load(write(MODEL_YAML)) == load({"model": MODEL})


def test_a_configuration_is_frozen() -> None:
    """Nobody changes settings after they have been read."""
    with pytest.raises(ValueError, match="frozen"):
        load({"model": MODEL}).page_size = 1


# --- Mistakes -----------------------------------------------------------------------------------


def test_every_mistake_is_reported_at_once_with_its_place(write: Any) -> None:
    """One look shows all: unknown, duplicate, mistyped, negative, contradictory, misspelt."""
    path = write(
        "model: {strategy: plian, dtype: bf16, num_layers: -3, num_kv_heads: '3', hed_dim: 64}\n"
        "page_size: 16\n"
        "page_size: 32\n"
        "device:\n"
        "  type: gpu\n"
        "  size: 8GB\n"
        "  tokens: 44\n"
        "  eviction_policy: lruu\n"
        "mode: offf\n"
        "run_threads: 0\n"
        "check: 1\n"
    )
    found = problems(path)
    places = {key: (problem.line, problem.column) for key, problem in found.items()}
    assert places == {
        "model.strategy": (1, 19),
        "model.dtype": (1, 33),
        "model.num_layers": (1, 51),
        "model.num_kv_heads": (1, 69),
        "model.hed_dim": (1, 74),
        "model.head_dim": (1, 1),
        "page_size": (3, 1),
        "device.type": (5, 9),
        "device.tokens": (7, 11),
        "device.eviction_policy": (8, 20),
        "mode": (9, 7),
        "run_threads": (10, 14),
        "check": (11, 8),
    }
    assert {problem.file for problem in found.values()} == {str(path)}
    assert str(found["model.hed_dim"]) == (
        f"{path}:1:74: model.hed_dim: unknown key (did you mean head_dim?)"
    )


@pytest.mark.parametrize(
    ("text", "key", "message", "suggestion"),
    [
        ("pagesize: 16", "pagesize", "unknown key", "did you mean page_size?"),
        ("device: {page_size: 4}", "device.page_size", "unknown key", "belongs to the top level"),
        ("tokens: 4096", "tokens", "unknown key", "belongs to device or host"),
        ("write_policy: write_back", "write_policy", "unknown key", "belongs to host"),
        ("device: {write_policy: x}", "device.write_policy", "unknown key", "belongs to host"),
        ("wheels: 4", "wheels", "unknown key", "the keys here are model, page_size, device"),
        ("host: {}", "host.size", "is required", "write size: 4GiB or tokens: 65536"),
        ("host: {write_policy: write_back}", "host.size", "is required", "write size: 4GiB"),
        ("host: {size: 1GB, tokens: 5}", "host.tokens", "says the same as size", "keep one of"),
        ("host: true", "host", "must be a section of keys and values, not true or false", None),
        ("host: {tokens: 5, pin: on}", "host.pin", "unknown key", "the keys here are size, tokens"),
        (
            "host: {tokens: 5, write_policy: writeback}",
            "host.write_policy",
            "no such choice",
            "did you mean write_back?",
        ),
        (
            "host: {tokens: 5, eviction_policy: LRU}",
            "host.eviction_policy",
            "no such choice",
            "did you mean lru?",
        ),
        (
            "host: {tokens: 5, load_back_threshold: 0}",
            "host.load_back_threshold",
            "must be 1 or more",
            None,
        ),
        ("page_size: -16", "page_size", "must be 1 or more", None),
        ("page_size: 16.0", "page_size", "must be a whole number, not a number with", None),
        ("page_size: true", "page_size", "must be a whole number, not true or false", None),
        ("page_size:", "page_size", "must be a whole number, not nothing", None),
        ("device: []", "device", "must be a section of keys and values, not a list", None),
        ("device: {size: 8G}", "device.size", "is not a size", "write 8GiB or 8GB"),
        ("device: {size: 64mb}", "device.size", "is not a size", "write 64MiB or 64MB"),
        ("device: {size: 64GIB}", "device.size", "is not a size", "write 64GiB or 64GB"),
        ("device: {size: lots}", "device.size", "is not a size", "write 8GiB, 8GB or a number"),
        ("device: {size: -8GiB}", "device.size", "is not a size", "write 8GiB, 8GB or a number"),
        ("device: {size: -8}", "device.size", "must be 1 or more", None),
        ("device: {size: 1.5}", "device.size", "must be a whole number", "write 8GiB"),
        ("device: {type: gpu}", "device.type", "no such device", "write cpu, cuda or"),
        (
            "device: {eviction_policy: LRU}",
            "device.eviction_policy",
            "no such",
            "did you mean lru?",
        ),
        ("device: {eviction_policy: best}", "device.eviction_policy", "no such", "one of lru, lfu"),
        ("mode: sometimes", "mode", "no such choice", "one of on, off"),
    ],
)
def test_a_mistake_says_what_to_write_instead(
    write: Any, text: str, key: str, message: str, suggestion: str | None
) -> None:
    """Message and suggestion, for each kind of mistake."""
    found = problems(write(f"{MODEL_YAML}{text}\n"))
    assert list(found) == [key]
    assert message in found[key].message
    assert found[key].line == 2
    assert (suggestion or "") in (found[key].suggestion or "")
    assert suggestion is None or found[key].suggestion is not None


@pytest.mark.parametrize(
    ("change", "key", "message"),
    [
        ({"num_layers": None}, "model.num_layers", "must be a whole number, not nothing"),
        ({"num_layers": 10**9}, "model.num_layers", "must be 1,000 or less"),
        ({"head_dim": None}, "model.head_dim", "is required"),
        ({"kv_lora_rank": 8}, "model.num_kv_heads", "means nothing beside kv_lora_rank"),
        ({"revision": 1}, "model.revision", "must be text, not a number"),
        ({"dtype": "fp16"}, "model.dtype", "no such choice"),
        ({"strategy": "dsa"}, "model.strategy", "no such strategy"),
        ({"extra_pools": {}}, "model.extra_pools", "must be a list, not a section"),
        (
            {"extra_pools": [{"name": "a b", "num_layers": 1, "row_shape": [1], "dtype": "int8"}]},
            "model.extra_pools[0].name",
            "is not a name",
        ),
        (
            {"extra_pools": [{"name": "a", "num_layers": 1, "row_shape": [0], "dtype": "int8"}]},
            "model.extra_pools[0].row_shape[0]",
            "must be 1 or more",
        ),
        (
            {"extra_pools": [{"name": "a", "num_layers": 1, "row_shape": [], "dtype": "int8"}]},
            "model.extra_pools[0].row_shape",
            "must not be empty",
        ),
        (
            {"extra_pools": [{"name": "a", "row_shape": [1], "dtype": "int8"}]},
            "model.extra_pools[0].num_layers",
            "is required",
        ),
        (
            {
                "extra_pools": [
                    {"name": "a", "num_layers": 1, "layers": [3], "row_shape": [1], "dtype": "int8"}
                ]
            },
            "model.extra_pools[0].layers",
            "says the same as num_layers",
        ),
        (
            {"extra_pools": [{"name": "a", "layers": [3, 3], "row_shape": [1], "dtype": "int8"}]},
            "model.extra_pools[0].layers",
            "names a layer twice",
        ),
        (
            {
                "extra_pools": [
                    {"name": "a", "num_layers": 1, "row_shape": [1], "dtype": "int8"},
                    {"name": "a", "num_layers": 1, "row_shape": [1], "dtype": "int8"},
                ]
            },
            "model.extra_pools",
            "two pools have the same name",
        ),
    ],
)
def test_mistakes_in_the_model(change: dict[str, Any], key: str, message: str) -> None:
    """The model section is as strict as the rest."""
    found = problems({"model": {**MODEL, **change}})
    assert list(found) == [key]
    assert message in found[key].message


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
STATE = {"name": "conv", "row_shape": [8, 4], "dtype": "float32"}


def test_layers_windows_and_states_are_read(write: Any) -> None:
    """As a Hugging Face config.json has them; one number stands for all windows."""
    text = (
        "model:\n  dtype: float32\n  num_layers: 3\n  num_kv_heads: 1\n  head_dim: 4\n"
        "  layer_types: [hybrid_sliding, full_attention, linear_attention]\n"
        "  sliding_window: 512\n"
        "  states: [{name: conv, row_shape: [8, 4], dtype: bfloat16}]\n"
        "device: {size: 1GiB, ratio: {swa: 0.5, mamba: 1}}\nhost: {size: 1GiB}\n"
    )
    config = load(write(text), environ={"TIERED_CACHE_HOST__RATIO__SWA": "0.25"})
    model = config.model
    assert model.windows == {512: (0,)}
    assert (model.layers_with("full"), model.layers_with("recurrent")) == ((1,), (0, 2))
    assert model.states[0].row_shape == (8, 4)
    assert model.state_kinds == {"full", "window", "recurrent"}
    assert config.device.ratio == {"swa": 0.5, "mamba": 1}
    assert config.host is not None
    assert config.host.ratio == {"swa": 0.25}
    assert load({"model": model, "device": {"size": "1GiB"}}).model == model


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        ({"layer_types": [FULL]}, "model.layer_types", "names 1 layers, where num_layers is 2"),
        ({"layer_types": []}, "model.layer_types", "must not be empty"),
        ({"layer_types": FULL}, "model.layer_types", "must be a list, not text"),
        ({"layer_types": [FULL, 5]}, "model.layer_types[1]", "must be text, not a number"),
        ({"layer_types": [FULL, "full_atention"]}, "model.layer_types[1]", "did you mean full_att"),
        ({"layer_types": ["mamba", FULL]}, "model.layer_types[0]", "did you mean linear_attention"),
        ({"layer_types": ["odd", FULL]}, "model.layer_types[0]", "register_stack_strategy"),
        ({"layer_types": ["none"] * 2}, "model.layer_types", "no layer keeps anything"),
        (
            {"layer_types": [LINEAR] * 2, "states": [STATE]},
            "model.num_kv_heads",
            "means nothing: no layer has attention",
        ),
        (
            {"layer_types": [SLIDING] * 2, "sliding_window": 4, "head_dim": None},
            "model.head_dim",
            "is required",
        ),
        ({"layer_types": [FULL, SLIDING]}, "model.sliding_window", "is required beside sliding"),
        ({"layer_types": [FULL, LINEAR]}, "model.states", "is required beside linear_attention"),
        ({"layer_types": [FULL, LINEAR], "states": []}, "model.states", "is required beside"),
        ({"sliding_window": 4}, "model.sliding_window", "means nothing: no layer has sliding"),
        ({"sliding_head_dim": 4}, "model.sliding_head_dim", "means nothing: no layer has sliding"),
        ({"states": [STATE]}, "model.states", "means nothing: no layer has linear_attention"),
        (
            {"layer_types": [FULL, SLIDING], "sliding_window": [4, 5]},
            "model.sliding_window",
            "has 2 numbers for 1 layers",
        ),
        (
            {"layer_types": [FULL, SLIDING], "sliding_window": "4"},
            "model.sliding_window",
            "must be a whole number, or a list of them",
        ),
        (
            {"layer_types": [FULL, SLIDING], "sliding_window": 0},
            "model.sliding_window[0]",
            "must be 1 or more",
        ),
        (
            {"layer_types": [FULL, LINEAR], "states": [{**STATE, "shape": 1}]},
            "model.states[0].shape",
            "unknown key (did you mean row_shape?)",
        ),
        (
            {"layer_types": [FULL, LINEAR], "states": [{**STATE, "name": "a b"}]},
            "model.states[0].name",
            "is not a name",
        ),
        (
            {"layer_types": [FULL, LINEAR], "states": [STATE, STATE]},
            "model.states",
            "two pools have the same name",
        ),
        (
            {
                "layer_types": [FULL, LINEAR],
                "states": [STATE],
                "extra_pools": [{**STATE, "num_layers": 1}],
            },
            "model.extra_pools",
            "two pools have the same name",
        ),
    ],
)
def test_mistakes_about_layers(change: dict[str, Any], key: str, words: str) -> None:
    """What is missing, too much, or misspelt, and what to write instead."""
    found = problems({"model": {**MODEL, **change}})
    assert list(found) == [key]
    assert words in str(found[key])


def test_all_mistakes_about_layers_are_reported_at_once() -> None:
    """Each unknown word once, however many layers have it."""
    found = problems(
        {
            "model": {
                **MODEL,
                "num_layers": 4,
                "layer_types": ["odd", "odd", "conv"],
                "states": [{"name": 5}],
                "sliding_window": -1,
            }
        }
    )
    assert set(found) == {
        "model.layer_types",
        "model.layer_types[0]",
        "model.layer_types[2]",
        "model.states[0].name",
        "model.states[0].row_shape",
        "model.states[0].dtype",
        "model.sliding_window[0]",
    }


@pytest.mark.parametrize(
    ("device", "key", "words"),
    [
        ({"ratio": {"swa": 0.5}}, "device.ratio", "means nothing without size or tokens"),
        ({"tokens": 64, "ratio": {"swa": 0}}, "device.ratio.swa", "must be more than 0"),
        ({"tokens": 64, "ratio": {"swa": 1001}}, "device.ratio.swa", "must be 1,000 or less"),
        ({"tokens": 64, "ratio": {"swa": "half"}}, "device.ratio.swa", "must be a number"),
        ({"tokens": 64, "ratio": 0.5}, "device.ratio", "must be a section of keys and values"),
    ],
)
def test_mistakes_in_a_ratio(device: dict[str, Any], key: str, words: str) -> None:
    """Which component ids there are is known only with the model; the numbers are judged here."""
    found = problems({"model": MODEL, "device": device})
    assert list(found) == [key]
    assert words in found[key].message


def test_a_model_is_required_and_says_how_to_get_one() -> None:
    """The hint names the way from a Hugging Face config."""
    found = problems({"page_size": 16})
    assert found["model"].message == "is required"
    assert "model_from_hf" in (found["model"].suggestion or "")


def test_a_compressed_pool_needs_a_page_size_that_it_divides() -> None:
    """A page holds whole rows of every pool."""
    pool = {"name": "c", "num_layers": 1, "row_shape": [1], "dtype": "int8", "tokens_per_row": 3}
    found = problems({"model": {**MODEL, "extra_pools": [pool]}})
    assert "multiple of 3" in (found["page_size"].suggestion or "")


def test_a_section_is_checked_as_a_whole_when_a_key_is_wrong(write: Any) -> None:
    """Neither kind of mistake hides the other."""
    found = problems(write(f"{MODEL_YAML}device: {{size: -1, tokens: 5, typ: cpu}}\n"))
    assert set(found) == {"device.size", "device.tokens", "device.typ"}


# --- The third tier -----------------------------------------------------------------------------

NAMED = {**MODEL, "id": "some/model", "revision": "r7"}
NAMED_YAML = MODEL_YAML.replace("}", ", id: some/model, revision: r7}")
HOST_YAML = "host: {size: 4GiB}\n"


def test_a_storage_section_turns_the_third_tier_on(write: Any) -> None:
    """Its backend is all that must be written; null takes it out again."""
    path = write(f"{NAMED_YAML}{HOST_YAML}storage: {{backend: memory}}\n")
    storage = load(path).storage
    assert storage == StorageConfig(backend="memory")
    assert (storage.options, storage.required, storage.timeout) == ({}, False, 10.0)
    assert storage.max_concurrency == 8
    assert storage.prefetch == PrefetchConfig(
        policy="timeout",
        threshold=256,
        timeout_base=1.0,
        timeout_per_ki_token=0.25,
        result_ttl=30.0,
    )
    assert storage.backup == BackupConfig(max_pending=256 << 20)
    assert storage.breaker == BreakerConfig(
        failures=5, retry_after=1.0, max_retry_after=30.0, slow=1.0
    )
    assert load(path, environ={"TIERED_CACHE_STORAGE": "null"}).storage is None
    assert load(path, {"mode": "off"}).storage == storage


def test_options_are_the_backends_and_pass_as_they_are(write: Any) -> None:
    """Any keys, nested ones too, from file, environment and arguments, key by key."""
    text = "storage: {backend: memory, options: {path: a, tls: {cert: b, check: true}, n: [1]}}\n"
    environ = {
        "TIERED_CACHE_STORAGE__OPTIONS__PATH": "/from/environment",
        "TIERED_CACHE_STORAGE__OPTIONS__URL": "redis://user:secret@host:6379/0",
    }
    overrides = {"storage": {"options": {"tls": {"cert": "argument"}}}}
    config = load(write(f"{NAMED_YAML}{HOST_YAML}{text}"), overrides, environ)
    assert config.storage is not None
    assert config.storage.options == {
        "path": "/from/environment",
        "url": "redis://user:secret@host:6379/0",
        "tls": {"cert": "argument", "check": True},
        "n": [1],
    }


def test_a_configuration_does_not_show_the_backends_options() -> None:
    """An address may hold a password, and configurations are logged."""
    options = {"url": "redis://user:secret@host"}
    source = {"model": NAMED, "host": {"size": "1GiB"}}
    config = load({**source, "storage": {"backend": "redis", "options": options}})
    assert config.storage is not None
    for text in (repr(config), str(config), repr(config.storage), f"{config.storage}"):
        assert "redis" in text
        assert "secret" not in text
        assert "url" not in text


def test_a_section_object_is_a_storage_section_too() -> None:
    """Made in Python, laid over a file's."""
    storage = StorageConfig(backend="memory", options={"max_size": 5}, timeout=2)
    config = load({"model": NAMED, "host": {"tokens": 64}}, {"storage": storage})
    assert config.storage == storage


@pytest.mark.parametrize(
    ("text", "key", "message", "suggestion"),
    [
        ("{}", "storage.backend", "is required", "write one of file, memory, redis"),
        ("{backend: fiel}", "storage.backend", "no such backend is inst", "did you mean file?"),
        ("{backend: s3}", "storage.backend", "no such backend is installed", "write one of file, "),
        ("{backend: 5}", "storage.backend", "must be text, not a number", "put it in quotes"),
        ("{backend: memory, opts: {}}", "storage.opts", "unknown key", "did you mean options?"),
        ("{backend: memory, where: x}", "storage.where", "unknown key", "own go into options"),
        ("{backend: memory, options: x}", "storage.options", "must be a section of keys", None),
        ("{backend: memory, options: }", "storage.options", "must be a section of keys", None),
        ("{backend: memory, required: 1}", "storage.required", "must be true or false", None),
        ("{backend: memory, timeout: 0}", "storage.timeout", "must be more than 0", None),
        ("{backend: memory, timeout: -1.5}", "storage.timeout", "must be more than 0", None),
        ("{backend: memory, timeout: 10s}", "storage.timeout", "must be a number, not text", None),
        ("{backend: memory, timeout: true}", "storage.timeout", "must be a number, not true", None),
        ("{backend: memory, timeout: .nan}", "storage.timeout", "must be a number with an", None),
        ("{backend: memory, timeout: 86401}", "storage.timeout", "must be 86,400 or less", None),
        ("{backend: memory, max_concurrency: 0}", "storage.max_concurrency", "1 or more", None),
        ("{backend: memory, threshold: 5}", "storage.threshold", "unk", "to storage.prefetch"),
        ("{backend: memory, prefetch: timeout}", "storage.prefetch", "must be a section", None),
        (
            "{backend: memory, prefetch: {policy: best-effort}}",
            "storage.prefetch.policy",
            "no such choice",
            "did you mean best_effort?",
        ),
        (
            "{backend: memory, prefetch: {threshold: -1}}",
            "storage.prefetch.threshold",
            "must be 0 or more",
            None,
        ),
        (
            "{backend: memory, prefetch: {time_out_base: 1}}",
            "storage.prefetch.time_out_base",
            "unknown key",
            "did you mean timeout_base?",
        ),
        (
            "{backend: memory, backup: {max_pending: 256M}}",
            "storage.backup.max_pending",
            "is not a size",
            "write 256MiB or 256MB",
        ),
        (
            "{backend: memory, backup: {max_pending: 1.5}}",
            "storage.backup.max_pending",
            "must be a whole number",
            "write 8GiB",
        ),
        (
            "{backend: memory, breaker: {failures: 0}}",
            "storage.breaker.failures",
            "must be 1 or more",
            None,
        ),
        (
            "{backend: memory, breaker: {retry_after: 60}}",
            "storage.breaker.retry_after",
            "max_retry_after is less than retry_after",
            "or more for max_retry_after",
        ),
        (
            "{backend: memory, breaker: {retry_after: 6, max_retry_after: 5}}",
            "storage.breaker.max_retry_after",
            "max_retry_after is less than retry_after",
            "or more for max_retry_after",
        ),
    ],
)
def test_mistakes_in_storage(
    write: Any, text: str, key: str, message: str, suggestion: str | None
) -> None:
    """As strict as the other sections, with what to write instead."""
    found = problems(write(f"{NAMED_YAML}{HOST_YAML}storage: {text}\n"))
    assert list(found) == [key]
    assert message in found[key].message
    assert found[key].line == 3
    assert (suggestion or "") in (found[key].suggestion or "")
    assert suggestion is None or found[key].suggestion is not None


def test_zero_is_a_threshold_and_no_grace() -> None:
    """Storage may be asked for every page, and given no time of its own."""
    prefetch = {"threshold": 0, "timeout_base": 0, "timeout_per_ki_token": 0}
    storage = {"backend": "memory", "prefetch": prefetch}
    config = load({"model": NAMED, "host": {"tokens": 64}, "storage": storage})
    assert config.storage is not None
    assert config.storage.prefetch.timeout_base == 0


def test_storage_needs_a_host_and_a_name_for_the_models_state(write: Any) -> None:
    """Pages go through the host; a fine-tune must never read its parent's state. All at once, and
    beside other mistakes."""
    found = problems(write(f"{MODEL_YAML}storage: {{backend: memory, timeout: 0}}\n"))
    assert set(found) == {"storage", "model.id", "model.revision", "storage.timeout"}
    assert "write one, such as host: {size: 4GiB}" in str(found["storage"])
    assert "would read its parent's state: write what changes" in str(found["model.revision"])
    assert found["model.revision"].line == found["model.id"].line == 1
    assert found["storage"].line == 2
    found = problems({"storage": {"backend": "memory"}, "host": {"tokens": 64}})
    assert set(found) == {"model"}  # nothing is said of what is inside a section that is not there


@pytest.mark.parametrize("key", ["id", "revision"])
@pytest.mark.parametrize("value", [None, ""])
def test_an_empty_name_is_none(key: str, value: str | None) -> None:
    """Two models without a name would share their state."""
    source = {"model": {**NAMED, key: value}, "host": {"tokens": 64}}
    found = problems({**source, "storage": {"backend": "memory"}})
    assert list(found) == [f"model.{key}"]


def test_a_key_of_the_options_is_text() -> None:
    """As everywhere; YAML's other keys are refused before."""
    storage = {"backend": "memory", "options": {5: "x"}}
    found = problems({"model": NAMED, "host": {"tokens": 64}, "storage": storage})
    assert found["storage.options"].message == "a key must be text"


def test_the_schema_knows_the_backends_that_the_registry_finds() -> None:
    """Two floors read the same entry points."""
    assert BACKEND_GROUP == registry.GROUP
    assert installed_backends() == registry.backend_names()


# --- Files --------------------------------------------------------------------------------------


def test_a_missing_file_says_so_and_offers_a_neighbour(write: Any) -> None:
    """A misspelt name is met with the name that exists."""
    path = write(MODEL_YAML, "device_only.yaml")
    found = problems(path.with_name("device-only.yaml"))
    assert found[""].message == "there is no such file"
    assert found[""].suggestion == f"did you mean {path}?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("- a\n- b\n", "the file holds a list, not settings"),
        ("hello\n", "the file holds text, not settings"),
        ("model: {dtype: float32\n", "not valid YAML"),
        ("model:\n\tdtype: float32\n", "not valid YAML"),
        ("a: b: c\n", "mapping values are not allowed here"),
        ("page_size: 16\n---\npage_size: 16\n", "a second document"),
        ("page_size: 16\x00\n", "a character that is not allowed"),
        ("a: &a [*a]\n", "without end"),
        ("[" * 3000, "not valid"),
    ],
)
def test_a_file_that_is_no_configuration(write: Any, text: str, message: str) -> None:
    """What cannot be read as settings is one problem, at its place, not a list of missing keys."""
    found = problems(write(text))
    assert list(found) == [""]
    assert message in found[""].message


def test_a_syntax_error_has_line_and_column(write: Any) -> None:
    """Where the parser gave up is where the user looks."""
    problem = problems(write("page_size: 16\ndevice: {size: 1GiB\nmode: on\n"))[""]
    assert (problem.line, problem.column) == (3, 5)


def test_directories_and_bytes_are_named(tmp_path: Path) -> None:
    """A path that is not a text file is a plain error, too."""
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert problems(tmp_path)[""].message == "is a directory, not a file"
    assert problems(binary)[""].message == "is not text in UTF-8"


def test_what_yaml_lets_pass_is_refused(write: Any) -> None:
    """Duplicate keys, keys that are not text, merge keys and tags."""
    text = f"{MODEL_YAML}device:\n  tokens: 1\n  tokens: 2\n1: x\n<<: {{a: 1}}\ncheck: !!set {{}}\n"
    found = problems(write(text))
    assert found["device.tokens"].message == "is written twice, first in line 3"
    assert (found["device.tokens"].line, found["device.tokens"].column) == (4, 3)
    with pytest.raises(ConfigError, match="a key must be text"):
        load(write(text))
    with pytest.raises(ConfigError, match="merge keys"):
        load(write(text))


@pytest.mark.parametrize("number", ["010", "016", "-07", "0_10", "1:30", "1:30:00", "190:20:30.15"])
def test_a_number_that_yaml_reads_otherwise_is_refused(write: Any, number: str) -> None:
    """`page_size: 010` would be 8, and a time limit of `1:30` 90; also in the environment, and
    where text was meant."""
    text = f"page_size: {number}\ndevice: {{tokens: {number}, max_pinned: {number}}}\n"
    found = problems(write(MODEL_YAML + text))
    assert {problem.line for problem in found.values()} == {2, 3}
    for key in ("page_size", "device.tokens", "device.max_pinned"):
        assert "another number" in found[key].message
    model = MODEL_YAML.replace("model: {", f"model: {{revision: {number}, ")
    assert "quotes" in str(problems(write(model))["model.revision"].suggestion)
    found = problems({"model": MODEL}, {"TIERED_CACHE_PAGE_SIZE": number})
    assert "another number" in found["page_size"].message


@pytest.mark.parametrize(
    ("number", "value"), [("0x10", 16), ("0b10000", 16), ("1_6", 16), ("+16", 16)]
)
def test_a_number_that_says_how_it_is_written_is_one(write: Any, number: str, value: int) -> None:
    """These cannot be misread."""
    assert load(write(f"{MODEL_YAML}page_size: {number}\n")).page_size == value


def test_exponential_aliases_are_refused(write: Any) -> None:
    """A file of a few lines cannot unfold to gigabytes."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]" for n in range(1, 12)]
    assert "without end" in problems(write("\n".join(lines)))[""].message


def test_plain_aliases_work(write: Any) -> None:
    """An anchor may be used twice, and both places are known."""
    model = "{dtype: float32, num_layers: 2, num_kv_heads: &n 2, head_dim: *n}"
    assert load(write(f"model: {model}\n")).model.head_dim == 2


# --- Secrets and the environment ----------------------------------------------------------------


def test_values_are_never_repeated(write: Any) -> None:
    """A value at the wrong place may be a password; messages name keys and types only."""
    secret = "hunter2"
    text = (
        f"{MODEL_YAML}password: {secret}\n"
        f"page_size: {secret}\n"
        f"device: {{size: {secret}, type: {secret}, eviction_policy: {secret}}}\n"
        f"check: {secret}\nmode: [{secret}]\n"
    )
    environ = {"TIERED_CACHE_TOKEN": secret, "TIERED_CACHE_RUN_THREADS": f"!{secret} x"}
    for source in (
        write(text),
        write(f"password: *{secret}\n"),
        write(f"page_size: !{secret} 1\n"),
    ):
        with pytest.raises(ConfigError) as caught:
            load(source, environ=environ)
        assert secret not in str(caught.value)
        assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_mistakes_in_the_environment_name_the_variable() -> None:
    """The place of such a setting is its variable."""
    environ = {
        "TIERED_CACHE_DEVICE__SZIE": "8GiB",
        "TIERED_CACHE_PAGE_SIZE": "sixteen",
        "TIERED_CACHE_RUN_THREADS": "[1",
    }
    found = problems({"model": MODEL}, environ)
    assert str(found["device.szie"]) == (
        "$TIERED_CACHE_DEVICE__SZIE: device.szie: unknown key (did you mean size?)"
    )
    assert found["page_size"].file == "$TIERED_CACHE_PAGE_SIZE"
    assert found["run_threads"].message.startswith("not valid YAML")


def test_mistakes_in_arguments_say_argument() -> None:
    """An override has no file, and does not borrow the line of what it replaced."""
    with pytest.raises(ConfigError, match=r"^argument: page_size: must be 1 or more$"):
        load({"model": MODEL, "page_size": 16}, {"page_size": 0})


# --- Details of single options ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        ("8GiB", 8 << 30),
        ("8GB", 8_000_000_000),
        ("1.5 KiB", 1536),
        ("2kB", 2000),
        ("3MB", 3_000_000),
        ("4TiB", 4 << 40),
        ("77B", 77),
        (1234, 1234),
    ],
)
def test_sizes(written: str | int, num_bytes: int) -> None:
    """Binary and decimal units are told apart, and a plain number is bytes."""
    assert load({"model": MODEL, "device": {"size": written}}).device.size == num_bytes


@pytest.mark.parametrize(("written", "mode"), [("on", "on"), ("off", "off"), ("'off'", "off")])
def test_mode_may_be_written_without_quotes(write: Any, written: str, mode: str) -> None:
    """YAML 1.1 reads `on` and `off` as booleans; here they are the words."""
    assert load(write(f"{MODEL_YAML}mode: {written}\n")).mode == mode


def test_a_problem_found_later_still_has_its_place(write: Any) -> None:
    """`Config.problem` remembers where a setting was written, or the section around it."""
    config = load(write(f"{MODEL_YAML}device:\n  size: 1KiB\n"))
    assert config.problem("device.size", "x").line == 3
    assert config.problem("device.tokens", "x").line == 2
