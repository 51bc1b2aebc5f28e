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
        self._tells_of_updates = False
        self._latest: tuple[int, str] | None = None

    def sizes_asked(self, layer: int, width: int) -> None:
        """Masks for `width` columns are made, as they are before a layer runs: another pass begins.

        Inkling's attention asks too, after its layer's states: not a new pass, or one that `ask` will find out about.
        """
        if self._latest != (layer, "states"):
            self.begin(width)

    def begin(self, width: int | None = None) -> None:
        """A forward pass of `width` columns begins. Raises `RuntimeError` if the last one did not come to its end."""
        if torch.compiler.is_compiling():
            return
        missing = self._last - self._reached if self._reached else set()
        if any(part == "keys" for _, part in missing) or (missing and self._asks()):
            last = max(layer for layer, _ in self._reached)
            end = max(layer for layer, _ in self._last)
            where = f"between layers {last} and {end}" if last < end else f"in layer {end}"
            raise RuntimeError(
                f"The last forward pass ended {where}, and layers that Transformers keeps (linear attention, "
                "convolutions, latents) cannot be put back as they were before it. Call reset()."
            )
        self.clear()
        # One column may be written into a state in place, without a word.
        self._tells_of_updates = width is not None and width > 1

    def reach(self, layer: int, part: str) -> None:
        """The keys of a layer came, or its states were updated."""
        if not torch.compiler.is_compiling():
            self._reached.add((layer, part))

    def ask(self, layer: int, part: str, what: Hashable) -> None:
        """The same, or the model asks for a layer's states; what a pass asks once, asked again, is another pass."""
        if torch.compiler.is_compiling():
            return
        if what in self._asked:
            self.begin()
        self._asked.add(what)
        self._latest = (layer, part)
        silent = part == "states" and self._tells_of_updates
        self._reached.add((layer, "asked" if silent else part))
