"""Mutants of recurrent states: the slot that a lease works with, and what a path keeps (§9.10)."""

from __future__ import annotations

from typing import Final

from tests.mutants.model import Mutant

LEASE: Final = "tiered_cache/lease.py"
PARTS: Final = "tiered_cache/lease_parts.py"
MAMBA: Final = "tiered_cache/tree/components/mamba.py"
SPARSE: Final = "tiered_cache/tree/components/sparse.py"
PATHS: Final = "tests/tree/test_states_per_path.py::"
SLOTS: Final = "tests/test_state_slots.py::"

MUTANTS: Final = [
    Mutant(
        id="no-state-is-ever-taken-over",
        rule="§9.10",
        harm="with as many slots as leases, a lease waits for ever for the state that it asks for",
        file=PARTS,
        old="return needed if self._accounts.spare(self.index) < needed else 0",
        new="return needed",
        test=SLOTS + "test_the_only_slot_is_taken_over_with_the_state_in_it",
    ),
    Mutant(
        id="a-state-is-promised-that-others-hold",
        rule="§11.5",
        harm="two leases work in one slot: wrong bytes",
        file=PARTS,
        old="return needed if self._accounts.spare(self.index) < needed else 0",
        new="return 0 if depth else needed",
        test=SLOTS + "test_a_state_that_another_lease_holds_is_not_taken",
    ),
    Mutant(
        id="a-state-that-was-taken-over-is-there-for-ever",
        rule="§9.10",
        harm="after a failed run a lease goes on from what that run has left: wrong bytes",
        file=PARTS,
        old="        self._origin, self._origin_depth = NO_PAGE, 0\n",
        new="        self._origin, self._origin_depth = slot, depth\n",
        test=SLOTS + "test_a_lease_whose_taken_state_is_void_begins_again",
    ),
    Mutant(
        id="a-lease-begins-again-under-a-run",
        rule="§11.4",
        harm="its pages are given to others while a run may be touching them",
        file=LEASE,
        old="        while self._num_runs or self._fences:\n",
        new="        while self._fences:\n",
        test=SLOTS + "test_one_that_begins_again_waits_for_its_place",
    ),
    Mutant(
        id="what-had-no-slot-is-lost",
        rule="§9.10",
        harm="where leases work in all slots, nothing is ever cached",
        file=LEASE,
        old="        if self._skipped and self.epoch == controller.epoch:\n",
        new="        if False:\n",
        test=SLOTS + "test_what_no_slot_was_free_for_is_published_at_the_end",
    ),
    Mutant(
        id="rejected-drafts-are-published-at-the-end",
        rule="§11.7",
        harm="tokens are cached that the request has taken back",
        file=LEASE,
        old="        self._skipped = min(self._skipped, length)\n",
        new="",
        test=SLOTS + "test_what_is_truncated_is_not_published_at_the_end",
    ),
    # --- what a path keeps ------------------------------------------------------------------------
    Mutant(
        id="a-path-keeps-all-its-states",
        rule="§9.10",
        harm="one long prompt pushes out the states of all others",
        file=MAMBA,
        old="            node.data[index].stamp -= SURPLUS\n",
        new="",
        test=PATHS + "test_what_a_path_can_do_without_goes_before_the_oldest",
    ),
    Mutant(
        id="the-first-state-of-a-path-is-surplus",
        rule="§9.10",
        harm="what many prompts begin with is computed again",
        file=MAMBA,
        old="        if not found:\n            return False\n        is_between",
        new="        is_between",
        test=PATHS + "test_the_first_that_is_left_is_kept",
    ),
    Mutant(
        id="forks-are-surplus",
        rule="§9.10",
        harm="where paths fork the state goes first, which all of them go on from",
        file=MAMBA,
        old="                    return False  # there is none between it and the fork\n",
        new="                    pass\n",
        test=PATHS + "test_states_where_paths_fork_are_kept",
    ),
    Mutant(
        id="a-fork-is-one-of-the-others",
        rule="§9.10",
        harm="a path keeps fewer states than it should",
        file=MAMBA,
        old="num_others += is_other and is_between",
        new="num_others += is_other",
        test=PATHS + "test_a_fork_is_none_of_the_others",
    ),
    Mutant(
        id="surplus-once-is-surplus-for-ever",
        rule="§9.10",
        harm="when the end of a path has gone, the last state goes first",
        file=MAMBA,
        old="stamp < 0 and not self._can_spare(node):",
        new="stamp < 0 and False:",
        test=PATHS + "test_what_is_left_of_a_path_is_looked_at_again",
    ),
    Mutant(
        id="the-deepest-states-are-kept",
        rule="§9.10",
        harm="who forks in the middle of a long prompt finds its beginning alone",
        file=MAMBA,
        old="at = others[len(gaps) - 1 - gaps[::-1].index(min(gaps))]",
        new="at = others[-1]",
        test=PATHS + "test_what_a_path_can_do_without_goes_before_the_oldest",
    ),
    Mutant(
        id="a-held-state-is-one-of-the-others",
        rule="§9.10",
        harm="a pin costs a path a state that it should keep",
        file=MAMBA,
        old="is_other, is_between = data.stamp >= 0 and not _is_held(data), True",
        new="is_other, is_between = data.stamp >= 0, True",
        test=PATHS + "test_a_state_that_is_held_is_kept",
    ),
    Mutant(
        id="a-surplus-mirror-is-in-no-order",
        rule="§2.5",
        harm="a host copy that could be spared is never given up",
        file=SPARSE,
        old="is_listed = data.mirror_rank != -1",
        new="is_listed = data.mirror_rank >= 0",
        test=PATHS + "test_a_mirror_of_one_is_found_again",
    ),
]
