"""Mutants of runs, truncation, deferred commits, all-or-nothing and the end: semantics §11, §12."""

from __future__ import annotations

from typing import Final

from tests.mutants.model import Mutant

LEASE: Final = "tiered_cache/lease.py"
CONTROLLER: Final = "tiered_cache/controller.py"
RUNS: Final = "tiered_cache/runs.py"
JOBS: Final = "tiered_cache/jobs.py"
TESTS: Final = "tests/test_lease.py::"

MUTANTS: Final = [
    Mutant(
        id="a-rejected-draft-is-accepted-later",
        rule="§11.7",
        harm="the state of a rejected token is published under another one: wrong bytes",
        file=LEASE,
        old="if chunk.num_cuts < len(self._cuts) and chunk.stop > min(",
        new="if chunk.stop > len(self) and chunk.stop > min(",
        test=TESTS + "test_a_chunk_from_before_a_truncation_is_refused_whatever_stands_there_now",
    ),
    Mutant(
        id="truncated-tokens-stay-computed",
        rule="§11.7",
        harm="tokens that were never computed are published: wrong bytes",
        file=LEASE,
        old="self._computed = min(self._computed, length)",
        new="pass",
        test=TESTS + "test_a_truncated_prompt_is_computed_anew_from_there",
    ),
    Mutant(
        id="a-run-overtakes-the-one-it-builds-on",
        rule="§11.4",
        harm="with several threads a run reads what is still being written: wrong bytes",
        file=RUNS,
        old="                await other.ended.wait()",
        new="                pass",
        test=TESTS + "test_runs_of_one_lease_go_in_order_even_with_several_threads",
    ),
    Mutant(
        id="a-run-follows-one-that-came-to-nothing",
        rule="§11.1",
        harm="it reads what was never written, and its result is returned: wrong bytes",
        file=RUNS,
        old="            if chunk.start > ends[chunk.lease]:\n                raise StaleError(",
        new="            if False:\n                raise StaleError(",
        test=TESTS + "test_a_run_that_builds_on_one_that_came_to_nothing_does_not_start",
    ),
    Mutant(
        id="a-commit-believes-in-a-run-that-fails",
        rule="§11.1",
        harm="unwritten pages are published: wrong bytes",
        file=LEASE,
        old="is_running = chunk in self._running",
        new="is_running = False",
        test=TESTS + "test_a_commit_of_a_chunk_that_is_being_computed_is_undone_by_its_failure",
    ),
    Mutant(
        id="a-deferred-commit-publishes-what-is-not-computed",
        rule="§11.1",
        harm="unwritten pages are published: wrong bytes",
        file=LEASE,
        old="stop, self._deferred = min(self._deferred, self._computed), 0",
        new="stop, self._deferred = self._deferred, 0",
        test=TESTS + "test_a_commit_of_a_chunk_that_is_being_computed_is_undone_by_its_failure",
    ),
    Mutant(
        id="suspend-forgets-what-it-deferred",
        rule="§11.7",
        harm="what was computed and committed is lost",
        file=LEASE,
        old="elif self._deferred and not self._is_using_load:",
        new="elif self._deferred and not self._is_using_load and not self._closed:",
        test=TESTS + "test_what_was_committed_during_a_run_is_published_though_the_lease_has_gone",
    ),
    Mutant(
        id="extend-grows-some",
        rule="§11.9",
        harm="an error leaves half of a batch longer: wrong bytes at the next step",
        file="tiered_cache/cache.py",
        old="            check_token(token, len(lease))\n",
        new="",
        test=TESTS + "test_a_token_that_is_none_changes_nothing",
    ),
    Mutant(
        id="a-dropped-job-is-a-cancellation",
        rule="§12.3",
        harm="a caller that nobody cancelled ends as if, silently",
        file=JOBS,
        old="if waiter.cancelled() and not is_cancelled():",
        new="if False:",
        test="tests/test_jobs.py::test_an_executor_that_drops_a_queued_job_is_not_a_cancellation",
    ),
    Mutant(
        id="close-leaves-queued-runs-behind-a-hung-one",
        rule="§12.2",
        harm="whoever awaits them hangs with it, for ever",
        file=RUNS,
        old="                run.job.cancel()",
        new="                pass",
        test="tests/test_cache.py::test_closing_drops_queued_runs_at_once",
    ),
    Mutant(
        id="the-end-of-the-sweep-is-told-too-early",
        rule="§12.2",
        harm="drain waits for traffic that need not come",
        file=JOBS,
        old="        self._children.discard(child)\n        self._on_end()",
        new="        self._on_end()\n        self._children.discard(child)",
        test="tests/test_jobs.py::test_its_end_is_told_when_a_child_no_longer_counts",
    ),
    Mutant(
        id="a-cancelled-close-leaves-its-tasks",
        rule="§12.2",
        harm="a task without an owner goes on",
        file=CONTROLLER,
        old="            self._supervisor.stop()\n            self._shut_down_after",
        new="            self._shut_down_after",
        test="tests/test_controller.py::test_a_close_that_is_cancelled_leaves_no_task",
    ),
    Mutant(
        id="close-works-from-any-thread",
        rule="§12.4",
        harm="a tree is changed in the middle of a change",
        file=CONTROLLER,
        old="        if threading.get_ident() != self._thread and os.getpid() == self._process:\n"
        "            raise self._why_not()",
        new="",
        test="tests/test_cache.py::test_nothing_answers_in_another_thread",
    ),
    Mutant(
        id="a-page-that-is-gone-is-gone-on-in",
        rule="§11.7",
        harm="a request writes to page -1, which is another's",
        file="tiered_cache/lease_parts.py",
        old="        if depth % self._size:  # and the page that it goes on in\n",
        new="        if False:\n",
        test="tests/test_found_by_schedules.py::test_a_component_of_a_user_s_own_in_a_lease",
    ),
]
