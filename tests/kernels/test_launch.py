from dataclasses import replace

import pytest
import torch
import triton

from hf_paged_attention.kernels.checks import AttentionShape
from hf_paged_attention.kernels.launch import (
    DECODE,
    REGIME_KEYS,
    UNIFIED,
    Gpu,
    plan_decode,
    plan_turn,
    plan_unified,
    plan_write,
    query_tiles,
    regime,
    tile_bytes,
)

HOPPER = Gpu("hopper", 132, 232448)
ADA = Gpu("ada", 128, 101376)
UNKNOWN = Gpu("other", 20, 65536)


def shape_of(
    query_heads, kv_heads, head_dim, dtype=torch.bfloat16, pool_dtype=None, requests=1, page=64, value_dim=None,
    value_pool_dtype=None,
):  # fmt: skip
    sizes = requests, requests, query_heads, kv_heads, head_dim, value_dim or head_dim, page
    pools = pool_dtype or dtype, value_pool_dtype or pool_dtype or dtype
    return AttentionShape(*sizes, dtype, *pools, torch.device("cpu"))


@pytest.mark.parametrize("gpu", [HOPPER, ADA, UNKNOWN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pool_dtype", [None, torch.int8])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256, 512])
def test_every_plan_fits_its_gpu(gpu, dtype, pool_dtype, head_dim):
    shape = shape_of(8, 2, head_dim, dtype, pool_dtype)
    plan = plan_unified(shape, max_query_len=512, max_seq_len=512, gpu=gpu)
    smallest = (plan.block_m, plan.block_n, plan.num_stages) == (16, 16, 1)
    assert smallest or tile_bytes(plan.block_m, plan.block_n, plan.num_stages, shape) <= gpu.shared_memory
    plan = plan_decode(shape, max_seq_len=512, gpu=gpu)
    smallest = (plan.block_n, plan.num_stages) == (16, 1)
    converted = plan.products != "bytes"
    assert smallest or tile_bytes(16, plan.block_n, plan.num_stages, shape, converted=converted) <= gpu.shared_memory


@pytest.mark.parametrize("gpu", [HOPPER, ADA, UNKNOWN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pools", [(torch.uint8, torch.uint8), (torch.uint8, torch.int8), (torch.int8, torch.uint8)])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256, 512])
def test_mixed_plans_fit_their_gpu_and_hold_whole_groups(gpu, dtype, pools, head_dim):
    shape = shape_of(8, 2, head_dim, dtype, pools[0], value_pool_dtype=pools[1])
    least = 32
    plan = plan_unified(shape, max_query_len=512, max_seq_len=512, gpu=gpu)
    smallest = (plan.block_m, plan.block_n, plan.num_stages) == (16, least, 1)
    assert plan.block_n % least == 0
    assert smallest or tile_bytes(plan.block_m, plan.block_n, plan.num_stages, shape) <= gpu.shared_memory
    plan = plan_decode(shape, max_seq_len=512, gpu=gpu).for_call(shape, values_by_slot=True, whole_pages=True)
    assert plan.block_n % least == 0
    keys_left = gpu is HOPPER and dtype == torch.bfloat16 and pools[1] == torch.uint8
    assert (plan.products, plan.descriptors) == ("keys" if keys_left else "rows", False)
    assert (plan.block_n, plan.num_stages) == (least, 1) or tile_bytes(
        16, plan.block_n, plan.num_stages, shape
    ) <= gpu.shared_memory


@pytest.mark.parametrize("gpu", [HOPPER, ADA])
@pytest.mark.parametrize("head_dim", [128, 192, 256])
@pytest.mark.parametrize(("heads", "allowed"), [(64, {}), (8, {"values_by_slot": False}), (8, {"whole_pages": False})])
@pytest.mark.parametrize(("requests", "keys"), [(1, 4096), (16, 8192), (300, 1000), (300, 4000)])
def test_a_plan_fits_after_what_the_call_does_not_allow_is_left_out(requests, keys, heads, allowed, head_dim, gpu):
    shape = shape_of(heads, 1, head_dim, pool_dtype=torch.int8, page=128, requests=requests)
    plan = plan_decode(shape, max_seq_len=keys, gpu=gpu, **allowed)
    assert plan == plan.for_call(shape, **{"values_by_slot": True, "whole_pages": True, **allowed})
    assert plan.products == "rows"
    rows = plan.query_rows(shape.group)
    assert tile_bytes(rows, plan.block_n, plan.num_stages, shape) <= gpu.shared_memory


def test_the_head_size_weighs_more_than_the_regime():
    shape = shape_of(32, 8, 64, requests=64)
    assert regime(shape, 4000, HOPPER) == "many"
    row = DECODE["hopper"]["16-bit", 64, "long"]
    assert plan_decode(shape, max_seq_len=4000, gpu=HOPPER).programs == row.plan(4, 8, 64, HOPPER.sms).programs


def test_more_tiles_than_a_launch_has_are_refused():
    shape = shape_of(64, 1, 128)
    assert query_tiles(replace(shape, tokens=131_000), 128) == 65_501
    with pytest.raises(ValueError, match=r"131072 tokens is 65537 tiles .* prefill_chunk_size"):
        query_tiles(replace(shape, tokens=131_072), 128)


@pytest.mark.parametrize(("heads", "kv_heads"), [(71, 1), (9, 1), (32, 8), (7, 1), (200, 1)])
def test_a_tile_holds_at_least_one_token_of_the_group(heads, kv_heads):
    plan = plan_unified(shape_of(heads, kv_heads, 64), max_query_len=512, max_seq_len=512, gpu=HOPPER)
    assert plan.block_m // (heads // kv_heads) >= 1


def test_decode_splits_fill_the_gpu_at_batch_one():
    plan = plan_decode(shape_of(32, 8, 128), max_seq_len=32768, gpu=HOPPER)
    assert plan.programs * 8 >= HOPPER.sms


@pytest.mark.parametrize("turned", [False, True])
def test_a_decode_step_writes_few_rows_a_program(turned):
    call = {"head_dim": 128, "value_dim": 128, "dtype": torch.bfloat16, "device": torch.device("cpu"), "gpu": HOPPER}
    few, many = (plan_write(rows=n * 8, **call, values_by_slot=True, turned=turned) for n in (64, 8192))
    assert few.key_rows < many.key_rows
    assert few.value_rows < many.value_rows


@pytest.mark.parametrize("gpu", [HOPPER, ADA, UNKNOWN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 16, 24, 64, 80, 128, 192, 256, 512])
@pytest.mark.parametrize("tokens", [1, 64, 512, 8192])
def test_a_turned_tile_fills_the_tensor_cores_and_its_sums_stay_in_a_thread(gpu, dtype, head_dim, tokens):
    call = {"head_dim": head_dim, "dtype": dtype, "device": torch.device("cpu"), "gpu": gpu}
    rotate = plan_turn(rows=tokens * 32, **call)
    write = plan_write(rows=tokens * 8, value_dim=128, **call, values_by_slot=True, turned=True)
    for rows, num_warps in ((rotate.rows, rotate.num_warps), (write.key_rows, write.num_warps)):
        assert rows * max(1, triton.next_power_of_2(head_dim) // 16) >= 16
        assert rows % (8 * num_warps) == 0
    assert write.value_rows * 128 <= 64 * 32 * write.num_warps


@pytest.mark.parametrize("table", [DECODE, UNIFIED])
def test_a_gpu_class_has_choices_for_every_storage(table):
    for gpu, rows in table.items():
        assert {key[0] for key in rows} == {"16-bit", "int8", "fp8"}, gpu
        assert all(key[1] in (64, 128, 256) for key in rows)
        assert all(key[2] in ("long", "short", "small pages", "many", "brief") for key in rows)


def test_a_decode_call_is_short_by_its_tiles_an_sm():
    one, many = shape_of(32, 8, 128), shape_of(32, 8, 128, requests=16)
    assert regime(one, 4096, HOPPER) == regime(one, 6144, HOPPER) == "short"
    assert regime(one, 32768, HOPPER) == regime(many, 8192, HOPPER) == "long"
    assert regime(shape_of(32, 8, 128, requests=33), 4096, HOPPER) == "many"
    assert regime(shape_of(32, 8, 128, requests=128), 1024, HOPPER) == "brief"
    assert regime(shape_of(32, 8, 128, requests=32), 4096, HOPPER) == "long"
    assert regime(shape_of(32, 8, 128, page=16, requests=16), 8192, HOPPER) == "small pages"
    assert regime(shape_of(32, 8, 128, pool_dtype=torch.int8, requests=16), 8192, HOPPER) == "small pages"
    assert plan_decode(many, max_seq_len=8192, window=256, gpu=HOPPER) == plan_decode(many, max_seq_len=256, gpu=HOPPER)


@pytest.mark.parametrize("gpu", [HOPPER, ADA, UNKNOWN])
def test_short_queries_take_short_tiles(gpu):
    shape = shape_of(32, 8, 128)
    assert plan_unified(shape, max_query_len=1, max_seq_len=512, gpu=gpu).block_m == 16
    plan = plan_unified(shape, max_query_len=8, max_seq_len=512, gpu=gpu)
    assert plan.block_m == 32
    assert plan.block_m >= 8 * plan.num_warps


@pytest.mark.parametrize("pool_dtype", [None, torch.int8])
def test_a_gpu_never_seen_gets_the_plainest_kernel(pool_dtype):
    shape = shape_of(32, 8, 128, pool_dtype=pool_dtype)
    assert plan_decode(shape, max_seq_len=512, gpu=UNKNOWN).products == "rows"
    assert not plan_unified(shape, max_query_len=512, max_seq_len=512, gpu=UNKNOWN).descriptors


def test_a_plan_gives_way_to_what_the_tensors_allow():
    shape = shape_of(32, 8, 128, pool_dtype=torch.int8)
    plan = plan_decode(shape, max_seq_len=512, gpu=HOPPER)
    assert plan.products == "bytes"
    assert plan.for_call(shape, values_by_slot=True, whole_pages=True).products == "bytes"
    assert plan.for_call(shape, values_by_slot=False, whole_pages=True).products == "rows"
    assert plan.for_call(shape, values_by_slot=True, whole_pages=False).products == "rows"
    wide_group = shape_of(71, 1, 128, pool_dtype=torch.int8)
    assert plan.for_call(wide_group, values_by_slot=True, whole_pages=True).products == "rows"


@pytest.mark.parametrize("window", [None, 1, 100, 1000, 1024, 1030, 4096])
@pytest.mark.parametrize(("requests", "kv_heads"), [(1, 1), (1, 8), (40, 8), (128, 8)])
def test_a_decode_plan_follows_from_how_many_tiles_the_longest_request_has(window, requests, kv_heads):
    """What `decode_attention` knows calls by."""
    shape = shape_of(4 * kv_heads, kv_heads, 128, torch.bfloat16, torch.int8, requests=requests, page=128)
    for longest in range(1, 2200):
        end = -(-longest // REGIME_KEYS) * REGIME_KEYS
        plan, last = (plan_decode(shape, max_seq_len=keys, window=window, gpu=HOPPER) for keys in (longest, end))
        assert plan == last
