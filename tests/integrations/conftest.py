"""One torch thread for all tests that run a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Two threads on two cores wait for each other; the library itself never sets this."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
