"""Mutants of transfers, loads, stores, layers and fences: semantics §9, with §5.12, §6.4, §7.3,
§8.3 and §12 where they are kept there."""

from __future__ import annotations

from typing import Final

from tests.mutants.model import Mutant

TRANSFERS: Final = "tiered_cache/transfers.py"
MOVER: Final = "tiered_cache/transfer/mover.py"
FULL: Final = "tiered_cache/tree/components/full.py"
RADIX: Final = "tiered_cache/tree/radix.py"
PREFIX: Final = "tiered_cache/prefix_load.py"
POLICIES: Final = "tiered_cache/write_policies.py"
LEASE: Final = "tiered_cache/lease.py"
CONTROLLER: Final = "tiered_cache/controller.py"
LAYERS: Final = "tiered_cache/layers.py"
LEAVES: Final = "tiered_cache/tree/leaves.py"
TESTS: Final = "tests/test_transfers.py::"
LOAD_BACK: Final = "tests/test_load_back.py::"
POLICY_TESTS: Final = "tests/test_write_policies.py::"
LAYER_TESTS: Final = "tests/test_layers.py::"
FOUND: Final = "tests/test_found_by_schedules.py::"
FENCES: Final = "tiered_cache/fences.py"
LEASE_PARTS: Final = "tiered_cache/lease_parts.py"
WINDOW_TESTS: Final = "tests/test_window_fences.py::"
FENCE_TESTS: Final = "tests/test_fences.py::"
ACCOUNT_TESTS: Final = "tests/test_accounts.py::"
FOUND: Final = "tests/test_found_by_schedules.py::"
MOVER_TESTS: Final = "tests/transfer/test_mover.py::"

MUTANTS: Final = [
    Mutant(
        id="a-transfer-is-published-when-it-is-submitted",
        rule="§9.2",
        harm="readers get pages whose bytes are still coming: wrong bytes",
        file=TRANSFERS,
        old="        self._active[transfer] = None\n        on_job",
        new=(
            "        self._active[transfer] = None\n"
            "        boundary = Boundary(transfer.node, transfer.depth)\n"
            "        self._tree.commit_transfer(\n"
            "            boundary, transfer.component, transfer.target, transfer.target_ids\n"
            "        )\n"
            "        on_job"
        ),
        test=LOAD_BACK + "test_a_load_is_seen_only_when_its_bytes_are_there",
    ),
    Mutant(
        id="a-cancelled-copy-ends-before-its-thread",
        rule="§9.3",
        harm="an early free: the thread writes into another's pages",
        file=MOVER,
        old="if not (batch.running or batch.has_more or batch.is_quiet):",
        new="if not (batch.has_more or batch.is_quiet):",
        test=LOAD_BACK + "test_pages_are_not_given_away_under_a_running_copy",
    ),
    Mutant(
        id="a-batch-ends-while-another-job-of-it-runs",
        rule="§9.3",
        harm="an early free under the other copy thread",
        file=MOVER,
        old="if not (batch.running or batch.has_more or batch.is_quiet):",
        new="if not ((batch.running and not batch.error) or batch.has_more or batch.is_quiet):",
        test=MOVER_TESTS + "test_a_batch_is_quiet_only_when_nothing_of_it_runs",
    ),
    Mutant(
        id="a-split-hides-what-is-pending",
        rule="§9.2",
        harm="the front is loaded again beside the load that brings it: two owners, or a leak",
        file=FULL,
        old="        upper.pending = lower.pending\n",
        new="",
        test=TESTS + "test_a_span_survives_splits_before_its_commit",
    ),
    Mutant(
        id="duplicates-of-a-load-are-kept",
        rule="§5.12",
        harm="a leak of each page that was published while it was loaded",
        file=TRANSFERS,
        old="            self._tiers[transfer.target].allocators[transfer.component].free(ids)",
        new="            pass",
        test=LOAD_BACK + "test_a_prompt_that_was_published_meanwhile_keeps_its_own_pages",
    ),
    Mutant(
        id="duplicates-of-a-load-leave-their-reader",
        rule="§9.9",
        harm="an early free: a layer-wise run still reads them",
        file=TRANSFERS,
        old="        if readers:\n",
        new="        if len(readers) > len(transfer.waiters):\n",
        test=TESTS + "test_pages_that_are_there_by_then_are_duplicates",
    ),
    Mutant(
        id="a-loads-source-is-not-held",
        rule="§6.4",
        harm="rows are reused while they are read: wrong bytes",
        file=RADIX,
        old="source = self.inc_host_lock_ref(boundary, start) if target is DEVICE else None",
        new="source = None",
        test=LOAD_BACK + "test_rows_are_not_taken_while_they_are_read",
    ),
    Mutant(
        id="a-stores-source-is-not-held",
        rule="§9.5",
        harm="pages are evicted and written while they are copied: wrong bytes on the host",
        file=RADIX,
        old="        receipt = self.hold_each(boundary, DEVICE, starts)\n",
        new=(
            "        receipt = self.hold_each(boundary, DEVICE, starts)\n"
            "        if target is not DEVICE:\n"
            "            self.release(receipt, component)\n"
        ),
        test=POLICY_TESTS + "test_what_is_being_copied_is_not_evicted",
    ),
    Mutant(
        id="a-partial-load-commits-everything",
        rule="§9.1",
        harm="pages that never arrived are shared: wrong bytes",
        file=TRANSFERS,
        old="transfer.num_moved = batch.num_pages_done",
        new="transfer.num_moved = transfer.num_pages if batch.num_done else 0",
        test=LOAD_BACK + "test_what_has_arrived_is_kept_when_the_rest_fails",
    ),
    Mutant(
        id="a-layer-wise-load-commits-what-has-some-layers",
        rule="§9.1",
        harm="pages without their last layers are shared: wrong bytes",
        file=TRANSFERS,
        old="        elif batch.num_done == len(batch.jobs):\n",
        new="        else:\n",
        test=LAYER_TESTS + "test_layer_wise_loads_commit_all_or_nothing",
    ),
    Mutant(
        id="a-failed-job-is-done",
        rule="§9.1",
        harm="a page that could not be read is shared: wrong bytes",
        file=MOVER,
        old="            self._failed(batch, at, error)\n        else:",
        new=(
            "            self._failed(batch, at, error)\n"
            "            batch.note_done(at)\n"
            "        else:"
        ),
        test=MOVER_TESTS + "test_a_failed_job_is_not_done_and_ends_its_batch",
    ),
    Mutant(
        id="pages-above-a-gap-have-arrived",
        rule="§9.1",
        harm="a page that is still coming is shared: wrong bytes",
        file=MOVER,
        old="        while self.num_done in self._done:\n            self.num_done += 1",
        new="        self.num_done = len(self._done)",
        test=MOVER_TESTS + "test_what_ends_above_a_failure_has_not_arrived",
    ),
    Mutant(
        id="only-the-first-waiter-is-told",
        rule="§9.2",
        harm="who joined a load recomputes what has been loaded for it",
        file=TRANSFERS,
        old="for waiter in tuple(transfer.waiters):\n            waiter.on_load_ended",
        new="for waiter in tuple(transfer.waiters)[:1]:\n            waiter.on_load_ended",
        test=LOAD_BACK + "test_equal_prompts_load_each_page_once",
    ),
    Mutant(
        id="a-load-ends-with-its-first-waiter",
        rule="§9.2",
        harm="whoever joined it gets nothing",
        file=TRANSFERS,
        old="                if not load.waiters and not load.has_moved:",
        new="                if not load.has_moved:",
        test=LOAD_BACK + "test_a_load_goes_on_for_whoever_joined_it",
    ),
    Mutant(
        id="a-load-that-nobody-needs-goes-on",
        rule="§9.2",
        harm="copy threads work for requests that have gone",
        file=TRANSFERS,
        old="                if not load.waiters and not load.has_moved:",
        new="                if load.has_moved and not load.waiters:",
        test=LOAD_BACK + "test_a_load_that_is_cancelled_in_the_queue_never_runs",
    ),
    Mutant(
        id="a-late-completion-is-committed",
        rule="§12.1",
        harm="pages from before a reset come up in the new tree, or never come home",
        file=TRANSFERS,
        old="        if transfer.epoch != self._tree.epoch:\n            self._end_stale",
        new="        if transfer.epoch < 0:\n            self._end_stale",
        test=TESTS + "test_late_completions_are_known_by_their_epoch",
    ),
    Mutant(
        id="a-load-commits-above-a-gap",
        rule="§9.2",
        harm="device pages below a node that has none: a prefix with a hole",
        file=TRANSFERS,
        old="            if self._tree.is_on_device(load.node, needs_to):",
        new="            if load.has_moved:",
        test=TESTS + "test_a_load_below_a_gap_waits_for_what_is_above",
    ),
    Mutant(
        id="a-failed-predecessor-is-not-planned-again",
        rule="§9.2",
        harm="what has arrived below is thrown away for one bad read",
        file=PREFIX,
        old="for _ in range(2):",
        new="for _ in range(1):",
        test=LOAD_BACK + "test_a_predecessor_that_fails_is_planned_once_more",
    ),
    Mutant(
        id="an-own-failure-is-tried-again",
        rule="§9.8",
        harm="a request waits twice for a host that fails",
        file=PREFIX,
        old="if failed is None or failed in own:",
        new="if failed is None:",
        test=LOAD_BACK + "test_what_has_arrived_is_kept_when_the_rest_fails",
    ),
    Mutant(
        id="write-through-ignores-fences",
        rule="§9.4",
        harm="what a device has not written yet is copied: wrong bytes on the host",
        file=POLICIES,
        old="        if self.fences.over(part.ids, component):",
        new="        if False:",
        test=FENCE_TESTS + "test_write_through_waits_for_the_fence",
    ),
    Mutant(
        id="a-closed-lease-leaves-its-fence",
        rule="§9.4",
        harm="an early free: the device writes into another's pages",
        file=LEASE,
        old="is_running = self._num_runs > 0 or bool(self._fences)",
        new="is_running = self._num_runs > 0",
        test=FENCE_TESTS + "test_pages_leave_a_lease_with_the_fence_of_its_last_run",
    ),
    Mutant(
        id="duplicates-leave-under-a-fence",
        rule="§9.4",
        harm="an early free: the device writes into another's pages",
        file=FENCES,
        old="        if self.keeps:\n            self._leave(",
        new="        if len(self) > 99:\n            self._leave(",
        test=FENCE_TESTS + "test_duplicates_stay_until_they_are_written",
    ),
    Mutant(
        id="what-is-left-behind-leaves-before-its-fence",
        rule="§9.4",
        harm="an early free: a device still reads what a load writes to",
        file=FENCES,
        old="self._is_open = self._all.computes_on",
        new="self._is_open = False",
        test=WINDOW_TESTS
        + "test_what_a_run_leaves_behind_waits_for_the_fence_of_its_commit[swa-1]",
    ),
    Mutant(
        id="one-lifted-fence-is-enough",
        rule="§9.4",
        harm="an early free: a device still reads what a load writes to",
        file=FENCES,
        old="and all(fence.lifted.is_set() for fence in self.fences)",
        new="and any(fence.lifted.is_set() for fence in self.fences)",
        test=WINDOW_TESTS + "test_nobody_has_what_a_device_still_reads[swa]",
    ),
    Mutant(
        id="what-is-published-behind-a-window-goes-under-a-fence",
        rule="§9.4",
        harm="an eviction gives away what a device still reads",
        file=LEASE_PARTS,
        old="            if ids is not None and node not in still:",
        new="            if False:",
        test=WINDOW_TESTS + "test_nobody_has_what_a_device_still_reads[swa]",
    ),
    Mutant(
        id="what-is-left-behind-waits-for-calm",
        rule="§11.5",
        harm="a loop that is ahead of its device uses its promise up",
        file=LEASE_PARTS,
        old="            self._free(part, part.left_behind(own_from, depth, (*ends, *safe)))",
        new=(
            "            if not self._fences:\n"
            "                self._free(part, part.left_behind(own_from, depth, (*ends, *safe)))"
        ),
        test=WINDOW_TESTS + "test_a_cache_that_is_off_under_fences[swa-1]",
    ),
    Mutant(
        id="a-reset-frees-what-is-being-loaded",
        rule="§12.1",
        harm="an early free: a copy thread writes into the next owner's pages",
        file=CONTROLLER,
        old="            held += self.transfers.held(Tier.DEVICE)\n",
        new="",
        test=LOAD_BACK + "test_a_reset_while_pages_are_being_loaded",
    ),
    Mutant(
        id="a-reset-frees-what-is-being-stored",
        rule="§12.1",
        harm="an early free: a copy thread writes into the next owner's rows",
        file=CONTROLLER,
        old="held_host = self.transfers.held(Tier.HOST) + self._rows_of_calls()",
        new="held_host = self._rows_of_calls()",
        test=POLICY_TESTS + "test_a_reset_while_pages_are_being_stored",
    ),
    Mutant(
        id="drain-does-not-see-transfers",
        rule="§12.2",
        harm="buffers are taken away under a copy thread",
        file=CONTROLLER,
        old="return bool(self.transfers) or bool(self.fences)",
        new="return bool(self.fences)",
        test=LOAD_BACK + "test_drain_waits_for_loads",
    ),
    Mutant(
        id="stores-overtake-loads",
        rule="§9.5",
        harm="requests wait for background work",
        file=MOVER,
        old="if loads and not (stores and self._loads_in_a_row >= LOADS_PER_STORE):",
        new="if loads and not stores:",
        test=MOVER_TESTS + "test_loads_go_before_stores",
    ),
    Mutant(
        id="stores-never-get-a-turn",
        rule="§9.5",
        harm="nothing is stored under load, and everything is recomputed after it",
        file=MOVER,
        old="if loads and not (stores and self._loads_in_a_row >= LOADS_PER_STORE):",
        new="if loads:",
        test=MOVER_TESTS + "test_after_eight_loads_one_store_goes",
    ),
    Mutant(
        id="a-load-keeps-the-promise-that-paid-for-it",
        rule="§9.8",
        harm="a lease waits for pages that it has already",
        file=PREFIX,
        old="            self.pages -= load.num_pages\n            load.funder",
        new="            load.funder",
        test=LOAD_BACK + "test_a_load_leaves_no_less_room_to_others",
    ),
    Mutant(
        id="what-does-not-come-is-not-promised-again",
        rule="§9.8",
        harm="growth within the reserve fails after a load that took too long",
        file=PREFIX,
        old="                await self._be_promised_again()\n\n",
        new="                self.pages = 0\n\n",
        test=LOAD_BACK + "test_after_the_time_limit_the_lease_waits_for_other_pages",
    ),
    Mutant(
        id="what-a-load-holds-is-promised-too",
        rule="§11.5",
        harm="more is promised than there is: growth within the reserve fails",
        file=PREFIX,
        old="        self._beside = max(0, lease.unpromised - accounts.spare(BASE))\n",
        new="        self._beside = 0\n",
        test=FOUND + "test_what_a_load_holds_on_the_device_is_in_its_lease_s_promise",
    ),
    Mutant(
        id="who-has-lost-room-to-a-load-does-not-start-over",
        rule="§11.5",
        harm="growth within the reserve fails, or is waited for by who holds what others wait for",
        file=PREFIX,
        old="            self.has_lost_room = self._beside > 0\n",
        new="            self._beside = self.pages = 0\n",
        test=FOUND + "test_a_lease_that_has_lost_its_room_to_a_load_starts_over",
    ),
    Mutant(
        id="what-does-not-come-is-tried-for-ever",
        rule="§9.7",
        harm="a hang: a lease whose loads fail again and again is never granted",
        file="tiered_cache/cache.py",
        old="limit = lease.prefix_len if has_tried_again else lease.reusable",
        new="limit = lease.reusable",
        test=FOUND + "test_loads_that_fail_again_and_again_end_in_a_grant",
    ),
    Mutant(
        id="loads-are-begun-that-cannot-be-of-use",
        rule="§11.5",
        harm="copies that hold pages of the base for nothing",
        file=PREFIX,
        old="        return wanted <= self._controller.accounts.spare(index)",
        new="        return wanted >= 0",
        test=FOUND + "test_no_load_is_begun_where_one_component_has_no_room",
    ),
    Mutant(
        id="a-load-that-failed-meanwhile-is-not-looked-at",
        rule="§9.9",
        harm="a model reads pages that are somebody else's: wrong bytes",
        file=LAYERS,
        old="            load.check()\n",
        new="            pass\n",
        test="tests/test_layers.py::test_a_load_that_fails_while_another_is_waited_for",
    ),
    Mutant(
        id="the-last-layer-arrives-before-the-commit",
        rule="§9.9",
        harm="a run ends above pages that are nobody's yet",
        file=LAYERS,
        old="self._change(min(num_layers, len(self._place) - 1), None)",
        new="self._change(num_layers, None)",
        test=LAYER_TESTS + "test_progress_of_one_load",
    ),
    Mutant(
        id="half-a-layer-is-a-layer",
        rule="§9.9",
        harm="a model reads pages of a layer that are still coming: wrong bytes",
        file=TRANSFERS,
        old="            moved.difference_update(jobs[done].layers or ())",
        new="            pass",
        test=LAYER_TESTS + "test_half_a_layer_is_no_layer",
    ),
    Mutant(
        id="a-commit-above-a-load-is-not-recorded",
        rule="§9.9",
        harm="the tree holds what hangs in the air",
        file=LEASE,
        old="            or (self._load is not None and self._load.is_under_way)\n",
        new="",
        test=LAYER_TESTS + "test_a_commit_above_a_load_runs_in_its_commit_beat",
    ),
    Mutant(
        id="a-closed-lease-publishes-above-its-load",
        rule="§9.9",
        harm="pages that never came are shared: wrong bytes",
        file=LEASE,
        old="                self._deferred = 0  # it stands on pages that may never come",
        new="                pass",
        test=LAYER_TESTS + "test_closing_discards_a_commit_above_a_load",
    ),
    Mutant(
        id="a-table-names-a-load-beyond-where-it-leaves-the-path",
        rule="§9.2",
        harm="a model reads another prompt's pages below the fork: wrong bytes",
        file=PREFIX,
        old="            stop = self._loads[load]\n",
        new="            stop = load.depth\n",
        test=FOUND + "test_its_own_load_begins_where_anothers_leaves_its_path",
    ),
    Mutant(
        id="planned-again-it-does-not-see-what-others-published",
        rule="§9.2",
        harm="the table names the rest at its front: wrong bytes",
        file=PREFIX,
        old="        lease.rematch(limit)  # planned",
        new="        # planned",
        test=FOUND + "test_who_plans_once_more_goes_on_from_what_others_publish",
    ),
    Mutant(
        id="a-load-that-has-come-is-not-looked-at-again",
        rule="§9.2",
        harm="a hang: what was above it is there, and it is never committed",
        file=TRANSFERS,
        old="        if load.has_moved:  # it waits",
        new="        if False:  # it waits",
        test=FOUND + "test_who_plans_once_more_goes_on_from_what_others_publish",
    ),
    Mutant(
        id="a-table-goes-on-naming-what-its-run-was-given",
        rule="§11.1",
        harm="pages that have gone home are read as the prefix: wrong bytes",
        file=LEASE,
        old="            return\n        self._name_canonical()\n",
        new="            return\n",
        test=FOUND + "test_a_lease_may_hold_what_its_run_still_waits_for",
    ),
    Mutant(
        id="a-table-changes-under-a-run",
        rule="§11.1",
        harm="a model reads half of a table that is being written: wrong bytes",
        file=LEASE,
        old="        if self._num_runs:  # of a load",
        new="        if False:  # of a load",
        test=FOUND + "test_a_run_above_a_load_that_fails_counts_for_nothing",
    ),
    Mutant(
        id="a-chunk-from-above-a-load-that-failed-is-published",
        rule="§9.9",
        harm="what was computed on state that never came is shared: wrong bytes",
        file=LEASE,
        old="        self._cuts = [*self._cuts, self.committed]\n",
        new="",
        test=FOUND + "test_a_run_above_a_load_that_fails_counts_for_nothing",
    ),
    Mutant(
        id="a-run-that-begins-after-the-failure-waits-for-nothing",
        rule="§9.9",
        harm="it reads pages that have gone home: wrong bytes",
        file=PREFIX,
        old="        return not (self._using or self.has_failed)",
        new="        return not self._using",
        test=FOUND + "test_a_run_above_a_load_that_fails_counts_for_nothing",
    ),
    Mutant(
        id="layer-waits-block-the-loop",
        rule="§9.9",
        harm="the loop waits for a load whose end only the loop can tell: a hang",
        file=LAYERS,
        old=(
            "        if self._loads and threading.get_ident() == self._thread:\n"
            "            raise WrongThreadError(\n"
            '                "layers.wait'
        ),
        new=(
            "        if threading.get_ident() < 0:\n"
            "            raise WrongThreadError(\n"
            '                "layers.wait'
        ),
        test=LAYER_TESTS + "test_waiting_on_the_loop_is_refused",
    ),
    Mutant(
        id="a-store-is-named-by-what-makes-room-for-it",
        rule="§9.1",
        harm="a leak: the rows are taken, and the copy cannot begin",
        file=POLICIES,
        old="        while node.parent is not None and node.parent.end >= part.stop:",
        new="        while False:",
        test=FOUND + "test_a_store_whose_rows_are_made_of_what_is_below_it",
    ),
    Mutant(
        id="a-mirror-goes-from-above-a-host-child",
        rule="§8.3",
        harm="host rows hang below nothing",
        file=LEAVES,
        old="            and node.host_children == 0\n            and (data.stored",
        new="            and (data.stored",
        test=POLICY_TESTS + "test_a_mirror_above_a_host_child_stays",
    ),
    Mutant(
        id="a-mirror-goes-that-is-nowhere-else",
        rule="§8.3",
        harm="a host copy is lost that storage does not have",
        file=LEAVES,
        old="and (data.stored or self.mirrors_are_spare)",
        new="and True",
        test=ACCOUNT_TESTS + "test_the_host_makes_room_by_its_leaves",
    ),
    Mutant(
        id="a-victim-is-dropped-although-it-can-be-copied",
        rule="§7.3",
        harm="write_back loses what the host had room for",
        file=CONTROLLER,
        old="return short > 0 and self.write_policy.makes_room(short)",
        new="return False",
        test=POLICY_TESTS + "test_write_back_copies_victims_in_a_round_before_they_go",
    ),
    Mutant(
        id="write-through-goes-on-after-a-failure",
        rule="§9.5",
        harm="a host that fails is written to for ever",
        file=POLICIES,
        old="if store.is_complete and has_room and is_current:",
        new="if has_room and is_current:",
        test=POLICY_TESTS + "test_a_store_that_fails_is_tried_again_at_the_next_use",
    ),
    Mutant(
        id="a-scan-fills-the-host",
        rule="§9.5",
        harm="write_through_selective copies what nobody will use again",
        file=POLICIES,
        old="node.hit_count < self._threshold",
        new="node.hit_count < 1",
        test=POLICY_TESTS + "test_write_through_selective_copies_at_the_second_use",
    ),
    Mutant(
        id="a-full-host-counts-nothing",
        rule="§9.5",
        harm="nobody sees that nothing is stored any more",
        file=POLICIES,
        old="        if num_taken < num_wanted:\n            parts.counters.stores_refused += 1\n",
        new="",
        test=POLICY_TESTS + "test_a_full_host_refuses_stores_and_counts_them",
    ),
    Mutant(
        id="a-closed-cache-goes-on-storing",
        rule="§12.2",
        harm="the close waits for work that began after it",
        file=POLICIES,
        old="self._is_closed = True  # also",
        new="self._is_closed = False  # also",
        test=POLICY_TESTS + "test_closing_ends_a_path_that_is_stored_in_parts",
    ),
]
