"""`python -m tests.mutants [--sample N --seed COMMIT | --all | --only ID ...]`.

Exit code 0 when every mutant tried was killed.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections.abc import Sequence

from tests.mutants.model import REPO, all_mutants
from tests.mutants.runner import run_mutants


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--all", action="store_true", help="try every mutant (the default)")
    parser.add_argument("--sample", type=int, metavar="N", help="try N of them")
    parser.add_argument("--seed", help="what chooses the sample; default: the commit checked out")
    parser.add_argument("--only", nargs="+", metavar="ID", help="try these")
    parser.add_argument("--verbose", action="store_true", help="show what the tests said")
    options = parser.parse_args(arguments)

    mutants = all_mutants()
    if options.only:
        mutants = [mutant for mutant in mutants if mutant.id in options.only]
    elif options.sample is not None and not options.all:
        chosen = random.Random(options.seed or commit())
        mutants = chosen.sample(mutants, min(options.sample, len(mutants)))
    failed = []
    for count, outcome in enumerate(run_mutants(mutants), 1):
        mutant = outcome.mutant
        sys.stdout.write(
            f"[{count}/{len(mutants)}] {outcome.verdict}: {mutant.id} ({mutant.rule}), "
            f"{outcome.seconds:.1f} s\n"
        )
        if not outcome.ok or options.verbose:
            sys.stdout.write(outcome.log)
        sys.stdout.flush()
        if not outcome.ok:
            failed.append(mutant.id)
    sys.stdout.write(
        f"{len(mutants) - len(failed)} of {len(mutants)} killed"
        + (f"; left: {', '.join(failed)}\n" if failed else "\n")
    )
    return 1 if failed else 0


def commit() -> str:
    """The commit that is checked out, or a constant where there is no git."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=REPO, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "no commit"
    return head.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
