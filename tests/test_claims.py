"""Claims: which runs are worth waiting for (semantics §11.3)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.lease_helpers import P, seq, turns
from tiered_cache.claims import GRACE_TURNS, Claim, Claims
from tiered_cache.keys import RadixKey


def claims_over(tokens: Sequence[int], start: int, stop: int) -> Claims:
    """Lease 1 runs `[start, stop)` of these tokens."""
    claims = Claims(P)
    claims.make(1, RadixKey(tokens, None, None), start, stop)
    return claims


def is_over(claims: Claims, tokens: Sequence[int], start: int, salt: str | None = None) -> bool:
    """Whether lease 2 would wait before it computes from `start` on."""
    return claims.over(2, RadixKey(tokens, None, salt), start) is not None


@pytest.mark.parametrize(
    ("start", "expected"), [(0, False), (4, True), (7, True), (8, True), (11, True), (12, False)]
)
async def test_a_run_claims_each_page_that_it_completes(start: int, expected: bool) -> None:
    """Also those in its middle; not the one that it only begins."""
    claims = claims_over(seq("A", 30), 5, 15)
    assert is_over(claims, seq("A", 30), start) == expected


async def test_nobody_waits_for_tokens_behind_another_prefix() -> None:
    """The same page at the same place means other state there, or other tokens no state at all."""
    claims = claims_over(seq("A", 20), 8, 16)
    assert is_over(claims, seq("A", 20), 8)
    assert not is_over(claims, [1, *seq("A", 20, 1)], 8)
    assert not is_over(claims, [*seq("A", 11), 1, *seq("A", 20, 12)], 8)
    assert not is_over(claims, [*seq("A", 8), *seq("A", 30, 12)], 8)


async def test_nobody_waits_for_another_namespace() -> None:
    """What it publishes could not be used."""
    claims = claims_over(seq("A", 20), 0, 20)
    assert is_over(claims, seq("A", 20), 0)
    assert not is_over(claims, seq("A", 20), 0, "salt")


@pytest.mark.parametrize(("length", "expected"), [(8, False), (9, True), (4, False)])
async def test_nobody_waits_for_the_page_of_the_last_token(length: int, expected: bool) -> None:
    """It is computed in any case, so there is nothing to gain."""
    claims = claims_over(seq("A", 20), 0, 20)
    assert is_over(claims, seq("A", length), 4) == expected


async def test_a_lease_does_not_wait_for_itself() -> None:
    """It would wait for ever."""
    claims = claims_over(seq("A", 20), 0, 20)
    assert claims.over(1, RadixKey(seq("A", 20), None, None), 0) is None


async def test_a_claim_ends_at_its_commit_or_a_few_turns_after_its_run() -> None:
    """Whichever is first; a commit before the run's end does not count."""
    claims = Claims(P)
    key = RadixKey(seq("A", 20), None, None)
    made: list[Claim] = [claims.make(lease_id, key, 0, 20) for lease_id in (1, 2)]
    claims.settle(1)
    assert not made[0].released.is_set()
    claims.end(made)
    claims.settle(1)
    assert made[0].released.is_set()
    await turns(GRACE_TURNS - 1)
    assert not made[1].released.is_set()
    await turns(2)
    assert made[1].released.is_set()
    assert not is_over(claims, seq("A", 20), 0)
    claims.settle(2)
