"""The proof of a component: subclass `ComponentTests`, say how to make one, run pytest.

    class TestSinks(ComponentTests):
        def make(self) -> Sinks:
            return Sinks("acme.sinks")

        def needed(self, depth: int, page_size: int) -> range:
            return range(1)

It needs pytest alone. Each test makes a tree of a base and the component, does to it what a cache
does, and has everything proven after every step: the tree's own check, the account of every id, the
content of every page, and where a prefix may end against a model by pages.

Owns: what every component must do. Refuses to know: what its state is.
"""

from __future__ import annotations

import gc
import random
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import pytest

from tiered_cache.errors import IntegrityError
from tiered_cache.keys import TOKEN_BYTES, RadixKey
from tiered_cache.observe import Event, EventKind
from tiered_cache.testing.component_scene import (
    EVERYTHING,
    TIERS,
    Role,
    TreeScene,
    Walk,
    part_of,
    role_of,
    whole_key,
)
from tiered_cache.tree.components.base import own, owns_memory
from tiered_cache.tree.components.full import FullComponent
from tiered_cache.tree.node import BASE
from tiered_cache.types import Boundary, InsertParams, Tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tiered_cache.tree.components.base import TreeComponent
    from tiered_cache.tree.locks import Receipt
    from tiered_cache.tree.node import ComponentData, Node
    from tiered_cache.types import PageIds

__all__ = ["ComponentTests"]

DEVICE, HOST = Tier.DEVICE, Tier.HOST

PAGES: Final = 12
"""Of the prompts below: enough for every rule to be met a few times."""


class ComponentTests(ABC):
    """See the module. A subclass is collected if its name begins with `Test`.

    To override: `make`; `needed` where a prefix does not need every page, or the state at its end;
    `brings` where a request does not have an id for every page; `stack` for other company, or none.

    Attributes:
        page_size: P, in most tests. A walk draws its own.
        num_walks, num_steps: how many random walks there are, and how long.
    """

    page_size: ClassVar[int] = 4
    num_walks: ClassVar[int] = 4
    num_steps: ClassVar[int] = 120

    # --- hooks ------------------------------------------------------------------------------------

    @abstractmethod
    def make(self) -> TreeComponent:
        """The component, as new; always with the same id."""

    def needed(self, depth: int, page_size: int) -> Iterable[int]:
        """The pages, by index, that a prefix of `depth` tokens needs of the component: it may end
        where they are all there. Of a state, the page that it ends."""
        return role_of(self.make()).needed(depth, page_size)

    def brings(self, pages: range) -> Iterable[int]:
        """Of the pages that a request computes, those that it has an id for."""
        return pages

    def stack(self) -> Sequence[TreeComponent]:
        """The components of a tree, in eviction order; the first is the base."""
        return [FullComponent("full"), self.make()]

    # --- scenes -----------------------------------------------------------------------------------

    def scene(self, page_size: int | None = None, **rest: Any) -> TreeScene:
        """A tree of `stack`, and all around it."""
        mine = self.make().id
        components = self.stack()
        roles = [
            Role(self.needed, self.brings) if component.id == mine else role_of(component)
            for component in components
        ]
        rest.setdefault("pages", 80)
        return TreeScene(components, page_size or self.page_size, roles=roles, **rest)

    def component(self, scene: TreeScene) -> TreeComponent:
        mine = self.make().id
        return next(component for component in scene.components if component.id == mine)

    def prompt(self, name: int = 0, num_pages: int = PAGES) -> list[int]:
        """Tokens that share none with another name's."""
        length = num_pages * self.page_size
        return list(range(1000 * name + 1, 1000 * name + 1 + length))

    def ends(self, num_pages: int = PAGES) -> list[int]:
        """Depths at which a page ends."""
        return list(range(self.page_size, num_pages * self.page_size + 1, self.page_size))

    def published(self, *, by_page: bool = False, **rest: Any) -> TreeScene:
        """A scene with one prompt, a state at every third page; as one insert, or page by page."""
        scene = self.scene(**rest)
        tokens = self.prompt()
        states = self.ends()[2::3]
        for stop in self.ends() if by_page else (len(tokens),):
            assert scene.publish(tokens[:stop], states=states) is not None
        return scene

    def boundaries(self, scene: TreeScene) -> list[Boundary]:
        """Every boundary of the prompt at which a prefix may end."""
        key = RadixKey(self.prompt())
        found = {scene.match(key, stop).device_length for stop in self.ends()}
        return [scene.match(key, depth).device_boundary for depth in sorted(found) if depth]

    def back_up(self, scene: TreeScene) -> None:
        """Copy everything of the prompt that can be found to the host."""
        for boundary in self.boundaries(scene):
            assert scene.move_all(boundary, HOST)

    # --- binding ----------------------------------------------------------------------------------

    def test_a_tree_binds_it(self) -> None:
        """§1.2: an id of its own, a dense index; a reset binds it anew, with nothing."""
        scene = self.published()
        component = self.component(scene)
        assert scene.tree.components[component.index] is component
        assert component.page_size == self.page_size
        index = component.index
        scene.reset()
        assert component.index == index
        assert scene.kept() == scene.kept(HOST) == [0] * len(scene.components)
        scene.check()
        assert scene.publish(self.prompt(), states=self.ends()) is not None
        scene.check()

    # --- ids --------------------------------------------------------------------------------------

    def test_ids_have_one_owner(self) -> None:
        """§5.3–7: of a request, the tree takes an id or gives it back, whatever is there; what is
        there stays."""
        for given_up in (0, self.page_size + 1, len(self.prompt())):
            for states in ([], self.ends()[1::2]):
                scene = self.scene()
                for stop in (self.ends()[3], self.ends()[-1], self.ends()[6]):
                    tokens = self.prompt()[:stop]
                    scene.publish(tokens, given_up=given_up, states=states)
                    scene.check()
                    before = scene.kept()
                    scene.publish_own(tokens, states=states)  # it may fill tombstones
                    scene.check()
                    filled = scene.kept()
                    scene.publish_own(tokens, states=states)
                    scene.check()
                    assert all(map(int.__le__, before, filled))
                    assert scene.kept() == filled, "what is there was taken twice"
                    scene.hit(RadixKey(self.prompt()))

    def test_a_gap_is_nobodys_page(self) -> None:
        """§5.5: −1 is no id."""
        scene = self.scene()
        gaps = {0, 4, PAGES - 1}
        for _ in range(2):
            scene.publish_own(self.prompt(), states=self.ends(), gaps=gaps)
            scene.check()
            gaps = {2, 4}
        scene.hit(RadixKey(self.prompt()))

    def test_what_the_request_owns_is_not_touched(self) -> None:
        """§5.1: nothing below `prev_prefix_len` is taken or given back; ids that are the tree's
        are no duplicates."""
        scene = self.published()
        key = RadixKey(self.prompt())
        for boundary in self.boundaries(scene):
            pages = scene.tree.pages(boundary)
            for owned in (0, boundary.depth):
                result = scene.tree.insert(
                    InsertParams(key, pages, length=boundary.depth, prev_prefix_len=owned)
                )
                assert [len(ids) for ids in result.duplicates] == [0] * len(scene.components)
            scene.check()

    def test_a_change_is_told_from_where_it_begins(self) -> None:
        """§5.4: before `first_changed` the caller's ids are the tree's."""
        scene = self.published()
        index, key = self.component(scene).index, RadixKey(self.prompt())
        computed = scene.compute(key, 0, states=self.ends())
        assert computed is not None
        # Of the others what the tree has, so that only this component has something to say.
        pages = scene.tree.pages(Boundary(scene.node(self.prompt()), len(key)))
        for other, pool in enumerate(scene.pools[DEVICE]):
            if other != index:
                pool.free(computed[other][computed[other] >= 0])
        mine = computed[index]
        result = scene.insert(key, (*pages[:index], mine, *pages[index + 1 :]))
        kept = scene.tree.pages(result.boundary)[index]
        same = result.first_changed // self.page_size
        there = kept[:same] >= 0
        assert kept[:same][there].tolist() == mine[:same][there].tolist()
        for page in result.duplicates[index].tolist():
            assert mine.tolist().index(page) >= same, "it went home, and the caller was not told"
        scene.check()

    # --- boundaries -------------------------------------------------------------------------------

    def test_a_prefix_ends_where_what_it_needs_is(self) -> None:
        """§3.3–4: at every limit as the model by pages says; parts of edges as if cut."""
        for by_page in (False, True):
            scene = self.published(by_page=by_page)
            key, component = RadixKey(self.prompt()), self.component(scene)
            for limit in range(len(key) + 1):
                scene.hit(key, limit)
            if component.has_tombstones:
                for node in scene.path(self.prompt())[::2]:
                    if part_of(node, component.index, DEVICE) is not None:
                        scene.drop(self.prompt()[: node.end], component.index)
                        scene.check()
                        for limit in range(len(key) + 1):
                            scene.hit(key, limit)

    def test_boundaries_are_monotone(self) -> None:
        """§3.3: more of a key is never less of a hit, nor is the host beside the device; a boundary
        is one when it is asked for itself."""
        scene = self.published(by_page=True)
        self.back_up(scene)
        component = self.component(scene)
        for node in scene.path(self.prompt())[1::3]:
            if component.has_tombstones and part_of(node, component.index, DEVICE) is not None:
                scene.drop(self.prompt()[: node.end], component.index)
        path = scene.path(self.prompt())
        answers = [
            [
                component.deepest_boundary(path[:n], n, path[n - 1].end, only)
                for only in (True, False)
            ]
            for n in range(1, len(path) + 1)
        ]
        for count, (device, best) in enumerate(answers, 1):
            assert 0 <= device <= best <= count
            for of, only in ((device, True), (best, False)):
                if of:
                    end = path[of - 1].end
                    assert component.deepest_boundary(path[:of], of, end, only) == of
                    assert component.deepest_boundary(path, of, end, only) == of
        for part in zip(*answers, strict=True):
            assert list(part) == sorted(part)
        assert component.deepest_boundary([], 0, 0, True) == 0

    def test_what_is_restorable(self) -> None:
        """§10.5: a prefix may end where the pages that it needs are all there, whoever has them."""
        rng = random.Random(0)
        scene = self.scene()
        component, ends = self.component(scene), self.ends()
        needed = {depth: list(self.needed(depth, self.page_size)) for depth in ends}
        for depth in ends:
            assert list(component.pages_needed(depth)) == needed[depth]
        for _ in range(50):
            share = rng.random()
            there = np.array([rng.random() < share for _ in ends], np.bool_)
            for count in range(len(ends) + 1):
                wanted = [all(there[page] for page in needed[depth]) for depth in ends[:count]]
                assert component.restorable(there[:count]).tolist() == wanted

    def test_what_a_request_keeps_to_go_on(self) -> None:
        """§11.6: at a page's end what a prefix needs that ends there; inside of a page all that the
        prefix at its end will need, but for the page itself."""
        scene = self.scene()
        component, size = self.component(scene), self.page_size
        if not component.is_per_page:
            return
        assert list(component.pages_to_go_on(0)) == []
        for depth in self.ends():
            needed = set(self.needed(depth, size))
            assert set(component.pages_to_go_on(depth)) == needed
            for inside in range(depth - size + 1, depth):
                kept = {*component.pages_to_go_on(inside), inside // size}
                assert needed <= kept, f"at {inside} tokens {needed - kept} are not kept"

    def test_a_match_changes_nothing_but_ages(self) -> None:
        """§3.8: whatever is looked for, and however often."""
        scene = self.published()
        before = scene.tree.pages(Boundary(scene.node(self.prompt()), len(self.prompt())))
        nodes = scene.tree.num_nodes
        for limit in range(len(self.prompt()) + 1):
            scene.match(RadixKey([*self.prompt(), 7]), limit)
        after = scene.tree.pages(Boundary(scene.node(self.prompt()), len(self.prompt())))
        assert [ids.tolist() for ids in after] == [ids.tolist() for ids in before]
        assert scene.tree.num_nodes == nodes
        scene.check()

    # --- splits -----------------------------------------------------------------------------------

    def test_a_split_loses_nothing(self) -> None:
        """§4: whatever is cut, the same ids are at the same depths, on both tiers; each part has
        memory of its own, and what could be found is found."""
        scene = self.published()
        self.back_up(scene)
        key, end = RadixKey(self.prompt()), len(self.prompt())
        node = scene.node(self.prompt())
        kept = scene.kept(), scene.kept(HOST)
        before = [ids.tolist() for ids in scene.tree.pages(Boundary(node, end))]
        legal = scene.legal(key, device_only=True)
        for at in (5, 2, 8, 1, 10, 3):
            scene.tree.cut(Boundary(scene.node(self.prompt()), self.ends()[at]))
            scene.check()
            assert (scene.kept(), scene.kept(HOST)) == kept
            assert [ids.tolist() for ids in scene.tree.pages(Boundary(node, end))] == before
            assert set(legal) <= set(scene.legal(key, device_only=True))
            for limit in self.ends():
                scene.hit(key, limit)
        for of in scene.tree.nodes():
            for component in scene.components:
                for tier in TIERS:
                    ids = part_of(of, component.index, tier)
                    assert ids is None or owns_memory(ids)

    # --- locks ------------------------------------------------------------------------------------

    def test_locks_are_symmetrical_through_splits(self) -> None:
        """§6.1–2: nested locks, cuts between them, any order of release: in the end all are 0."""
        for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
            scene = self.published()
            held: list[Receipt] = []
            boundaries = [*self.boundaries(scene)[-2:], self.boundaries(scene)[0]]
            for boundary, cut in zip((boundaries * 3)[:3], (7, 3, 10), strict=True):
                held.append(scene.tree.inc_lock_ref(boundary))
                scene.check()
                scene.tree.cut(Boundary(scene.node(self.prompt()), self.ends()[cut]))
                scene.check()
            for at in order:
                scene.tree.dec_lock_ref(held[at])
                scene.check()
            assert scene.held() == [0] * len(scene.components)

    def test_host_locks_are_spans_through_splits(self) -> None:
        """§6.4: of any start, and none of them protects anything in the end."""
        scene = self.published()
        self.back_up(scene)
        held: list[Receipt] = []
        for start, cut in zip((0, *self.ends()[::3]), (6, 2, 9, 4, 1), strict=True):
            boundary = self.boundaries(scene)[-1]
            held.append(scene.tree.inc_host_lock_ref(boundary, min(start, boundary.depth)))
            scene.check()
            scene.tree.cut(Boundary(scene.node(self.prompt()), self.ends()[cut]))
            scene.check()
        for index in range(len(scene.components)):
            scene.evict(index, EVERYTHING)  # the first span is all of it
            scene.evict(index, EVERYTHING, HOST)
            scene.check()
        assert scene.hit(RadixKey(self.prompt()), held[0].depth) == (0, held[0].depth)
        for receipt in held:
            scene.tree.dec_host_lock_ref(receipt)
            scene.check()
        assert scene.held(HOST) == [0] * len(scene.components)

    def test_a_lock_keeps_what_a_prefix_needs(self) -> None:
        """§6.2, §7.2: whatever is evicted, a held prefix is still one, with the right bytes."""
        key = RadixKey(self.prompt())
        for at in range(len(self.boundaries(self.published()))):
            scene = self.published()
            scene.publish(self.prompt(1), states=self.ends())
            boundary = self.boundaries(scene)[at]
            receipt = scene.tree.inc_lock_ref(boundary)
            for index in reversed(range(len(scene.components))):
                scene.evict(index, EVERYTHING)
                scene.check()
            assert scene.hit(key, boundary.depth)[0] == boundary.depth
            pages = scene.tree.pages(Boundary(receipt.node, receipt.depth))
            scene.check_prefix(key, receipt.depth, pages)
            scene.tree.dec_lock_ref(receipt)
            scene.check()

    def test_would_protect_and_would_release_tell_the_truth(self) -> None:
        """§11.5: admission counts on them: of any boundary, alone or under other locks, before the
        cut that a lock makes."""
        scene = self.published()
        held: list[Receipt] = []
        node = scene.node(self.prompt())
        for depth in (self.ends()[7], *self.ends()[::-2], self.ends()[2]):
            boundary, before = Boundary(node, depth), scene.held()
            told = scene.tree.would_protect(boundary)
            held.append(scene.tree.inc_lock_ref(boundary))
            assert told == [now - old for now, old in zip(scene.held(), before, strict=True)]
            scene.check()
        while held:
            before, leaving = scene.held(), held[-2:]
            told = scene.tree.would_release(leaving)
            for receipt in leaving:
                scene.tree.dec_lock_ref(receipt)
            assert told == [old - now for now, old in zip(scene.held(), before, strict=True)]
            del held[-2:]
            scene.check()
        assert scene.held() == [0] * len(scene.components)

    def test_its_part_of_a_lock_is_released_early_once(self) -> None:
        """§6.1: the base stays held, the full release skips it, and another's hold is another's."""
        scene = self.published()
        component = self.component(scene)
        if component.index == BASE:
            return  # what all others count on goes last
        boundary = self.boundaries(scene)[-1]
        mine, other = scene.tree.inc_lock_ref(boundary), scene.tree.inc_lock_ref(boundary)
        before = scene.held()
        for _ in range(2):
            scene.tree.release(mine, component.index)
            assert scene.held() == before
            scene.check()
        scene.tree.dec_lock_ref(mine)
        assert scene.held() == before
        scene.tree.release(other, component.index)
        assert scene.held() == [
            0 if index == component.index else pages for index, pages in enumerate(before)
        ]
        scene.check()
        scene.tree.dec_lock_ref(other)
        assert scene.held() == [0] * len(scene.components)

    def test_a_lock_goes_down_with_its_request(self) -> None:
        """§5.10: held are what the deeper prefix needs, and nothing else."""
        scene = self.published()
        boundaries = self.boundaries(scene)
        receipt = scene.tree.inc_lock_ref(boundaries[0])
        for boundary in boundaries[1:]:
            scene.tree.advance(receipt, boundary)
            scene.check()
            fresh = scene.tree.inc_lock_ref(boundary)
            assert scene.tree.would_release([receipt]) == [0] * len(scene.components)
            scene.tree.dec_lock_ref(fresh)
            assert scene.tree.would_release([receipt]) == scene.held()
        scene.tree.dec_lock_ref(receipt)
        assert scene.held() == [0] * len(scene.components)
        scene.check()

    def test_what_appears_under_a_lock_is_protected(self) -> None:
        """§6.3: whoever creates it counts it so."""
        scene = self.scene()
        scene.publish(self.prompt(), given_up=len(self.prompt()))
        receipt = scene.tree.inc_lock_ref(Boundary(scene.node(self.prompt()), len(self.prompt())))
        scene.publish_own(self.prompt(), states=self.ends())
        scene.check()
        scene.tree.dec_lock_ref(receipt)
        scene.check()
        assert scene.held() == [0] * len(scene.components)

    # --- eviction ---------------------------------------------------------------------------------

    def test_eviction_gives_what_was_asked(self) -> None:
        """§7.1, §8.2: on either tier, that much or all there is, at most a victim more; the account
        says the same."""
        for tier in TIERS:
            for wanted in (1, 2, 3, 5):
                scene = self.published(by_page=True)
                index = self.component(scene).index
                if tier is HOST:
                    self.back_up(scene)
                    scene.evict(BASE, EVERYTHING)
                while before := scene.tree.evictable_size(index, tier):
                    largest = max(
                        len(ids)
                        for node in scene.tree.nodes()
                        if (ids := part_of(node, index, tier)) is not None
                    )
                    gone = scene.evict(index, wanted, tier).count(index, tier)
                    assert min(wanted, before) <= gone < wanted + largest
                    assert scene.tree.evictable_size(index, tier) == before - gone
                    scene.check()
                assert scene.evict(index, wanted, tier).count(index, tier) == 0

    def test_what_is_used_goes_last(self) -> None:
        """§3.6, §7.2: of two prompts, what the one needs that was used just now."""
        scene = self.published()
        scene.publish(self.prompt(1), states=self.ends())
        index, key = self.component(scene).index, RadixKey(self.prompt())
        other = RadixKey(self.prompt(1))
        depth = scene.hit(key)[0]
        assert depth
        while max(scene.legal(other, device_only=True)):
            assert scene.hit(key)[0] == depth
            assert scene.evict(index, 1).count(index)
            scene.check()

    def test_nothing_is_left(self) -> None:
        """§2.7, §7.5: when all is evicted there is no node, every id is free, and nothing keeps a
        node alive."""
        for first in range(len(self.stack())):
            scene = self.published(by_page=True)
            self.back_up(scene)
            alive: weakref.WeakSet[Node] = weakref.WeakSet(scene.tree.nodes())
            for tier in TIERS:
                for index in (first, BASE):
                    scene.evict(index, EVERYTHING, tier)
                    scene.check()
            assert scene.tree.num_nodes == 0
            for pools in scene.pools.values():
                assert all(pool.num_free == pool.capacity for pool in pools)
            gc.collect()
            assert not list(alive)

    # --- moving -----------------------------------------------------------------------------------

    def test_it_goes_to_the_host_and_back(self) -> None:
        """§7.3, §9.7: what was copied is found there when the device has lost it, and a load brings
        what a prefix needs; the same bytes."""
        scene = self.published(by_page=True)
        key = RadixKey(self.prompt())
        self.back_up(scene)
        scene.check()
        length = scene.hit(key)[0]
        assert length
        for index in reversed(range(len(scene.components))):
            scene.evict(index, EVERYTHING)
            scene.check()
        assert scene.hit(key) == (0, length)
        assert scene.move_all(scene.match(key).best_boundary, DEVICE)
        scene.check()
        assert scene.hit(key) == (length, length)

    def test_it_comes_from_storage(self) -> None:
        """§5.11: rows on the host, of one component after the other, under locks and through cuts;
        what is there twice goes home."""
        scene = self.scene()
        key, end = RadixKey(self.prompt()), len(self.prompt())
        assert scene.fetch(key, [BASE])
        scene.check()
        node = scene.node(self.prompt())
        held = [scene.tree.inc_lock_ref(Boundary(node, end))]
        held += [
            scene.tree.inc_host_lock_ref(Boundary(node, end), at) for at in (0, self.ends()[4])
        ]
        scene.check()
        for index in range(1, len(scene.components)):
            assert scene.fetch(key, [index])
            scene.check()
        assert scene.hit(key) == (0, end)
        for at in (6, 2, 9):
            scene.tree.cut(Boundary(node, self.ends()[at]))
            scene.check()
        kept = scene.kept(HOST)
        assert scene.fetch(key)
        assert scene.kept(HOST) == kept
        assert scene.move_all(Boundary(node, end), DEVICE)
        scene.check()
        for receipt in held:
            scene.tree.let_go(receipt)
            scene.check()
        assert scene.hit(key) == (end, end)

    def test_a_commit_keeps_what_is_there(self) -> None:
        """§5.12, §2.2: ids for what is there, or for what has no base, are given back."""
        scene = self.published(by_page=True)
        component, pool = self.component(scene), scene.pools[HOST]
        index = component.index
        self.back_up(scene)
        kept = scene.kept(HOST)
        for node in scene.path(self.prompt()):
            if part_of(node, index, HOST) is None:
                continue
            ids = pool[index].allocate(component.num_ids(node))
            assert ids is not None
            left = scene.tree.commit_transfer(Boundary(node, node.end), index, HOST, ids)
            assert left.tolist() == ids.tolist()
            pool[index].free(left)
        assert scene.kept(HOST) == kept
        scene.check()
        if index != BASE:
            scene.evict(BASE, EVERYTHING)
            for node in scene.path(self.prompt()):
                ids = own(np.arange(component.num_ids(node), dtype=np.int32))
                left = scene.tree.commit_transfer(Boundary(node, node.end), index, DEVICE, ids)
                assert left.tolist() == ids.tolist(), "taken without a base"
            scene.check()

    # --- what others see --------------------------------------------------------------------------

    def test_every_residency_is_told(self) -> None:
        """§2, of both tiers: replayed events equal what is there."""
        for seed in range(2):
            replay = Replay()

            def make(page_size: int, host_pages: int, replay: Replay = replay) -> TreeScene:
                scene = self.scene(page_size, host_pages=host_pages, observers=[replay])
                replay.components = {component.id: component for component in scene.components}
                return scene

            walk = Walk(f"events {seed}", make)
            for _ in range(self.num_steps // 2):
                walk.step()
                assert replay.there() == what_is_there(walk.scene)
            walk.end()
            assert not replay.there()

    # --- proof ------------------------------------------------------------------------------------

    def test_its_check_finds_a_planted_fault(self) -> None:
        """§2: an id too many, one too few, counters that are off, a lock that nobody has."""
        for plant in FAULTS:
            scene = self.published()
            scene.check()
            component = self.component(scene)
            node, ids = next(
                (node, ids)
                for node in scene.tree.nodes()
                if (ids := part_of(node, component.index, DEVICE)) is not None
            )
            plant(component, node.data[component.index], ids)
            with pytest.raises(IntegrityError):
                scene.tree.check_integrity()

    def test_random_walks(self) -> None:
        """Requests, evictions, copies, loads, locks and resets in random order; everything is
        proven after every step."""
        for seed in range(self.num_walks):
            walk = Walk(seed, lambda size, host_pages: self.scene(size, host_pages=host_pages))
            walk.run(self.num_steps)


# --- faults to plant ------------------------------------------------------------------------------


def too_many_ids(component: TreeComponent, data: ComponentData, ids: PageIds) -> None:
    data.value = own(np.append(ids, np.int32(EVERYTHING)))
    component.device.credit(1, data.lock_ref)


def too_few_ids(component: TreeComponent, data: ComponentData, ids: PageIds) -> None:
    data.value = own(ids[1:])
    component.device.credit(-1, data.lock_ref)


def writable_ids(component: TreeComponent, data: ComponentData, ids: PageIds) -> None:
    data.value = ids.copy()


def miscounted(component: TreeComponent, data: ComponentData, ids: PageIds) -> None:
    component.device.protect(1)


def held_by_nobody(component: TreeComponent, data: ComponentData, ids: PageIds) -> None:
    data.lock_ref += 1
    component.device.protect(len(ids))


FAULTS: Final = (too_many_ids, too_few_ids, writable_ids, miscounted, held_by_nobody)


# --- what is there, by events and by looking ------------------------------------------------------

Place = tuple[str, Tier, bytes]


class Replay:
    """A model of both tiers, made from events alone."""

    def __init__(self) -> None:
        self.components: dict[str, TreeComponent] = {}
        self._model: Counter[Place] = Counter()

    def on_event(self, event: Event) -> None:
        if event.kind is EventKind.CLEARED:
            self._model.clear()
        elif event.tier is not Tier.STORAGE:  # a belief, and of what outlives the tree
            assert event.node is not None
            for place in places(self.components[event.component], event.node):
                gained = 1 if event.kind is EventKind.STORED else -1
                self._model[event.component, event.tier, place] += gained

    def there(self) -> dict[Place, int]:
        return {place: count for place, count in self._model.items() if count}


def what_is_there(scene: TreeScene) -> dict[Place, int]:
    return {
        (component.id, tier, place): 1
        for node in scene.tree.nodes()
        for component in scene.components
        for tier in TIERS
        if part_of(node, component.index, tier) is not None
        for place in places(component, node)
    }


def places(component: TreeComponent, node: Node) -> list[bytes]:
    """What stands for the pages, or the state, that a component has at a node: the key up to
    there, which no split changes."""
    key, size = whole_key(node), component.page_size
    ends = range(node.start + size, node.end + 1, size) if component.is_per_page else [node.end]
    space = repr(node.namespace).encode()
    return [space + key.data[: end * TOKEN_BYTES + key.overlap] for end in ends]
