"""The doctor measures real parts, leaves nothing behind, and says what ails them and what to do."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiered_cache.cli import _doctor_probe, doctor
from tiered_cache.cli.doctor import Source
from tiered_cache.errors import BackendError
from tiered_cache.storage import ReadResult, WriteResult
from tiered_cache.testing.faulty_backend import Fault, FaultyBackend, flipped
from tiered_cache_memory import Kept, MemoryBackend, MemoryOptions

MODEL = (
    "model: {id: a, revision: b, dtype: bfloat16, num_layers: 2, num_kv_heads: 3, head_dim: 64}\n"
)
TIERS = "device: {tokens: 512}\nhost: {tokens: 1024}\n"
STORAGE = "storage: {backend: memory, prefetch: {policy: wait_complete}}\n"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_doctor_probe, "PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(_doctor_probe, "BATCH_BYTES", 100_000)
    monkeypatch.setattr(_doctor_probe, "REPEAT", 2)


@pytest.fixture
def examine(run: Any, tmp_path: Path) -> Any:
    """Examines a configuration of this text; (exit code, standard output, standard error)."""
    path = tmp_path / "cache.yaml"

    def examine(text: str, *arguments: object) -> Any:
        path.write_text(text)
        return run("doctor", path, *arguments)

    return examine


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Kept]:
    """Lets the memory backend fail as told; what it keeps."""

    def storage(*faults: Fault, max_size: int | None = None) -> Kept:
        kept = Kept()

        async def open_one(options: Any, context: Any) -> Any:
            return FaultyBackend(MemoryBackend(max_size, kept), *faults)

        monkeypatch.setattr(MemoryBackend, "open", open_one)
        return kept

    return storage


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_all_tiers_are_measured_and_nothing_stays(
    examine: Any, storage: Callable[..., Kept]
) -> None:
    """One line for each way, figures in it; what was written has been removed."""
    kept = storage()
    code, out, err = examine(MODEL + TIERS + STORAGE)
    assert (code, err) == (0, "")
    shown = lines(out)
    assert shown[0] == "Speed, with 32 pages of 16 tokens"
    figures = r" [\d.,e+]+ ms [\d.,]+ GB/s [\d.,e+]+ ms"
    for name in (
        "device (cpu) → host",
        "host → device (cpu)",
        "host → storage (memory)",
        "storage (memory) → host",
    ):
        assert any(re.fullmatch(re.escape(name) + figures, line) for line in shown), name
    assert any(re.fullmatch(r"ask storage for a page [\d.,e+-]+ ms", line) for line in shown)
    assert sum("a model of" in line for line in shown) == 4
    assert shown[-1] == "Everything works."
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80
    assert kept.rows == {}


def test_a_configuration_of_two_tiers_and_of_one(examine: Any) -> None:
    """What is not there is not measured."""
    code, out, _ = examine(MODEL + TIERS)
    assert code == 0
    assert "host → device" in out
    assert "storage" not in out
    code, out, _ = examine(MODEL + "device: {tokens: 512}\n")
    assert code == 0
    assert lines(out) == [
        "One tier: there is nothing to move, and nothing to measure.",
        "Everything works.",
    ]


def test_the_probe_is_small_however_large_the_tiers_are(examine: Any) -> None:
    """Sized in bytes, and without a device budget too."""
    code, out, _ = examine(f"{MODEL}host: {{size: 1GiB}}\n{STORAGE}")
    assert code == 0
    assert "Speed, with 36 pages of 16 tokens" in out


def test_a_host_tier_that_this_machine_cannot_hold_is_a_problem(
    examine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`open` would refuse it; the rest is measured all the same."""
    monkeypatch.setattr(doctor, "available_bytes", lambda: 1_000_000)
    code, out, _ = examine(MODEL + TIERS)
    assert code == 1
    assert "host → device" in out
    assert "host.tokens: the host tier takes 1,835,008 bytes" in out
    assert "Everything works" not in out


# --- Storage that ails ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            Fault("write", error=BackendError("nobody listens at host:1")),
            "problem: nobody listens at host:1: see that storage is up",
        ),
        (
            Fault("read", error=OSError("redis://user:secret@host")),
            "problem: storage has failed: OSError: see that storage is up",
        ),
        (
            Fault("write", result=WriteResult.FAILED),
            "problem: 32 of 32 rows could not be written: see",
        ),
        (
            Fault("read", result=ReadResult.MISSING),
            "rows came back wrong (the first is missing): run `tiered-cache storage verify`",
        ),
        (
            Fault("read", change=flipped(600)),
            "rows came back wrong (the first does not match its checksum): run",
        ),
        (
            Fault("read", change=flipped(600), times=1),
            "problem: 1 of 66 rows came back wrong (the first",
        ),
        (
            Fault("contains", answer=lambda found: [True] * len(found)),
            "problem: storage still has what was deleted",
        ),
    ],
    ids=["writes", "reads", "no write", "missing", "corrupt", "one bit", "undead"],
)
def test_storage_that_ails_is_a_problem_with_what_to_do(
    examine: Any, storage: Callable[..., Kept], fault: Fault, words: str
) -> None:
    """Exit code 1; the host's figures are there; nothing stays behind, and no secret is shown."""
    kept = storage(fault)
    code, out, err = examine(MODEL + TIERS + STORAGE)
    assert (code, err) == (1, "")
    assert words in out
    assert "secret" not in out
    assert "host → device" in out
    assert kept.rows == {}


def test_storage_without_room_is_a_problem(examine: Any, storage: Callable[..., Kept]) -> None:
    """How many rows found none is said."""
    kept = storage(max_size=10 * 28_672)
    code, out, _ = examine(MODEL + TIERS + STORAGE)
    assert code == 1
    assert "problem: storage has no room for 22 of 32 rows: allow it more" in out
    assert kept.rows == {}


def test_storage_that_cannot_be_reached_is_a_problem(
    examine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing raises: the other figures are shown."""

    async def refuse(options: Any, context: Any) -> Any:
        raise BackendError("connection refused")

    monkeypatch.setattr(MemoryBackend, "open", refuse)
    code, out, _ = examine(MODEL + TIERS + STORAGE)
    assert code == 1
    assert "problem: connection refused: see that storage is up" in out
    assert "host → device" in out


def test_what_was_written_is_removed_after_an_interrupt(
    examine: Any, storage: Callable[..., Kept]
) -> None:
    """Ctrl-C in the middle of the writes."""

    def interrupt(answer: Any) -> Any:
        if len(answer) > 1 and len(kept.rows) > 5:
            signal.raise_signal(signal.SIGINT)
        return answer

    kept = storage(Fault("write", answer=interrupt))
    deleted = []
    storage_delete = MemoryBackend.delete

    async def noting(self: Any, keys: Any) -> None:
        deleted.append(len(kept.rows))
        await storage_delete(self, keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryBackend, "delete", noting)
        code, out, _ = examine(MODEL + TIERS + STORAGE)
    assert code != 0
    assert "GB/s" not in out
    assert deleted[-1] > 5
    assert kept.rows == {}


# --- What the figures mean ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first_s", "s_per_token", "tokens_per_second", "least"),
    [
        (0.0, 0.0, 1000, 16),
        (0.016, 0.0, 1000, 16),
        (0.017, 0.0, 1000, 32),
        (0.016, 0.0005, 1000, 32),
        (1.0, 0.0009, 1000, 10_000),
        (0.0, 0.001, 1000, None),
        (0.0, 0.002, 1000, None),
    ],
)
def test_from_where_a_load_beats_computing(
    first_s: float, s_per_token: float, tokens_per_second: float, least: int | None
) -> None:
    """Where n tokens take as long either way, in whole pages; never, if each takes longer."""
    source = Source("host", first_s, s_per_token)
    assert source.break_even(tokens_per_second, 16) == least


def test_thresholds_below_the_break_even_are_named(
    examine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the speed of the user's own model, with what to write."""
    sources = [Source("host", 0.032, 0.0), Source("storage", 0.6, 0.0001)]
    monkeypatch.setattr(doctor, "_sources", lambda measured: sources)
    code, out, _ = examine(MODEL + TIERS + STORAGE, "--tokens-per-second", 1000)
    assert code == 0
    assert "a model of 1,000 tokens/s 32 672" in lines(out)
    assert (
        "warning: host.load_back_threshold is 1, but your model computes fewer than 32 tokens "
        "sooner than host brings them: write 32"
    ) in lines(out)
    assert "warning: storage.prefetch.threshold is 256, but your model" in out
    code, out, _ = examine(MODEL + TIERS + STORAGE, "--tokens-per-second", 20_000)
    assert "storage is slower than your model" in out
    assert lines(out)[-1] == "Everything works."
    assert "warning" not in examine(MODEL + TIERS + STORAGE)[1]  # nobody knows the model's speed


def test_a_prefetch_limit_that_storage_cannot_keep_is_named(
    examine: Any, storage: Callable[..., Kept]
) -> None:
    """Long prefixes would come in part."""
    storage(Fault("read", delay=0.02))
    limited = STORAGE.replace("wait_complete", "timeout, timeout_per_ki_token: 0.001")
    _, out, _ = examine(MODEL + TIERS + limited)
    assert "storage.prefetch.timeout_per_ki_token allows 0.001" in out


def test_a_disk_that_is_smaller_than_what_storage_may_keep_is_named(
    examine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For backends that have a path and a limit; what they have taken already counts."""

    class OnDisk(MemoryOptions):
        path: str

    monkeypatch.setattr(MemoryBackend, "Options", OnDisk)
    path = f"{tmp_path}/not/yet"
    for size, is_named in ((512 << 40, True), (20_000_000, False)):
        options = f"options: {{path: {path}, max_size: {size}}}"
        text = MODEL + TIERS + STORAGE.replace("memory,", f"memory, {options},")
        _, out, _ = examine(text)
        assert ("storage may take 512 TiB more, and its disk has" in out) is is_named
