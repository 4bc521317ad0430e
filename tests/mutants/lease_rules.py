"""Mutants of leases, accounts, admission, claims, runs and life cycle: semantics §11 and §12."""

from __future__ import annotations

from typing import Final

from tests.mutants.model import Mutant

LEASE: Final = "tiered_cache/lease.py"
CONTROLLER: Final = "tiered_cache/controller.py"
PUBLISH: Final = "tiered_cache/publish.py"
ACCOUNTS: Final = "tiered_cache/accounts.py"
ADMISSION: Final = "tiered_cache/admission.py"
CLAIMS: Final = "tiered_cache/claims.py"
TABLE: Final = "tiered_cache/page_table.py"
JOBS: Final = "tiered_cache/jobs.py"
RULES: Final = "tests/test_lease_rules.py::"

MUTANTS: Final = [
    Mutant(
        id="lease-takes-the-whole-prompt",
        rule="§11.2",
        harm="nothing is left to compute, or the last token is applied twice: wrong bytes",
        file=LEASE,
        old="return self.prompt_len - 1 if self._controller.enabled else 0",
        new="return self.prompt_len if self._controller.enabled else 0",
        test=RULES + "test_a_wholly_cached_prompt_leaves_its_last_token_b08",
    ),
    Mutant(
        id="admission-forgets-what-a-prefix-pins",
        rule="§11.5",
        harm="more is promised than there is: growth within the reserve fails",
        file="tiered_cache/tree/radix.py",
        old="if component.would_protect(path, depth) > room[component.index]:",
        new="if room[component.index] < 0:",
        test=RULES + "test_pages_that_a_prefix_would_pin_count_in_admission",
    ),
    Mutant(
        id="a-window-that-several-hold-is-room-for-one",
        rule="§11.5",
        harm="more is promised than there is: growth within the reserve fails",
        file=ACCOUNTS,
        old="return spare - self.shared(index) if self._is_window[index] else spare",
        new="return spare",
        test="tests/test_found_by_schedules.py::test_a_window_that_two_hold_is_room_for_both",
    ),
    Mutant(
        id="a-request-holds-all-of-a-long-window",
        rule="§11.5",
        harm="it is promised as much less, and has no page to go on with",
        file="tiered_cache/tree/radix.py",
        old="                        path.insert(at + 1, self._split_node(node, depth))\n",
        new="                        pass\n",
        test="tests/test_found_by_schedules.py::test_a_window_is_held_without_what_is_above_it",
    ),
    Mutant(
        id="admission-promises-nothing",
        rule="§11.5",
        harm="others take what was promised: growth within the reserve fails",
        file=LEASE,
        old="        controller.accounts.promise(self._promised)\n",
        new="",
        test=RULES + "test_growth_within_the_reserve_cannot_fail",
    ),
    Mutant(
        id="a-promise-outlives-its-lease",
        rule="§11.7",
        harm="a leak: admission closes for the life of the process",
        file=LEASE,
        old="            controller.accounts.promise(-self._promised)",
        new="            pass",
        test=RULES + "test_a_thousand_grants_that_come_to_nothing_leak_nothing_b28",
    ),
    Mutant(
        id="growth-beyond-the-reserve-is-not-checked",
        rule="§11.5",
        harm="takes what was promised to another lease",
        file=LEASE,
        old="            self._controller.check_spare_of_base(fresh - unspent)",
        new="            pass",
        test=RULES + "test_beyond_the_reserve_there_is_room_or_a_capacity_error",
    ),
    Mutant(
        id="a-failed-run-counts-as-computed",
        rule="§11.1",
        harm="unwritten pages are published: wrong bytes",
        file=LEASE,
        old="if computed and chunk.start <= self._computed and not has_failed:",
        new="if chunk.start <= self._computed and not has_failed:",
        test=RULES + "test_a_run_that_raises_computes_nothing",
    ),
    Mutant(
        id="a-commit-does-not-wait-for-the-run",
        rule="§11.1",
        harm="the table changes under a running model: it writes into shared pages",
        file=LEASE,
        old="            self._deferred = max(self._deferred, stop)\n"
        "            return self.committed",
        new="            return self._publish(stop)",
        test=RULES + "test_a_commit_during_a_run_takes_effect_at_its_end",
    ),
    Mutant(
        id="the-table-keeps-duplicates",
        rule="§5.4",
        harm="reads and writes pages that have gone home: wrong bytes",
        file=PUBLISH,
        old="        request.table.write(first_changed // tree.page_size, canonical)\n",
        new="",
        test=RULES + "test_who_publishes_second_uses_the_first_ones_pages",
    ),
    Mutant(
        id="duplicates-are-kept",
        rule="§5.4",
        harm="a leak of each page that two requests computed",
        file=LEASE,
        old="            self._fences.give_back(duplicates)\n",
        new="",
        test=RULES + "test_who_publishes_second_uses_the_first_ones_pages",
    ),
    Mutant(
        id="closing-frees-pages-under-a-run",
        rule="§11.4",
        harm="an early free: the thread writes into another's pages",
        file=LEASE,
        old="        if not is_running:\n            self._release()\n",
        new="        self._release()\n",
        test=RULES + "test_a_cancelled_run_waits_for_its_thread_b96",
    ),
    Mutant(
        id="closing-keeps-the-lock",
        rule="§11.7",
        harm="a leak: the prefix can never be evicted",
        file=LEASE,
        old="            controller.tree.dec_lock_ref(receipt)\n",
        new="",
        test=RULES + "test_what_was_not_published_is_dropped_b09",
    ),
    Mutant(
        id="truncate-keeps-the-pages",
        rule="§11.7",
        harm="a leak of the pages of rejected drafts",
        file=LEASE,
        old=(
            "            self._fences.give_back(self.table.cut(keep))\n"
            "            self.settle_promise()"
        ),
        new="            self.table.cut(keep)\n            self.settle_promise()",
        test=RULES + "test_truncate_drops_rejected_drafts",
    ),
    Mutant(
        id="a-take-over-goes-backwards",
        rule="§11.3",
        harm="what was computed beyond the match is lost",
        file=LEASE,
        old="boundary.depth <= self._computed or not",
        new="boundary.depth <= self.committed or not",
        test=RULES + "test_what_is_computed_is_not_given_up_for_less",
    ),
    Mutant(
        id="a-take-over-keeps-its-own-pages",
        rule="§11.3",
        harm="a leak of the pages for tokens that others published",
        file=LEASE,
        old="        if superfluous:\n            self._fences.give_back(superfluous)\n",
        new="",
        test=RULES + "test_next_chunk_goes_on_from_what_others_have_published",
    ),
    Mutant(
        id="an-outdated-chunk-may-run",
        rule="§11.3",
        harm="the model writes into pages that others share: wrong bytes",
        file=LEASE,
        old="if chunk.start < self.committed:",
        new="if chunk.start < 0:",
        test=RULES + "test_a_chunk_from_before_a_take_over_is_refused",
    ),
    Mutant(
        id="a-claim-outlives-its-run",
        rule="§11.3",
        harm="who waits for a run that failed waits for ever",
        file=CLAIMS,
        old="            self._release_later(claim, GRACE_TURNS)",
        new="            pass",
        test=RULES + "test_a_run_that_ends_without_a_commit_wakes_who_waits",
    ),
    Mutant(
        id="the-queue-is-a-stack",
        rule="§11.5",
        harm="a large request starves",
        file=ADMISSION,
        old="insort(self._turns, turn, key=itemgetter(0))",
        new="self._turns.insert(0, turn)",
        test=RULES + "test_admission_is_in_order_of_arrival",
    ),
    Mutant(
        id="who-leaves-the-queue-wakes-nobody",
        rule="§11.5",
        harm="a hang: the next in the queue never looks",
        file=ADMISSION,
        old="            self._turns.remove(turn)\n            self.look_again()",
        new="            self._turns.remove(turn)",
        test=RULES + "test_admission_is_in_order_of_arrival",
    ),
    Mutant(
        id="a-reset-frees-what-leases-hold",
        rule="§12.1",
        harm="an early free: a model thread writes into the next owner's pages",
        file=ACCOUNTS,
        old="                refs[ids[ids != NO_PAGE]] += 1",
        new="                pass",
        test=RULES + "test_a_reset_quarantines_what_leases_hold_b93",
    ),
    Mutant(
        id="stale-pages-come-back-once-for-each-holder",
        rule="§12.1",
        harm="an early free, twice",
        file=ACCOUNTS,
        old="allocator.free(ids[refs[ids] == 0])",
        new="allocator.free(ids)",
        test=RULES + "test_a_reset_quarantines_what_leases_hold_b93",
    ),
    Mutant(
        id="slots-start-at-the-page",
        rule="§11.8",
        harm="wrong bytes: reads and writes other tokens' rows",
        file=TABLE,
        old="        offset = start % size",
        new="        offset = 0",
        test=RULES + "test_slots_and_tables_say_the_same",
    ),
    Mutant(
        id="a-cancelled-run-leaves-its-thread",
        rule="§11.4",
        harm="an early free under the thread",
        file=JOBS,
        old="            await _settled(waiter, given_up)\n        raise",
        new="            pass\n        raise",
        test=RULES + "test_a_cancelled_run_waits_for_its_thread_b96",
    ),
    Mutant(
        id="drain-does-not-see-quarantines",
        rule="§12.2",
        harm="buffers are taken away under a thread",
        file=CONTROLLER,
        old="            self._ending[lease.id] = lease",
        new="            pass",
        test=RULES + "test_a_cancelled_run_waits_for_its_thread_b96",
    ),
]
