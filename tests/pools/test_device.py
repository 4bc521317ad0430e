"""Device pools give every layer's rows by page id, in tensors of their own or of the user's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tiered_cache.errors import ConfigError
from tiered_cache.pools.device import DevicePools
from tiered_cache.pools.spec import PoolSpec
from tiered_cache.types import ComponentId

FULL = ComponentId("full")
K = PoolSpec("k", FULL, (0, 2), (3, 5), "float32", rows_per_page=4)
LATENT = PoolSpec("latent", FULL, (0,), (6,), "bfloat16", rows_per_page=2)


def rows(num_pages: int = 7, spec: PoolSpec = K, **options: Any) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    return torch.zeros(num_pages * spec.rows_per_page, *spec.row_shape, dtype=dtype, **options)


def refusal(tensors: dict[str, list[torch.Tensor]], device: str = "cpu") -> str:
    with pytest.raises(ConfigError) as caught:
        DevicePools((K,), device=device, tensors=tensors)
    assert all(problem.key == "device_pools" for problem in caught.value.problems)
    return str(caught.value)


# --- Made here --------------------------------------------------------------------------------


def test_a_layer_is_rows_and_a_page_is_consecutive_ones() -> None:
    """Row = page id × rows per page + offset, in the row view and in the page view alike."""
    pools = DevicePools((K, LATENT), {FULL: 7})
    assert pools.layer("k", 2).shape == (28, 3, 5)
    assert pools.pages("k", 2).shape == (7, 4, 3, 5)
    assert pools.layer("latent", 0).shape == (14, 6)
    pools.layer("k", 2)[5 * 4 + 3] = 9.0
    assert bool((pools.pages("k", 2)[5, 3] == 9.0).all())
    assert not bool(pools.layer("k", 0).any())


def test_pools_count_their_bytes_over_layers_and_pools() -> None:
    """One page id stands for all pools of its component."""
    pools = DevicePools((K, LATENT), {FULL: 7})
    assert pools.page_bytes(FULL) == 2 * 4 * 15 * 4 + 2 * 6 * 2
    assert pools.num_pages == {FULL: 7}
    assert repr(pools) == "<DevicePools ['k', 'latent'] on cpu, full: 7 pages>"


def test_fresh_pools_hold_no_nan() -> None:
    """What was never written is masked by kernels, but 0 × NaN would come through a mask."""
    assert torch.isfinite(DevicePools((K,), {FULL: 64}).layer("k", 0)).all()


def test_pools_made_in_inference_mode_can_be_written_outside() -> None:
    """Whoever opens the cache decides nothing about who writes into it later."""
    with torch.inference_mode():
        pools = DevicePools((K,), {FULL: 2})
    pools.layer("k", 0)[0] = 1.0
    assert not pools.layer("k", 0).is_inference()


def test_the_number_of_torch_threads_is_left_alone() -> None:
    """That setting belongs to the program."""
    before = torch.get_num_threads()
    DevicePools((K,), {FULL: 2})
    assert torch.get_num_threads() == before


def test_a_layer_that_a_pool_does_not_have_is_a_key_error() -> None:
    """Layers go by the model's numbers."""
    pools = DevicePools((K,), {FULL: 2})
    with pytest.raises(KeyError):
        pools.layer("k", 1)
    with pytest.raises(KeyError):
        pools.layer("v", 0)


# --- The user's own ---------------------------------------------------------------------------


def test_the_users_tensors_are_used_as_they_are_and_define_the_pages() -> None:
    """Both shapes are taken, and what the library writes the user sees."""
    flat, paged = rows(), torch.zeros(7, 4, 3, 5)
    pools = DevicePools((K,), tensors={"k": [flat, paged]})
    assert pools.num_pages == {FULL: 7}
    assert not pools.owned
    pools.layer("k", 0)[0] = 1.0
    pools.layer("k", 2)[27] = 2.0
    assert float(flat[0, 0, 0]) == 1.0
    assert float(paged[6, 3, 0, 0]) == 2.0


def test_pages_may_stand_apart() -> None:
    """Keys and values interleaved page by page in one tensor, as many engines keep them."""
    both = torch.zeros(7, 2, 4, 3, 5)
    pools = DevicePools((K,), tensors={"k": [both[:, 0], both[:, 1]]})
    pools.pages("k", 2)[6, 3] = 1.0
    assert float(both[6, 1, 3].sum()) == 15.0
    with pytest.raises(ValueError, match=r"pool 'k', layer 2: .*index pages\(name, layer\)"):
        pools.layer("k", 2)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (rows().half(), "dtype is torch.float16, the model's is torch.float32"),
        (torch.zeros(28, 3, 6), "shape is [28, 3, 6], expected [pages × 4, 3, 5] or [pages, 4, 3"),
        (torch.zeros(7, 2, 3, 5), "shape is [7, 2, 3, 5]"),
        (torch.zeros(30, 3, 5), "30 rows are not a whole number of pages of 4 rows"),
        (torch.zeros(0, 3, 5), "has no pages"),
        (torch.zeros(28, 5, 3).transpose(1, 2), "pages are not contiguous"),
        (torch.zeros(56, 3, 5)[::2], "pages are not contiguous"),
        (torch.zeros(1, 4, 3, 5).expand(7, 4, 3, 5), "pages are not contiguous"),
        (torch.zeros(28, 3, 5, device="meta"), "is on meta, the pools are on cpu"),
        (torch.zeros(24, 3, 5), "6 pages, where other tensors of component 'full' have 7"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(wrong: torch.Tensor, words: str) -> None:
    """Pool, layer, what it is and what it should be."""
    text = refusal({"k": [rows(), wrong]})
    assert "pool 'k', layer 2: " in text
    assert words in text


def test_all_misfits_are_reported_at_once() -> None:
    """Wrong in two layers, and a pool that is not there."""
    text = refusal({"k": [rows().half(), rows().double()], "v": [rows()]})
    assert len(text.splitlines()) == 3
    assert "there is no pool 'v' (the pools are k)" in text


def test_a_missing_pool_or_layer_is_named() -> None:
    """One tensor per layer of the spec."""
    assert "pool 'k' needs 2 tensors, one per layer [0, 2]; 0 given" in refusal({})
    assert "pool 'k' needs 2 tensors, one per layer [0, 2]; 1 given" in refusal({"k": [rows()]})


def test_one_tensor_for_two_layers_is_refused() -> None:
    """Each would overwrite the other's state."""
    same = rows()
    assert "pool 'k', layer 2: is the memory of pool 'k', layer 0" in refusal({"k": [same, same]})


def test_a_user_gives_tensors_or_a_size() -> None:
    """Nothing is guessed."""
    with pytest.raises(ValueError, match="either num_pages or tensors"):
        DevicePools((K,))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu() -> None:
    """The same views, on the device that was asked for."""
    pools = DevicePools((K,), {FULL: 7}, "cuda")
    assert pools.layer("k", 0).is_cuda
    assert DevicePools((K,), device="cuda", tensors={"k": [rows().cuda(), rows().cuda()]})
