"""What the documents say is so: links lead somewhere, keys are described, versions are pinned."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tiered_cache.config.problems import SECTIONS

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link names a file or folder of the repository."""
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_excerpts_are_from_the_example() -> None:
    """What the page about backends quotes stands in the file that is run."""
    text = (ROOT / "docs" / "backends" / "writing-a-backend.md").read_text()
    example = (ROOT / "examples" / "custom_backend.py").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    quoted = [block for block in blocks if block in example]
    assert len(quoted) == 3
    for block in set(blocks) - set(quoted):
        assert "from tiered_cache" in block, "either an excerpt, or with its imports"


def test_every_setting_is_described() -> None:
    """The page about configuration knows each key of the schema."""
    text = (ROOT / "docs" / "configuration.md").read_text()
    for section in SECTIONS.values():
        for key in section.model_fields:
            assert re.search(rf"\b{key}\b", text), key


def test_every_dependency_is_pinned_for_development() -> None:
    """A fresh environment is the one that CI had. Optional backends are not installed by it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = project["optional-dependencies"]
    wanted = project["dependencies"] + groups["transformers"] + groups["demo"] + groups["dev"]
    names = {re.split(r"[\[>=<]", requirement)[0].lower() for requirement in wanted}
    pins = (ROOT / "constraints-dev.txt").read_text().lower()
    assert names - {"tiered-cache"} <= set(re.findall(r"^([a-z0-9_.-]+)==", pins, re.MULTILINE))


def test_the_makefile_stays_short() -> None:
    """Set-up that needs more lines than this needs thought instead."""
    assert len((ROOT / "Makefile").read_text().splitlines()) < 40
