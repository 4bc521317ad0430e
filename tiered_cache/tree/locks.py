"""Receipts: what a lock acquisition returns and its release needs (semantics §6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiered_cache.errors import LockError, StaleError

if TYPE_CHECKING:
    from tiered_cache.tree.node import Node
    from tiered_cache.types import Tier


class Receipt:
    """Proof of one acquisition. Compared by identity: equal contents do not open a lock.

    `node` is the end of what is locked and `depth` its end; splits leave both true. `parts`: per
    component, what its release needs (None: given back early, or never taken).
    """

    __slots__ = ("depth", "epoch", "node", "parts", "tier")

    def __init__(self, node: Node, tier: Tier, epoch: int, parts: list[Any]) -> None:
        self.node = node
        self.depth = node.end
        self.tier = tier
        self.epoch = epoch
        self.parts = parts

    def __repr__(self) -> str:
        return f"<Receipt {self.tier.value} [0:{self.depth})>"


class ReceiptBook:
    """All receipts that are out. A receipt that is not in the book opens nothing, whoever made
    it."""

    __slots__ = ("_live", "epoch")

    def __init__(self) -> None:
        self._live: set[Receipt] = set()
        self.epoch = 0

    def issue(self, node: Node, tier: Tier, parts: list[Any]) -> Receipt:
        receipt = Receipt(node, tier, self.epoch, parts)
        self._live.add(receipt)
        return receipt

    def check(self, receipt: Receipt, tier: Tier) -> None:
        """Raise unless the receipt is out and of this tier; nothing changes."""
        if receipt not in self._live:
            if receipt.epoch < self.epoch:
                raise StaleError("this receipt is from before a reset(): what it locked is gone")
            raise LockError("this receipt was released before, or is not from this tree")
        if receipt.tier is not tier:
            raise LockError(
                f"this receipt locks the {receipt.tier.value} tier, not the {tier.value} tier"
            )

    def redeem(self, receipt: Receipt, tier: Tier) -> None:
        if receipt not in self._live or receipt.tier is not tier:
            self.check(receipt, tier)
        self._live.remove(receipt)

    def void_all(self) -> None:
        """A new epoch: every receipt that is out becomes stale."""
        self._live.clear()
        self.epoch += 1

    def __iter__(self) -> Any:
        return iter(self._live)

    def __len__(self) -> int:
        return len(self._live)
