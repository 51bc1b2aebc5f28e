"""Numbers only: which blocks are free, who holds the others, and what is copied before it is written."""

from __future__ import annotations

import pytest

from hf_paged_attention import CacheFullError
from hf_paged_attention.cache.pool import BlockPool
from hf_paged_attention.cache.table import FREED, BlockTable


def filled(tokens, window=None, max_blocks=None) -> BlockTable:
    """A table with block size 16 and a row for each number of tokens."""
    table = BlockTable(16, window, max_blocks)
    table.start(len(tokens))
    table.extend([0] * len(tokens), list(tokens))
    return table


def test_the_lowest_free_block_is_given_out_first():
    pool = BlockPool()
    assert [pool.allocate() for _ in range(4)] == [0, 1, 2, 3]
    for block in (3, 0, 2):
        pool.release(block)
    assert [pool.allocate() for _ in range(3)] == [0, 2, 3]


def test_a_block_is_free_when_its_last_holder_lets_go():
    pool = BlockPool()
    block = pool.allocate()
    pool.share(block)
    pool.release(block)
    assert (pool.num_used, pool.num_free, pool.num_shared) == (1, 0, 0)
    pool.release(block)
    assert (pool.num_used, pool.num_free) == (0, 1)


def test_a_full_pool_names_its_bound_and_the_way_out():
    pool = BlockPool(max_blocks=2)
    pool.allocate()
    pool.check(1)
    with pytest.raises(CacheFullError, match=r"max_blocks=2 .* 1 blocks are in use and 2 more.*reset\(\)"):
        pool.check(2)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_for_tokens(tokens, blocks):
    table = BlockTable(16, None, None)
    table.start(1)
    assert table.blocks_needed([0], [tokens]) == blocks
    table.extend([0], [tokens])
    assert len(table.rows[0]) == blocks


def test_a_shared_block_is_copied_before_it_is_written():
    table = filled([20])
    table.select([0, 0, 0])
    assert table.rows == [[0, 1]] * 3
    assert table.blocks_needed([20] * 3, [1] * 3) == 2  # the last one to write has the block to itself
    copies = table.extend([20] * 3, [1] * 3)
    assert [(copy.row, copy.index, copy.source) for copy in copies] == [(0, 1, 1), (1, 1, 1)]
    assert len({row[1] for row in table.rows}) == 3
    assert {row[0] for row in table.rows} == {0}


def test_a_full_shared_block_is_never_copied():
    table = filled([32])
    table.select([0, 0])
    assert table.extend([32, 32], [1, 1]) == []
    assert table.rows[0][:2] == table.rows[1][:2] == [0, 1]
    assert table.rows[0][2] != table.rows[1][2]


def test_a_row_without_new_tokens_takes_no_block_and_makes_no_copy():
    table = filled([20])
    table.select([0, 0])
    assert table.blocks_needed([20, 20], [0, 5]) == 1
    copies = table.extend([20, 20], [0, 5])
    assert [copy.row for copy in copies] == [1]


def test_undone_copies_leave_the_rows_as_they_were():
    table = filled([20])
    table.select([0, 0])
    copies = table.extend([20, 20], [1, 1])
    table.undo(copies)
    assert table.rows == [[0, 1], [0, 1]]
    assert table.pool.reference_counts[:2] == [2, 2]
    assert table.pool.num_used == 2


@pytest.mark.parametrize(
    ("window", "length", "kept"), [(16, 16, 1), (16, 31, 1), (16, 32, 2), (24, 200, 2), (1, 64, 1)]
)
def test_a_sliding_table_holds_what_the_next_query_sees(window, length, kept):
    """The next query stands at `length` and sees `window` keys, itself included."""
    table = filled([length], window=window)
    table.release_behind_window([length])
    held = [index for index, block in enumerate(table.rows[0]) if block != FREED]
    first = max(0, length - window + 1) // 16
    assert held == list(range(first, -(-length // 16)))
    assert len(held) <= kept
    assert table.pool.num_used == len(held)


def test_slots_follow_the_blocks():
    table = filled([16, 40])
    assert table.rows == [[0], [1, 2, 3]]
    assert table.slots(1, 15, 3).tolist() == [31, 32, 33]
    assert table.slots(1, 0, 0).tolist() == []


def test_everything_is_free_after_clear():
    table = filled([40, 3, 17])
    table.select([2, 0, 0, 1])
    table.clear()
    assert table.pool.num_used == 0
    assert set(table.pool.reference_counts) <= {0}
