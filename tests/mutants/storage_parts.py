"""Mutants of windows and states in the third tier: semantics §10.4-5, §10.7, §10.10 and §8.4."""

from __future__ import annotations

from typing import Final

from tests.mutants.model import Mutant

PREFETCH: Final = "tiered_cache/prefetch_parts.py"
BACKUP: Final = "tiered_cache/backup_parts.py"
IO: Final = "tiered_cache/storage_io.py"
RADIX: Final = "tiered_cache/tree/radix.py"
SWA: Final = "tiered_cache/tree/components/swa.py"
TESTS: Final = "tests/storage/test_hybrid_storage.py::"
FOUND: Final = "tests/test_found_by_schedules.py::"
CASES: Final = "tests/cases/test_cases_prefetch.py::"
RANKS: Final = "tests/cases/test_cases_ranks.py::"

MUTANTS: Final = [
    # --- what is kept -----------------------------------------------------------------------------
    Mutant(
        id="a-part-is-written-before-its-base",
        rule="§10.4",
        harm="storage fills with what nobody can reach",
        file=BACKUP,
        old="        if node.data[BASE].stored:\n",
        new="        if True:\n",
        test=TESTS + "test_no_part_without_its_base",
    ),
    Mutant(
        id="a-part-of-a-stored-base-is-not-noticed",
        rule="§10.4",
        harm="a window that was refused once is never kept",
        file=BACKUP,
        old="                return [node, *ends]\n",
        new="                return ends\n",
        test=TESTS + "test_a_refused_part_keeps_none_of_the_others",
    ),
    Mutant(
        id="a-part-that-is-written-is-not-held",
        rule="§6.4",
        harm="wrong bytes are kept: the host gives rows up while storage reads them",
        file=BACKUP,
        old="                call = self._write(index, receipt,",
        new=(
            "                component.release_component_lock(\n"
            "                    receipt.node, receipt.tier, receipt.parts[index]\n"
            "                )\n"
            "                receipt.parts[index] = None\n"
            "                call = self._write(index, receipt,"
        ),
        test=TESTS + "test_what_is_written_stays_where_it_is",
    ),
    Mutant(
        id="a-boundary-that-does-not-come-keeps-its-room",
        rule="§10.5",
        harm="a short read falls back to nothing, where the quota is one window",
        file=PREFETCH,
        old="            self._count_again(prefetch)\n",
        new="            pass\n",
        test=FOUND + "test_a_boundary_that_does_not_come_leaves_room_for_the_next",
    ),
    Mutant(
        id="a-prefetch-holds-what-is-in-reach-alone",
        rule="§6.4",
        harm="room for the beginning of a prompt is made by giving up its end",
        file=PREFETCH,
        old="tree.known_boundary(prefetch.key, parts.goal)\n",
        new="tree.base_boundary(prefetch.key, parts.goal)\n",
        test=FOUND + "test_a_prefetch_keeps_what_the_host_has_below_what_is_missing",
    ),
    Mutant(
        id="what-is-there-takes-of-the-quota-again",
        rule="§10.7",
        harm="a prefix of which half is there comes to half of what there is room for",
        file=PREFETCH,
        old="lacking = np.flatnonzero(~self._tree.presence(prefetch.key, parts.goal)[BASE])",
        new="lacking = np.arange(parts.goal // size)",
        test=FOUND + "test_a_prefetch_keeps_what_the_host_has_below_what_is_missing",
    ),
    Mutant(
        id="rows-that-storage-reads-are-given-to-others",
        rule="§9.3",
        harm="wrong bytes are kept: the device gives a base up, and what hangs on it goes home",
        file="tiered_cache/accounts.py",
        old="        if any(lent is not None for lent in self._lent):\n",
        new="        if False:\n",
        test=FOUND + "test_rows_that_storage_reads_are_quiet_when_the_device_gives_up_their_base",
    ),
    Mutant(
        id="a-part-that-is-written-is-not-believed",
        rule="§8.4",
        harm="every use of a prompt writes its windows and states again",
        file=RADIX,
        old="            self.believe_stored(node, component, True)\n            return\n",
        new="            return\n",
        test=TESTS + "test_nothing_is_written_twice",
    ),
    Mutant(
        id="what-is-wrong-of-one-component-is-wrong-of-all",
        rule="§10.3",
        harm="a spoilt window makes a miss of the base, and is not replaced itself",
        file=IO,
        old="            self._suspects[component, key] = is_wrong\n",
        new="            self._suspects[0, key] = is_wrong\n",
        test=TESTS + "test_a_corrupt_part_is_replaced_and_its_base_is_not",
    ),
    # --- what comes -------------------------------------------------------------------------------
    Mutant(
        id="a-window-a-page-too-short-is-enough",
        rule="§10.5",
        harm="a boundary is gone for that nobody can use",
        file=SWA,
        old="        tops = np.maximum(0, ends - self.window) // size",
        new="        tops = np.maximum(0, ends - self.window + size) // size",
        test=TESTS + "test_any_loss_against_the_rule_by_tokens",
    ),
    Mutant(
        id="the-very-prompt-gets-nothing",
        rule="§10.5",
        harm="a prompt of whole pages that storage has is a miss (B23)",
        file=PREFETCH,
        old="        for most in (prefetch.length, prefetch.key.num_tokens - 1):\n",
        new="        for most in (prefetch.length,):\n",
        test=CASES + "test_b23_what_a_prefetch_brings_is_what_a_match_can_use",
    ),
    Mutant(
        id="the-base-is-not-held-until-the-rest-has-come",
        rule="§10.5",
        harm="the base goes while its window is read, and all was in vain",
        file=PREFETCH,
        old="tree.known_boundary(prefetch.key, parts.goal)\n",
        new="tree.known_boundary(prefetch.key, 0)\n",
        test=CASES + "test_b55_a_time_limit_holds_while_a_window_or_a_state_is_pending",
    ),
    Mutant(
        id="a-base-in-vain-is-held",
        rule="§10.5",
        harm="after a failed read of a window, the host keeps its base for nobody",
        file=PREFETCH,
        old="        if prefetch.parts is not None and prefetch.parts.goal > prefetch.reached:\n",
        new="        if False:\n",
        test=CASES + "test_b55_a_time_limit_holds_while_a_window_or_a_state_is_pending",
    ),
    Mutant(
        id="a-result-is-let-go-in-part",
        rule="§10.7",
        harm="untaken results hold the host for ever",
        file=PREFETCH,
        old="        self._let_go_of_ground(prefetch)\n        super()._let_go(prefetch)\n",
        new="        super()._let_go(prefetch)\n",
        test=TESTS + "test_it_ends_when_nobody_waits",
    ),
    Mutant(
        id="a-window-may-have-no-room",
        rule="§10.7",
        harm="where the host has few windows, storage has them for nobody",
        file=PREFETCH,
        old="max(self._quotas[component.index], least)",
        new="self._quotas[component.index]",
        test=TESTS + "test_a_window_always_has_room",
    ),
    Mutant(
        id="a-lost-part-is-believed-to-be-there",
        rule="§8.4",
        harm="a window that storage has lost is never written again",
        file=PREFETCH,
        old="            self._tree.disbelieve(prefetch.key, index, lost)\n",
        new="            pass\n",
        test=TESTS + "test_beliefs_are_put_right_by_component",
    ),
    Mutant(
        id="a-corrupt-part-is-believed-to-be-right",
        rule="§8.4",
        harm="a window that storage has wrong is never written again",
        file=PREFETCH,
        old="in results if result is not ReadResult.READ]\n",
        new="in results if not result]\n",
        test=TESTS + "test_a_part_that_a_read_finds_wrong_is_written_again",
    ),
    Mutant(
        id="each-rank-goes-for-its-own-boundary",
        rule="§10.10",
        harm="ranks hold different prefixes",
        file=PREFETCH,
        old="if depth <= parts.most and (parts.common",
        new="if depth <= parts.most or (parts.common",
        test=RANKS + "test_b91_windows_and_states_that_storage_has_on_one_rank",
    ),
]
