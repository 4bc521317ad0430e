"""Frozen snapshots, good enough to assert on."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Where the pages of one component on one tier are; the parts add up to `capacity` (semantics
    §2.4).

    `private`: taken by leases and not published. `quarantined`: given up, but a run or a copier may
    still touch them. `in_flight`: targets of transfers that have not ended.
    `unspent`: promised to admitted leases and not taken yet (part of free and evictable).
    """

    capacity: int
    free: int
    evictable: int
    protected: int
    private: int = 0
    quarantined: int = 0
    in_flight: int = 0
    unspent: int = 0

    @property
    def total(self) -> int:
        """What the parts add up to."""
        held = self.private + self.quarantined + self.in_flight
        return self.free + self.evictable + self.protected + held


@dataclass(slots=True)
class Counters:
    """What has happened since the cache was opened. The library's own, live record; `CacheStats`
    holds a copy."""

    leases_granted: int = 0
    leases_released: int = 0
    admissions_queued: int = 0
    admissions_timed_out: int = 0
    admissions_cancelled: int = 0
    tokens_requested: int = 0
    tokens_hit_device: int = 0
    tokens_hit_host: int = 0
    tokens_hit_storage: int = 0
    tokens_computed: int = 0
    tokens_committed: int = 0
    tokens_dropped: int = 0
    pages_evicted: int = 0
    pages_evicted_host: int = 0
    states_skipped: int = 0
    """States that could not be kept, because no slot was free."""
    states_taken_over: int = 0
    """States that leases began with and the tree has lost, because no slot was free."""
    pages_duplicate: int = 0
    chunks: int = 0
    chunk_waits: int = 0
    rematches: int = 0
    runs: int = 0
    runs_cancelled: int = 0
    runs_failed: int = 0
    resets: int = 0
    loads: int = 0
    loads_joined: int = 0
    loads_failed: int = 0
    load_timeouts: int = 0
    pages_loaded: int = 0
    stores: int = 0
    stores_failed: int = 0
    stores_refused: int = 0
    stores_skipped: int = 0
    pages_stored: int = 0
    prefetches: int = 0
    prefetches_joined: int = 0
    prefetches_refused: int = 0
    prefetches_timed_out: int = 0
    pages_prefetched: int = 0
    pages_backed_up: int = 0
    backups_skipped: int = 0
    backups_refused: int = 0
    backups_failed: int = 0
    leases_dropped_unclosed: int = 0
    background_failures: int = 0


@dataclass(slots=True)
class StorageCounters:
    """What has crossed the border since the cache was opened: objects that were there or not, and
    bytes that were really moved."""

    objects_probed: int = 0
    objects_found: int = 0
    objects_read: int = 0
    bytes_read: int = 0
    objects_missing: int = 0
    objects_corrupt: int = 0
    objects_unreadable: int = 0
    objects_written: int = 0
    bytes_written: int = 0
    objects_existing: int = 0
    objects_refused: int = 0
    objects_unwritable: int = 0
    objects_deleted: int = 0
    calls_failed: int = 0
    calls_timed_out: int = 0


@dataclass(frozen=True, slots=True)
class StorageStats:
    """The storage tier.

    `reads`, `writes`: their health: closed (well), degraded, open (not asked for now), half-open;
    `reason`: why, last. `calls_queued`, `calls_hung`: waiting for their turn; beyond their limit
    without an end. `pages_pending`: waiting to be written. `pages_prefetched`: on the host, being
    read or not taken yet. `num_objects`, `num_bytes`, `max_bytes`: as the backend knows (None: it
    does not).
    """

    is_connected: bool
    reads: str
    writes: str
    reason: str
    read_latency_s: float
    write_latency_s: float
    calls_queued: int
    calls_hung: int
    pages_pending: int
    pages_prefetched: int
    num_objects: int | None
    num_bytes: int | None
    max_bytes: int | None
    counters: StorageCounters


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot of a cache. `pools`: per component, of the device tier; `host`: of the host tier
    (empty without one); `storage`: None without one."""

    pools: dict[str, PoolStats]
    host: dict[str, PoolStats]
    num_nodes: int
    num_leases: int
    num_queued: int
    num_runs: int
    counters: Counters = field(default_factory=Counters)
    storage: StorageStats | None = None

    @property
    def hit_rate(self) -> float:
        """Share of the requested prompt tokens that were not computed."""
        counters = self.counters
        reused = counters.tokens_hit_device + counters.tokens_hit_host + counters.tokens_hit_storage
        return reused / counters.tokens_requested if counters.tokens_requested else 0.0
