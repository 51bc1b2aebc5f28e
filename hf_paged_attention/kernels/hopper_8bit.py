"""Prefill attention on Hopper over 8-bit caches: the kernel of hopper.py with warps that convert.

Beside hopper.py's two consumers there are four warps that copy and convert. Pages come through the copy engine as bytes
into a small ring of their own. The warps take a tile of bytes into registers, have the next one copied in its place,
and store the tile as 16-bit floats, which hold a byte exactly, in the ring that the consumers' products read; from
there on everything is as in hopper.py. A token's scales lie beside the tile of its keys: the consumers multiply
columns of scores by the one and columns of probabilities by the other, both in float32.

Values are transposed in their pages, [D, slots], and stay so: a product of 16-bit operands reads either way.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .checks import AttentionShape, strides_or_zeros
from .convert import (
    E4M3_TO_BF16,
    E4M3_TO_FP16,
    INT8,
    INT8_TO_BF16,
    INT8_TO_FP16,
    pool_bytes,
    pool_factor,
    pool_format,
)
from .dependent import dependent_launch
from .hopper import (
    BLOCK_M,
    FIRST,
    LAYOUT,
    PANEL,
    ROWS,
    SECOND,
    _barrier,
    _consume,
    _follow,
    _load_box,
    _next,
    _pages,
    _tiles,
    _view,
)
from .known_calls import KnownCall, Launch
from .launch import SpecialisedPlan, query_tiles
from .pool_descriptors import PoolMatrix, pool_matrix
from .softmax import LOG2_E

# Registers that a thread of a consumer and one of the warps that convert have together with the other consumer's:
# three times four warps start with 168 each.
REGISTERS = gl.constexpr(504)
SCALE_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def _byte_layout(columns):
    """Of bytes in shared memory: rows of 64 or 128, swizzled over their whole width, as the copy engine lays them."""
    return gl.NVMMASharedLayout(swizzle_byte_width=columns, element_bitwidth=8, rank=2)


@gluon.constexpr_function
def _register_layout(rows, columns):
    """16 bytes of a row a thread, a warp 8 rows by 64 columns.

    Eight threads access shared memory at once: four of row r and four of row r ^ 5, whose swizzles differ in the lowest
    bit and in the highest. So neither the 16 bytes read nor the twice 16 written meet others in a bank.
    """
    registers = [[0, 1], [0, 2], [0, 4], [0, 8]] + ([[0, 64]] if columns == 128 else [])
    row = 32
    while row < rows:
        registers.append([row, 0])
        row *= 2
    lanes = [[0, 16], [0, 32], [5, 0], [1, 0], [2, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[8, 0], [16, 0]], [], [rows, columns])


@gluon.jit
def _decode(tile, FORMAT: gl.constexpr, dtype: gl.constexpr):
    """`convert.decode_tile`, in Gluon."""
    if dtype == gl.bfloat16:
        ASSEMBLY: gl.constexpr = INT8_TO_BF16 if FORMAT == INT8 else E4M3_TO_BF16
        return gl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r", [tile], dtype=gl.bfloat16, is_pure=True, pack=4)
    else:
        ASSEMBLY: gl.constexpr = INT8_TO_FP16 if FORMAT == INT8 else E4M3_TO_FP16
        return gl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r", [tile], dtype=gl.float16, is_pure=True, pack=4)


@gluon.jit
def _load_keys(
    desc, memory, copied, stage, tile, pages, head_row, block_rows,
    PAGE: gl.constexpr, BLOCK_N: gl.constexpr, BOX_KEYS: gl.constexpr, D: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Have a tile's boxes [BOX_KEYS, COLUMNS] copied into a stage [panel, box] of `memory`."""
    PANELS: gl.constexpr = D // COLUMNS
    BOXES: gl.constexpr = BLOCK_N // BOX_KEYS
    mbarrier.expect(copied, BLOCK_N * D)
    for box in gl.static_range(BOXES):
        row = head_row + pages[box] * block_rows + (tile * BLOCK_N + box * BOX_KEYS) % PAGE
        for panel in gl.static_range(PANELS):
            _load_box(desc, [row, panel * COLUMNS], copied, memory.index((stage * PANELS + panel) * BOXES + box))


@gluon.jit
def _load_values(
    desc, memory, copied, stage, tile, pages, head_row, block_rows,
    PAGE: gl.constexpr, BLOCK_N: gl.constexpr, BOX_KEYS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Have a tile's boxes [D, BOX_KEYS] copied into a stage [box] of `memory`."""
    BOXES: gl.constexpr = BLOCK_N // BOX_KEYS
    mbarrier.expect(copied, BLOCK_N * D)
    for box in gl.static_range(BOXES):
        slot = (tile * BLOCK_N + box * BOX_KEYS) % PAGE
        _load_box(desc, [head_row + pages[box] * block_rows, slot], copied, memory.index(stage * BOXES + box))


@gluon.jit
def _take(
    memory, stage,
    PIECES: gl.constexpr, SHAPE_ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A stage's pieces of bytes [SHAPE_ROWS, COLUMNS] in registers."""
    BYTES: gl.constexpr = _byte_layout(COLUMNS)
    REGISTERS: gl.constexpr = _register_layout(SHAPE_ROWS, COLUMNS)
    ring = _view(memory, [STAGES * PIECES, SHAPE_ROWS, COLUMNS], BYTES)
    pieces = ()  # starred, a tuple is no tuple of the language
    for piece in gl.static_range(PIECES):
        pieces = pieces + (ring.index(stage * PIECES + piece).load(REGISTERS),)  # noqa: RUF005
    return pieces


@gluon.jit
def _decoded(pieces, FORMAT: gl.constexpr, dtype: gl.constexpr):
    """The pieces as `dtype`."""
    decoded = ()
    for piece in gl.static_range(len(pieces)):
        decoded = decoded + (_decode(pieces[piece], FORMAT, dtype),)  # noqa: RUF005
    return decoded


@gluon.jit
def _give(
    memory, stage, pieces, full,
    PIECES: gl.constexpr, SHAPE_ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Store the pieces as a stage of the consumers' ring, and tell them."""
    ring = _view(memory, [STAGES * PIECES, SHAPE_ROWS, COLUMNS], LAYOUT)
    for piece in gl.static_range(PIECES):
        ring.index(stage * PIECES + piece).store(pieces[piece])
    # The tensor cores read what these threads wrote: fenced by each, and told after all are.
    fence_async_shared()
    _barrier()
    mbarrier.arrive(full, count=1)


@gluon.jit
def _load_scales(
    k_scale_ptr, v_scale_ptr, pages, tile, low, high, scale, v_factor, stride_ks_block, stride_ks_slot,
    stride_vs_block, stride_vs_slot, PAGE: gl.constexpr, BLOCK_N: gl.constexpr, VECTOR: gl.constexpr,
):  # fmt: skip
    """What a tile's scores and probabilities are multiplied by, [BLOCK_N] each; 0 for keys outside [low, high).

    Scales of slots never written may be NaN.
    """
    keys = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=VECTOR)
    held = (keys >= low) & (keys < high)
    pages = pages.to(gl.int64)
    slots = keys % PAGE
    ks = gl.load(k_scale_ptr + pages * stride_ks_block + slots * stride_ks_slot, mask=held, other=0.0)
    vs = gl.load(v_scale_ptr + pages * stride_vs_block + slots * stride_vs_slot, mask=held, other=0.0)
    return ks * scale, vs * v_factor


@gluon.jit
def _key_pages(table_ptr, tile, first_page, last_page, PAGE: gl.constexpr, BLOCK_N: gl.constexpr, VECTOR: gl.constexpr):
    """`_pages`, one a key."""
    pages = (tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=VECTOR)) // PAGE
    return gl.load(table_ptr + gl.minimum(gl.maximum(pages, first_page), last_page))


@gluon.jit
def _convert(
    k_desc, v_desc, k_bytes, v_bytes, k_copied, v_copied, k_memory, v_memory, k_full, v_full, done, scales,
    k_scale_ptr, v_scale_ptr, table_ptr, first_tile, last_tile, first_page, last_page, low, high, scale, v_factor,
    k_row, v_row, k_block_rows, v_block_rows, stride_ks_block, stride_ks_slot, stride_vs_block, stride_vs_slot,
    KEY_FORMAT: gl.constexpr, VALUE_FORMAT: gl.constexpr, PAGE: gl.constexpr, BLOCK_N: gl.constexpr,
    BOX_KEYS: gl.constexpr, D: gl.constexpr, COLUMNS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    BYTE_STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The warps that copy and convert: K of the first tile, then K of tile i + 1 and V of tile i.

    Stages become free as in `hopper._produce`; scales lie in the stages of K. A stage of bytes is free as soon as all
    warps have it in registers.
    """
    PANELS: gl.constexpr = D // COLUMNS
    BOXES: gl.constexpr = BLOCK_N // BOX_KEYS
    STEPS: gl.constexpr = done.shape[0]
    VECTOR: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    for ahead in gl.static_range(BYTE_STAGES):
        tile = first_tile + ahead
        if tile < last_tile:
            pages = _pages(table_ptr, tile, first_page, last_page, PAGE, BLOCK_N, BOX_KEYS)
            _load_keys(
                k_desc, k_bytes, k_copied.index(ahead), ahead, tile, pages, k_row, k_block_rows, PAGE, BLOCK_N,
                BOX_KEYS, D, COLUMNS,
            )  # fmt: skip
            _load_values(
                v_desc, v_bytes, v_copied.index(ahead), ahead, tile, pages, v_row, v_block_rows, PAGE, BLOCK_N,
                BOX_KEYS, D,
            )  # fmt: skip
    # Scales are loaded a tile ahead, their pages looked up sooner still: else their latency would stand in the way.
    key_pages = _key_pages(table_ptr, first_tile, first_page, last_page, PAGE, BLOCK_N, VECTOR)
    ks, vs = _load_scales(
        k_scale_ptr, v_scale_ptr, key_pages, first_tile, low, high, scale, v_factor, stride_ks_block, stride_ks_slot,
        stride_vs_block, stride_vs_slot, PAGE, BLOCK_N, VECTOR,
    )  # fmt: skip
    key_pages = _key_pages(table_ptr, first_tile + 1, first_page, last_page, PAGE, BLOCK_N, VECTOR)
    pages = _pages(table_ptr, first_tile + BYTE_STAGES, first_page, last_page, PAGE, BLOCK_N, BOX_KEYS)
    k_byte_stage = 0
    k_byte_parity = 0
    v_byte_stage = 0
    v_byte_parity = 0
    k_stage = 0
    v_stage = 0
    # Step -K_STAGES, and 1 - V_STAGES.
    k_step = STEPS - K_STAGES
    k_step_parity = 1
    v_step = (STEPS + 1 - V_STAGES) % STEPS
    v_step_parity = 1 if V_STAGES > 1 else 0
    # Not `pages`: a name that the loop sets to what it was before the loop would not be carried by it.
    v_pages = _pages(table_ptr, first_tile + BYTE_STAGES - 1, first_page, last_page, PAGE, BLOCK_N, BOX_KEYS)
    for tile in range(first_tile - 1, last_tile):
        following = tile + 1
        next_pages = _pages(table_ptr, following + BYTE_STAGES + 1, first_page, last_page, PAGE, BLOCK_N, BOX_KEYS)
        if following < last_tile:
            mbarrier.wait(k_copied.index(k_byte_stage), k_byte_parity)
            keys = _take(k_bytes, k_byte_stage, PANELS, BLOCK_N, COLUMNS, BYTE_STAGES)
            if EARLY:
                keys = _decoded(keys, KEY_FORMAT, k_memory.dtype)
            _barrier()
            if following + BYTE_STAGES < last_tile:
                _load_keys(
                    k_desc, k_bytes, k_copied.index(k_byte_stage), k_byte_stage, following + BYTE_STAGES, pages, k_row,
                    k_block_rows, PAGE, BLOCK_N, BOX_KEYS, D, COLUMNS,
                )  # fmt: skip
            k_byte_stage, k_byte_parity = _next(k_byte_stage, k_byte_parity, BYTE_STAGES)
            mbarrier.wait(done.index(k_step), k_step_parity)
            k_step, k_step_parity = _next(k_step, k_step_parity, STEPS)
            if not EARLY:
                keys = _decoded(keys, KEY_FORMAT, k_memory.dtype)
            scales.index(2 * k_stage).store(ks)
            scales.index(2 * k_stage + 1).store(vs)
            _give(k_memory, k_stage, keys, k_full.index(k_stage), PANELS, BLOCK_N, COLUMNS, K_STAGES)
            k_stage = gl.where(k_stage == K_STAGES - 1, 0, k_stage + 1)
        ks, vs = _load_scales(
            k_scale_ptr, v_scale_ptr, key_pages, following + 1, low, high, scale, v_factor, stride_ks_block,
            stride_ks_slot, stride_vs_block, stride_vs_slot, PAGE, BLOCK_N, VECTOR,
        )  # fmt: skip
        key_pages = _key_pages(table_ptr, following + 2, first_page, last_page, PAGE, BLOCK_N, VECTOR)
        if tile >= first_tile:
            mbarrier.wait(v_copied.index(v_byte_stage), v_byte_parity)
            values = _take(v_bytes, v_byte_stage, BOXES, D, BOX_KEYS, BYTE_STAGES)
            if EARLY:
                values = _decoded(values, VALUE_FORMAT, v_memory.dtype)
            _barrier()
            if tile + BYTE_STAGES < last_tile:
                _load_values(
                    v_desc, v_bytes, v_copied.index(v_byte_stage), v_byte_stage, tile + BYTE_STAGES, v_pages, v_row,
                    v_block_rows, PAGE, BLOCK_N, BOX_KEYS, D,
                )  # fmt: skip
            v_byte_stage, v_byte_parity = _next(v_byte_stage, v_byte_parity, BYTE_STAGES)
            mbarrier.wait(done.index(v_step), v_step_parity)
            v_step, v_step_parity = _next(v_step, v_step_parity, STEPS)
            if not EARLY:
                values = _decoded(values, VALUE_FORMAT, v_memory.dtype)
            _give(v_memory, v_stage, values, v_full.index(v_stage), BOXES, D, BOX_KEYS, V_STAGES)
            v_stage = gl.where(v_stage == V_STAGES - 1, 0, v_stage + 1)
        v_pages = pages
        pages = next_pages


@gluon.jit
def _specialised_8bit_kernel(
    query_ptr,
    k_desc,
    v_desc,
    k_scale_ptr,
    v_scale_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    query_start_ptr,
    seq_lens_ptr,
    table_ptr,
    kv_start_ptr,
    num_requests,
    scale,
    v_factor,
    stride_q_token,
    stride_q_head,
    stride_ks_block,
    stride_ks_slot,
    stride_ks_head,
    stride_vs_block,
    stride_vs_slot,
    stride_vs_head,
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
    KEY_FORMAT: gl.constexpr,
    VALUE_FORMAT: gl.constexpr,
    PAGE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BOX_KEYS: gl.constexpr,
    COLUMNS: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    BYTE_STAGES: gl.constexpr,
    CONVERTER_REGISTERS: gl.constexpr,
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

    STEPS: gl.constexpr = max(K_STAGES, V_STAGES + 1)
    TILE: gl.constexpr = BLOCK_N * D // (8 * PANEL)
    K_PIECES: gl.constexpr = D // COLUMNS * (BLOCK_N // BOX_KEYS)
    V_PIECES: gl.constexpr = BLOCK_N // BOX_KEYS
    K_BYTES: gl.constexpr = _byte_layout(COLUMNS)
    V_BYTES: gl.constexpr = _byte_layout(BOX_KEYS)
    dtype: gl.constexpr = query_ptr.dtype.element_ty
    q_memory = gl.allocate_shared_memory(dtype, [2, ROWS, D], LAYOUT)
    k_memory = gl.allocate_shared_memory(dtype, [K_STAGES * TILE, 8, PANEL], LAYOUT)
    # A probability times a scale may leave float16's range.
    v_memory = gl.allocate_shared_memory(gl.bfloat16, [V_STAGES * TILE, 8, PANEL], LAYOUT)
    k_bytes = gl.allocate_shared_memory(k_desc.dtype, [BYTE_STAGES * K_PIECES, BOX_KEYS, COLUMNS], K_BYTES)
    v_bytes = gl.allocate_shared_memory(v_desc.dtype, [BYTE_STAGES * V_PIECES, D, BOX_KEYS], V_BYTES)
    scales = gl.allocate_shared_memory(gl.float32, [2 * K_STAGES, BLOCK_N], SCALE_LAYOUT)
    k_copied = gl.allocate_shared_memory(gl.int64, [BYTE_STAGES, 1], mbarrier.MBarrierLayout())
    v_copied = gl.allocate_shared_memory(gl.int64, [BYTE_STAGES, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [STEPS, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(BYTE_STAGES):
        mbarrier.init(k_copied.index(stage), count=1)
        mbarrier.init(v_copied.index(stage), count=1)
    for stage in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(stage), count=1)
    for stage in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(stage), count=1)
    for step in gl.static_range(STEPS):
        mbarrier.init(done.index(step), count=2)
    for part in gl.static_range(2):
        mbarrier.init(turns.index(part), count=1)
    fence_async_shared()

    table_ptr += request.to(gl.int64) * stride_table
    k_scale_ptr += kv_head.to(gl.int64) * stride_ks_head
    v_scale_ptr += kv_head.to(gl.int64) * stride_vs_head
    last_page = (seq_len - 1) // PAGE
    first_page = gl.minimum(first_held // PAGE, last_page)
    low = gl.maximum(kv_start, first_page * PAGE)
    CUT: gl.constexpr = WINDOW > 0 or kv_start_ptr is not None
    EARLY: gl.constexpr = CONVERTER_REGISTERS >= 88
    # Constants keep being constants only where the call is written with them.
    gl.warp_specialize(
        [
            (_consume, (
                query_ptr, out_ptr, lse_ptr, sinks_ptr, q_memory, k_memory, v_memory, k_full, v_full, done,
                turns, first_tile, full_tile, diagonal_tile, last_tile, query_start, first_token, query_len, seq_len,
                first_held, kv_head, scale, scales, stride_q_token, stride_q_head, stride_out_token, stride_out_head,
                stride_lse_token, stride_lse_head, FIRST, GROUP, D, WINDOW, CUT, BLOCK_N, K_STAGES, V_STAGES,
                QUERY_IN_REGISTERS, PING_PONG, NEGATED, True,
            )),
            (_consume, (
                query_ptr, out_ptr, lse_ptr, sinks_ptr, q_memory, k_memory, v_memory, k_full, v_full, done,
                turns, first_tile, full_tile, diagonal_tile, last_tile, query_start, first_token, query_len, seq_len,
                first_held, kv_head, scale, scales, stride_q_token, stride_q_head, stride_out_token, stride_out_head,
                stride_lse_token, stride_lse_head, SECOND, GROUP, D, WINDOW, CUT, BLOCK_N, K_STAGES, V_STAGES,
                QUERY_IN_REGISTERS, PING_PONG, NEGATED, True,
            )),
            (_convert, (
                k_desc, v_desc, k_bytes, v_bytes, k_copied, v_copied, k_memory, v_memory, k_full, v_full, done, scales,
                k_scale_ptr, v_scale_ptr, table_ptr, first_tile, last_tile, first_page, last_page, low, seq_len, scale,
                v_factor, kv_head * k_head_rows, kv_head * v_head_rows, k_block_rows, v_block_rows, stride_ks_block,
                stride_ks_slot, stride_vs_block, stride_vs_slot, KEY_FORMAT, VALUE_FORMAT, PAGE, BLOCK_N, BOX_KEYS, D,
                COLUMNS, K_STAGES, V_STAGES, BYTE_STAGES, EARLY,
            )),
        ],
        [4, 4],
        [(REGISTERS - CONVERTER_REGISTERS) // 2, CONVERTER_REGISTERS],
    )  # fmt: skip


def _descriptor(matrix: PoolMatrix, box: list[int]) -> TensorDescriptor:
    """The pool's matrix, read in boxes of up to 128 bytes a row."""
    return TensorDescriptor(matrix.pool, matrix.shape, matrix.strides, box, _byte_layout(box[1]))


def specialised_8bit_attention(
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
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> bool:
    """`unified_attention` into `out`, or False where the pools have no matrix that the copy engine reads.

    Values must be transposed in their pages, and a page hold 64 keys at least, a swizzled row of their bytes.
    """
    shape: AttentionShape = call.shape
    keys, columns = min(shape.page, plan.block_n), min(shape.head_dim, 128)
    if keys < 64 or v_pool.stride(1) != 1:
        return False
    k_bytes, v_bytes = pool_bytes(k_pool), pool_bytes(v_pool)
    k_matrix = pool_matrix(k_bytes, keys=keys, channels=columns)
    v_matrix = pool_matrix(v_bytes, keys=keys, channels=shape.head_dim)
    if k_matrix is None or v_matrix is None or k_pool.stride(1) == 1:
        return False

    def rest() -> Launch:
        numbers = (
            shape.requests,
            abs(scale) * LOG2_E.value * pool_factor(k_pool.dtype),
            pool_factor(v_pool.dtype),
            query.stride(0),
            query.stride(1),
            *k_scale.stride(),
            *v_scale.stride(),
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
            KEY_FORMAT=pool_format(k_pool.dtype),
            VALUE_FORMAT=pool_format(v_pool.dtype),
            PAGE=shape.page,
            BLOCK_N=plan.block_n,
            BOX_KEYS=keys,
            COLUMNS=columns,
            K_STAGES=plan.key_stages,
            V_STAGES=plan.value_stages,
            BYTE_STAGES=plan.byte_stages,
            CONVERTER_REGISTERS=plan.converter_registers,
            QUERY_IN_REGISTERS=plan.query_in_registers,
            PING_PONG=plan.ping_pong,
            NEGATED=scale < 0,
            num_warps=4,
            **dependent_launch(query.device),
        )
        return (shape.kv_heads, query_tiles(shape, BLOCK_M), 1), numbers, constants

    tensors = (
        query, _descriptor(k_matrix, [keys, columns]), _descriptor(v_matrix, [shape.head_dim, keys]), k_scale, v_scale,
        sinks, out, lse, query_start_loc, seq_lens, block_table, kv_start,
    )  # fmt: skip
    call.launch(_specialised_8bit_kernel, tensors, rest)
    return True
