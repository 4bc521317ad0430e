"""Publishing what a request has computed: the one step in which private pages become shared.

A lease and an engine's request do the same here. Owns: the order of insert, hold and table. Refuses
to know: when to publish, and where duplicates go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tiered_cache.types import InsertParams

if TYPE_CHECKING:
    from tiered_cache.keys import RadixKey
    from tiered_cache.page_table import PageTable
    from tiered_cache.tree.locks import Receipt
    from tiered_cache.tree.radix import RadixTree
    from tiered_cache.types import PageIds


class Publishing(Protocol):
    """Whoever has computed something: a lease, an engine's request."""

    key: RadixKey
    table: PageTable
    prompt_len: int
    priority: int
    committed: int
    receipt: Receipt | None


def publish(tree: RadixTree, request: Publishing, stop: int) -> tuple[int, tuple[PageIds, ...]]:
    """Insert the whole pages of `[0, stop)`, hold them, and have the table name the tree's pages.

    Returns the depth from which the table has changed (`stop` when it has not), and per component
    the request's pages that are not needed any more, because somebody else had published the same.
    """
    committed, receipt = request.committed, request.receipt
    assert receipt is not None, "whoever publishes holds a receipt"
    params = InsertParams(
        request.key,
        tuple(request.table.ids),
        length=stop,
        prev_prefix_len=committed,
        inserted_len=committed,
        priority=request.priority,
    )
    if committed < request.prompt_len < stop:
        params.prompt_len = request.prompt_len
    result = tree.insert_below(receipt, params)
    first_changed = result.first_changed
    if first_changed < stop:
        canonical = tree.pages(result.boundary, first_changed)
        request.table.write(first_changed // tree.page_size, canonical)
    request.committed = stop
    return first_changed, result.duplicates
