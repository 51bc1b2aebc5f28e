"""Launch choices: given shapes, lengths and the GPU, the tile, warps, stages and splits of each kernel.

Pure functions of their arguments, so that a plan can be tested and printed; nothing is timed in a user's process.
`DECODE` and `UNIFIED` are the measured table; `python scripts/tune.py --write` regenerates a GPU class's part of it.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton

from .checks import PACKED_DTYPE, AttentionShape
from .integers import cdiv, next_power_of_2


@dataclass(frozen=True)
class Gpu:
    """What plans see: a class ("hopper", "ada", "ampere", "other", "cpu"), SMs, and shared memory a block (bytes).

    float8: whether an instruction casts to float8.
    """

    kind: str
    sms: int
    shared_memory: int
    float8: bool = False


CPU = Gpu("cpu", 4, 1 << 20)


@lru_cache
def gpu_of(device: torch.device) -> Gpu:
    """The GPU behind a device; the interpreter's tiles on a CPU."""
    if device.type != "cuda":
        return CPU
    properties = torch.cuda.get_device_properties(device)
    kinds = {(8, 0): "ampere", (8, 6): "ada", (8, 9): "ada", (9, 0): "hopper"}
    kind = kinds.get((properties.major, properties.minor), "other")
    float8 = (properties.major, properties.minor) >= (8, 9)
    return Gpu(kind, properties.multi_processor_count, properties.shared_memory_per_block_optin, float8)


@dataclass(frozen=True)
class SpecialisedPlan:
    """The kernel of hopper.py, or of hopper_8bit.py: block_n keys a tile, stages of keys and of values.

    query_in_registers: the query is an operand from registers, else from shared memory. ping_pong: the two consumers
    take turns at the tensor cores. byte_stages: of 8-bit keys and of 8-bit values, before they are converted.
    converter_registers: a thread of the warps that convert; from 88 on a tile is converted before its stage is free.
    """

    block_n: int
    key_stages: int
    value_stages: int
    query_in_registers: bool = False
    ping_pong: bool = False
    byte_stages: int = 0
    converter_registers: int = 72


@dataclass(frozen=True)
class UnifiedPlan:
    """block_m rows (tokens x group) and block_n keys a tile.

    descriptors: tiles through the copy engine, where a page holds a tile and the pool has a matrix. specialised: the
    plan of Hopper's own kernel, which then takes the call where it can; the rest of the plan is for where it cannot.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    descriptors: bool = False
    specialised: SpecialisedPlan | None = None


# Keys a tile that "bytes" needs: with 64, Triton 3.6 lets the product of int8 values read past shared memory (seen with
# compute-sanitizer on an H200).
FEWEST_BYTES = 128


# Keys of the tiles that `regime` counts.
REGIME_KEYS = 64
# Tiles of so many keys an SM up to which a decode call is "short": 1 x 6,144 for 8 KV heads on 132 SMs.
SHORT_TILES = 6
# Keys a request, whole tiles, up to which fewer stages pay: more programs an SM hide each other's starts and ends.
BRIEF_KEYS = 1024


@dataclass(frozen=True)
class DecodePlan:
    """block_n keys a tile; about `programs` splits a KV head over all requests, of at least `min_tiles` tiles each.

    A request's splits are merged in teams of `team`, and then the teams, merge_splits partial outputs at a time.
    products: which operand of the two products is the left one, "rows" (the query's), "keys" (keys and values), or
    "bytes" (keys and values as the 8 bits they are stored in, the query and the probabilities in that many 8-bit
    `pieces`). descriptors: tiles through the copy engine. registers: at most so many a thread; None, as many as the
    compiler likes.
    """

    block_n: int
    num_warps: int
    num_stages: int
    programs: int
    min_tiles: int
    merge_splits: int = 8
    team: int = 8
    products: str = "rows"
    pieces: int = 2
    descriptors: bool = False
    registers: int | None = None

    @property
    def slots(self) -> int:
        """Columns of the right operand a head."""
        return 2 if self.pieces == 2 else 4

    def query_rows(self, group: int) -> int:
        """Rows of the query tile, or columns of it transposed: 16 at least, which "bytes" fills with pieces."""
        least = 16 // self.slots if self.products == "bytes" else 16
        return max(least, next_power_of_2(group))

    def for_call(self, shape: AttentionShape, *, values_by_slot: bool, whole_pages: bool) -> "DecodePlan":
        """This plan, with the products and loads that the call's tensors allow.

        values_by_slot: the slots of a page of values follow one another. whole_pages: a page is block_size slots.
        """
        products = self.products
        eight_bit = shape.query_dtype.itemsize == 2 or triton.knobs.runtime.interpret
        large = min(shape.head_dim, shape.value_dim) >= 32 and self.block_n >= 32
        if products == "bytes" and not (shape.quantized and eight_bit and values_by_slot and large):
            products = "rows"
        if shape.mixed and products != "rows":
            # As the left operand, 8-bit values beside keys of another type came out wrong on Triton 3.6.
            products = "keys" if shape.value_pool_dtype == PACKED_DTYPE else "rows"
        if products == "bytes" and self.block_n < FEWEST_BYTES:
            products = "rows"
        if products != "rows" and (not whole_pages or replace(self, products=products).query_rows(shape.group) > 32):
            products = "rows"
        descriptors = self.descriptors and products != "rows" and shape.page >= self.block_n
        if (products, descriptors) == (self.products, self.descriptors):
            return self
        return replace(self, products=products, descriptors=descriptors)


# Splits whose partial outputs one program merges. A second level of merging costs about as much as four more tiles a
# split, so a request of few enough tiles gets no more splits than a team has.
TEAM = 16


def merge_splits(group: int, value_dim: int, num_warps: int) -> int:
    """Partial outputs that a program merges at once: as many as 128 registers a thread hold, from 4 to a team."""
    elements = next_power_of_2(group) * next_power_of_2(value_dim)
    return min(TEAM, max(4, 128 * 32 * num_warps // elements))


@dataclass(frozen=True)
class TurnPlan:
    """rows (token, head) of one KV head a program."""

    rows: int
    num_warps: int


@dataclass(frozen=True)
class WritePlan:
    """Rows a program, of one KV head: key_rows tokens of keys and rows (token, head) of queries, value_rows tokens."""

    key_rows: int
    value_rows: int
    num_warps: int


@dataclass(frozen=True)
class DecodeChoice:
    """A row of the table: a `DecodePlan` without its splits, and how many programs an SM should get."""

    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: float
    min_tiles: int
    products: str
    pieces: int
    descriptors: bool
    registers: int | None = None

    def plan(self, group: int, kv_heads: int, value_dim: int, sms: int) -> DecodePlan:
        programs = max(1, math.ceil(self.programs_per_sm * sms / kv_heads))
        at_once = merge_splits(group, value_dim, self.num_warps)
        return DecodePlan(
            self.block_n, self.num_warps, self.num_stages, programs, self.min_tiles,
            at_once, TEAM, self.products, self.pieces, self.descriptors, self.registers,
        )  # fmt: skip


# Both are keyed by GPU class, then (how keys are stored: "16-bit", "int8" or "fp8"; largest head_dim, smallest first;
# `regime` or `prefill_regime`). Where a regime has no row that of "long" serves.
# "hopper" by scripts/tune.py on an H200; "ada" and "ampere" by reasoning: about 100 and 164 kB of shared memory a
# block, no wide tensor cores and no copy engine, so the query's rows stay the left operand.
# begin table
DECODE: dict[str, dict[tuple, DecodeChoice]] = {
    "hopper": {
        ("16-bit", 64, "long"): DecodeChoice(64, 4, 3, 4, 2, "keys", 2, True),
        ("16-bit", 64, "short"): DecodeChoice(64, 4, 3, 2, 1, "keys", 2, False),
        ("16-bit", 128, "long"): DecodeChoice(64, 4, 4, 1, 2, "keys", 2, False),
        ("16-bit", 128, "short"): DecodeChoice(64, 4, 3, 1, 1, "rows", 2, False),
        ("16-bit", 128, "small pages"): DecodeChoice(128, 4, 3, 1, 2, "rows", 2, False),
        ("16-bit", 128, "many"): DecodeChoice(64, 4, 3, 1, 2, "keys", 2, True),
        ("16-bit", 256, "long"): DecodeChoice(64, 4, 3, 1, 2, "keys", 2, True),
        ("16-bit", 256, "short"): DecodeChoice(64, 4, 3, 1, 1, "keys", 2, True),
        ("16-bit", 256, "many"): DecodeChoice(64, 4, 3, 1, 2, "keys", 2, True),
        ("fp8", 64, "long"): DecodeChoice(128, 4, 3, 4, 1, "bytes", 3, False),
        ("fp8", 64, "short"): DecodeChoice(128, 4, 2, 2, 1, "bytes", 3, False),
        ("fp8", 64, "small pages"): DecodeChoice(128, 4, 3, 3, 2, "bytes", 3, False),
        ("fp8", 128, "long"): DecodeChoice(128, 4, 4, 1, 2, "bytes", 3, True),
        ("fp8", 128, "short"): DecodeChoice(128, 4, 3, 1, 1, "bytes", 3, False),
        ("fp8", 128, "small pages"): DecodeChoice(128, 4, 3, 2, 2, "bytes", 3, False),
        ("fp8", 128, "many"): DecodeChoice(128, 4, 3, 1, 2, "bytes", 3, True),
        ("fp8", 128, "brief"): DecodeChoice(128, 4, 2, 1, 2, "bytes", 3, True),
        ("fp8", 256, "long"): DecodeChoice(128, 4, 3, 1, 2, "bytes", 3, True),
        ("fp8", 256, "short"): DecodeChoice(128, 4, 3, 1, 1, "bytes", 3, True),
        ("fp8", 256, "small pages"): DecodeChoice(128, 4, 3, 1, 2, "bytes", 3, False),
        ("int8", 64, "long"): DecodeChoice(128, 4, 3, 4, 1, "bytes", 2, False),
        ("int8", 64, "short"): DecodeChoice(128, 4, 3, 2, 1, "bytes", 2, False),
        ("int8", 64, "small pages"): DecodeChoice(128, 4, 2, 4, 2, "bytes", 2, False),
        ("int8", 128, "long"): DecodeChoice(128, 4, 4, 1, 2, "bytes", 2, False),
        ("int8", 128, "short"): DecodeChoice(128, 4, 3, 1, 1, "bytes", 2, False),
        ("int8", 128, "small pages"): DecodeChoice(128, 4, 3, 2, 2, "bytes", 2, False),
        ("int8", 128, "many"): DecodeChoice(128, 4, 3, 1, 2, "bytes", 2, True),
        ("int8", 128, "brief"): DecodeChoice(128, 4, 2, 1, 2, "bytes", 2, True),
        ("int8", 256, "long"): DecodeChoice(128, 4, 3, 1, 2, "bytes", 2, True),
        ("int8", 256, "short"): DecodeChoice(128, 4, 3, 1, 1, "bytes", 2, True),
        ("int8", 256, "small pages"): DecodeChoice(128, 8, 3, 1, 2, "bytes", 2, False),
    },
    "ampere": {
        ("16-bit", 128, "long"): DecodeChoice(64, 4, 3, 2, 2, "rows", 2, False),
        ("16-bit", 256, "long"): DecodeChoice(32, 4, 3, 2, 2, "rows", 2, False),
        ("int8", 128, "long"): DecodeChoice(64, 4, 3, 3, 2, "rows", 2, False),
        ("fp8", 128, "long"): DecodeChoice(64, 4, 3, 3, 2, "rows", 2, False),
    },
    "ada": {
        ("16-bit", 128, "long"): DecodeChoice(32, 4, 3, 2, 4, "rows", 2, False),
        ("16-bit", 256, "long"): DecodeChoice(16, 4, 3, 2, 4, "rows", 2, False),
        ("int8", 128, "long"): DecodeChoice(64, 4, 2, 2, 2, "rows", 2, False),
        ("fp8", 128, "long"): DecodeChoice(64, 4, 2, 2, 2, "rows", 2, False),
    },
}
UNIFIED: dict[str, dict[tuple, UnifiedPlan]] = {
    "hopper": {
        ("16-bit", 128, "long"): UnifiedPlan(128, 64, 4, 2, True),
        ("16-bit", 128, "short"): UnifiedPlan(64, 64, 4, 3, True),
        ("16-bit", 128, "small pages"): UnifiedPlan(128, 128, 8, 2, False),
        ("16-bit", 256, "long"): UnifiedPlan(128, 64, 8, 2, True),
        ("16-bit", 256, "short"): UnifiedPlan(64, 64, 4, 2, True),
        ("fp8", 128, "long"): UnifiedPlan(256, 64, 8, 2, True),
        ("fp8", 128, "short"): UnifiedPlan(64, 64, 4, 3, True),
        ("fp8", 128, "small pages"): UnifiedPlan(256, 64, 8, 3, False),
        ("fp8", 256, "long"): UnifiedPlan(128, 64, 8, 2, True),
        ("fp8", 256, "short"): UnifiedPlan(64, 64, 4, 2, True),
        ("int8", 128, "long"): UnifiedPlan(128, 64, 4, 2, True),
        ("int8", 128, "short"): UnifiedPlan(64, 64, 4, 3, True),
        ("int8", 128, "small pages"): UnifiedPlan(256, 64, 8, 3, False),
        ("int8", 256, "long"): UnifiedPlan(128, 64, 8, 2, True),
        ("int8", 256, "short"): UnifiedPlan(64, 64, 4, 2, True),
    },
    "ampere": {
        ("16-bit", 128, "long"): UnifiedPlan(128, 64, 8, 2, False),
        ("16-bit", 256, "long"): UnifiedPlan(64, 32, 4, 2, False),
        ("int8", 128, "long"): UnifiedPlan(128, 32, 8, 2, False),
        ("fp8", 128, "long"): UnifiedPlan(128, 32, 8, 2, False),
    },
    "ada": {
        ("16-bit", 128, "long"): UnifiedPlan(64, 64, 4, 2, False),
        ("16-bit", 256, "long"): UnifiedPlan(64, 16, 4, 2, False),
        ("int8", 128, "long"): UnifiedPlan(64, 64, 4, 2, False),
        ("fp8", 128, "long"): UnifiedPlan(64, 64, 4, 2, False),
    },
}
# end table
# For int4, and for keys and values in two formats, whose tiles are decoded in registers; by largest head size. The
# first is for int4 values on Hopper, the second for all else. MIXED_DECODE is by what the compiler spills; the others
# were measured on an H200.
INT4_DECODE = {
    128: DecodeChoice(64, 4, 3, 3, 2, "keys", 2, False, 168),
    512: DecodeChoice(64, 4, 2, 2, 2, "keys", 2, False),
}
MIXED_DECODE = {
    128: DecodeChoice(64, 4, 2, 3, 2, "rows", 2, False),
    512: DecodeChoice(32, 4, 2, 2, 4, "rows", 2, False),
}
MIXED_UNIFIED = {128: UnifiedPlan(128, 64, 4, 2), 512: UnifiedPlan(128, 64, 8, 2)}

# Hopper's own kernel, by head size: as many stages as shared memory holds beside the query.
SPECIALISED: dict[int, SpecialisedPlan] = {
    64: SpecialisedPlan(128, 4, 4, True),
    128: SpecialisedPlan(128, 3, 3),
    256: SpecialisedPlan(64, 3, 2),
}
# The same over 8-bit caches, which needs room for bytes and registers for the warps that convert them.
SPECIALISED_8BIT: dict[int, SpecialisedPlan] = {
    64: SpecialisedPlan(128, 3, 3, byte_stages=3),
    128: SpecialisedPlan(128, 2, 2, byte_stages=2),
    256: SpecialisedPlan(64, 2, 2, byte_stages=1),
}
# In a window of so few keys the tiles that are masked, two a program, weigh more than what a larger tile gains.
SPECIALISED_WINDOW = 2048
SPECIALISED_WINDOWED: dict[int, SpecialisedPlan] = {128: SpecialisedPlan(64, 6, 6, True)}
# Programs of a launch in all but its first dimension.
LARGEST_GRID = 65535
# Rows a request below which that kernel's 128 rows a program would mostly be empty.
SPECIALISED_ROWS = 256


@lru_cache
def gluon_compiles() -> bool:
    """Whether hopper.py and hopper_8bit.py are for this Triton: Gluon changes with versions; these were compiled."""
    if not triton.__version__.startswith(("3.6.", "3.9.")) or torch.version.hip is not None:
        return False
    try:
        from . import hopper, hopper_8bit  # noqa: F401
    except Exception:  # whatever a build without Gluon raises: the other kernel serves every call
        return False
    return True


def plan_specialised(
    shape: AttentionShape, max_query_len: int, gpu: Gpu, window: int | None = None
) -> SpecialisedPlan | None:
    """The plan of Hopper's own kernel, None where it does not take the shape."""
    plans = SPECIALISED_8BIT if shape.quantized else SPECIALISED
    if not shape.quantized and window is not None and window <= SPECIALISED_WINDOW:
        plans = SPECIALISED | SPECIALISED_WINDOWED
    # A swizzled row of transposed values is 64 keys at least.
    stored = shape.page >= 64 if shape.quantized else shape.pool_dtype == shape.query_dtype
    takes = (
        gpu.kind == "hopper"
        and shape.query_dtype in (torch.bfloat16, torch.float16)
        and stored
        and shape.value_pool_dtype == shape.pool_dtype
        and shape.head_dim == shape.value_dim
        and shape.head_dim in plans
        and shape.group <= 64
        and max_query_len * shape.group >= SPECIALISED_ROWS
        and gluon_compiles()
    )
    return plans[shape.head_dim] if takes else None


def storage_of(shape: AttentionShape) -> str:
    """How keys are stored, as the table says it; "mixed" has no row in it."""
    if shape.mixed:
        return "mixed"
    return {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}.get(shape.pool_dtype, "16-bit")


def regime(shape: AttentionShape, keys: int, gpu: Gpu) -> str:
    """What bounds a decode call of up to `keys` keys a request.

    "short": latency, an SM has few tiles; "small pages": a tile is gathered from several; "many": the starts and ends
    of the programs of requests that fill the SMs unsplit, "brief" where each has few tiles; "long": the memory.
    """
    tiles = shape.requests * shape.kv_heads * cdiv(keys, REGIME_KEYS)
    if tiles <= SHORT_TILES * gpu.sms:
        return "short"
    if shape.page < (128 if shape.quantized else 64):
        return "small pages"
    if shape.requests * shape.kv_heads < 2 * gpu.sms:
        return "long"
    return "brief" if keys <= BRIEF_KEYS else "many"


def prefill_regime(shape: AttentionShape, gpu: Gpu) -> str:
    """Of a unified call: "short" where tiles of 128 rows do not fill the GPU twice; the others as in `regime`."""
    if shape.page < 64:
        return "small pages"
    tiles = shape.kv_heads * cdiv(shape.tokens * shape.group, 128)
    return "short" if tiles <= 2 * gpu.sms else "long"


def _row(table: dict, gpu: Gpu, shape: AttentionShape, *regimes: str):
    """The table's row for a shape, None where it has none: another GPU, float32, a larger head."""
    dim = max(shape.head_dim, shape.value_dim)
    if shape.query_dtype.itemsize != 2 or max(shape.pool_dtype.itemsize, shape.value_pool_dtype.itemsize) > 2:
        return None
    if shape.mixed:
        if table is UNIFIED:
            mixed = MIXED_UNIFIED
        else:
            mixed = INT4_DECODE if gpu.kind == "hopper" and shape.value_pool_dtype == PACKED_DTYPE else MIXED_DECODE
        return mixed[min(limit for limit in mixed if limit >= dim)]
    rows = table.get(gpu.kind, {})
    fitting = {key[1:]: row for key, row in rows.items() if key[0] == storage_of(shape) and key[1] >= dim}
    if not fitting:
        return None
    # The head size weighs more than the regime.
    limit = min(limit for limit, _ in fitting)
    return next((fitting[limit, name] for name in regimes if (limit, name) in fitting), None)


def tile_bytes(block_m: int, block_n: int, stages: int, shape: AttentionShape, *, converted: bool = True) -> int:
    """Shared memory of a tile: the query, and K and V for each stage; 8-bit tiles are converted to the query's type.

    float32 operands lie there twice more, as the two 11-bit floats that the tensor cores take them for.
    """
    d, dv = shape.channels
    halves = 8 if shape.query_dtype.itemsize == 4 else 0
    size = block_m * d * (halves or shape.query_dtype.itemsize)
    for channels, dtype in ((d, shape.pool_dtype), (dv, shape.value_pool_dtype)):
        copies = shape.query_dtype.itemsize if converted and dtype.itemsize != shape.query_dtype.itemsize else 0
        copies = halves or copies
        size += block_n * channels * (stages * dtype.itemsize + copies)
    return size


def query_tiles(shape: AttentionShape, block_m: int) -> int:
    """Programs a KV head that hold every tile of `block_m` rows (tokens x group): each request may begin one.

    Raises `ValueError` for more than a launch can have.
    """
    tiles = shape.tokens // (block_m // shape.group) + shape.requests
    if tiles > LARGEST_GRID:
        raise ValueError(
            f"query of {shape.tokens} tokens is {tiles} tiles of {block_m} rows, more than the {LARGEST_GRID} of one "
            "launch. Pass fewer tokens at a time (generate: prefill_chunk_size)."
        )
    return tiles


def plan_unified(
    shape: AttentionShape, *, max_query_len: int, max_seq_len: int, window: int | None = None, gpu: Gpu | None = None
) -> UnifiedPlan:
    """The tile of `unified_attention`: as many rows as the batch fills, as many keys as shared memory holds."""
    gpu = gpu or gpu_of(shape.device)
    wide = max(shape.head_dim, shape.value_dim) > 128
    plan = _row(UNIFIED, gpu, shape, prefill_regime(shape, gpu), "long")
    if plan is None and shape.query_dtype.itemsize == 4:
        # Three products of 11-bit floats, whose operands lie in shared memory twice.
        plan = UnifiedPlan(64, 32, 4, 2)
    plan = plan or UnifiedPlan(128, 64, 8 if wide else 4, 2)
    plan = replace(plan, specialised=plan_specialised(shape, max_query_len, gpu, window))
    group_rows = next_power_of_2(shape.group)
    rows = max(16, group_rows, min(plan.block_m, next_power_of_2(max_query_len * shape.group)))
    # A warp takes 16 rows at least.
    plan = replace(plan, block_m=rows, num_warps=min(plan.num_warps, 8 if wide and rows >= 64 else max(4, rows // 16)))
    while tile_bytes(plan.block_m, plan.block_n, plan.num_stages, shape) > gpu.shared_memory:
        if plan.num_stages > 2:
            plan = replace(plan, num_stages=plan.num_stages - 1)
        elif plan.block_n > shape.fewest_keys:
            plan = replace(plan, block_n=plan.block_n // 2)
        elif plan.block_m > max(16, group_rows):
            plan = replace(plan, block_m=plan.block_m // 2)
        else:
            return replace(plan, num_stages=1)
    return plan


def plan_decode(
    shape: AttentionShape,
    *,
    max_seq_len: int,
    window: int | None = None,
    values_by_slot: bool = True,
    whole_pages: bool = True,
    gpu: Gpu | None = None,
) -> DecodePlan:
    """The tile and splits of `decode_attention`: enough splits to fill every SM, none shorter than two tiles.

    values_by_slot, whole_pages: as in `DecodePlan.for_call`.
    """
    gpu = gpu or gpu_of(shape.device)
    keys = max_seq_len if window is None else min(window, max_seq_len)
    name = regime(shape, keys, gpu)
    # A brief call without a row of its own is one of many.
    names = ("brief", "many", "long") if name == "brief" else (name, "long")
    row = _row(DECODE, gpu, shape, *names) or DecodeChoice(64, 4, 3, 4, 2, "rows", 2, False)

    def for_call(plan: DecodePlan) -> DecodePlan:
        return plan.for_call(shape, values_by_slot=values_by_slot, whole_pages=whole_pages)

    def size(plan: DecodePlan) -> int:
        rows = plan.query_rows(shape.group) * (plan.slots if plan.products == "bytes" else 1)
        return tile_bytes(rows, plan.block_n, plan.num_stages, shape, converted=plan.products != "bytes")

    # What the call's tensors do not allow is left out first: it is not what has to fit.
    plan = for_call(row.plan(shape.group, shape.kv_heads, shape.value_dim, gpu.sms))
    while size(plan) > gpu.shared_memory // (1 if row.programs_per_sm == 1 else 2):
        if plan.num_stages > 2:
            plan = replace(plan, num_stages=plan.num_stages - 1)
        elif plan.block_n > shape.fewest_keys:
            plan = for_call(replace(plan, block_n=plan.block_n // 2))
        else:
            return replace(plan, num_stages=1)
    return plan


def _turn_tile(few: bool, head_dim: int, dtype: torch.dtype) -> TurnPlan:
    """A multiple of 8 rows a warp, as `turned_tile` asks, and of 16 rows of a tensor core's tile."""
    if few:
        return TurnPlan(8 if head_dim > 16 else 16, 1)
    return TurnPlan(64 if head_dim <= 128 and dtype.itemsize == 2 else 32, 4)


def plan_turn(
    *, rows: int, head_dim: int, dtype: torch.dtype, device: torch.device, gpu: Gpu | None = None
) -> TurnPlan:
    """The tile of a kernel that turns `rows` rows: of a warp where rows are few, so that they spread over the SMs."""
    gpu = gpu or gpu_of(device)
    if gpu.kind == "cpu":
        return TurnPlan(64, 4)
    return _turn_tile(rows <= 32 * gpu.sms, head_dim, dtype)


def plan_write(
    *,
    rows: int,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    values_by_slot: bool = False,
    turned: bool = False,
    gpu: Gpu | None = None,
) -> WritePlan:
    """Rows a program of `write_kv`: few when rows (token, KV head) are few, so that they spread over the SMs.

    turned: keys pass through `turned_tile`.
    """
    gpu = gpu or gpu_of(device)
    if gpu.kind == "cpu":
        return WritePlan(64, 64, 4)
    few = rows <= 16 * gpu.sms
    if not values_by_slot:
        value_rows = 4 if few else 16
    elif few:
        value_rows = 1
    else:
        # 32 tokens of a head are a sector of each channel of a transposed page; four warps have registers for 8,192
        # elements.
        value_rows = max(16, min(64, 8192 // next_power_of_2(value_dim)))
    if turned:
        turn = _turn_tile(few, head_dim, dtype)
        return WritePlan(turn.rows, value_rows, turn.num_warps)
    return WritePlan(4 if few else 16, value_rows, 1 if few else 4)
