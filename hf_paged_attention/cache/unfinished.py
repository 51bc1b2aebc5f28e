"""Whether the latest forward pass reached its end, where layers keep states that cannot be put back.

Keys in blocks are dropped when an exception ended their pass (`Sequences`). The states of linear attention, of
convolutions and of MLA's latents are Transformers' and are overwritten, so a cache that holds some refuses the next
pass. Models say little about them: they ask for a layer's state as they come to it (`get_conv_state`, on 5.17
`has_previous_state`), update it in place, and tell the cache of some updates. So what is watched is how far they came.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch


class PassWatch:
    """The places (layer, "keys" or "states") that a forward pass has come to; `last` are those of the last layer.

    asks: whether the model asks the cache for states at all; what it keeps elsewhere cannot be watched.
    """

    def __init__(self, last: set[tuple[int, str]], asks: Callable[[], bool]):
        self._last = frozenset(last)
        self._asks = asks
        self.clear()

    def clear(self) -> None:
        self._reached: set[tuple[int, str]] = set()
        self._asked: set[Hashable] = set()

    def begin(self) -> None:
        """A forward pass begins. Raises `RuntimeError` if the last one did not come to its end."""
        if torch.compiler.is_compiling():
            return
        missing = self._last - self._reached if self._reached else set()
        if any(part == "keys" for _, part in missing) or (missing and self._asks()):
            layers = sorted({layer for layer, _ in self._reached})
            end = max(layer for layer, _ in self._last)
            raise RuntimeError(
                f"The last forward pass ended between layers {layers[-1]} and {end}, and layers that Transformers "
                "keeps (linear attention, convolutions, latents) cannot be put back as they were before it. Call "
                "reset()."
            )
        self.clear()

    def reach(self, layer: int, part: str, first: Hashable = None) -> None:
        """A pass comes to a layer's keys or states. `first`: what a pass asks once; asked again, another one began."""
        if torch.compiler.is_compiling():
            return
        if first is not None:
            if first in self._asked:
                self.begin()
            self._asked.add(first)
        self._reached.add((layer, part))
