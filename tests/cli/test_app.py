"""The command prints what it is asked for; what the user can mend ends with 2, not a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tiered_cache.cli import plan

MODEL = (
    "model: {dtype: bfloat16, num_layers: 2, num_kv_heads: 3, head_dim: 64, "
    "id: some/model, revision: r7}\n"
)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "cache.yaml"
        path.write_text(text)
        return path

    return write


def test_check_says_fine(run: Any, write: Any) -> None:
    """A good file is one line."""
    path = write(f"{MODEL}device: {{tokens: 1024}}\n")
    assert run("check", path) == (0, f"{path}: fine\n", "")


def test_check_warns_of_what_is_allowed_but_odd(run: Any, write: Any) -> None:
    """A warning is no error: the exit code stays 0."""
    code, out, _ = run("check", write(f"{MODEL}device: {{tokens: 31}}\nmode: off\ncheck: true\n"))
    assert code == 0
    assert "a single page" in out
    assert "16 tokens are used" in out
    assert "mode is off" in out
    assert "check is on" in out
    _, out, _ = run("check", write(MODEL))
    assert "open needs device_pools" in out


@pytest.mark.parametrize("command", ["check", "plan"])
def test_a_bad_file_is_explained_on_standard_error(run: Any, write: Any, command: str) -> None:
    """All problems, one a line, with their places; brackets and all; exit code 2."""
    path = write(f"{MODEL}page_size: [1]\ndevice: {{size: 8GG}}\nrun_thread: 1\n")
    code, out, err = run(command, path)
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        f"{path}:2:12: page_size: must be a whole number, not a list",
        f"{path}:3:16: device.size: is not a size (write 8GiB, 8GB or a number of bytes)",
        f"{path}:4:1: run_thread: unknown key (did you mean run_threads?)",
    ]
    assert "Traceback" not in err


def test_a_budget_that_is_too_small_is_explained_too(run: Any, write: Any) -> None:
    """What shows only after the model is known ends the same way."""
    code, _, err = run("check", write(f"{MODEL}device: {{size: 1kB}}\n"))
    assert code == 2
    assert "cache.yaml:2:16: device.size: is too small for one page" in err


def test_a_missing_file_is_explained(run: Any, tmp_path: Path) -> None:
    """No stack of calls for a typing mistake."""
    code, _, err = run("check", tmp_path / "none.yaml")
    assert (code, err) == (2, f"{tmp_path / 'none.yaml'}: there is no such file\n")


def test_plan_shows_pools_tiers_and_rows(run: Any, write: Any) -> None:
    """The numbers of a small model, by hand."""
    path = write(f"{MODEL}device: {{tokens: 1024}}\n")
    code, out, err = run("plan", path)
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "some/model @ r7: 2 layers, bfloat16, pages of 16 tokens." in lines
    assert "full/k 3×64 bfloat16 a share 2 768 12,288" in lines
    assert "all 1,536 24,576" in lines
    assert "device cpu full 64 1,024 1.5 MiB" in lines
    assert "full 4 6,144 512 24,576 3,584 28,672 14.3%" in lines


def test_plan_shows_the_host_tier(run: Any, write: Any) -> None:
    """Rows of 28,672 bytes for pages of 24,576; together with the device that is what is taken."""
    path = write(f"{MODEL}device: {{tokens: 1024}}\nhost: {{size: 4MiB}}\n")
    code, out, err = run("plan", path)
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "host memory full 146 2,336 3.992 MiB" in lines
    assert "all 5.492 MiB" in lines
    assert "Rows in bytes (how a page lies in the host tier)" in lines
    assert "warning" not in out
    _, out, _ = run("plan", write(f"{MODEL}host: {{size: 4MiB}}\n"))
    assert "3.992 MiB" in out
    assert "all  " not in out.partition("Tiers")[2]  # the caller's tensors are not counted


def test_plan_shows_each_component(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pools, its window, its ids on each tier; a state stands for no number of tokens."""
    monkeypatch.setattr(plan, "available_bytes", lambda: None)
    code, out, err = run("plan", Path(__file__).parents[2] / "configs" / "mamba_swa.yaml")
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for line in (
        "full/k 5×64 bfloat16 a share 3 1,920 61,440",
        "all of full 3,840 122,880",
        "swa.k 5×64 bfloat16 a share 14 8,960 286,720",
        "mamba/temporal 3200×16 float32 a share 32 6,553,600",
        "all of mamba a state 7,372,800",
        "device cpu full 939 30,048 110 MiB",
        "device cpu swa, window 1,024 469 15,008 256.5 MiB",
        "device cpu mamba 93 states 653.9 MiB",
        "host memory mamba 372 states 2.556 GiB",
        "mamba 64 ≤ 204,800 512 7,372,800 3,584 7,376,896 0.1%",
    ):
        assert line in lines, line


def test_warnings_about_the_host_tier(run: Any, write: Any) -> None:
    """Sizes that make it useless, and a page size that wastes it."""
    path = write(
        "model: {dtype: int8, num_layers: 1, num_kv_heads: 1, head_dim: 4}\n"
        "device: {tokens: 1024}\nhost: {tokens: 100, load_back_threshold: 97}\n"
    )
    for command in ("check", "plan"):
        code, out, _ = run(command, path)
        assert code == 0
        assert [line for line in out.splitlines() if line.startswith("warning")] == [
            "warning: host.tokens is not a multiple of page_size: 96 tokens are used",
            "warning: host holds 96 tokens, fewer than the device (1,024): what the device evicts "
            "would not fit",
            "warning: host.load_back_threshold is 97, but no hit is longer than 96 tokens: nothing "
            "would be loaded back",
            "warning: 97% of the host tier would hold no state but the header room and padding of "
            "its rows: a larger page_size wastes less",
        ]


STORED = f"{MODEL}device: {{tokens: 64}}\nhost: {{tokens: 1024}}\nstorage: {{backend: memory%s}}\n"


def test_check_and_plan_of_storage(run: Any, write: Any) -> None:
    """Which backend; how much it keeps is for its options to say. An object is a row."""
    path = write(STORED % "")
    assert run("check", path) == (0, f"{path}: fine\n", "")
    code, out, err = run("plan", path)
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "storage memory full as its options say" in lines
    assert "Rows in bytes (how a page lies in the host tier, and in storage)" in lines


def test_check_says_what_the_backend_says_of_its_options(run: Any, write: Any) -> None:
    """With the place, as for every other key; the value is not repeated."""
    path = write(STORED % ", options: {max_size: hunter2, pth: hunter2}")
    code, out, err = run("check", path)
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        f"{path}:4:48: storage.options.max_size: must be a whole number, not text",
        f"{path}:4:57: storage.options.pth: unknown key (the keys here are max_size)",
    ]


def test_warnings_about_storage(run: Any, write: Any) -> None:
    """Settings that contradict each other, though each is fine."""
    path = write(
        STORED % ", timeout: 0.5, prefetch: {threshold: 513}, backup: {max_pending: 28671}"
    )
    _, out, _ = run("check", path)
    assert out.splitlines()[:-1] == [
        "warning: storage.prefetch.threshold is 513, but prefetches may take half of the host tier "
        "(512 tokens): nothing would be read",
        "warning: storage.backup.max_pending is 28,671, less than a row (28,672 bytes): rows are "
        "written one by one",
        "warning: storage.breaker.slow is 1, not less than storage.timeout (0.5): a call that "
        "takes so long has failed",
    ]


def test_plan_warns_of_a_host_tier_that_this_machine_cannot_hold(
    run: Any, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine may: no error here, and `check` says nothing."""
    monkeypatch.setattr(plan, "available_bytes", lambda: 1_000_000)
    path = write(f"{MODEL}device: {{tokens: 16}}\nhost: {{tokens: 1024}}\n")
    code, out, _ = run("plan", path)
    assert code == 0
    assert out.splitlines()[-1] == (
        f"warning: on this machine: {path}:3:16: host.tokens: the host tier takes 1,835,008 bytes, "
        "and the device tier 24,576 beside it; 1,000,000 are left (write at most tokens: 544)"
    )
    assert "warning: on" not in run("check", path)[1]


def test_plan_fits_into_eighty_columns(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is cut: the numbers are the point."""
    monkeypatch.setattr(plan, "available_bytes", lambda: None)
    for path in sorted((Path(__file__).parents[2] / "configs").glob("*.yaml")):
        _, out, _ = run("plan", path)
        assert "…" not in out
        assert max(len(line.rstrip()) for line in out.splitlines()) <= 80


def test_plan_of_a_pool_in_parts_of_a_byte_per_token(run: Any, write: Any) -> None:
    """Compressed state can come to less than a byte for a token."""
    extra = "{name: c, num_layers: 1, row_shape: [2], dtype: uint8, tokens_per_row: 4}"
    path = write(MODEL.replace("}", f", extra_pools: [{extra}]}}", 1))
    _, out, _ = run("plan", path)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "full/c 2 uint8 a share 1 0.5 8" in lines
    assert "device cpu full as in device_pools" in lines


def test_the_other_commands_do_not_import_the_demos_packages() -> None:
    """`check` answers at once, and where the extra is not installed."""
    script = (
        "import sys, tiered_cache.cli.app; "
        "assert not {'transformers', 'matplotlib', 'gguf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
