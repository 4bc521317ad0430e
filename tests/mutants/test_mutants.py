"""The mutants are current, and a sample of them, chosen by the commit, is killed."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.mutants.model import REPO, Mutant, all_mutants

MUTANTS = all_mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_a_mutant_applies_compiles_and_names_a_test(mutant: Mutant) -> None:
    """Each mutant's snippet occurs once, the result is Python, and its test exists."""
    broken = mutant.apply((REPO / mutant.file).read_text())
    compile(broken, mutant.file, "exec")
    file, _, test = mutant.test.partition("::")
    name = re.escape(test.split("::")[-1].split("[")[0])
    assert re.search(rf"\bdef {name}\(", (REPO / file).read_text()), mutant.test
    assert re.match(r"§\d+(\.\d+)?", mutant.rule), mutant.rule


def test_ids_are_unique() -> None:
    """A report names one mutant by its id."""
    assert len({mutant.id for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.timeout(180)
def test_a_sample_is_killed() -> None:
    """Eight mutants, other ones with every commit, each make their test fail."""
    run_tool("--sample", "8")


@pytest.mark.soak
def test_all_are_killed() -> None:
    """Every mutant makes its test fail."""
    run_tool("--all")


def run_tool(*arguments: str) -> None:
    tool = [sys.executable, "-m", "tests.mutants", *arguments]
    done = subprocess.run(tool, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
