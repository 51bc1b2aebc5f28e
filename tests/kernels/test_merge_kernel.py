import math

import pytest
import torch
from paged_batches import DEVICE

from hf_paged_attention.kernels import merge_splits, reference_merge_splits


def dense_merge(out, lse):
    weights = lse.double().softmax(0).nan_to_num(0.0)
    return torch.einsum("snh,snhd->nhd", weights, out.double().nan_to_num(0.0)), lse.double().logsumexp(0)


@pytest.mark.parametrize("merge", [merge_splits, reference_merge_splits])
@pytest.mark.parametrize("splits", [1, 2, 7, 40])
@pytest.mark.parametrize("dim", [32, 80])
def test_merge_is_attention_over_all_keys(merge, splits, dim):
    g = torch.Generator().manual_seed(0)
    out, lse = torch.randn(splits, 3, 5, dim, generator=g), torch.randn(splits, 3, 5, generator=g) * 20
    got, got_lse = merge(out.to(DEVICE), lse.to(DEVICE))
    want, want_lse = dense_merge(out, lse)
    torch.testing.assert_close(got.cpu().double(), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(got_lse.cpu().double(), want_lse, atol=1e-4, rtol=0)


@pytest.mark.parametrize("merge", [merge_splits, reference_merge_splits])
def test_an_empty_split_counts_for_nothing(merge):
    out, lse = torch.randn(3, 2, 2, 32, device=DEVICE), torch.randn(3, 2, 2, device=DEVICE)
    lse[1], out[1] = -math.inf, math.nan
    got, got_lse = merge(out, lse)
    want, want_lse = merge(out[[0, 2]].contiguous(), lse[[0, 2]].contiguous())
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got_lse, want_lse)


@pytest.mark.parametrize("merge", [merge_splits, reference_merge_splits])
def test_nothing_but_empty_splits_gives_zeros(merge):
    out, lse = merge(
        torch.full((4, 1, 2, 32), math.nan, device=DEVICE), torch.full((4, 1, 2), -math.inf, device=DEVICE)
    )
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_shapes_that_do_not_agree_are_named():
    with pytest.raises(ValueError, match=r"\[2, 1, 2, 32\] and \[3, 1, 2\]"):
        merge_splits(torch.zeros(2, 1, 2, 32), torch.zeros(3, 1, 2))
