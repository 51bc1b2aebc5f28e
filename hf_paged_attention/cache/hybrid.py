"""A layer of attention and of a recurrent or convolution state at once (Falcon-H1, Zamba, Zaya): keys in blocks."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from .formats import Format
from .layer import PagedLayer
from .sequences import Sequences


class PagedHybridLayer(LinearAttentionLayer, PagedLayer):
    """`PagedLayer` for the keys; the states are `LinearAttentionLayer`'s, as Transformers keeps them."""

    is_compileable = False

    def __init__(self, index: int, sequences: Sequences, format: Format, window: int | None, number_of_states: int = 1):
        PagedLayer.__init__(self, index, sequences, format, window)
        self._new_states(number_of_states)

    def _new_states(self, number: int) -> None:
        recorded = self.sequences.record_past
        LinearAttentionLayer.__init__(self, number_of_states=number)  # says record_past=False, to all layers
        self.sequences.record_past = recorded

    def __repr__(self) -> str:
        return PagedLayer.__repr__(self).replace("PagedLayer", "PagedHybridLayer")

    def lazy_initialization(self, *states: torch.Tensor, **named: Any) -> None:
        """Keys and values come by position, as `PagedLayer` hands them on, states by name."""
        owner = PagedLayer if states else LinearAttentionLayer
        owner.lazy_initialization(self, *states, **named)

    def forget(self, keep_fit: bool = False) -> None:
        PagedLayer.forget(self, keep_fit)
        self._new_states(self.number_of_states)

    def reset(self) -> None:
        self.forget()
