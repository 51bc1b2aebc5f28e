"""The block pool: which blocks are free, and how many sequences hold each of the others.

Knows numbers only; the tensors that the numbers index belong to the layers. Every layer of a block table's group uses
the same numbers, so one allocation serves them all.
"""

from __future__ import annotations

import heapq

from ..errors import CacheFullError


class BlockPool:
    """Reference-counted block numbers 0 .. capacity - 1; `capacity` grows on demand up to `max_blocks`.

    The lowest free number is given out first: a lone sequence's blocks follow one another, and where a sliding window
    gives blocks back, those in use drift to low numbers and `trim` can drop the rest.
    """

    def __init__(self, max_blocks: int | None = None):
        self.max_blocks = max_blocks
        self.reference_counts: list[int] = []
        self._free: list[int] = []  # a heap

    @property
    def capacity(self) -> int:
        """Blocks that exist, free or held: what a layer's tensors must have room for."""
        return len(self.reference_counts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.capacity - len(self._free)

    @property
    def num_shared(self) -> int:
        return sum(count > 1 for count in self.reference_counts)

    def check(self, count: int) -> None:
        """Raise `CacheFullError` if `count` more blocks cannot be had."""
        if self.max_blocks is not None and self.num_used + count > self.max_blocks:
            raise CacheFullError(
                f"max_blocks={self.max_blocks} is too small: {self.num_used} blocks are in use and {count} more are "
                "needed. Nothing was stored. Give PagedCache a larger max_blocks (or None), fewer or shorter "
                "sequences, or call reset()."
            )

    def allocate(self) -> int:
        """A free block, held once."""
        if not self._free:
            self.check(1)
            self._free.append(self.capacity)
            self.reference_counts.append(0)
        block = heapq.heappop(self._free)
        self.reference_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        self.reference_counts[block] += 1

    def release(self, block: int) -> None:
        self.reference_counts[block] -= 1
        if self.reference_counts[block] == 0:
            heapq.heappush(self._free, block)

    def trim(self) -> None:
        """Forget the free blocks above the highest one in use."""
        while self.reference_counts and self.reference_counts[-1] == 0:
            self.reference_counts.pop()
        self._free = [block for block in self._free if block < self.capacity]
        heapq.heapify(self._free)

    def is_shared(self, block: int) -> bool:
        return self.reference_counts[block] > 1
