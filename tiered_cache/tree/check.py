"""Proof of the tree's invariants (semantics §2), by recomputing everything that is kept
incrementally."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from tiered_cache.errors import IntegrityError
from tiered_cache.keys import TOKEN_BYTES, hash_pages, namespace_seed
from tiered_cache.tree.node import BASE
from tiered_cache.types import Tier

if TYPE_CHECKING:
    from tiered_cache.tree.node import Node
    from tiered_cache.tree.radix import RadixTree


def check_integrity(tree: RadixTree) -> None:
    """Raise `IntegrityError` with every violation found."""
    faults: list[str] = []
    if tree.root.parent is not None or tree.root.key or tree.root.end:
        faults.append("the root has a parent, a key or a depth")
    nodes = list(tree.nodes())
    if len(nodes) != tree.num_nodes:
        faults.append(f"num_nodes is {tree.num_nodes}, the tree has {len(nodes)}")
    for node in nodes:
        _check_node(tree, node, faults)
    _check_sizes(tree, nodes, faults)
    _check_owners(tree, nodes, faults)
    _check_leaf_sets(tree, nodes, faults)
    _check_locks(tree, nodes, faults)
    for component in tree.components:
        component.check_orders(nodes, faults.append)
    if faults:
        raise IntegrityError("\n".join(faults))


def _check_node(tree: RadixTree, node: Node, faults: list[str]) -> None:
    def fail(message: str) -> None:
        faults.append(f"{node!r} {message}")

    parent = node.parent
    if parent is None or parent.children.get(node.child_key) is not node:
        fail("does not hang under its own child key")
        return
    overlap = TOKEN_BYTES if node.namespace.is_bigram else 0
    if len(node.key) - overlap != (node.end - parent.end) * TOKEN_BYTES:
        fail(f"has an edge of {len(node.key)} bytes")
    if node.end <= parent.end or node.end % tree.page_size:
        fail("does not end at a page behind its parent")
    page = node.key[: tree.page_size * TOKEN_BYTES + overlap]
    seed = namespace_seed(node.namespace)
    if parent is tree.root:
        if not node.child_key.endswith(seed + page) or (len(node.child_key) == len(page)) != (
            not seed and not node.namespace.is_bigram
        ):
            fail("hangs under the root by another key than its namespace and first page give")
    elif node.child_key != page or parent.namespace != node.namespace:
        fail("hangs under another key than its first page gives")
    base = node.data[BASE]
    if node.device_children != sum(
        child.data[BASE].value is not None for child in node.children.values()
    ):
        fail(f"counts {node.device_children} children on the device")
    if node.host_children != sum(
        child.data[BASE].host_value is not None for child in node.children.values()
    ):
        fail(f"counts {node.host_children} children on the host")
    if node.only is not None and list(node.children.values()) != [node.only]:
        fail(f"has {node.only!r} as its only child")
    if node.live_children != sum(_is_live(child) for child in node.children.values()):
        fail(f"counts {node.live_children} live children")
    if not _is_live(node) and not node.children and not base.lock_ref and not base.host_lock_ref:
        fail("stands for nothing and should be gone")
    if node.page_keys is not None and node.page_keys != _page_keys(tree, node):
        fail("has other page keys than its path gives")
    for component, data in zip(tree.components, node.data, strict=True):
        if min(data.lock_ref, data.host_lock_ref) < 0:
            fail(f"has a negative lock count of {component.id}")
        if data.lock_ref > base.lock_ref:
            fail(f"is locked more by {component.id} than by the base (semantics §2.3)")
        component.check(node, fail)


def _check_sizes(tree: RadixTree, nodes: list[Node], faults: list[str]) -> None:
    for component in tree.components:
        parts = [node.data[component.index] for node in nodes]
        device = [(len(data.value), data.lock_ref) for data in parts if data.value is not None]
        host = [
            (len(data.host_value), data.host_lock_ref)
            for data in parts
            if data.host_value is not None
        ]
        for name, sizes, found in (
            ("device", component.device, device),
            ("host", component.host, host),
        ):
            evictable = sum(pages for pages, locks in found if not locks)
            protected = sum(pages for pages, locks in found if locks)
            if (sizes.evictable, sizes.protected) != (evictable, protected):
                faults.append(
                    f"{component.id} on the {name} counts {sizes.evictable} evictable and "
                    f"{sizes.protected} protected "
                    f"pages, the nodes have {evictable} and {protected}"
                )


def _check_owners(tree: RadixTree, nodes: list[Node], faults: list[str]) -> None:
    for component in tree.components:
        for tier in (Tier.DEVICE, Tier.HOST):
            seen: dict[int, Node] = {}
            for node in nodes:
                data = node.data[component.index]
                value = data.value if tier is Tier.DEVICE else data.host_value
                for page in value.tolist() if value is not None else ():
                    if page in seen:
                        faults.append(
                            f"{component.id} page {page} on the {tier.value} has two owners: "
                            f"{seen[page]!r}, {node!r}"
                        )
                    seen[page] = node


def _check_leaf_sets(tree: RadixTree, nodes: list[Node], faults: list[str]) -> None:
    for tier, queue, is_leaf in (
        (Tier.DEVICE, tree.leaves.device, _is_device_leaf),
        (Tier.HOST, tree.leaves.host, _is_host_leaf),
    ):
        wanted = {node for node in nodes if is_leaf(node)}
        listed = list(tree.leaves.in_order(tier))
        if set(listed) != wanted or len(listed) != len(queue):
            faults.append(f"the {tier.value} leaves are {listed}, they should be {wanted}")
        for node in listed:
            if node.data[BASE].queue is not queue:
                faults.append(f"{node!r} is in the {tier.value} order and does not know it")
            if not queue.is_in_place(node):
                faults.append(f"{node!r} stands in the {tier.value} order under an old rank")

    mirrors = list(tree.leaves.mirrors)
    wanted = {node for node in nodes if _is_spare_mirror(tree, node)}
    if set(mirrors) != wanted or len(mirrors) != len(tree.leaves.mirrors):
        faults.append(f"the mirrors are {mirrors}, they should be {wanted}")
    faults += [
        f"{node!r} stands in the order of mirrors under an old rank"
        for node in mirrors
        if not tree.leaves.mirrors.is_in_place(node)
    ]


def _check_locks(tree: RadixTree, nodes: list[Node], faults: list[str]) -> None:
    """All locks equal what the receipts that are out hold."""
    held: Counter[tuple[Tier, int, Node]] = Counter()
    for receipt in tree.receipts:
        nodes_held = [
            (receipt.tier, component.index, node)
            for component, part in zip(tree.components, receipt.parts, strict=True)
            if part is not None  # else it was given up early
            for node in component.held(receipt.node, receipt.tier, part)
        ]
        held.update(nodes_held)
        node = receipt.node
        if nodes_held and node.end != receipt.depth:
            faults.append(f"{receipt!r} ends inside {node!r}")
        while node.parent is not None:
            node = node.parent
        if nodes_held and node is not tree.root:
            faults.append(f"{receipt!r} holds a node that is gone")
    for node in nodes:
        for component, data in zip(tree.components, node.data, strict=True):
            for tier, locks in ((Tier.DEVICE, data.lock_ref), (Tier.HOST, data.host_lock_ref)):
                receipts = held[tier, component.index, node]
                if locks != receipts:
                    faults.append(
                        f"{node!r} has {locks} {tier.value} locks of {component.id}, the receipts "
                        f"that are out are {receipts}"
                    )


def _page_keys(tree: RadixTree, node: Node) -> list[bytes]:
    """A node's page keys, hashed anew from the root."""
    path = []
    current = node
    while current.parent is not None:
        path.append(current)
        current = current.parent
    keys: list[bytes] = []
    previous = namespace_seed(node.namespace)
    for step in reversed(path):
        tokens = np.frombuffer(step.key, np.int64)
        keys = hash_pages(tokens, tree.page_size, previous, is_bigram=node.namespace.is_bigram)
        previous = keys[-1] if keys else previous
    return keys


def _is_live(node: Node) -> bool:
    return node.data[BASE].value is not None or node.data[BASE].host_value is not None


def _is_device_leaf(node: Node) -> bool:
    return (
        node.data[BASE].value is not None
        and not any(data.lock_ref for data in node.data)
        and not any(child.data[BASE].value is not None for child in node.children.values())
    )


def _is_host_leaf(node: Node) -> bool:
    base = node.data[BASE]
    return (
        base.value is None
        and base.host_value is not None
        and not base.lock_ref
        and not base.host_lock_ref
        and not any(_is_live(child) for child in node.children.values())
    )


def _is_spare_mirror(tree: RadixTree, node: Node) -> bool:
    base = node.data[BASE]
    return (
        base.value is not None
        and base.host_value is not None
        and not base.host_lock_ref
        and base.pending is None
        and not any(child.data[BASE].host_value is not None for child in node.children.values())
        and (base.stored or tree.leaves.mirrors_are_spare)
    )
