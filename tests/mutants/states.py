"""Mutants of recurrent states: the slot that a lease works with, and what a path keeps (§9.10)."""

from __future__ import annotations

from typing import Final

from tests.mutants.model import Mutant

LEASE: Final = "tiered_cache/lease.py"
PARTS: Final = "tiered_cache/lease_parts.py"
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
]
