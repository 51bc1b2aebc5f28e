"""Blocks found again by the tokens in them: a later prompt that begins like an earlier one computes only the rest.

A full block is known by its tokens and by the block before it, so a path from the root spells a prompt's beginning.
Keys are the tokens themselves, not a digest: two prompts never meet by accident. The index holds a reference on each
block; under pressure the least recently used ends of paths go first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from .table import BlockTable

ROOT = 0


@dataclass
class _Node:
    number: int
    key: tuple[int, tuple[int, ...]]
    blocks: dict[int | None, int]  # by the window of the block table
    children: int = field(default=0)


class PrefixIndex:
    """Paths of full blocks, least recently used first."""

    def __init__(self, tables: dict[int | None, BlockTable], block_size: int):
        self._tables = tables
        self._block_size = block_size
        self._nodes: OrderedDict[tuple[int, tuple[int, ...]], _Node] = OrderedDict()
        self._by_number: dict[int, _Node] = {}
        self._last_number = ROOT

    def __len__(self) -> int:
        """Blocks of one table that the index holds."""
        return len(self._nodes)

    def match(self, tokens: list[int]) -> list[dict[int | None, int]]:
        """The blocks, by table, of the longest known beginning of `tokens`."""
        found, parent = [], ROOT
        for start in range(0, len(tokens) - self._block_size + 1, self._block_size):
            node = self._nodes.get((parent, tuple(tokens[start : start + self._block_size])))
            if node is None:
                break
            self._nodes.move_to_end(node.key)
            found.append(node.blocks)
            parent = node.number
        return found

    def insert(self, tokens: list[int], rows: dict[int | None, list[int]]) -> None:
        """Remember the full blocks of a sequence whose stored tokens are `tokens` and whose blocks are `rows`."""
        parent = ROOT
        for index in range(len(tokens) // self._block_size):
            key = (parent, tuple(tokens[index * self._block_size : (index + 1) * self._block_size]))
            node = self._nodes.get(key)
            if node is None:
                self._last_number += 1
                node = _Node(self._last_number, key, {window: row[index] for window, row in rows.items()})
                self._nodes[key] = self._by_number[node.number] = node
                for window, block in node.blocks.items():
                    self._tables[window].pool.share(block)
                if parent != ROOT:
                    self._by_number[parent].children += 1
            self._nodes.move_to_end(key)
            parent = node.number

    def evict(self, window: int | None, count: int) -> None:
        """Free at least `count` blocks of one table if the index holds so many that no sequence does."""
        pool = self._tables[window].pool
        goal = pool.num_used - count
        while pool.num_used > goal:
            idle = (node for node in self._nodes.values() if not pool.is_shared(node.blocks[window]))
            end = next((node for node in idle if not node.children), None)
            if end is None:
                # What goes on from an idle block is a row's that computed the same beginning in blocks of its own: the
                # path is forgotten from there on.
                end = next((node for node in self._nodes.values() if not pool.is_shared(node.blocks[window])), None)
                if end is None:
                    return
            self._remove_path(end)

    def _remove_path(self, node: _Node) -> None:
        if node.children:
            for other in [other for other in self._nodes.values() if other.key[0] == node.number]:
                self._remove_path(other)
        self._remove(node)

    def clear(self) -> None:
        for node in list(self._nodes.values()):
            self._remove(node)

    def _remove(self, node: _Node) -> None:
        del self._nodes[node.key], self._by_number[node.number]
        parent = self._by_number.get(node.key[0])
        if parent is not None:
            parent.children -= 1
        for window, block in node.blocks.items():
            self._tables[window].pool.release(block)
