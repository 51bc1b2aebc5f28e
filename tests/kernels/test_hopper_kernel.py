"""Hopper's own prefill kernel against float64; its plan's choice on any machine."""

import math
from dataclasses import replace

import pytest
import torch
from paged_batches import make_batch

from hf_paged_attention.kernels import launch, unified_attention
from hf_paged_attention.kernels.checks import AttentionShape
from hf_paged_attention.kernels.launch import (
    SPECIALISED,
    SPECIALISED_8BIT,
    SPECIALISED_WINDOWED,
    Gpu,
    SpecialisedPlan,
    UnifiedPlan,
    plan_unified,
)

HOPPER = Gpu("hopper", 132, 232448)
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a GPU of the Hopper generation")
# Contexts one before, at and after a tile's end; requests of one token; a chunk behind cached keys.
LENS = [1, 127, 128, 129, 640, 257]
QUERY_LENS = [1, 127, 1, 129, 90, 200]
KV_START = torch.tensor([0, 100, 64, 129, 5, 130], dtype=torch.int32)


EIGHT_BIT = [torch.int8, torch.float8_e4m3fn]


def shape_of(**changes):
    dtypes = [torch.bfloat16] * 3
    shape = AttentionShape(1, 1, 32, 8, 128, 128, 64, *dtypes, torch.device("cpu"))
    return replace(shape, **changes)


def specialised(shape, *, max_query_len=512, gpu=HOPPER, window=None):
    return plan_unified(shape, max_query_len=max_query_len, max_seq_len=4096, gpu=gpu, window=window).specialised


@pytest.fixture
def compiles(monkeypatch):
    monkeypatch.setattr(launch, "gluon_compiles", lambda: True)


def test_a_prefill_on_hopper_is_planned_for_its_own_kernel(compiles):
    for dim, plan in SPECIALISED.items():
        assert specialised(shape_of(head_dim=dim, value_dim=dim)) == plan
    assert (
        specialised(shape_of(**dict.fromkeys(("query_dtype", "pool_dtype", "value_pool_dtype"), torch.float16)))
        is not None
    )


@pytest.mark.parametrize(
    "changes",
    [
        dict.fromkeys(("query_dtype", "pool_dtype", "value_pool_dtype"), torch.float32),
        {"value_pool_dtype": torch.int8},
        {"pool_dtype": torch.float16},
        {"head_dim": 80, "value_dim": 80},
        {"value_dim": 64},
        {"query_heads": 71, "kv_heads": 1},
    ],
)
def test_other_shapes_keep_the_general_kernel(compiles, changes):
    assert specialised(shape_of(**changes)) is None


@pytest.mark.parametrize("dtype", EIGHT_BIT)
def test_8bit_caches_have_plans_of_their_own(compiles, dtype):
    stored = {"pool_dtype": dtype, "value_pool_dtype": dtype, "page": 128}
    for dim, plan in SPECIALISED_8BIT.items():
        assert specialised(shape_of(head_dim=dim, value_dim=dim, **stored)) == plan
    assert specialised(shape_of(**{**stored, "page": 64})) is not None
    assert specialised(shape_of(query_dtype=torch.float16, **stored)) is not None
    for other in ({"page": 32}, {"value_pool_dtype": torch.bfloat16}, {"query_dtype": torch.float32}):
        assert specialised(shape_of(**{**stored, **other})) is None


@pytest.mark.parametrize("dim", SPECIALISED_8BIT)
def test_stages_of_bytes_fit_shared_memory_beside_the_converted(dim):
    plan = SPECIALISED_8BIT[dim]
    stages = plan.key_stages + plan.value_stages
    tiles = 2 * dim * (128 + plan.block_n * stages) + 2 * dim * plan.block_n * plan.byte_stages
    scales, barriers = 2 * 4 * plan.block_n * plan.key_stages, 512
    assert plan.key_stages >= 2
    assert plan.byte_stages >= 1
    assert tiles + scales + barriers <= HOPPER.shared_memory


def test_narrow_windows_have_smaller_tiles(compiles):
    assert specialised(shape_of(), window=1024) == SPECIALISED_WINDOWED[128]
    assert specialised(shape_of(), window=4096) == SPECIALISED[128]
    assert specialised(shape_of(head_dim=256, value_dim=256), window=1024) == SPECIALISED[256]


def test_short_queries_and_other_gpus_keep_the_general_kernel(compiles):
    assert specialised(shape_of(), max_query_len=63) is None
    assert specialised(shape_of(), max_query_len=64) is not None
    assert specialised(shape_of(), gpu=Gpu("ada", 128, 101376)) is None


def test_without_a_known_gluon_the_general_kernel_serves(monkeypatch):
    launch.gluon_compiles.cache_clear()
    monkeypatch.setattr(launch.triton, "__version__", "3.2.0")
    assert specialised(shape_of()) is None
    launch.gluon_compiles.cache_clear()


@pytest.mark.parametrize(("dim", "plan"), [*SPECIALISED.items(), *SPECIALISED_WINDOWED.items()])
def test_stages_fit_shared_memory(dim, plan):
    barriers = 1024
    tiles = 2 * dim * (128 + plan.block_n * (plan.key_stages + plan.value_stages))
    assert plan.key_stages >= 2
    assert tiles + barriers <= HOPPER.shared_memory


def check(lens, query_lens, plan=None, **options):
    """Every element against float64, by the specialised kernel and no other."""
    from hf_paged_attention.kernels import hopper, hopper_8bit

    options = {"dtype": torch.bfloat16, "block_size": 64, "head_dim": 128, "group": 4, **options}
    eight_bit = options.get("pool_dtype") in EIGHT_BIT
    batch = make_batch(lens, query_lens, transposed_values=eight_bit, **options)
    plans, module, name = SPECIALISED, hopper, "specialised_attention"
    if eight_bit:
        plans, module, name = SPECIALISED_8BIT, hopper_8bit, "specialised_8bit_attention"
    plan = UnifiedPlan(128, 64, 4, 2, specialised=plan or plans[options["head_dim"]])
    taken = []
    plain = getattr(module, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, lambda *a, **k: taken.append(plain(*a, **k)) or taken[-1])
        batch.check(unified_attention, plan=plan)
    assert taken == [True]
    return batch, plan


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("group", [1, 3, 4, 6, 7])
def test_any_group_fills_the_rows(group):
    check(LENS, QUERY_LENS, group=group)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", list(SPECIALISED))
@pytest.mark.parametrize("block_size", [16, 64, 128, 256])
def test_heads_and_pages(head_dim, block_size, dtype):
    check(LENS, QUERY_LENS, head_dim=head_dim, block_size=block_size, dtype=dtype)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", list(SPECIALISED))
@pytest.mark.parametrize("window", [1, 30, 128, 300])
def test_windows(head_dim, window):
    check(LENS, QUERY_LENS, head_dim=head_dim, window=window)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("window", [None, 70])
def test_a_first_key_and_queries_before_it(window):
    check(LENS, QUERY_LENS, kv_start=KV_START, window=window)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", list(SPECIALISED))
@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 385, 513])
def test_contexts_around_tile_ends(head_dim, length):
    check([length], [length], head_dim=head_dim, kv_heads=1)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    "plan",
    [
        SpecialisedPlan(128, 2, 2),
        SpecialisedPlan(128, 2, 3, True),
        SpecialisedPlan(128, 3, 3, False, True),
        SpecialisedPlan(128, 3, 3, True, True),
        SpecialisedPlan(64, 6, 6, True, True),
        SpecialisedPlan(64, 2, 1),
    ],
)
def test_every_variant(plan):
    check(LENS, QUERY_LENS, plan)


@pytest.mark.gpu
@on_hopper
def test_sinks_and_a_negative_scale():
    check(LENS, QUERY_LENS, sinks=torch.randn(8))
    check(LENS, QUERY_LENS, scale=-0.1)


@pytest.mark.gpu
@on_hopper
def test_pages_behind_a_window_may_be_given_back():
    """Table entries that no query of the batch reaches name no block, and are not looked up."""
    batch, plan = check([700], [100], window=130)
    first = 600 - 130 + 1
    batch.args["block_table"][0, : first // 64] = 2**30
    batch.check(unified_attention, plan=plan)


@pytest.mark.gpu
@on_hopper
def test_strided_query_and_output():
    batch, plan = check(LENS, QUERY_LENS)
    tokens, heads, dim = batch.query.shape
    wide = torch.full((tokens, heads + 2, dim + 8), math.nan, device="cuda", dtype=batch.query.dtype)
    out, query = wide.clone()[:, 1:-1, :dim], wide[:, 1:-1, :dim]
    query.copy_(batch.query)
    unified_attention(query, **batch.args, **batch.options, out=out, plan=plan)
    want, _ = batch.expected()
    torch.testing.assert_close(out[: len(want)].double(), want, atol=3e-2 * float(want.abs().max()), rtol=0)


@pytest.mark.gpu
@on_hopper
def test_the_same_bits_each_time():
    batch, plan = check(LENS, QUERY_LENS)
    first = batch.run(unified_attention, plan=plan)[0][: sum(QUERY_LENS)]
    for _ in range(20):
        assert torch.equal(first, batch.run(unified_attention, plan=plan)[0][: sum(QUERY_LENS)])


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("pool_dtype", EIGHT_BIT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", list(SPECIALISED_8BIT))
@pytest.mark.parametrize("block_size", [64, 128, 256])
def test_8bit_heads_and_pages(head_dim, block_size, dtype, pool_dtype):
    """Scales of slots never written are NaN, and their bytes e4m3's NaN."""
    check(LENS, QUERY_LENS, head_dim=head_dim, block_size=block_size, dtype=dtype, pool_dtype=pool_dtype)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("pool_dtype", EIGHT_BIT)
@pytest.mark.parametrize("options", [{"group": 1}, {"group": 3}, {"group": 7}, {"window": 1}, {"window": 300}])
def test_8bit_groups_and_windows(options, pool_dtype):
    check(LENS, QUERY_LENS, pool_dtype=pool_dtype, **options)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", list(SPECIALISED_8BIT))
@pytest.mark.parametrize("window", [None, 70])
def test_8bit_first_keys_sinks_and_a_negative_scale(head_dim, window):
    stored = {"pool_dtype": torch.int8, "head_dim": head_dim, "window": window}
    check(LENS, QUERY_LENS, kv_start=KV_START, **stored)
    check(LENS, QUERY_LENS, sinks=torch.randn(8), scale=-0.1, **stored)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 385, 513])
def test_8bit_contexts_around_tile_ends(length):
    check([length], [length], kv_heads=1, pool_dtype=torch.int8)
    check([length], [length], kv_heads=1, pool_dtype=torch.float8_e4m3fn, head_dim=256)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    "plan",
    [
        SpecialisedPlan(128, 2, 2, byte_stages=1),
        SpecialisedPlan(128, 2, 2, byte_stages=2, converter_registers=88),
        SpecialisedPlan(128, 2, 2, ping_pong=True, byte_stages=2),
        SpecialisedPlan(64, 4, 4, byte_stages=3),
        SpecialisedPlan(64, 2, 1, True, byte_stages=2),
    ],
)
def test_every_8bit_variant(plan):
    check(LENS, QUERY_LENS, plan, pool_dtype=torch.int8, block_size=128)


@pytest.mark.gpu
@on_hopper
def test_8bit_pages_behind_a_window_may_be_given_back():
    batch, plan = check([700], [100], window=130, pool_dtype=torch.int8)
    batch.args["block_table"][0, : (600 - 130 + 1) // 64] = 2**30
    batch.check(unified_attention, plan=plan)


@pytest.mark.gpu
@on_hopper
def test_the_same_8bit_bits_each_time():
    batch, plan = check(LENS, QUERY_LENS, pool_dtype=torch.int8, block_size=128)
    first = batch.run(unified_attention, plan=plan)[0][: sum(QUERY_LENS)]
    for _ in range(20):
        assert torch.equal(first, batch.run(unified_attention, plan=plan)[0][: sum(QUERY_LENS)])
