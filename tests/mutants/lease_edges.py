"""Mutants of leases at the edges: runs and commits under way, queues, claims, two caches."""

from __future__ import annotations

from typing import Final

from tests.mutants.model import Mutant

LEASE: Final = "tiered_cache/lease.py"
CONTROLLER: Final = "tiered_cache/controller.py"
RUNS: Final = "tiered_cache/runs.py"
PUBLISH: Final = "tiered_cache/publish.py"
CLAIMS: Final = "tiered_cache/claims.py"
TABLE: Final = "tiered_cache/page_table.py"
EDGES: Final = "tests/test_lease_edges.py::"
CLAIM_TESTS: Final = "tests/test_claims.py::"

MUTANTS: Final = [
    Mutant(
        id="a-lease-is-granted-after-the-close",
        rule="§12.2",
        harm="a leak: nobody closes that cache again",
        file=LEASE,
        old="        controller.check()\n        if self._admitted_pages",
        new="        if self._admitted_pages",
        test=EDGES + "test_a_lease_that_is_entered_after_the_close_is_refused",
    ),
    Mutant(
        id="a-waiting-lease-is-entered-again",
        rule="§11.7",
        harm="a leak: granted twice, given back once",
        file="tiered_cache/cache.py",
        old="        self._entered = True\n",
        new="        pass\n",
        test=EDGES + "test_a_lease_is_entered_once_also_while_it_waits",
    ),
    Mutant(
        id="a-chunk-of-another-cache-may-run",
        rule="§11.4",
        harm="an early free: its own lease does not know of the run",
        file=RUNS,
        old="            if chunk.lease not in ends:",
        new="            if chunk.lease_id not in {lease.id for lease in leases}:",
        test=EDGES + "test_a_lease_of_another_cache_is_refused",
    ),
    Mutant(
        id="a-take-over-does-not-wait-for-the-run",
        rule="§11.3",
        harm="the pages that a thread writes are given to others",
        file=LEASE,
        old="if self._num_runs or self._is_using_load or not controller.enabled:",
        new="if self._is_using_load or not controller.enabled:",
        test=EDGES + "test_nothing_is_taken_over_while_a_run_writes",
    ),
    Mutant(
        id="a-truncation-does-not-wait-for-the-run",
        rule="§11.7",
        harm="an early free: the thread writes into another's pages",
        file=LEASE,
        old='        if self._num_runs:\n            raise ValueError("cannot truncate',
        new='        if False:\n            raise ValueError("cannot truncate',
        test=EDGES + "test_truncate_is_refused_while_a_run_writes",
    ),
    Mutant(
        id="a-deferred-commit-survives-a-reset",
        rule="§12.1",
        harm="quarantined pages are published: two owners",
        file=LEASE,
        old="        if self.epoch != self._controller.epoch:\n"
        "            self._deferred = 0\n"
        "        elif has_failed:",
        new="        if has_failed:",
        test=EDGES + "test_a_reset_forgets_what_was_committed_during_a_run",
    ),
    Mutant(
        id="a-deferred-commit-is-never-forgotten",
        rule="§11.1",
        harm="a draft is published that nobody has committed",
        file=LEASE,
        old="stop, self._deferred = min(self._deferred, self._computed), 0",
        new="stop = min(self._deferred, self._computed)",
        test=EDGES + "test_a_commit_that_came_to_nothing_is_forgotten",
    ),
    Mutant(
        id="drain-does-not-see-runs",
        rule="§12.2",
        harm="buffers are taken away under a thread",
        file=CONTROLLER,
        old="if self.runs or self._ending or self._dropped",
        new="if self._ending or self._dropped",
        test=EDGES + "test_drain_waits_for_runs_also_for_those_that_follow_at_once",
    ),
    Mutant(
        id="drain-looks-once",
        rule="§12.2",
        harm="buffers are taken away under the thread of a run that followed at once",
        file=CONTROLLER,
        old="        while self.busy:\n            self._quiet.clear()",
        new="        if self.busy:\n            self._quiet.clear()",
        test=EDGES + "test_drain_waits_for_runs_also_for_those_that_follow_at_once",
    ),
    Mutant(
        id="a-commit-does-not-wake-the-queue",
        rule="§11.5",
        harm="a hang: duplicates have gone home, and nobody looks",
        file=CONTROLLER,
        old="        self._tell(EventKind.COMMITTED, lease, num_tokens)\n"
        "        self.admission.look_again()",
        new="        self._tell(EventKind.COMMITTED, lease, num_tokens)",
        test=EDGES + "test_duplicates_that_go_home_let_the_queue_go_on",
    ),
    Mutant(
        id="a-truncation-does-not-wake-the-queue",
        rule="§11.5",
        harm="a hang: pages have gone home, and nobody looks",
        file=LEASE,
        old="            self.settle_promise()\n"
        "            self._controller.admission.look_again()",
        new="            self.settle_promise()",
        test=EDGES + "test_a_truncation_lets_the_queue_go_on",
    ),
    Mutant(
        id="a-changed-table-keeps-its-version",
        rule="§11.8",
        harm="a kernel's copy names pages that are gone: wrong bytes",
        file=TABLE,
        old="            self.num_pages = stop\n        self.version += 1",
        new="            self.num_pages = stop",
        test=EDGES + "test_the_version_rises_with_every_change_of_the_table",
    ),
    Mutant(
        id="a-cut-table-keeps-its-version",
        rule="§11.8",
        harm="a kernel's copy names pages that are gone: wrong bytes",
        file=TABLE,
        old="        self.num_pages = min(self.num_pages, num_pages)\n        self.version += 1",
        new="        self.num_pages = min(self.num_pages, num_pages)",
        test=EDGES + "test_the_version_rises_with_every_change_of_the_table",
    ),
    Mutant(
        id="the-prompt-ends-inside-a-node",
        rule="§5.9",
        harm="what was generated takes the prompt along when it is evicted",
        file=PUBLISH,
        old="    if committed < request.prompt_len < stop:",
        new="    if False:",
        test=EDGES + "test_a_finished_request_ends_a_node_with_its_prompt",
    ),
    Mutant(
        id="each-chunk-counts-again",
        rule="§5.8",
        harm="long prompts look popular: frequency policies keep the wrong pages",
        file=PUBLISH,
        old="        inserted_len=committed,\n",
        new="        inserted_len=0,\n",
        test=EDGES + "test_a_request_counts_once_for_each_node_b13",
    ),
    Mutant(
        id="a-grant-does-not-count",
        rule="§3.8",
        harm="frequency policies are LRU: a scan flushes the hot prefix",
        file="tiered_cache/tree/radix.py",
        old="        self._count_hits(path, 0, priority)\n",
        new="",
        test=EDGES + "test_a_request_counts_once_for_each_node_b13",
    ),
    Mutant(
        id="a-take-over-does-not-count",
        rule="§3.8",
        harm="frequency policies forget who came in a burst",
        file=LEASE,
        old="        tree.count_hits(receipt, above=held, priority=self.priority)\n",
        new="",
        test=EDGES + "test_a_request_counts_once_for_each_node_b13",
    ),
    Mutant(
        id="claims-cross-namespaces",
        rule="§11.3",
        harm="a request waits for another tenant's run, which it cannot use",
        file=CLAIMS,
        old="                claim.key.namespace == key.namespace\n                and ",
        new="                True\n                and ",
        test=CLAIM_TESTS + "test_nobody_waits_for_another_namespace",
    ),
    Mutant(
        id="a-claim-is-its-first-page",
        rule="§11.3",
        harm="equal prompts that are out of step are computed twice",
        file=CLAIMS,
        old="not claim.start <= start < claim.stop",
        new="start != claim.start",
        test=CLAIM_TESTS + "test_a_run_claims_each_page_that_it_completes",
    ),
    Mutant(
        id="a-claim-does-not-know-its-prefix",
        rule="§11.3",
        harm="a request waits for state that it cannot use",
        file=CLAIMS,
        old="                and claim.key.data.startswith(memoryview(key.data)[:at])\n",
        new="",
        test=CLAIM_TESTS + "test_nobody_waits_for_tokens_behind_another_prefix",
    ),
    Mutant(
        id="a-lease-waits-for-what-it-must-compute",
        rule="§11.3",
        harm="a request waits, and has gained nothing",
        file=CLAIMS,
        old="        if start + self._page_size > len(key) - 1:",
        new="        if start + self._page_size > len(key):",
        test=CLAIM_TESTS + "test_nobody_waits_for_the_page_of_the_last_token",
    ),
]
