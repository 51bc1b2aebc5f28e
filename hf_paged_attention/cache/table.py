"""Block tables: for each sequence, the block that holds each `block_size` of its tokens.

Layers with the same window share one table (and one pool of block numbers), because they see the same tokens and give
the same blocks back. `FREED` marks a block that a sliding layer gave back: no query will read it again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .pool import BlockPool

FREED = -1


class BlockCopy(NamedTuple):
    """A sequence's own copy of a block that it shared: entry `index` of row `row` was `source`, is `destination`."""

    row: int
    index: int
    source: int
    destination: int


class BlockTable:
    """The rows of block numbers of all sequences, for the layers with one `window` (None: full attention)."""

    def __init__(self, block_size: int, window: int | None, max_blocks: int | None):
        self.block_size = block_size
        self.window = window
        self.pool = BlockPool(max_blocks)
        self.rows: list[list[int]] = []
        self.version = 0  # rises with every change of the rows
        self._mirrors: dict[torch.device, torch.Tensor] = {}

    # What the next tokens need ------------------------------------------------------------------------------------

    def blocks_needed(self, lengths: list[int], new_tokens: list[int]) -> int:
        """Blocks that `extend` with the same arguments will allocate, copies of shared blocks included."""
        needed = 0
        claimed: dict[int, int] = {}  # shared blocks that earlier rows of this call will have stopped sharing
        for row, length, new in zip(self.rows, lengths, new_tokens, strict=True):
            if new == 0:
                continue
            needed += max(0, self._blocks_for(length + new) - len(row))
            tail = self._partial_block(row, length)
            if tail is not None and self.pool.reference_counts[tail] - claimed.get(tail, 0) > 1:
                claimed[tail] = claimed.get(tail, 0) + 1
                needed += 1
        return needed

    def capacity_for(self, lengths: list[int], new_tokens: int, keeps_past: bool) -> int:
        """The pool's capacity, at most, after `new_tokens` more tokens a row, given one by one.

        keeps_past: what falls behind the window is not given back.
        """
        more = 0
        for row, length in zip(self.rows, lengths, strict=True):
            blocks = self._blocks_for(length + new_tokens) - len(row)
            if self.window is not None and not keeps_past:
                blocks = min(blocks, self._blocks_for(self.window) + 2)
            more += blocks
        total = self.pool.capacity + more
        return total if self.pool.max_blocks is None else min(total, self.pool.max_blocks)

    def extend(self, lengths: list[int], new_tokens: list[int]) -> list[BlockCopy]:
        """Give every row the blocks for its new tokens.

        Returns the copies to make before anything is written: a shared block is copied before it is written to. Call
        `pool.check(blocks_needed(...))` first: this must not fail half-way.
        """
        copies = []
        for index, (row, length, new) in enumerate(zip(self.rows, lengths, new_tokens, strict=True)):
            if new == 0:
                continue
            tail = self._partial_block(row, length)
            if tail is not None and self.pool.is_shared(tail):
                copies.append(BlockCopy(index, length // self.block_size, tail, self.pool.allocate()))
                self.pool.release(tail)
                row[length // self.block_size] = copies[-1].destination
                self._changed()
            while len(row) < self._blocks_for(length + new):
                row.append(self.pool.allocate())
                self._changed()
        return copies

    def undo(self, copies: list[BlockCopy]) -> None:
        """Put the shared blocks back: not every layer has made these copies."""
        for copy in copies:
            self.pool.share(copy.source)
            self.pool.release(copy.destination)
            self.rows[copy.row][copy.index] = copy.source
            self._changed()

    # What is no longer needed ---------------------------------------------------------------------------------------

    def truncate(self, lengths: list[int]) -> None:
        """Give back the blocks past each row's length."""
        for row, length in zip(self.rows, lengths, strict=True):
            while len(row) > self._blocks_for(length):
                block = row.pop()
                if block != FREED:
                    self.pool.release(block)
                self._changed()

    def release_behind_window(self, lengths: list[int]) -> None:
        """Give back the blocks that no later query can see: the next one, at position `length`, sees `window` keys."""
        if self.window is None:
            return
        for row, length in zip(self.rows, lengths, strict=True):
            first_needed = max(0, length - self.window + 1) // self.block_size
            for index in range(min(first_needed, len(row)) - 1, -1, -1):
                if row[index] == FREED:
                    break
                self.pool.release(row[index])
                row[index] = FREED
                self._changed()
        if self.pool.num_free > self.pool.num_used:
            self.pool.trim()

    def can_continue_at(self, row: int, length: int) -> bool:
        """Whether every key that a query at position `length` of `row` sees is still held."""
        if self.window is None:
            return True
        first_needed = max(0, length - self.window + 1) // self.block_size
        return all(block != FREED for block in self.rows[row][first_needed : self._blocks_for(length)])

    # Rows ---------------------------------------------------------------------------------------------------------

    def start(self, batch_size: int) -> None:
        self.rows = [[] for _ in range(batch_size)]
        self._changed()

    def select(self, indices: list[int]) -> None:
        """Row i becomes a copy of row `indices[i]`, its blocks shared: nothing is moved in memory."""
        selected = [list(self.rows[index]) for index in indices]
        for row in selected:
            for block in row:
                if block != FREED:
                    self.pool.share(block)
        self.clear()
        self.rows = selected

    def clear(self) -> None:
        for row in self.rows:
            for block in row:
                if block != FREED:
                    self.pool.release(block)
        self.rows = []
        self._changed()

    # For the kernels ------------------------------------------------------------------------------------------------

    def slots(self, row: int, start: int, count: int) -> torch.Tensor:
        """Slots (block * block_size + offset), int64 `[count]`, of a row's positions start .. start + count - 1."""
        positions = torch.arange(start, start + count)
        first = start // self.block_size
        blocks = torch.tensor(self.rows[row][first : self._blocks_for(start + count)], dtype=torch.long)
        return blocks[positions // self.block_size - first] * self.block_size + positions % self.block_size

    def tensor(self, device: torch.device) -> torch.Tensor:
        """int32 `[rows, width]` on `device`; entries past a row's end or behind its window are 0 and never read.

        The width grows in powers of two, so that a compiled consumer sees few shapes.
        """
        if device not in self._mirrors:
            longest = max((len(row) for row in self.rows), default=0)
            width = 1 << max(0, longest - 1).bit_length()
            self._mirrors[device] = to_device(self._padded(width), device)
        return self._mirrors[device]

    def copy_into(self, target: torch.Tensor) -> None:
        """Write the rows into int32 `[rows, width]`, whose address a captured graph has kept."""
        target.copy_(to_device(self._padded(target.shape[1]), target.device), non_blocking=True)

    def _padded(self, width: int) -> torch.Tensor:
        padded = [[max(block, 0) for block in row] + [0] * (width - len(row)) for row in self.rows]
        return torch.tensor(padded, dtype=torch.int32).reshape(len(self.rows), width)

    def _changed(self) -> None:
        self.version += 1
        self._mirrors.clear()

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _partial_block(self, row: list[int], length: int) -> int | None:
        """The block that position `length` falls into, if earlier tokens are in it too."""
        if length % self.block_size == 0 or length // self.block_size >= len(row):
            return None
        return row[length // self.block_size]


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy without making the host wait: through pinned memory where the device is a GPU."""
    if device.type == "cpu":
        return host
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
