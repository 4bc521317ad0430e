"""Mutants of the third tier: semantics §10, with §5.11, §8.4, §9.3 and §12.1 where they are kept
there."""

from __future__ import annotations

from typing import Final

from tests.mutants.model import Mutant

PREFETCH: Final = "tiered_cache/prefetch.py"
BACKUP: Final = "tiered_cache/backup.py"
IO: Final = "tiered_cache/storage_io.py"
TIER: Final = "tiered_cache/storage_tier.py"
HEALTH: Final = "tiered_cache/storage/health.py"
WRAPPERS: Final = "tiered_cache/storage/wrappers.py"
POLICIES: Final = "tiered_cache/write_policies.py"
RADIX: Final = "tiered_cache/tree/radix.py"
CONTROLLER: Final = "tiered_cache/controller.py"
PREFETCH_TESTS: Final = "tests/storage/test_prefetch.py::"
BACKUP_TESTS: Final = "tests/storage/test_backup.py::"
HEALTH_TESTS: Final = "tests/storage/test_health.py::"
ENDS: Final = "tests/storage/test_ends.py::"
THREE: Final = "tests/storage/test_three_tiers.py::"
OPTIONS: Final = "tests/storage/test_options.py::"
FOUND: Final = "tests/test_found_by_schedules.py::"
DETACHED: Final = "test_the_cache_s_end_waits_for_a_store_that_was_detached_as_it_was_opened"
EVENTS: Final = "tests/cases/test_cases_storage_events.py::"
KINDS: Final = "tests/cases/test_cases_kinds.py::"

MUTANTS: Final = [
    # Buffers are quiet.
    Mutant(
        id="rows-go-home-when-the-limit-passes",
        rule="§9.3",
        harm="an early free: the backend still touches what others are given",
        file=IO,
        old=(
            '        call.error = BackendError(f"no answer within {self._limit_s:g} s")\n'
            "        call.answered.set()\n"
        ),
        new=(
            '        call.error = BackendError(f"no answer within {self._limit_s:g} s")\n'
            "        self._end(call)\n"
        ),
        test=BACKUP_TESTS + "test_a_hung_write_is_waited_for_by_nobody",
    ),
    Mutant(
        id="rows-of-a-read-that-is-given-up-go-home-at-once",
        rule="§9.3",
        harm="wrong bytes: the backend still fills what others are given",
        file=IO,
        old="            call.is_given_up = True\n            call.answered.set()\n",
        new=(
            "            call.is_given_up = True\n"
            "            call.error = BackendError('given up')\n"
            "            self._end(call)\n"
        ),
        test=PREFETCH_TESTS + "test_pages_of_a_read_that_runs_are_nobody_elses",
    ),
    Mutant(
        id="rows-that-are-written-are-not-held",
        rule="§6.4",
        harm="wrong bytes are kept: the host gives rows up while storage reads them",
        file=BACKUP,
        old="                call = self._write(BASE, receipt, start,",
        new=(
            "                tree.components[0].release_component_lock(\n"
            "                    receipt.node, receipt.tier, receipt.parts[0]\n"
            "                )\n"
            "                receipt.parts[0] = None\n"
            "                call = self._write(BASE, receipt, start,"
        ),
        test=BACKUP_TESTS + "test_a_hung_write_is_waited_for_by_nobody",
    ),
    Mutant(
        id="a-call-that-never-began-has-no-error",
        rule="§9.3",
        harm="a leak: its end fails in the library, and its rows never go home",
        file=IO,
        old="        if not call.is_quiet:\n            call.error = call.error or",
        new="        if not call.is_quiet:\n            call.error = None and",
        test=ENDS + "test_a_call_that_never_began_has_failed",
    ),
    Mutant(
        id="a-backend-is-closed-under-a-question",
        rule="§12.2",
        harm="a crash in the backend's own code",
        file=TIER,
        old="        await self._connection.idle()\n",
        new="",
        test=ENDS + "test_no_backend_is_closed_under_a_call",
    ),
    # What is read.
    Mutant(
        id="the-verdict-of-the-checksum-is-ignored",
        rule="§10.3",
        harm="wrong bytes: what a disk has spoilt is served",
        file=IO,
        old="            if verdict is not None:\n                results",
        new="            if verdict is None and False:\n                results",
        test=PREFETCH_TESTS + "test_a_page_that_is_wrong_ends_the_prefix",
    ),
    Mutant(
        id="what-comes-after-a-gap-is-taken",
        rule="§10.5",
        harm="wrong bytes: a row that was not read is published",
        file=IO,
        old="            if result not in good:\n                return count\n",
        new="            if result not in good:\n                pass\n",
        test=PREFETCH_TESTS + "test_a_page_that_is_wrong_ends_the_prefix",
    ),
    Mutant(
        id="a-read-from-before-a-reset-is-published",
        rule="§12.1",
        harm="two owners: its rows were promised to others at the reset",
        file=PREFETCH,
        old="        if call.epoch != self._tree.epoch:\n",
        new="        if False:\n",
        test=PREFETCH_TESTS + "test_reset_ends_prefetches",
    ),
    Mutant(
        id="a-result-is-not-held",
        rule="§10.5",
        harm="what was brought for a request is gone when it comes",
        file=PREFETCH,
        old="        prefetch.receipt = receipt\n        prefetch.reached",
        new="        self._tree.dec_host_lock_ref(receipt)\n        prefetch.reached",
        test=THREE + "test_prefetch_brings_it_to_the_host",
    ),
    Mutant(
        id="a-result-is-held-for-ever",
        rule="§10.7",
        harm="a leak: what nobody takes keeps half of the host",
        file=PREFETCH,
        old="            prefetch.timer = self._loop.call_later(ttl_s, self._let_go, prefetch)\n",
        new="            pass\n",
        test=PREFETCH_TESTS + "test_detached_it_needs_no_handle",
    ),
    Mutant(
        id="results-that-are-let-go-stay-listed",
        rule="§10.5",
        harm="a leak: each detached prefetch stays for ever",
        file=PREFETCH,
        old="        if prefetch.detached and prefetch.done.is_set():\n",
        new="        if False:\n",
        test=ENDS + "test_a_detached_prefetch_ends",
    ),
    Mutant(
        id="the-quota-is-not-counted",
        rule="§10.7",
        harm="prefetches take all of the host",
        file=PREFETCH,
        old=(
            "        room = self._quotas[component] - self._num_pages_of(component)\n"
            "        if room < num_pages:"
        ),
        new="        room = self._quotas[component]\n        if room < num_pages:",
        test=PREFETCH_TESTS + "test_a_refusal_can_be_tried_again",
    ),
    Mutant(
        id="the-quota-forgets-what-nobody-wants",
        rule="§10.7",
        harm="reads that hang and were given up take all of the host",
        file=PREFETCH,
        old="        return num_reading + sum(",
        new="        return 0 * num_reading + sum(",
        test=ENDS + "test_rows_of_reads_that_nobody_wants_count_until_they_end",
    ),
    Mutant(
        id="a-joiner-does-not-try-again",
        rule="§10.8",
        harm="whoever joined gets nothing when the first goes",
        file=PREFETCH,
        old="            await self._join(other)\n            return True\n",
        new="            await self._join(other)\n            return False\n",
        test=PREFETCH_TESTS + "test_a_reader_that_goes_leaves_nobody_waiting",
    ),
    Mutant(
        id="a-joiner-waits-for-the-others-thread",
        rule="§9.3",
        harm="a hang: of a call that was given up and does not end",
        file=PREFETCH,
        old="        self._counters.prefetches_joined += 1\n        await call.answered.wait()\n",
        new="        self._counters.prefetches_joined += 1\n        await call.ended.wait()\n",
        test=ENDS + "test_who_joined_a_read_does_not_wait_for_its_thread",
    ),
    Mutant(
        id="equal-pages-are-read-twice",
        rule="§10.8",
        harm="a burst of equal prompts reads all of it again and again",
        file=PREFETCH,
        old="            self._reading[page] = prefetch\n",
        new="            pass\n",
        test=PREFETCH_TESTS + "test_equal_pages_are_read_once",
    ),
    Mutant(
        id="a-short-hit-is-read",
        rule="§10.6",
        harm="a read that costs more than it saves",
        file=PREFETCH,
        old="        elif not self.is_worth(found - hit):\n",
        new="        elif False:\n",
        test=PREFETCH_TESTS + "test_less_than_the_threshold_is_not_read",
    ),
    Mutant(
        id="a-miss-is-remembered",
        rule="§10.7",
        harm="what comes to storage later is never found",
        file=PREFETCH,
        old="        self._io.suspect(call.component, corrupt)\n",
        new="        self._io.suspect(call.component, page_keys[call.num_good :])\n",
        test=PREFETCH_TESTS + "test_a_miss_is_not_remembered",
    ),
    # What is kept, and what is believed to be.
    Mutant(
        id="pages-are-written-from-the-leaf",
        rule="§10.4",
        harm="what is kept cannot be reached when a write ends half way",
        file=BACKUP,
        old="            if missing and not self._writes[BASE]:",
        new=(
            "            missing = missing[::-1]\n"
            "            if missing and not self._writes[BASE]:"
        ),
        test=BACKUP_TESTS + "test_pages_are_written_from_the_root",
    ),
    Mutant(
        id="children-do-not-wait-for-their-parents",
        rule="§10.4",
        harm="pages are kept that cannot be reached",
        file=BACKUP,
        old="            if is_there and call.results and call.num_good == len(ids):\n",
        new="            if is_there and call.results:\n",
        test=BACKUP_TESTS + "test_a_refused_page_is_written_when_it_is_next_used",
    ),
    Mutant(
        id="what-is-stored-stands-for-what-is-above-it",
        rule="§10.4",
        harm="pages are kept that cannot be reached, until a shorter prefix is used",
        file=BACKUP,
        old="                is_end = True  # what is above may still be missing",
        new="                break  #",
        test=BACKUP_TESTS + "test_what_storage_lacks_above_what_it_has_is_written",
    ),
    Mutant(
        id="a-failed-write-is-believed",
        rule="§8.4",
        harm="the host gives up what is nowhere else",
        file=BACKUP,
        old="            if is_there and call.results and call.num_good == len(ids):\n",
        new="            if True:\n",
        test=BACKUP_TESTS + "test_a_refused_page_is_written_when_it_is_next_used",
    ),
    Mutant(
        id="a-write-from-before-a-reset-gives-its-lock-back",
        rule="§12.1",
        harm="a leak: its rows stay quarantined for ever",
        file=BACKUP,
        old="            if call.epoch != self._tree.epoch:\n",
        new="            if False:\n",
        test=BACKUP_TESTS + "test_reset_while_it_is_written",
    ),
    Mutant(
        id="what-is-wrong-is-not-written-again",
        rule="§10.3",
        harm="a page that was spoilt once is a miss for ever",
        file=BACKUP,
        old="            if not is_there or self._io.is_suspect(component, key)\n",
        new="            if not is_there\n",
        test=BACKUP_TESTS + "test_what_storage_has_wrong_is_replaced",
    ),
    Mutant(
        id="what-is-wrong-is-not-deleted",
        rule="§10.3",
        harm="a store that leaves what it has keeps the wrong page for ever",
        file=BACKUP,
        old="        if wrong and self._writes[component]:\n",
        new="        if False:\n",
        test=BACKUP_TESTS + "test_what_storage_has_wrong_is_replaced",
    ),
    Mutant(
        id="what-is-lost-is-believed-to-be-there",
        rule="§8.4",
        harm="a page that storage has lost is never written again",
        file=PREFETCH,
        old="        forgotten = self._tree.forget_stored(prefetch.key, start",
        new="        forgotten = self._tree.forget_stored(prefetch.key, 1 << 40 | start",
        test=ENDS + "test_what_is_given_up_for_a_lost_page_is_counted",
    ),
    Mutant(
        id="what-is-forgotten-is-not-counted",
        rule="§8.4",
        harm="state is dropped and no counter says so",
        file=PREFETCH,
        old="        self._host.take_back(forgotten)\n",
        new="        self._host.give_back(forgotten.host)\n",
        test=ENDS + "test_what_is_given_up_for_a_lost_page_is_counted",
    ),
    Mutant(
        id="one-store-is-believed-to-be-the-next",
        rule="§8.4",
        harm="pages are kept in a new store without those above them",
        file=TIER,
        old="        for forgotten in self._around.tree.forget_all_stored(SWEEP_NODES):\n",
        new="        for forgotten in ():\n",
        test=EVENTS + "test_b40_what_the_host_lacks_in_the_middle_is_kept_when_it_is_next_used",
    ),
    Mutant(
        id="a-write-from-before-a-clear-is-believed",
        rule="§8.4",
        harm="pages are kept without those above them, which a clear has deleted",
        file=BACKUP,
        old="            is_there = call.clears == self._io.num_clears\n",
        new="            is_there = True\n",
        test=EVENTS + "test_b106_what_was_under_way_at_a_clear_is_not_believed",
    ),
    Mutant(
        id="an-answer-from-before-a-clear-is-believed",
        rule="§8.4",
        harm="pages that a clear has deleted are never written again",
        file=BACKUP,
        old="        if clears != self._io.num_clears:\n",
        new="        if False:\n",
        test=EVENTS + "test_b106_what_was_under_way_at_a_clear_is_not_believed",
    ),
    Mutant(
        id="a-read-from-before-a-clear-is-believed",
        rule="§8.4",
        harm="pages that a clear has deleted are never written again",
        file=PREFETCH,
        old="            if boundary is not None and call.clears == self._io.num_clears:\n",
        new="            if boundary is not None:\n",
        test=EVENTS + "test_b106_what_was_under_way_at_a_clear_is_not_believed",
    ),
    Mutant(
        id="a-question-corrects-nothing",
        rule="§8.4",
        harm="a page that storage has lost is never written again",
        file=PREFETCH,
        old="        if found < believed:",
        new="        if False:",
        test=EVENTS + "test_b106_what_is_believed_is_put_right_by_a_question",
    ),
    Mutant(
        id="only-what-hangs-on-the-end-follows",
        rule="§10.4",
        harm="what was used is not stored: it waited for pages above it that others have written",
        file=BACKUP,
        old="        while above is not None and above.end > start:\n            for child",
        new="        if above is not None and above.end > start:\n            for child",
        test=FOUND + "test_what_waits_below_a_lost_page_follows_whoever_writes_that",
    ),
    Mutant(
        id="a-store-that-is-being-opened-has-gone",
        rule="§12.2",
        harm="a leak: what is opened then is closed when the threads that it needs have ended",
        file=TIER,
        old="        await self._tried.wait()",
        new="        await asyncio.sleep(0)",
        test=FOUND + DETACHED,
    ),
    Mutant(
        id="nobody-knows-of-a-store-that-is-being-attached",
        rule="§12.2",
        harm="a leak: the cache ends, and the store that is opened for it stays",
        file=CONTROLLER,
        old="        current = (self._attaching, self.storage)",
        new="        current = (None, self.storage)",
        test=FOUND + "test_the_cache_s_end_waits_for_a_store_that_is_being_attached",
    ),
    Mutant(
        id="nobody-knows-of-a-store-that-could-not-be-attached",
        rule="§12.2",
        harm="a leak: the cache ends while the store is being closed, with the threads for that",
        file=CONTROLLER,
        old=(
            "            self._detached.append(tier)\n"
            "            tier.when_gone(partial(self._gone, tier))\n"
        ),
        new="",
        test=FOUND + "test_the_cache_s_end_waits_for_a_store_that_is_being_attached",
    ),
    Mutant(
        id="a-store-that-could-not-be-attached-is-in-the-way-of-the-next",
        rule="§10.9",
        harm="a hang: the next store waits until the tree has forgotten what it never believed",
        file=CONTROLLER,
        old="            tier.forgotten.set()  # nothing was believed of it\n",
        new="",
        test=FOUND + "test_the_cache_s_end_waits_for_a_store_that_is_being_attached",
    ),
    Mutant(
        id="a-backup-does-not-look-above",
        rule="§8.4",
        harm="pages are kept without those above them, which storage has lost",
        file=BACKUP,
        old="            if missing and missing[0] < first:",
        new="            if False:",
        test=EVENTS + "test_b41_what_storage_has_lost_above_is_kept_again",
    ),
    Mutant(
        id="a-clear-is-told-to-nobody",
        rule="§12.1",
        harm="observers believe in pages that storage has no more",
        file=RADIX,
        old="        self.observers.on_event(Event(EventKind.FORGOTTEN, tier=Tier.STORAGE))\n",
        new="",
        test=EVENTS + "test_b106_what_was_under_way_at_a_clear_is_not_believed",
    ),
    Mutant(
        id="only-the-end-of-a-path-is-looked-at",
        rule="§9.5",
        harm="what is above a host copy, and was only in storage, is never kept again",
        file=POLICIES,
        old="            node = node.parent  # what is above may lack it",
        new="            return  # what is above may lack it",
        test=EVENTS + "test_b40_what_the_host_lacks_in_the_middle_is_kept_when_it_is_next_used",
    ),
    Mutant(
        id="what-waits-is-not-bounded",
        rule="§10.9",
        harm="behind a store that hangs the host fills up with what waits",
        file=BACKUP,
        old="self._num_pending + num_pages > self._max_pending)",
        new="False)",
        test=BACKUP_TESTS + "test_what_waits_is_bounded",
    ),
    Mutant(
        id="the-worker-forgets-who-comes-as-it-ends",
        rule="§10.4",
        harm="what is noted in that step is not kept before it is used again",
        file=BACKUP,
        old="        self._worker = None  # in this very step: whoever comes now needs another\n",
        new="",
        test=BACKUP_TESTS + "test_what_comes_as_the_worker_ends_is_not_forgotten",
    ),
    Mutant(
        id="write-through-copies-what-storage-has",
        rule="§8.4",
        harm="a livelock: a host smaller than the device copies in circles",
        file=POLICIES,
        old="Tier.HOST, unless_stored=True)",
        new="Tier.HOST)",
        test=BACKUP_TESTS + "test_a_prompt_longer_than_the_host",
    ),
    Mutant(
        id="a-copy-makes-room-of-its-own-path",
        rule="§9.8",
        harm="a leak: the rows of a copy whose path has gone",
        file=POLICIES,
        old="        while node.parent is not None and node.parent.end >= part.stop:\n",
        new="        while False:\n",
        test=ENDS + "test_what_makes_room_for_a_copy_may_be_below_it",
    ),
    # Whose it is.
    Mutant(
        id="a-tenants-pages-are-kept-as-anybodys",
        rule="§10.1",
        harm="another tenant's state is served",
        file=RADIX,
        old="                seed = namespace_seed(node.namespace)\n                # Edges",
        new='                seed = b""\n                # Edges',
        test=THREE + "test_namespaces_do_not_meet_in_storage",
    ),
    Mutant(
        id="the-type-of-state-is-no-fact",
        rule="§10.2",
        harm="wrong numbers: float32 is read as another type of that size",
        file="tiered_cache/build.py",
        old="for key, value in asdict(spec).items() if value is not None}",
        new='for key, value in asdict(spec).items() if value is not None and key != "dtype"}',
        test="tests/test_storage_parts.py::"
        "test_a_row_of_another_type_is_a_miss_though_its_bytes_are_as_many",
    ),
    # Health.
    Mutant(
        id="a-breaker-never-closes-again",
        rule="§10.9",
        harm="a store that was away for a moment is not used until the next start",
        file=HEALTH,
        old="self._state is HealthState.OPEN:\n            return  # a call from before; the",
        new="self._state is not HealthState.CLOSED:\n            return  # a call from before; the",
        test=OPTIONS + "test_retry_after_is_when_it_is_tried_again",
    ),
    Mutant(
        id="a-probe-that-comes-early-is-the-last",
        rule="§10.9",
        harm="a store that is well again is not asked before a request has to find out",
        file=TIER,
        old="            self._probe_later()  # its timer came early\n",
        new="            pass\n",
        test=ENDS + "test_a_probe_that_comes_early_is_made_later",
    ),
    Mutant(
        id="what-is-late-in-the-queue-is-asked-all-the-same",
        rule="§9.3",
        harm="a slow store is asked for nobody, ever later, and nothing ends",
        file=IO,
        old="        if hung.done() or self._limited.withdraw(hung):\n",
        new="        if hung.done():\n",
        test=HEALTH_TESTS + "test_a_backend_that_is_slower_than_it_is_asked_has_no_queue",
    ),
    Mutant(
        id="a-call-that-hangs-keeps-its-turn",
        rule="§9.3",
        harm="a hang: one call that does not end stops all others",
        file=IO,
        old="            self._limited.replace(hung)\n",
        new="            pass\n",
        test=ENDS + "test_a_call_that_hangs_gives_its_turn_away",
    ),
    Mutant(
        id="a-turn-is-given-away-for-good",
        rule="§9.3",
        harm="more calls at a time than a store was promised, after each that was late",
        file=WRAPPERS,
        old="                self._replaced.remove(task)\n",
        new="                self._replaced.remove(task)\n                self._turns.release()\n",
        test=HEALTH_TESTS + "test_calls_that_hang_are_replaced_four_times",
    ),
    Mutant(
        id="a-turn-is-given-to-who-never-had-one",
        rule="§9.3",
        harm="more calls at a time than a store was promised, after each that was given up",
        file=WRAPPERS,
        old="            self._surplus += 1\n",
        new="            pass\n",
        test=HEALTH_TESTS + "test_a_turn_that_was_never_taken_is_taken_back",
    ),
    Mutant(
        id="a-probe-on-another-loop-fails",
        rule="§10.9",
        harm="on uvloop a timer has no time once it is due, and storage is never probed again",
        file=TIER,
        old="            self._timers.remove(timer)\n",
        new="            self._timers = [old for old in self._timers if old.when() > 0]\n",
        test=HEALTH_TESTS + "test_a_probe_that_is_due_at_once_is_made[uvloop]",
    ),
    Mutant(
        id="a-late-end-closes-the-breaker",
        rule="§10.9",
        harm="a store that is far too slow passes for well",
        file=WRAPPERS,
        old="        elif (took_s := self._clock() - began) <= self._limit_s:\n",
        new="        elif (took_s := self._clock() - began) >= 0:\n",
        test=ENDS + "test_a_call_that_ends_late_has_failed",
    ),
    Mutant(
        id="a-prefetch-goes-on-with-a-key-that-is-its-owners",
        rule="§10.2",
        harm="wrong bytes: what storage has of a prompt is published under what its key has become",
        file="tiered_cache/cache.py",
        old="        return tokens.snapshot()\n",
        new="        return tokens\n",
        test=KINDS + "test_a_key_that_its_owner_changes_while_it_is_fetched",
    ),
    Mutant(
        id="storage-of-another-model-is-attached",
        rule="§10.2",
        harm="wrong bytes are kept under another model's name, which reads them as its own",
        file="tiered_cache/storage_control.py",
        old="            if problems := foreign_state(config, self._parts):\n",
        new="            if problems := []:\n",
        test=KINDS + "test_storage_of_another_model_is_not_attached",
    ),
    Mutant(
        id="what-comes-from-the-host-is-no-use",
        rule="§10.4",
        harm="what storage lacks of a prompt that the host serves is not tried again",
        file="tiered_cache/controller.py",
        old="        self.used(lease.published)  # when it was granted",
        new="        # when it was granted",
        test=KINDS + "test_a_prefix_that_comes_from_the_host_is_used",
    ),
    Mutant(
        id="what-cannot-be-read-is-never-written-again",
        rule="§10.3",
        harm="a prefix ends there for ever: storage says to have it, so no backup replaces it",
        file=PREFETCH,
        old="        self._io.suspect(call.component, unread, is_read=False)\n",
        new="",
        test=KINDS + "test_a_file_that_is_not_the_page_s_is_written_again",
    ),
    Mutant(
        id="what-cannot-be-read-once-is-missing",
        rule="§10.7",
        harm="one bad moment of a disk costs a computation, though the page is as good as ever",
        file=IO,
        old="            is_wrong = is_read or self.is_wrong(component, key)\n",
        new="            is_wrong = True\n",
        test=KINDS + "test_what_cannot_be_read_once_is_asked_for_again",
    ),
]
