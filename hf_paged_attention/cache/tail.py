"""The tail: each sequence's newest tokens as they arrived, for formats that encode keys in groups of tokens.

A block is *sealed*, encoded into the layers' pools, when it is full and EXACT_TOKENS newer tokens have come, from the
tail and from keys that have just arrived. The tail is one more block table, aligned with the others, whose entries for
sealed blocks are `FREED`; a long prompt's full blocks never enter it. All layers share it, as every layer sees the same
tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from .table import FREED, BlockCopy, BlockTable

# The newest tokens of a sequence that are never encoded, besides those of an unfinished block. Queries look mostly at
# their near past: for SmolLM2, int4 (the protocol of docs/accuracy.md), 64 lower the mean KL from 1.8e-2 to 1.2e-2. And
# what assisted decoding takes back is fewer, so that it goes on from what arrived.
EXACT_TOKENS = 64


class Unsealed(NamedTuple):
    """Entry `index` of row `row`, sealed before a crop, goes on in the tail's block `block`."""

    row: int
    index: int
    block: int


class TailTable(BlockTable):
    """`sealed[r]` tokens of row r, whole blocks, are encoded; the tail holds the rest."""

    def __init__(self, block_size: int):
        super().__init__(block_size, window=None, max_blocks=None)
        self.sealed: list[int] = []
        self._released: list[int] = []  # tokens before which no entry is held

    def extend(self, lengths: list[int], new_tokens: list[int]) -> list[BlockCopy]:
        """Seal the full blocks before the newest EXACT_TOKENS, and give the tokens behind them blocks.

        Returns the copies to make before anything is written, as `BlockTable.extend`.
        """
        copies = []
        for index, (row, length, new) in enumerate(zip(self.rows, lengths, new_tokens, strict=True)):
            if new == 0:
                continue
            complete = max(0, length + new - EXACT_TOKENS) // self.block_size * self.block_size
            sealed = self.sealed[index] = max(self.sealed[index], complete)
            at = length // self.block_size
            partial = self._partial_block(row, length)
            # A block that is sealed now is not written to again, so it needs no copy.
            if partial is not None and at * self.block_size >= sealed and self.pool.is_shared(partial):
                copies.append(BlockCopy(index, at, partial, self.pool.allocate()))
                self.pool.release(partial)
                row[at] = copies[-1].destination
            while len(row) < self._blocks_for(length + new):
                row.append(FREED if len(row) * self.block_size < sealed else self.pool.allocate())
        self._changed()
        return copies

    def release_sealed(self) -> None:
        """Give back the blocks of tokens that every layer has encoded."""
        for row, released, sealed in zip(self.rows, self._released, self.sealed, strict=True):
            for index in range(released // self.block_size, sealed // self.block_size):
                if row[index] != FREED:
                    self.pool.release(row[index])
                    row[index] = FREED
                    self._changed()
        self._released = list(self.sealed)

    def unseal(self, lengths: list[int]) -> list[Unsealed]:
        """After rows were cut to `lengths`: open the block that each goes on in, where it was sealed.

        Returns the blocks whose tokens every layer must decode into the tail. A block that the tail still holds needs
        nothing.
        """
        opened = []
        for row, length in enumerate(lengths):
            if length >= self.sealed[row]:
                continue
            index = length // self.block_size
            self.sealed[row] = index * self.block_size
            self._released[row] = min(self._released[row], self.sealed[row])
            if length % self.block_size and self.rows[row][index] == FREED:
                self.rows[row][index] = self.pool.allocate()
                opened.append(Unsealed(row, index, self.rows[row][index]))
                self._changed()
        return opened

    def capacity_one_by_one(self) -> int:
        """The pool's capacity, at most, while the present rows are given tokens one by one."""
        return max(self.pool.capacity, len(self.rows) * (self._blocks_for(EXACT_TOKENS) + 2))

    def start(self, batch_size: int) -> None:
        super().start(batch_size)
        self.sealed, self._released = [0] * batch_size, [0] * batch_size

    def adopt(self, rows: list[list[int]], sealed: list[int]) -> None:
        """Begin with rows of blocks, which the caller has shared, of which so many tokens are sealed."""
        self.clear()
        self.rows, self.sealed, self._released = [list(row) for row in rows], list(sealed), [0] * len(rows)

    def select(self, indices: list[int]) -> None:
        sealed, released = ([counts[index] for index in indices] for counts in (self.sealed, self._released))
        super().select(indices)
        self.sealed, self._released = sealed, released

    def clear(self) -> None:
        super().clear()
        self.sealed, self._released = [], []
