"""Mutants of windows and states: semantics §3 to §9, where the components beside the base keep
them."""

from __future__ import annotations

from typing import Final

from tests.mutants.model import Mutant

SWA: Final = "tiered_cache/tree/components/swa.py"
MAMBA: Final = "tiered_cache/tree/components/mamba.py"
SPARSE: Final = "tiered_cache/tree/components/sparse.py"
RADIX: Final = "tiered_cache/tree/radix.py"

SWA_TESTS: Final = "tests/tree/test_swa.py::"
MAMBA_TESTS: Final = "tests/tree/test_mamba.py::"
CASES: Final = "tests/cases/test_cases_hybrid.py::"
GROWTH: Final = "tests/test_hybrid_leases.py::test_growth_within_the_reserve_finds_its_windows"

MUTANTS: Final = [
    # --- windows ----------------------------------------------------------------------------------
    Mutant(
        id="a-window-is-counted-on-through-a-tombstone",
        rule="§3.4",
        harm="a prefix whose window has a hole: wrong bytes",
        file=SWA,
        old="count, end = at, node.start  #",
        new="count = at  #",
        test=SWA_TESTS + "test_the_length_starts_anew_at_each_tombstone",
    ),
    Mutant(
        id="a-prefix-shorter-than-its-window-is-none",
        rule="§3.4",
        harm="no short prompt is ever reused",
        file=SWA,
        old="return count  # up to the root",
        new="return count if end >= self.window else 0  # up to the root",
        test=SWA_TESTS + "test_a_path_without_a_tombstone_is_valid_though_it_is_short",
    ),
    Mutant(
        id="a-match-dates-the-windows-of-a-whole-path",
        rule="§3.6",
        harm="one hot long prompt pushes out all other windows",
        file=SWA,
        old="index, top = self.index, path[-1].end - self._dated",
        new="index, top = self.index, 0",
        test=SWA_TESTS + "test_a_match_dates_a_window_and_a_page",
    ),
    Mutant(
        id="a-split-keeps-window-locks-below",
        rule="§4",
        harm="the upper part of a held window is evicted under its holder",
        file=SWA,
        old="upper.lock_ref, upper.host_lock_ref = lower.lock_ref, lower.host_lock_ref",
        new="upper.lock_ref, upper.host_lock_ref = 0, 0",
        test=SWA_TESTS + "test_a_split_cuts_the_pages_and_copies_the_locks",
    ),
    Mutant(
        id="a-page-that-was-given-up-in-part-is-adopted",
        rule="§5.5",
        harm="a page of which tokens are gone is found by others: wrong bytes",
        file=SWA,
        old="return max(start, self._ceil(params.swa_evicted_seqlen), params.prev_prefix_len)",
        new="return max(start, self._floor(params.swa_evicted_seqlen), params.prev_prefix_len)",
        test=SWA_TESTS + "test_what_is_given_up_and_named_goes_home",
    ),
    Mutant(
        id="a-window-that-the-request-owned-is-adopted",
        rule="§5.5",
        harm="pages that were the tree's and have gone to others are cached again: wrong bytes",
        file=SWA,
        old="return max(start, self._ceil(params.swa_evicted_seqlen), params.prev_prefix_len)",
        new="return max(start, self._ceil(params.swa_evicted_seqlen))",
        test=SWA_TESTS + "test_what_the_request_owned_is_not_adopted",
    ),
    Mutant(
        id="a-window-is-cut-only-where-its-pages-begin",
        rule="§5.5",
        harm="pages in front of a gap belong to nobody: a leak",
        file=SWA,
        old="np.flatnonzero(there[1:] != there[:-1])",
        new="np.flatnonzero(there[1:] > there[:-1])",
        test=SWA_TESTS + "test_no_page_is_never_adopted",
    ),
    Mutant(
        id="window-pages-go-home-untold",
        rule="§5.5",
        harm="the request reads on from pages that are others' now: wrong bytes",
        file=SWA,
        old="result.first_changed = min(result.first_changed, first)",
        new="pass",
        test=SWA_TESTS + "test_pages_that_are_there_go_home",
    ),
    Mutant(
        id="the-tail-of-a-leaf-is-less-than-a-window",
        rule="§5.6",
        harm="a lock pins the whole prompt's window pages",
        file=SWA,
        old="self._whole_window = self._ceil(self.window)",
        new="self._whole_window = self._floor(self.window)",
        test=SWA_TESTS + "test_a_fresh_leaf_is_cut_for_its_windows",
    ),
    Mutant(
        id="a-window-lock-ends-at-a-tombstone",
        rule="§6.2",
        harm="what is computed again under a lock is evicted under its holder",
        file=SWA,
        old="            if node.end <= start:\n                break\n            self._hold(node",
        new=(
            "            if node.end <= start or node.data[self.index].value is None:\n"
            "                break\n            self._hold(node"
        ),
        test=SWA_TESTS + "test_tombstones_are_counted_by_a_lock",
    ),
    Mutant(
        id="a-window-is-released-by-its-length",
        rule="§6.2",
        harm="after a split a part stays locked for ever, or another's lock is released",
        file=SWA,
        old="current.parent is not None and current.end > part:",
        new="current.parent is not None and node.end - current.end < self.window:",
        test=SWA_TESTS + "test_a_cut_of_the_topmost_held_node_is_released_on_both_sides",
    ),
    Mutant(
        id="a-window-held-already-counts-against-admission",
        rule="§11.5",
        harm="prompts that share a prefix wait for room that they do not need",
        file=SWA,
        old="            if not node.data[self.index].lock_ref\n",
        new="",
        test=SWA_TESTS + "test_a_lock_keeps_one_window",
    ),
    Mutant(
        id="a-load-brings-windows-that-nobody-needs",
        rule="§9.7",
        harm="a long prompt's load evicts everybody's windows",
        file=SWA,
        old="if target is not DEVICE or not path:",
        new="if path:",
        test=SWA_TESTS + "test_a_load_is_for_the_last_window",
    ),
    Mutant(
        id="what-can-be-rolled-back-of-a-window-is-not-promised",
        rule="§11.5",
        harm="a request fails within its reserve",
        file="tiered_cache/lease_parts.py",
        old="self._most = min(num_pages, footprint + -(-rollback // self._size))",
        new="self._most = min(num_pages, footprint)",
        test=GROWTH + "[40-0-False-swa]",
    ),
    Mutant(
        id="a-prompt-s-end-is-kept-at-the-cost-of-what-comes",
        rule="§11.5",
        harm="a request fails within its reserve",
        file="tiered_cache/lease_parts.py",
        old="            if self._num_held + kept > self._most_behind:",
        new="            if False:",
        test=GROWTH + "[10-60-False-swa]",
    ),
    Mutant(
        id="two-windows-are-held-and-one-is-paid",
        rule="§11.5",
        harm="a request fails within its reserve",
        file=SWA,
        old="end - top > window + self.page_size else 0",
        new="end - top > 2 * window else 0",
        test=GROWTH + "[0-60-False-swa]",
    ),
    Mutant(
        id="a-load-brings-whole-nodes-of-a-window",
        rule="§9.1",
        harm="up to twice the pages are copied, and others are pushed out for them",
        file=RADIX,
        old="        if target is DEVICE and self._windows:",
        new="        if False:",
        test="tests/test_hybrid_leases.py::"
        "test_a_load_brings_a_window_and_no_more_of_the_nodes_it_is_in[swa]",
    ),
    # --- states -----------------------------------------------------------------------------------
    Mutant(
        id="a-state-serves-a-shorter-prefix",
        rule="§3.4",
        harm="the state of another depth: wrong bytes",
        file=MAMBA,
        old="if node.end == depth and self.has(node, device_only):",
        new="if self.has(node, device_only):",
        test=CASES + "test_b26_a_look_up_does_not_spoil_a_state",
    ),
    Mutant(
        id="a-split-takes-a-state-s-locks-up",
        rule="§4",
        harm="a node that has no state stays locked for ever",
        file=MAMBA,
        old='"""The state stays at its depth, and so do its locks: with the child (semantics §4)."""',  # noqa: E501
        new="parent.data[self.index].lock_ref = child.data[self.index].lock_ref",
        test=MAMBA_TESTS + "test_a_state_stays_with_the_child",
    ),
    Mutant(
        id="a-request-s-own-state-is-a-duplicate",
        rule="§5.7",
        harm="a slot is cached and free at once: wrong bytes",
        file=MAMBA,
        old="left = left[left != value[0]]",
        new="left = left[left != NO_PAGE]",
        test=MAMBA_TESTS + "test_one_s_own_state_is_no_duplicate",
    ),
    Mutant(
        id="a-taken-state-is-said-to-be-the-request-s",
        rule="§5.7",
        harm="the request gives back a slot that the tree has: wrong bytes",
        file=MAMBA,
        old="self._age_surplus(leaf)\n            result.mamba_exist = False",
        new="self._age_surplus(leaf)\n            result.mamba_exist = True",
        test=MAMBA_TESTS + "test_a_new_leaf_takes_the_slot",
    ),
    Mutant(
        id="the-prompt-s-end-is-cut-without-a-state",
        rule="§5.9",
        harm="nodes that nothing can end at",
        file=MAMBA,
        old="depth > 0 and bool(params.pages[self.index][depth // self.page_size - 1] != NO_PAGE)",
        new="depth > 0",
        test=MAMBA_TESTS + "test_the_prompt_s_end_is_a_boundary_where_a_state_stands",
    ),
    Mutant(
        id="a-lock-holds-the-topmost-state",
        rule="§6.2",
        harm="the state that a request goes on from is evicted under it",
        file=MAMBA,
        old="self._hold(path[0], tier)",
        new="self._hold(path[-1], tier)",
        test=MAMBA_TESTS + "test_a_lock_keeps_one_state",
    ),
    # --- both -------------------------------------------------------------------------------------
    Mutant(
        id="a-part-comes-without-its-base",
        rule="§2.2",
        harm="state that no match can reach fills the device",
        file=SPARSE,
        old="if is_there or not has_base:",
        new="if is_there:",
        test=SWA_TESTS + "test_a_commit_takes_nothing_where_the_base_is_not",
    ),
    Mutant(
        id="rows-of-a-window-make-a-node",
        rule="§5.11",
        harm="a node that stands for nothing, and rows that no match can reach",
        file=RADIX,
        old="complete = start if component == BASE else stop",
        new="complete = start",
        test=SWA_TESTS + "test_rows_of_a_window_need_their_base",
    ),
    Mutant(
        id="a-held-copy-stands-in-the-order",
        rule="§6.4",
        harm="rows that a transfer reads are handed out: wrong bytes",
        file=SPARSE,
        old="if data.host_value is not None and not data.host_lock_ref:",
        new="if data.host_value is not None:",
        test=SWA_TESTS + "test_on_the_host_what_is_held_stays",
    ),
    Mutant(
        id="a-locked-base-goes-with-its-window",
        rule="§7.2",
        harm="pages that a request computes with are handed out: wrong bytes",
        file=RADIX,
        old="if node.base.queue is self.leaves.device and self.evict_device_leaf(",
        new="if not node.device_children and self.evict_device_leaf(",
        test=CASES + "test_b15_a_locked_base_does_not_go_with_its_window_or_state",
    ),
    Mutant(
        id="a-state-outlives-its-window",
        rule="§1.2",
        harm="slots that no prefix can end at are kept, and useful ones go",
        file=RADIX,
        old="            if component.index < owner.index:\n                return\n",
        new="            if component is not owner:\n                continue\n",
        test=SWA_TESTS + "test_on_an_internal_node_it_takes_what_is_below_it",
    ),
    Mutant(
        id="the-only-copy-passes-for-a-mirror",
        rule="§8.3",
        harm="what was copied so that the device can let go is gone",
        file=SPARSE,
        old="            and (data.stored or self.mirrors_are_spare)\n",
        new="",
        test=SWA_TESTS + "test_a_mirror_that_nothing_else_has_stays",
    ),
    Mutant(
        id="mirrors-of-windows-go-last",
        rule="§8.3",
        harm="the host gives up what only it has, and keeps what the device has too",
        file=SPARSE,
        old="self.orders.first_mirror() or self._oldest(Tier.HOST)",
        new="self._oldest(Tier.HOST) or self.orders.first_mirror()",
        test=SWA_TESTS + "test_mirrors_go_first_whatever_is_below_them",
    ),
]
