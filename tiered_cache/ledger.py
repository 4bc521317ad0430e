"""The books of a cache, read and proved: who holds what, where every page is, whether it adds up.

Owns: nothing; it looks at the parts that own. Refuses to change any of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tiered_cache.errors import IntegrityError
from tiered_cache.stats import CacheStats, Counters, PoolStats
from tiered_cache.types import Outstanding, Tier

if TYPE_CHECKING:
    from tiered_cache.accounts import TierPages
    from tiered_cache.controller import HybridCacheController
    from tiered_cache.lease import Lease
    from tiered_cache.transfers import Transfer
    from tiered_cache.types import PageIds


def outstanding(controller: HybridCacheController) -> list[Outstanding]:
    """All that somebody holds, oldest first."""
    now, components = controller.now(), controller.tree.components
    found = []
    for lease in controller.all_leases():
        held = zip(components, lease.held_pages(), strict=True)
        pages = {str(component.id): len(ids) for component, ids in held}
        kind = _kind_of_lease(controller, lease)
        found.append(Outstanding(kind, repr(lease), now - lease.granted_at, pages))
    for transfer in controller.transfers or ():
        pages = {str(components[transfer.component].id): transfer.num_pages}
        kind = _kind_of_transfer(controller, transfer)
        found.append(Outstanding(kind, repr(transfer), now - transfer.started_at, pages))
    for pin in controller.pins:
        pages = {str(components[0].id): pin.num_pages}
        found.append(Outstanding("pin", repr(pin), now - pin.since, pages))
    if controller.storage is not None:
        for prefetch in controller.storage.prefetches:
            pages = {str(components[0].id): prefetch.num_pages}
            found.append(Outstanding("prefetch", repr(prefetch), now - prefetch.started_at, pages))
    for call in controller.storage_calls():
        pages = {str(components[call.component].id): len(call.ids)}
        kind = "quarantine" if call.answered.is_set() or call.epoch != controller.epoch else "read"
        if kind == "read" and not call.is_read:
            kind = "write"
        found.append(Outstanding(kind, repr(call), now - call.started_at, pages))
    lent = controller.lent
    if lent:
        pages = {
            str(component.id): len(lent.pages(index)) for index, component in enumerate(components)
        }
        found.append(Outstanding("lent pages", "the engine", now - lent.since, pages))
    return sorted(found, key=lambda item: -item.age_s)


def _kind_of_lease(controller: HybridCacheController, lease: Lease) -> str:
    if controller.is_ending(lease):
        return "quarantine"
    return "lease" if lease.epoch == controller.epoch else "stale lease"


def _kind_of_transfer(controller: HybridCacheController, transfer: Transfer) -> str:
    """A load that nobody waits for any more, or from before a reset, is quarantined until its
    copier has ended."""
    is_given_up = transfer.target is Tier.DEVICE and not transfer.waiters
    if is_given_up or transfer.epoch != controller.epoch:
        return "quarantine"
    return transfer.kind


def stats(controller: HybridCacheController) -> CacheStats:
    """A frozen snapshot."""
    leases = controller.current_leases()
    ending = [lease for lease in leases if controller.is_ending(lease)]
    device, host = {}, {}
    for index, component in enumerate(controller.tree.components):
        quarantined = sum(len(lease.private_pages()[index]) for lease in ending)
        private = sum(len(lease.private_pages()[index]) for lease in leases) - quarantined
        pool = _pool_stats(controller, Tier.DEVICE, index)
        device[str(component.id)] = replace(
            pool,
            private=private + len(controller.lent.pages(index)),
            quarantined=pool.quarantined + quarantined,
            unspent=controller.accounts.promised[index],
        )
        if controller.host_pages is not None:
            host[str(component.id)] = _pool_stats(controller, Tier.HOST, index)
    live = controller.counters
    counters = Counters(**{name: getattr(live, name) for name in Counters.__slots__})
    counters.background_failures = controller.num_background_failures
    return CacheStats(
        pools=device,
        host=host,
        num_nodes=controller.tree.num_nodes,
        num_leases=len(leases) - len(ending),
        num_queued=len(controller.admission),
        num_runs=len(controller.runs),
        counters=counters,
        storage=controller.storage.stats() if controller.storage is not None else None,
    )


def check(controller: HybridCacheController) -> None:
    """Prove the accounts, and that every page has one owner (semantics §2.4).

    Raises:
        IntegrityError: naming everything that does not hold.
    """
    faults: list[str] = []
    leases = controller.current_leases()
    snapshot = stats(controller)
    for index, (name, pool) in enumerate(snapshot.pools.items()):
        promised = sum(lease.unspent_of(index) for lease in leases)
        if pool.unspent != promised:
            faults.append(f"{name}: {pool.unspent} pages are promised, leases say {promised}")
        shared = controller.accounts.shared(index)
        if pool.free + pool.evictable < pool.unspent + shared:
            beside = f", and {shared} are held by several" if shared else ""
            faults.append(f"{name}: more is promised than there is: {pool}{beside}")
        private = [lease.private_pages()[index] for lease in leases]
        private.append(controller.lent.pages(index))
        faults += _wrong_owners(controller, Tier.DEVICE, index, private)
        if controller.host_pages is not None:
            faults += _wrong_owners(controller, Tier.HOST, index, [])
    for tier, pools in (("device", snapshot.pools), ("host", snapshot.host)):
        faults += [
            f"{name} on the {tier}: {pool} adds up to {pool.total}"
            for name, pool in pools.items()
            if pool.total != pool.capacity
        ]
    for lease in leases:
        faults += lease.check_table()
    if faults:
        raise IntegrityError("\n".join(faults))


def _pages_of(controller: HybridCacheController, tier: Tier) -> TierPages:
    pages = controller.accounts if tier is Tier.DEVICE else controller.host_pages
    assert pages is not None, "callers look whether there is a host tier"
    return pages


def _pool_stats(controller: HybridCacheController, tier: Tier, index: int) -> PoolStats:
    """Where a component's pages on a tier are, without those of leases and engines."""
    pages, component = _pages_of(controller, tier), controller.tree.components[index]
    sizes = component.device if tier is Tier.DEVICE else component.host
    quarantined, in_flight = len(pages.quarantined(index)), 0
    if controller.transfers is not None:
        quarantined += controller.transfers.num_retired(tier, index)
        in_flight = controller.transfers.num_in_flight(tier, index)
    if tier is Tier.HOST:
        in_flight += sum(map(len, _rows_being_read(controller, index)))
    return PoolStats(
        capacity=pages.allocators[index].capacity,
        free=pages.allocators[index].num_free,
        evictable=sizes.evictable,
        protected=sizes.protected,
        quarantined=quarantined,
        in_flight=in_flight,
    )


def _wrong_owners(
    controller: HybridCacheController, tier: Tier, index: int, private: list[PageIds]
) -> list[str]:
    pages, component = _pages_of(controller, tier), controller.tree.components[index]
    allocator = pages.allocators[index]
    owners = np.zeros(allocator.capacity, dtype=np.int32)
    held = [allocator.free_ids(), pages.quarantined(index), *private]
    if controller.transfers is not None:
        held += [by_component[index] for by_component in controller.transfers.held(tier)]
    if tier is Tier.HOST:
        held += _rows_being_read(controller, index)
    for node in controller.tree.nodes():
        data = node.data[index]
        value = data.value if tier is Tier.DEVICE else data.host_value
        if value is not None:
            held.append(value)
    for ids in held:
        np.add.at(owners, ids, 1)
    wrong = np.flatnonzero(owners != 1)
    if not len(wrong):
        return []
    return [
        f"{component.id}: pages {wrong.tolist()} on the {tier.value} have "
        f"{owners[wrong].tolist()} owners"
    ]


def _rows_being_read(controller: HybridCacheController, index: int) -> list[PageIds]:
    """Rows of this epoch that storage is filling: nobody's yet. Those that it is told to keep are
    the tree's."""
    return [
        call.ids
        for call in controller.storage_calls()
        if call.is_read and call.component == index and call.epoch == controller.epoch
    ]
