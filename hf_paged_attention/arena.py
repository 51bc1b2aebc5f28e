"""What captured steps keep from one call of `generate` to the next, and who may use it.

A captured step is tied to addresses, and every call builds a cache of its own. So the memory of the last cache is lent
to the next one, if it has as many rows and *if the last one is gone*: a cache that a user still holds is never written
by a later call. Its arena then goes with it, so that a chat that continues with the same cache replays too, and the
memory is freed when the user lets go of it.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from .cache import PagedCache
from .cache.storage import Memory


class Arena:
    """Fixed addresses for `rows` rows: of the step (in `parts`, by the loop that made them) and of the pools."""

    def __init__(self, rows: int):
        self.rows = rows
        self.parts: dict[str, Any] = {}
        self._memory: list[Memory] = []
        self._holders: list[weakref.ref] = []

    def __deepcopy__(self, memo: dict) -> None:
        """A copied cache has memory of its own, which nothing was captured over."""
        return None

    @property
    def owner(self) -> PagedCache | None:
        """The cache whose pools the graphs read and write, while anyone holds it or a part of it."""
        return self._holders[0]() if self._holders else None

    @property
    def is_free(self) -> bool:
        return bool(self._memory) and all(holder() is None for holder in self._holders)

    def keep(self, cache: PagedCache) -> None:
        """Hold the memory of `cache` beyond its life."""
        self._memory = [layer.storage.memory() for layer in cache.layers]
        parts = [cache, cache.sequences, *cache.layers, *(layer.storage for layer in cache.layers)]
        self._holders = [weakref.ref(part) for part in parts]

    def holds(self, cache: PagedCache) -> bool:
        """Whether the memory held is that of `cache` as it is now."""
        return self.owner is cache and all(
            mine is now
            for held, layer in zip(self._memory, cache.layers, strict=True)
            for mine, now in zip(held, layer.storage.memory(), strict=True)
        )

    def lend(self, cache: PagedCache) -> None:
        """Let `cache`, which is empty, begin with the memory that is held."""
        for layer, memory in zip(cache.layers, self._memory, strict=True):
            layer.lent = memory
        self.let_go()

    def let_go(self) -> None:
        self._memory, self._holders = [], []


class ArenaKeeper:
    """The arena of an enabled model: one at a time, used by one call at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arena: Arena | None = None

    def __reduce__(self) -> Any:
        """Copied and pickled empty: captured addresses are the original's."""
        return ArenaKeeper, ()

    def lend_to(self, cache: PagedCache, rows: int) -> None:
        """Let a cache that `generate` has just built, for `rows` rows, begin with the last one's memory, if it may.

        Otherwise what is kept is let go of: it would serve no later call either.
        """
        with self._lock:
            arena, self._arena = self._arena, None
        if arena is None:
            return
        if arena.rows == rows and arena.is_free:
            arena.lend(cache)
            cache.arena = arena
        elif arena.owner is not None:
            arena.owner.arena = arena
            arena.let_go()

    def of(self, cache: PagedCache) -> Arena:
        """The arena for the steps of `cache`, whose rows are known by now; new where none fits."""
        arena = cache.arena
        with self._lock:
            if arena is None and self._arena is not None and self._arena.owner is cache:
                arena = self._arena
            if arena is not None and arena is self._arena and not cache.is_built_by_generate:
                self._arena = None  # the user goes on with a cache that an earlier call returned: it goes with that
                arena.let_go()
        if arena is None or arena.rows != cache.sequences.batch_size:
            arena = Arena(cache.sequences.batch_size)
        cache.arena = arena
        return arena

    def hold(self, arena: Arena, cache: PagedCache) -> None:
        """After steps: what a cache that `generate` built leaves behind stays here. A user's own keeps its arena."""
        if cache.is_built_by_generate and not arena.holds(cache):
            arena.keep(cache)
            with self._lock:
                self._arena = arena

    def forget(self) -> None:
        with self._lock:
            self._arena = None
