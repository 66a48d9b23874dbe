"""Tests that attention's batched products use the smallest multiple of rows in which the BLAS keeps a row's bits."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from thresher.kernels.attention import tiles
from thresher.kernels.attention.tiles import ROW_TILE, row_tile

Product = Callable[[Tensor, Tensor], Tensor]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    tiles._smallest.cache_clear()
    yield
    tiles._smallest.cache_clear()


def rounding_otherwise_below(rows: int, product: Product) -> Product:
    """Return a product that rounds differently if its number of rows is not a multiple of `rows`."""

    def bmm(left: Tensor, right: Tensor) -> Tensor:
        out = product(left.double(), right.double()).float()
        return out if left.shape[1] % rows == 0 else out + 1e-7

    return bmm


@pytest.mark.parametrize("rows", [2, 4, 8, 16])
def test_the_smallest_multiple_that_changes_no_bit(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "bmm", rounding_otherwise_below(rows, torch.bmm))
    assert row_tile(24, 64, torch.float32, CPU) == min(rows, ROW_TILE)


def test_both_products_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    product = torch.bmm
    odd = rounding_otherwise_below(8, product)
    monkeypatch.setattr(torch, "bmm", lambda x, y: odd(x, y) if x.shape[2] == 64 else product(x.double(), y.double()))
    assert row_tile(24, 64, torch.float32, CPU) == ROW_TILE


def test_where_bits_are_not_promised_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "bmm")
    assert row_tile(64, 64, torch.bfloat16, CPU) == row_tile(64, 64, torch.float32, torch.device("cuda")) == ROW_TILE
