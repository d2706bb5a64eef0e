from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sparseautomodel.threads import SIDE_BY_SIDE, torch_threads


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_number_of_threads_holds_within_and_is_restored() -> None:
    torch.set_num_threads(4)
    with torch_threads(1, 3):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_it_is_restored_after_an_error(error: type[BaseException]) -> None:
    torch.set_num_threads(4)
    with pytest.raises(error), torch_threads(1, torch.get_num_threads()):
        raise error
    assert torch.get_num_threads() == 4


def test_workers_do_not_take_the_number_of_each_other() -> None:
    torch.set_num_threads(4)
    wanted = torch.get_num_threads()
    both = threading.Barrier(SIDE_BY_SIDE)

    def work(_: int) -> tuple[int, int]:
        with torch_threads(wanted // SIDE_BY_SIDE, wanted):
            both.wait(10)
            inside = torch.get_num_threads()
            both.wait(10)
        return inside, torch.get_num_threads()

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        assert list(pool.map(work, range(SIDE_BY_SIDE))) == [(2, 4)] * SIDE_BY_SIDE
    assert torch.get_num_threads() == wanted
