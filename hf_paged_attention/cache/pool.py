"""The block pool: which blocks are free, and how many sequences hold each of the others.

Knows numbers only; the tensors that the numbers index belong to the layers. Every layer of a block table's group uses
the same numbers, so one allocation serves them all.
"""

from __future__ import annotations

from ..errors import CacheFullError


class BlockPool:
    """Reference-counted block numbers 0 .. capacity - 1; `capacity` grows on demand up to `max_blocks`."""

    def __init__(self, max_blocks: int | None = None):
        self.max_blocks = max_blocks
        self.reference_counts: list[int] = []
        self._free: list[int] = []

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
        """A free block, held once. Lowest numbers first, so that a lone sequence's blocks follow one another."""
        if not self._free:
            self.check(1)
            self._free.append(self.capacity)
            self.reference_counts.append(0)
        block = self._free.pop()
        self.reference_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        self.reference_counts[block] += 1

    def release(self, block: int) -> None:
        self.reference_counts[block] -= 1
        if self.reference_counts[block] == 0:
            self._free.append(block)

    def is_shared(self, block: int) -> bool:
        return self.reference_counts[block] > 1
