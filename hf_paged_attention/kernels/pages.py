"""Where a tile of keys lies: key i of a request is slot i % PAGE of block table[i // PAGE].

A tile inside one page costs one look-up; a tile over several pages looks up every slot. Offsets are 64-bit as far as
they can exceed a page: a contiguous cache is a single page that may hold more than 2^31 elements.
"""

import triton
import triton.language as tl


@triton.jit
def tile_pages(
    table_ptr, tile, last_tile, first_held, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr
):
    """Block ids of a tile: a scalar where a page holds a whole tile, else one a key. 0 for tiles from last_tile on.

    Loops look them up a tile ahead: else every load of keys would wait for the table. MASKED tiles look up only pages
    with keys in [first_held, end): entries of others may name blocks that were given back.
    """
    if PAGE >= BLOCK_N:
        pages = tl.load(table_ptr + tile * BLOCK_N // PAGE, mask=tile < last_tile, other=0)
    else:
        page = (tile * BLOCK_N + tl.arange(0, BLOCK_N)) // PAGE
        wanted = page < last_tile * (BLOCK_N // PAGE)
        if MASKED:
            # Whole pages: loads are told that the slots of one follow one another.
            wanted &= (page >= first_held // PAGE) & (page * PAGE < end)
        pages = tl.load(table_ptr + page, mask=wanted, other=0)
    return pages


@triton.jit
def tile_offsets(pages, first_key, stride_block, stride_slot, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Element offsets [BLOCK_N] of the tile's slots in a pool or in its scales."""
    keys = tl.arange(0, BLOCK_N)
    if PAGE >= BLOCK_N:
        slot = tl.multiple_of(first_key % PAGE, BLOCK_N)
        base = pages * stride_block + slot.to(tl.int64) * stride_slot
        offsets = base + keys * stride_slot
    else:
        offsets = pages * stride_block + ((first_key + keys) % PAGE) * stride_slot
    return offsets
