"""Every token of a text is scored once, from as much context as the windows promise."""

import pytest
import torch

from eval.windows import windows_of


@pytest.mark.parametrize("bos", [None, 7])
@pytest.mark.parametrize(
    ("length", "window", "stride"), [(100, 32, 32), (100, 32, 8), (33, 32, 16), (2, 32, 32), (64, 32, 32)]
)
def test_each_token_is_scored_once_and_in_order(length, window, stride, bos):
    ids = torch.arange(1000, 1000 + length)
    windows = windows_of(ids, window, stride, bos)
    scored = torch.cat([piece.targets for piece in windows]).tolist()
    if bos is not None:
        assert scored == ids.tolist()
    elif stride < window:
        assert scored == ids.tolist()[1:]
    else:  # without overlap or BOS a window's first token has nothing before it
        assert scored == [token for at, token in enumerate(ids.tolist()) if at % window]


@pytest.mark.parametrize("bos", [None, 7])
def test_a_scored_token_sees_what_the_stride_leaves_it(bos):
    windows = windows_of(torch.arange(200), 32, 8, bos)
    assert all(len(piece.ids) <= 32 for piece in windows)
    assert all(piece.first >= 32 - 8 - 1 for piece in windows[1:])


def test_a_text_that_opens_with_bos_does_not_get_a_second_one():
    (window,) = windows_of(torch.tensor([7, 1, 2, 3]), 16, 16, bos=7)
    assert window.ids.tolist() == [7, 1, 2, 3]
    assert window.targets.tolist() == [1, 2, 3]


def test_no_window_without_a_token_to_score():
    assert windows_of(torch.tensor([5]), 16, 16) == []
