"""Prefill attention on Hopper: `unified_attention`'s function by a kernel whose warps are specialised, in Gluon.

The design is FlashAttention-3's (Shah et al. 2024, arXiv 2407.08608, sections 3.1 and 3.2): one warp copies tiles of
keys and values into a ring of stages in shared memory, and two groups of four warps consume them, 64 query rows each. A
consumer issues the scores of tile j + 1, then the product with the values of tile j, and computes the softmax of the
one while the tensor cores work on the other; its registers come from those that the copying warp gives up.

Pages come through the copy engine (TMA) in boxes of up to `block_n` keys by 64 channels, the rows of shared memory that
a 128-byte swizzle covers: a tile may so lie on several pages. Mbarriers tell what is where. Tile i of a program (i from
0) lies in stage i % stages, and the barrier of a full stage completes its phase i // stages with it. Step i of a
consumer is the scores of tile i and the product with the values of tile i - 1; after it both stages are free, and
barrier i % steps completes phase i // steps. A wait for a phase before the first passes at once: a new barrier takes
the parity of -1 for completed. A consumer waits for the keys of tile i + 1 within step i, so keys have two stages at
least.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .checks import AttentionShape, strides_or_zeros
from .dependent import dependent_launch
from .known_calls import KnownCall, Launch
from .launch import SpecialisedPlan, query_tiles
from .pool_descriptors import PoolMatrix, pool_matrix
from .softmax import LN_2, LOG2_E

# Query rows of a program and of a consumer, and channels of a box: 128 bytes.
BLOCK_M = 128
ROWS = gl.constexpr(64)
PANEL = gl.constexpr(64)
FIRST = gl.constexpr(0)
SECOND = gl.constexpr(1)
LAYOUT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
# Registers a thread: consumers and producer share what 3 x 4 warps have, 168 each.
CONSUMER_REGISTERS = gl.constexpr(232)
PRODUCER_REGISTERS = gl.constexpr(40)

# Names that Triton changed after 3.6.
_load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_REINTERPRETS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def _view(memory, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory in another shape."""
    if _REINTERPRETS:
        return memory.reinterpret(memory.dtype, shape, layout)
    else:
        return memory._reinterpret(memory.dtype, shape, layout)


@gluon.jit
def _follow(DEPENDENT: gl.constexpr):
    """`dependent.follow`, in Gluon."""
    if DEPENDENT:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _request_of_tile(query_start_ptr, tile, num_requests, TILE_TOKENS: gl.constexpr):
    """`unified.request_of_tile`, in Gluon."""
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        first = gl.load(query_start_ptr + middle) // TILE_TOKENS + middle
        if first <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@gluon.jit
def _next(stage, parity, STAGES: gl.constexpr):
    """The ring's next stage, and its round's parity."""
    stage += 1
    wraps = stage == STAGES
    return gl.where(wraps, 0, stage), gl.where(wraps, parity ^ 1, parity)


@gluon.jit
def _pages(table_ptr, tile, first_page, last_page, PAGE: gl.constexpr, BLOCK_N: gl.constexpr, BOX_KEYS: gl.constexpr):
    """The blocks of a tile's boxes.

    Pages outside [first_page, last_page] may have been given back, and their entries may name anything: the nearest
    page inside stands for them.
    """
    pages = ()  # starred, a tuple is no tuple of the language
    for box in gl.static_range(BLOCK_N // BOX_KEYS):
        page = (tile * BLOCK_N + box * BOX_KEYS) // PAGE
        pages = pages + (gl.load(table_ptr + gl.minimum(gl.maximum(page, first_page), last_page)),)  # noqa: RUF005
    return pages


@gluon.jit
def _load_tile(
    desc, memory, full, stage, tile, pages, head_row, block_rows,
    PAGE: gl.constexpr, BLOCK_N: gl.constexpr, BOX_KEYS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Have a tile's boxes copied into a stage [panel, box] of `memory`; they arrive at the barrier `full`."""
    PANELS: gl.constexpr = D // PANEL
    BOXES: gl.constexpr = BLOCK_N // BOX_KEYS
    mbarrier.expect(full, BLOCK_N * D * 2)
    for box in gl.static_range(BOXES):
        row = head_row + pages[box] * block_rows + (tile * BLOCK_N + box * BOX_KEYS) % PAGE
        for panel in gl.static_range(PANELS):
            _load_box(desc, [row, panel * PANEL], full, memory.index((stage * PANELS + panel) * BOXES + box))


@gluon.jit
def _zero_unwritten(memory, stage, tile, low, high, BLOCK_N: gl.constexpr, D: gl.constexpr):
    """Zero the tile's rows of keys outside [low, high): slots never written may hold NaN, and 0 * NaN is NaN.

    memory: the ring in pieces of 8 rows [8, PANEL], over which the swizzle repeats.
    """
    PANELS: gl.constexpr = D // PANEL
    PIECES: gl.constexpr = BLOCK_N // 8
    PIECE_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    rows = gl.arange(0, 8, layout=gl.SliceLayout(1, PIECE_LAYOUT))
    pieces = _view(memory, [memory.shape[0] * (memory.shape[1] // 8), 8, PANEL], LAYOUT)
    first = tile * BLOCK_N
    for piece in range(gl.where(first < low, 0, gl.maximum(high - first, 0) // 8), PIECES):
        keys = first + piece * 8 + rows
        written = (keys >= low) & (keys < high)
        for panel in gl.static_range(PANELS):
            values = pieces.index((stage * PANELS + panel) * PIECES + piece)
            kept = values.load(PIECE_LAYOUT)
            values.store(gl.where(written[:, None], kept, gl.zeros_like(kept)))


@gluon.jit
def _produce(
    k_desc, v_desc, k_memory, v_memory, k_full, v_full, done, v_copied, table_ptr, first_tile, last_tile,
    first_page, last_page, low, high, k_row, v_row, k_block_rows, v_block_rows,
    PAGE: gl.constexpr, BLOCK_N: gl.constexpr, BOX_KEYS: gl.constexpr, D: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warp: K of the first tile, then K of tile i + 1 and V of tile i, as the consumers take them.

    low, high: keys outside have slots that may never have been written. The stage of K of tile i is free after step
    i - K_STAGES, that of V after step i + 1 - V_STAGES; with STEPS barriers none is rounds ahead of what is waited for.
    """
    STEPS: gl.constexpr = done.shape[0]
    # Looked up before the waits for a stage, which so hide the table's latency.
    pages = _pages(table_ptr, first_tile, first_page, last_page, PAGE, BLOCK_N, BOX_KEYS)
    _load_tile(
        k_desc, k_memory, k_full.index(0), 0, first_tile, pages, k_row, k_block_rows, PAGE, BLOCK_N, BOX_KEYS, D
    )  # fmt: skip
    k_stage = 1
    v_stage = 0
    # Step 1 - K_STAGES, and 1 - V_STAGES.
    k_step = STEPS + 1 - K_STAGES
    k_step_parity = 1
    v_step = (STEPS + 1 - V_STAGES) % STEPS
    v_step_parity = 1 if V_STAGES > 1 else 0
    copied_parity = 0
    for tile in range(first_tile, last_tile):
        following = gl.minimum(tile + 1, last_tile - 1)
        next_pages = _pages(table_ptr, following, first_page, last_page, PAGE, BLOCK_N, BOX_KEYS)
        if tile + 1 < last_tile:
            mbarrier.wait(done.index(k_step), k_step_parity)
            k_step, k_step_parity = _next(k_step, k_step_parity, STEPS)
            _load_tile(
                k_desc, k_memory, k_full.index(k_stage), k_stage, following, next_pages, k_row, k_block_rows, PAGE,
                BLOCK_N, BOX_KEYS, D,
            )  # fmt: skip
            k_stage = gl.where(k_stage == K_STAGES - 1, 0, k_stage + 1)
        mbarrier.wait(done.index(v_step), v_step_parity)
        v_step, v_step_parity = _next(v_step, v_step_parity, STEPS)
        if (tile * BLOCK_N < low) | ((tile + 1) * BLOCK_N > high):
            _load_tile(
                v_desc, v_memory, v_copied, v_stage, tile, pages, v_row, v_block_rows, PAGE, BLOCK_N, BOX_KEYS, D
            )  # fmt: skip
            mbarrier.wait(v_copied, copied_parity)
            copied_parity ^= 1
            _zero_unwritten(v_memory, v_stage, tile, low, high, BLOCK_N, D)
            # The tensor cores read what this warp wrote: fenced by each lane, and told after all lanes are.
            fence_async_shared()
            _barrier()
            mbarrier.arrive(v_full.index(v_stage), count=1)
        else:
            _load_tile(
                v_desc, v_memory, v_full.index(v_stage), v_stage, tile, pages, v_row, v_block_rows, PAGE, BLOCK_N,
                BOX_KEYS, D,
            )  # fmt: skip
        v_stage = gl.where(v_stage == V_STAGES - 1, 0, v_stage + 1)
        pages = next_pages


@gluon.jit
def _softmax(
    s, row_max, row_sum, row_pos, tile, first_held, scale, scales, stage,
    WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, S_LAYOUT: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Probabilities of a tile's scores [ROWS, BLOCK_N], the new maximum and sum, and what the old ones shrink by.

    scales: None, or shared memory [2 * stages, BLOCK_N] that holds what multiplies the keys' columns of scores, `scale`
    included, and their columns of probabilities.
    """
    if scales is not None:
        s = s * scales.index(2 * stage).load(gl.SliceLayout(0, S_LAYOUT))[None, :]
    if MASKED:
        keys = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT))
        seen = (keys >= first_held)[None, :] & (keys[None, :] <= row_pos[:, None])
        if WINDOW > 0:
            seen &= keys[None, :] > row_pos[:, None] - WINDOW
        s = gl.where(seen, s if scales is not None else s * scale, float("-inf"))
        new_max = gl.maximum(row_max, gl.max(s, 1))
        # A row that has seen no key yet keeps row_max = -inf; -inf - -inf would be NaN.
        safe_max = gl.where(new_max == float("-inf"), 0.0, new_max)
        p = gl.exp2(s - safe_max[:, None])
    elif scales is not None:
        new_max = gl.maximum(row_max, gl.max(s, 1))
        safe_max = new_max
        p = gl.exp2(s - new_max[:, None])
    else:
        # Scaled after the maximum: one fused multiply-add an element.
        new_max = gl.maximum(row_max, gl.max(s, 1) * scale)
        safe_max = new_max
        p = gl.exp2(s * scale - new_max[:, None])
    alpha = gl.exp2(row_max - safe_max)
    row_sum = row_sum * alpha + gl.sum(p, 1)
    if scales is not None:
        p = p * scales.index(2 * stage + 1).load(gl.SliceLayout(0, S_LAYOUT))[None, :]
    return p, new_max, row_sum, alpha


@gluon.jit
def _packed(p, dtype: gl.constexpr):
    """Probabilities [ROWS, BLOCK_N] as int32 [ROWS, BLOCK_N / 2], two of `dtype` each.

    A loop that carried them as 16-bit values would carry halves of registers, and put them together anew.
    """
    low, high = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
    TYPE: gl.constexpr = "bf16" if dtype == gl.bfloat16 else "f16"
    return gl.inline_asm_elementwise(
        "cvt.rn." + TYPE + "x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _unpacked(packed, dtype: gl.constexpr, P_LAYOUT: gl.constexpr):
    """The probabilities as a product's left operand."""
    low = packed.to(gl.int16).to(dtype, bitcast=True)
    high = (packed >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.convert_layout(
        gl.reshape(gl.join(low, high), [packed.shape[0], 2 * packed.shape[1]]), P_LAYOUT, assert_trivial=True
    )


@gluon.jit
def _values(v_ring, stage, VALUES_BY_SLOT: gl.constexpr):
    """A stage's values [BLOCK_N, D], which a pool that is transposed in its pages brings as [D, BLOCK_N]."""
    values = v_ring.index(stage)
    if VALUES_BY_SLOT:
        values = values.permute((1, 0))
    return values


@gluon.jit
def _attend(
    acc, p, alpha, row_max, row_sum, q, k_ring, v_ring, k_full, v_full, done, turns, k_stage, k_parity,
    v_stage, v_parity, step, turn_parity, low, high, last_tile, row_pos, first_held, scale, scales,
    PART: gl.constexpr, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    PING_PONG: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
    MASKED: gl.constexpr, VALUES_BY_SLOT: gl.constexpr,
):  # fmt: skip
    """Take the scores of the tiles [low, high), and the values of each one's predecessor.

    p: the predecessor's probabilities (`_packed`); alpha: what the sum before it shrinks by.
    """
    STEPS: gl.constexpr = done.shape[0]
    for tile in range(low, high):
        if PING_PONG:
            mbarrier.wait(turns.index(PART), turn_parity)
            turn_parity ^= 1
        s = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
        s = warpgroup_mma(q, k_ring.index(k_stage).permute((1, 0)), s, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(v_stage), v_parity)
        # The tensor cores compute scores meanwhile.
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
        v = _values(v_ring, v_stage, VALUES_BY_SLOT)
        acc = warpgroup_mma(_unpacked(p, v_ring.dtype, P_LAYOUT), v, acc, is_async=True)
        if PING_PONG:
            mbarrier.arrive(turns.index(1 - PART), count=1)
        s = warpgroup_mma_wait(1, deps=(s,))
        next_p, row_max, row_sum, alpha = _softmax(
            s, row_max, row_sum, row_pos, tile, first_held, scale, scales, k_stage, WINDOW, BLOCK_N, S_LAYOUT, MASKED
        )
        # The next tile's keys are waited for here because a branch keeps the assembler from moving the wait for the
        # product up, before the softmax.
        next_stage, k_parity = _next(k_stage, k_parity, K_STAGES)
        mbarrier.wait(k_full.index(next_stage), k_parity, pred=tile + 1 < last_tile)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        # Not sooner: the product reads the registers of p.
        p = _packed(next_p, v_ring.dtype)
        # Told by one thread, once all four warps are done with the stages.
        _barrier()
        mbarrier.arrive(done.index(step), count=1)
        step = gl.where(step == STEPS - 1, 0, step + 1)
        k_stage = next_stage
        v_stage, v_parity = _next(v_stage, v_parity, V_STAGES)
    return acc, p, alpha, row_max, row_sum, k_stage, k_parity, v_stage, v_parity, step, turn_parity


@gluon.jit
def _consume(
    query_ptr, out_ptr, lse_ptr, sinks_ptr, q_memory, k_memory, v_memory, k_full, v_full, done, turns,
    first_tile, full_tile, diagonal_tile, last_tile, query_start, first_token, query_len, seq_len, first_held, kv_head,
    scale, scales, stride_q_token, stride_q_head, stride_out_token, stride_out_head, stride_lse_token, stride_lse_head,
    PART: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, WINDOW: gl.constexpr, CUT: gl.constexpr,
    BLOCK_N: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, QUERY_IN_REGISTERS: gl.constexpr,
    PING_PONG: gl.constexpr, NEGATED: gl.constexpr, VALUES_BY_SLOT: gl.constexpr,
):  # fmt: skip
    """Rows PART * ROWS on of the program's, over all its tiles of keys; there is at least one tile."""
    TILE_TOKENS: gl.constexpr = 2 * ROWS // GROUP
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 2)
    IO_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])

    # Rows of 8 consecutive channels a thread, into shared memory and at the end out of it.
    rows = PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, IO_LAYOUT))
    channels = gl.arange(0, D, layout=gl.SliceLayout(0, IO_LAYOUT))
    tokens = first_token + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    row_held = (rows < TILE_TOKENS * GROUP) & (tokens < query_len)
    row_token = (query_start + tokens).to(gl.int64)
    q_at = query_ptr + (row_token * stride_q_token + heads * stride_q_head)[:, None] + channels[None, :]
    q = gl.load(q_at, mask=row_held[:, None], other=0.0)
    if NEGATED:
        q = -q
    own = q_memory.index(PART)
    own.store(q)
    fence_async_shared()
    _barrier()
    q = own.load(Q_LAYOUT) if QUERY_IN_REGISTERS else own

    rows = PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    row_pos = seq_len - query_len + gl.minimum(first_token + rows // GROUP, query_len - 1)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    row_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    if sinks_ptr is not None:
        sinks = gl.load(sinks_ptr + kv_head * GROUP + rows % GROUP)
        row_max = sinks.to(gl.float32) * LOG2_E
        row_sum = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
    k_ring = _view(k_memory, [K_STAGES, BLOCK_N, D], LAYOUT)
    v_ring = _view(v_memory, [V_STAGES, D, BLOCK_N] if VALUES_BY_SLOT else [V_STAGES, BLOCK_N, D], LAYOUT)

    # The first tile's scores, for which no values are ready yet.
    mbarrier.wait(k_full.index(0), 0)
    s = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q, k_ring.index(0).permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    if scales is None:
        _barrier()
        mbarrier.arrive(done.index(0), count=1)
    p, row_max, row_sum, alpha = _softmax(
        s, row_max, row_sum, row_pos, first_tile, first_held, scale, scales, 0, WINDOW, BLOCK_N, S_LAYOUT, True
    )
    if scales is not None:
        # A stage of keys holds their scales too.
        _barrier()
        mbarrier.arrive(done.index(0), count=1)
    p = _packed(p, v_ring.dtype)
    k_stage, k_parity = _next(0, 0, K_STAGES)
    mbarrier.wait(k_full.index(k_stage), k_parity, pred=first_tile + 1 < last_tile)
    v_stage = 0
    v_parity = 0
    step = 1
    # Consumer 0 goes first: a new barrier passes a wait for the parity before its first.
    turn_parity = 1 - PART

    # Without a window or a first key nothing is cut before the diagonal, and there is no code for it.
    for phase in gl.static_range(0 if CUT else 1, 3):
        if phase == 0:
            low = first_tile + 1
            high = full_tile
        elif phase == 1:
            low = gl.maximum(full_tile, first_tile + 1)
            high = diagonal_tile
        else:
            low = gl.maximum(diagonal_tile, first_tile + 1)
            high = last_tile
        acc, p, alpha, row_max, row_sum, k_stage, k_parity, v_stage, v_parity, step, turn_parity = _attend(
            acc, p, alpha, row_max, row_sum, q, k_ring, v_ring, k_full, v_full, done, turns, k_stage, k_parity, v_stage,
            v_parity, step, turn_parity, low, high, last_tile, row_pos, first_held, scale, scales, PART, WINDOW,
            BLOCK_N, K_STAGES, V_STAGES, PING_PONG, S_LAYOUT, O_LAYOUT, P_LAYOUT, phase != 1, VALUES_BY_SLOT,
        )  # fmt: skip
    mbarrier.wait(v_full.index(v_stage), v_parity)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
    v = _values(v_ring, v_stage, VALUES_BY_SLOT)
    acc = warpgroup_mma(_unpacked(p, v_ring.dtype, P_LAYOUT), v, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))

    total = gl.where(row_sum == 0.0, 1.0, row_sum)
    out = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, O_LAYOUT))[:, None]
    # Through the query's shared memory, for whole rows a store.
    _barrier()
    own.store(out.to(out_ptr.dtype.element_ty))
    _barrier()
    rows = PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, IO_LAYOUT))
    tokens = first_token + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    row_held = (rows < TILE_TOKENS * GROUP) & (tokens < query_len)
    row_token = (query_start + tokens).to(gl.int64)
    out_at = out_ptr + (row_token * stride_out_token + heads * stride_out_head)[:, None] + channels[None, :]
    gl.store(out_at, own.load(IO_LAYOUT), mask=row_held[:, None])
    if lse_ptr is not None:
        rows = PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
        tokens = first_token + rows // GROUP
        row_held = (rows < TILE_TOKENS * GROUP) & (tokens < query_len)
        lse = gl.where(row_sum == 0.0, float("-inf"), (row_max + gl.log2(total)) * LN_2)
        lse_at = (query_start + tokens).to(gl.int64) * stride_lse_token
        lse_at += (kv_head * GROUP + rows % GROUP) * stride_lse_head
        gl.store(lse_ptr + lse_at, lse, mask=row_held)


@gluon.jit
def _tiles(
    query_start_ptr, seq_lens_ptr, kv_start_ptr, num_requests,
    GROUP: gl.constexpr, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The program's request and first token, which is none of the request's for a spare tile, and its tiles of keys.

    A request's last tile of queries, which sees most keys, comes first; requests in the batch's order. Tiles of keys
    before `full_tile` cut the window's or the request's first key, those from `diagonal_tile` on causality.
    """
    TILE_TOKENS: gl.constexpr = 2 * ROWS // GROUP
    tile = gl.program_id(1)
    request = _request_of_tile(query_start_ptr, tile, num_requests, TILE_TOKENS)
    query_start = gl.load(query_start_ptr + request)
    query_end = gl.load(query_start_ptr + request + 1)
    query_len = query_end - query_start
    first_token = (query_end // TILE_TOKENS + request - tile) * TILE_TOKENS
    seq_len = gl.load(seq_lens_ptr + request)
    kv_start = 0
    if kv_start_ptr is not None:
        kv_start = gl.load(kv_start_ptr + request)
    first_pos = seq_len - query_len + first_token
    last_pos = seq_len - query_len + gl.minimum(first_token + TILE_TOKENS, query_len) - 1

    first_held = kv_start
    first_full = kv_start
    if WINDOW > 0:
        first_held = gl.maximum(kv_start, first_pos - WINDOW + 1)
        first_full = gl.maximum(kv_start, last_pos - WINDOW + 1)
    last_tile = gl.cdiv(last_pos + 1, BLOCK_N)
    # One tile at least, all of it masked for queries before the request's first key.
    first_tile = gl.minimum(first_held // BLOCK_N, last_tile - 1)
    full_tile = gl.minimum(gl.cdiv(first_full, BLOCK_N), last_tile)
    diagonal_tile = gl.maximum((first_pos + 1) // BLOCK_N, full_tile)
    return (
        request, query_start, query_len, seq_len, kv_start, first_token, first_held, first_tile, full_tile,
        diagonal_tile, last_tile,
    )  # fmt: skip


@gluon.jit
def _specialised_kernel(
    query_ptr,
    k_desc,
    v_desc,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    query_start_ptr,
    seq_lens_ptr,
    table_ptr,
    kv_start_ptr,
    num_requests,
    scale,
    stride_q_token,
    stride_q_head,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    stride_table,
    k_head_rows,
    k_block_rows,
    v_head_rows,
    v_block_rows,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    WINDOW: gl.constexpr,
    PAGE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BOX_KEYS: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    QUERY_IN_REGISTERS: gl.constexpr,
    PING_PONG: gl.constexpr,
    NEGATED: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    _follow(DEPENDENT)
    gl.static_assert(K_STAGES >= 2, "a consumer holds the keys of one tile while it waits for the next")
    kv_head = gl.program_id(0)
    (
        request, query_start, query_len, seq_len, kv_start, first_token, first_held, first_tile, full_tile,
        diagonal_tile, last_tile,
    ) = _tiles(query_start_ptr, seq_lens_ptr, kv_start_ptr, num_requests, GROUP, WINDOW, BLOCK_N)  # fmt: skip
    # A spare tile, or one past the last request's.
    if (first_token >= query_len) | (first_token < 0):
        return

    BOXES: gl.constexpr = D // PANEL * (BLOCK_N // BOX_KEYS)
    STEPS: gl.constexpr = max(K_STAGES, V_STAGES + 1)
    dtype: gl.constexpr = query_ptr.dtype.element_ty
    q_memory = gl.allocate_shared_memory(dtype, [2, ROWS, D], LAYOUT)
    k_memory = gl.allocate_shared_memory(dtype, [K_STAGES * BOXES, BOX_KEYS, PANEL], LAYOUT)
    v_memory = gl.allocate_shared_memory(dtype, [V_STAGES * BOXES, BOX_KEYS, PANEL], LAYOUT)
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [STEPS, 1], mbarrier.MBarrierLayout())
    v_copied = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(stage), count=1)
    for stage in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(stage), count=1)
    for step in gl.static_range(STEPS):
        mbarrier.init(done.index(step), count=2)
    mbarrier.init(v_copied, count=1)
    for part in gl.static_range(2):
        mbarrier.init(turns.index(part), count=1)
    fence_async_shared()

    table_ptr += request.to(gl.int64) * stride_table
    last_page = (seq_len - 1) // PAGE
    first_page = gl.minimum(first_held // PAGE, last_page)
    low = gl.maximum(kv_start, first_page * PAGE)
    CUT: gl.constexpr = WINDOW > 0 or kv_start_ptr is not None
    # Constants keep being constants only where the call is written with them.
    gl.warp_specialize(
        [
            (_consume, (
                query_ptr, out_ptr, lse_ptr, sinks_ptr, q_memory, k_memory, v_memory, k_full, v_full, done,
                turns, first_tile, full_tile, diagonal_tile, last_tile, query_start, first_token, query_len, seq_len,
                first_held, kv_head, scale, None, stride_q_token, stride_q_head, stride_out_token, stride_out_head,
                stride_lse_token, stride_lse_head, FIRST, GROUP, D, WINDOW, CUT, BLOCK_N, K_STAGES, V_STAGES,
                QUERY_IN_REGISTERS, PING_PONG, NEGATED, False,
            )),
            (_consume, (
                query_ptr, out_ptr, lse_ptr, sinks_ptr, q_memory, k_memory, v_memory, k_full, v_full, done,
                turns, first_tile, full_tile, diagonal_tile, last_tile, query_start, first_token, query_len, seq_len,
                first_held, kv_head, scale, None, stride_q_token, stride_q_head, stride_out_token, stride_out_head,
                stride_lse_token, stride_lse_head, SECOND, GROUP, D, WINDOW, CUT, BLOCK_N, K_STAGES, V_STAGES,
                QUERY_IN_REGISTERS, PING_PONG, NEGATED, False,
            )),
            (_produce, (
                k_desc, v_desc, k_memory, v_memory, k_full, v_full, done, v_copied, table_ptr, first_tile,
                last_tile, first_page, last_page, low, seq_len, kv_head * k_head_rows, kv_head * v_head_rows,
                k_block_rows, v_block_rows, PAGE, BLOCK_N, BOX_KEYS, D, K_STAGES, V_STAGES,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def _descriptor(matrix: PoolMatrix, keys: int) -> TensorDescriptor:
    """The pool's matrix, read in boxes of `keys` slots by a panel of channels."""
    return TensorDescriptor(matrix.pool, matrix.shape, matrix.strides, [keys, PANEL.value], LAYOUT.value)


def specialised_attention(
    call: KnownCall,
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    out: torch.Tensor,
    plan: SpecialisedPlan,
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    kv_start: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> bool:
    """`unified_attention` into `out`, or False where the pools have no matrix that the copy engine reads."""
    shape: AttentionShape = call.shape
    keys = min(shape.page, plan.block_n)
    k_matrix = pool_matrix(k_pool, keys=keys, channels=PANEL.value)
    v_matrix = pool_matrix(v_pool, keys=keys, channels=PANEL.value)
    if k_matrix is None or v_matrix is None or v_pool.stride(1) == 1:
        return False

    def rest() -> Launch:
        numbers = (
            shape.requests,
            abs(scale) * LOG2_E.value,
            query.stride(0),
            query.stride(1),
            out.stride(0),
            out.stride(1),
            *strides_or_zeros(lse, 2),
            block_table.stride(0),
            k_matrix.rows_a_head,
            k_matrix.rows_a_block,
            v_matrix.rows_a_head,
            v_matrix.rows_a_block,
        )
        constants = dict(
            GROUP=shape.group,
            D=shape.head_dim,
            WINDOW=window or 0,
            PAGE=shape.page,
            BLOCK_N=plan.block_n,
            BOX_KEYS=keys,
            K_STAGES=plan.key_stages,
            V_STAGES=plan.value_stages,
            QUERY_IN_REGISTERS=plan.query_in_registers,
            PING_PONG=plan.ping_pong,
            NEGATED=scale < 0,
            num_warps=4,
            **dependent_launch(query.device),
        )
        return (shape.kv_heads, query_tiles(shape, BLOCK_M), 1), numbers, constants

    tensors = (
        query, _descriptor(k_matrix, keys), _descriptor(v_matrix, keys), sinks, out, lse, query_start_loc, seq_lens,
        block_table, kv_start,
    )  # fmt: skip
    call.launch(_specialised_kernel, tensors, rest)
    return True
