import math

import pytest
import torch
from paged_batches import DEVICE

from hf_paged_attention.kernels import reference_rotate_heads, reference_write_kv, write_kv
from hf_paged_attention.kernels.launch import WritePlan

FORMATS = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]


def new_pools(kv_heads, head_dim, value_dim, dtype, *, num_blocks=5, block_size=16, transposed=False):
    pools = []
    for dim in (head_dim, value_dim):
        shape = (kv_heads, num_blocks, dim, block_size) if transposed else (kv_heads, num_blocks, block_size, dim)
        pool = torch.zeros(shape, dtype=dtype, device=DEVICE)
        pools.append(pool.permute(1, 3, 0, 2) if transposed else pool.permute(1, 2, 0, 3))
    quantized = dtype.itemsize == 1
    scales = [torch.full((kv_heads, num_blocks, block_size), -1.0, device=DEVICE).permute(1, 2, 0) for _ in range(2)]
    return {"k_pool": pools[0], "v_pool": pools[1]} | (
        {"k_scale": scales[0], "v_scale": scales[1]} if quantized else {"k_scale": None, "v_scale": None}
    )


def written(function, key, value, slots, pools, **options):
    function(key, value, slot_mapping=slots, **pools, **options)
    return pools


def factors(kv_heads, head_dim, seed=0):
    exponents = torch.randint(-3, 4, (kv_heads, head_dim), generator=torch.Generator().manual_seed(seed))
    return torch.exp2(exponents.float()).to(DEVICE)


def assert_turned(query, turned, factor):
    """As `reference_rotate_heads` in float64, but for the rounding of the query's own dtype."""
    want = reference_rotate_heads(query.double(), factor.double(), divide=False)
    assert turned.dtype == query.dtype
    assert turned.is_contiguous()
    step = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[query.dtype]
    torch.testing.assert_close(turned.double(), want, rtol=step, atol=step * float(want.abs().max()) / 8)


def assert_same(got, want):
    for name in got:
        if got[name] is None:
            continue
        a, b = got[name], want[name]
        if a.dtype.itemsize == 1:
            a, b = a.view(torch.uint8), b.view(torch.uint8)
        if a.dtype == torch.bfloat16 and DEVICE == "cpu":
            # The interpreter cuts a float32 where the hardware rounds it.
            torch.testing.assert_close(a, b, rtol=2**-7, atol=0)
        else:
            assert torch.equal(a, b), name


@pytest.mark.parametrize("pool_dtype", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("kv_heads", "head_dim", "value_dim"), [(2, 32, 32), (3, 80, 48), (1, 192, 128)])
def test_write_is_the_reference(pool_dtype, dtype, kv_heads, head_dim, value_dim):
    g = torch.Generator().manual_seed(0)
    key = torch.randn(37, kv_heads, head_dim, generator=g).to(dtype).to(DEVICE)
    value = torch.randn(37, kv_heads, value_dim, generator=g).to(dtype).to(DEVICE)
    slots = torch.randperm(80, generator=g)[:37].to(DEVICE)
    got = written(write_kv, key, value, slots, new_pools(kv_heads, head_dim, value_dim, pool_dtype))
    want = written(reference_write_kv, key, value, slots, new_pools(kv_heads, head_dim, value_dim, pool_dtype))
    assert_same(got, want)


@pytest.mark.parametrize("pool_dtype", FORMATS[3:], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("head_dim", "transposed"), [(64, False), (80, True), (128, True), (256, True)])
@pytest.mark.parametrize("tokens", [1, 37])
def test_turned_keys(pool_dtype, dtype, head_dim, transposed, tokens):
    g = torch.Generator().manual_seed(0)
    key, value = (torch.randn(tokens, 2, head_dim, generator=g).to(DEVICE, dtype) for _ in range(2))
    factor = torch.exp2(torch.randint(-3, 4, (2, head_dim), generator=g).float()).to(DEVICE)
    slots = torch.randperm(80, generator=g)[:tokens].to(DEVICE)
    got, want = (new_pools(2, head_dim, head_dim, pool_dtype, transposed=transposed) for _ in range(2))
    written(write_kv, key, value, slots, got, turn_factor=factor)
    turned = reference_rotate_heads(key.double(), factor.double(), divide=True).float()
    written(reference_write_kv, turned, value, slots, want)
    # A sum in another order may round a code the other way.
    torch.testing.assert_close(got["k_scale"], want["k_scale"], rtol=1e-5, atol=0)
    step = 1.0 if pool_dtype == torch.int8 else 32.0
    codes = (got["k_pool"].float() - want["k_pool"].float()).abs()
    assert codes.max() <= step
    assert (codes > 0).float().mean() < 0.01
    assert_same({"v": got["v_pool"]}, {"v": want["v_pool"]})


@pytest.mark.parametrize("pool_dtype", FORMATS, ids=str)
def test_left_out_tokens_write_nothing(pool_dtype):
    key, value = torch.randn(4, 2, 32, device=DEVICE), torch.randn(4, 2, 32, device=DEVICE)
    slots = torch.tensor([3, -1, 40, -1], device=DEVICE)
    got = written(write_kv, key, value, slots, new_pools(2, 32, 32, pool_dtype))
    assert_same(got, written(reference_write_kv, key, value, slots, new_pools(2, 32, 32, pool_dtype)))
    touched = got["k_pool"].float().abs().sum((2, 3)).flatten().nonzero().flatten().tolist()
    assert touched == [3, 40]


@pytest.mark.parametrize("pool_dtype", FORMATS[3:], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_strided_tensors(pool_dtype, transposed):
    # Keys and values as slices of one fused projection, values transposed in their page.
    fused = torch.randn(20, 8, 32, device=DEVICE)
    slots = torch.arange(20, device=DEVICE) + 10
    pools = [new_pools(2, 32, 32, pool_dtype, transposed=transposed) for _ in range(2)]
    got = written(write_kv, fused[:, 4:6], fused[:, 6:], slots, pools[0])
    assert_same(got, written(reference_write_kv, fused[:, 4:6], fused[:, 6:], slots, pools[1]))


@pytest.mark.parametrize("pool_dtype", FORMATS[3:], ids=str)
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-8, 1.0, 1e4, 6e4])
def test_eight_bits_hold_any_size(pool_dtype, size):
    key = torch.randn(9, 2, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    key = key / key.abs().amax() * size
    slots = torch.arange(9, device=DEVICE)
    got = written(write_kv, key, key, slots, new_pools(2, 32, 32, pool_dtype))
    for pool, scale in ((got["k_pool"], got["k_scale"]), (got["v_pool"], got["v_scale"])):
        decoded = (pool.float() * scale[..., None])[0, :9]
        assert decoded.isfinite().all()
        step = 1 / 250 if pool_dtype == torch.int8 else 1 / 15
        assert ((decoded - key).abs() <= key.abs().amax(-1, keepdim=True) * step + 1e-30).all()


def test_every_e4m3_byte_is_its_own_code():
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    value = codes.view(torch.float8_e4m3fn).float()
    # One token a code, beside the largest so that the scale is 1.
    key = torch.stack([value, torch.full_like(value, 448.0)], 1)[:, None].to(DEVICE)
    pools = new_pools(1, 2, 2, torch.float8_e4m3fn, num_blocks=16)
    write_kv(key, key, slot_mapping=torch.arange(len(codes), device=DEVICE), **pools)
    assert torch.equal(pools["k_pool"].view(torch.uint8).flatten(0, 1)[: len(codes), 0, 0].cpu(), codes)
    assert (pools["k_scale"].flatten()[: len(codes)] == 1).all()


def test_e4m3_rounds_half_to_even():
    g = torch.Generator().manual_seed(0)
    value = torch.cat([torch.rand(4000, generator=g) * 896 - 448, torch.randn(4000, generator=g) * 0.02])
    halfway = torch.tensor([1.0625, 1.1875, 2**-10, 3 * 2**-10, 15 * 2**-10, 440.0, 432.0])
    value = torch.cat([value, halfway, -halfway])
    key = torch.stack([value, torch.full_like(value, 448.0)], 1)[:, None].to(DEVICE)
    pools = new_pools(1, 2, 2, torch.float8_e4m3fn, num_blocks=512)
    write_kv(key, key, slot_mapping=torch.arange(len(value), device=DEVICE), **pools)
    got = pools["k_pool"].view(torch.uint8).flatten(0, 1)[: len(value), 0, 0].cpu()
    assert torch.equal(got, value.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [24, 64, 80, 96, 128, 192, 256, 512])
@pytest.mark.parametrize(("tokens", "group"), [(1, 4), (37, 3)])
def test_queries_are_turned_beside(dtype, head_dim, tokens, group):
    g = torch.Generator().manual_seed(0)
    # Queries, keys and values as slices of one fused projection.
    fused = torch.randn(tokens, 2 * group + 4, head_dim, generator=g).to(DEVICE, dtype)
    query, key, value = fused.split([2 * group, 2, 2], 1)
    factor, slots = factors(2, head_dim), torch.randperm(80, generator=g)[:tokens].to(DEVICE)
    got, want = (new_pools(2, head_dim, head_dim, torch.int8, transposed=True) for _ in range(2))
    plain = key, value, got["k_pool"], got["v_pool"], slots
    scales = {"k_scale": got["k_scale"], "v_scale": got["v_scale"]}
    turned = write_kv(*plain, **scales, turn_factor=factor, query=query)
    assert_turned(query, turned, factor)
    # The keys and values are those that a write without the query gives.
    written(write_kv, key, value, slots, want, turn_factor=factor)
    assert_same(got, want)


@pytest.mark.parametrize("pool_dtype", FORMATS[3:], ids=str)
@pytest.mark.parametrize("plan", [WritePlan(16, 32, 4), WritePlan(16, 1, 1), WritePlan(64, 16, 4)], ids=str)
def test_many_programs_write_every_token_once(pool_dtype, plan):
    # Ragged ends of all three kinds of programs, and tokens without a slot among the others.
    g = torch.Generator().manual_seed(0)
    tokens, group = 133, 3
    key, value = (torch.randn(tokens, 2, 64, generator=g).to(DEVICE) for _ in range(2))
    query = torch.randn(tokens, 2 * group, 64, generator=g).to(DEVICE)
    factor, slots = factors(2, 64), torch.randperm(160, generator=g)[:tokens].to(DEVICE)
    slots[::7] = -1
    got, want = (new_pools(2, 64, 64, pool_dtype, num_blocks=10, transposed=True) for _ in range(2))
    turned = write_kv(key, value, slot_mapping=slots, **got, turn_factor=factor, query=query, plan=plan)
    assert_turned(query, turned, factor)
    written(reference_write_kv, reference_rotate_heads(key, factor, divide=True), value, slots, want)
    torch.testing.assert_close(got["k_scale"], want["k_scale"], rtol=1e-5, atol=0)
    step = 1.0 if pool_dtype == torch.int8 else 32.0
    assert (got["k_pool"].float() - want["k_pool"].float()).abs().max() <= step
    assert_same({n: got[n] for n in ("v_pool", "v_scale")}, {n: want[n] for n in ("v_pool", "v_scale")})


def test_turned_keys_beside_int4_values():
    g = torch.Generator().manual_seed(0)
    key, value = (torch.randn(21, 2, 64, generator=g).to(DEVICE) for _ in range(2))
    query, factor, slots = torch.randn(21, 4, 64, generator=g).to(DEVICE), factors(2, 64), torch.arange(21).to(DEVICE)
    got, want = (
        new_pools(2, 64, 64, torch.int8)
        | {
            "v_pool": torch.zeros(5, 16, 2, 32, dtype=torch.uint8, device=DEVICE),
            "v_scale": torch.zeros(5, 16, 2, 2, 2, dtype=torch.float16, device=DEVICE),
        }
        for _ in range(2)
    )
    turned = write_kv(key, value, slot_mapping=slots, **got, turn_factor=factor, query=query)
    assert_turned(query, turned, factor)
    written(reference_write_kv, reference_rotate_heads(key, factor, divide=True), value, slots, want)
    assert (got["k_pool"].float() - want["k_pool"].float()).abs().max() <= 1
    assert_same({n: got[n] for n in ("v_pool", "v_scale")}, {n: want[n] for n in ("v_pool", "v_scale")})


@pytest.mark.parametrize("pool_dtype", FORMATS, ids=str)
def test_keys_of_any_format_are_turned(pool_dtype):
    key = torch.randn(9, 2, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    factor, slots = factors(2, 32), torch.arange(9, device=DEVICE)
    pools = new_pools(2, 32, 32, pool_dtype)
    write_kv(key, key, slot_mapping=slots, **pools, turn_factor=factor)
    got = pools["k_pool"].float()
    if pools["k_scale"] is not None:
        got = got * pools["k_scale"][..., None]
    want = reference_rotate_heads(key.double(), factor.double(), divide=True)
    step = {torch.float32: 1e-6, torch.int8: 1 / 250, torch.float8_e4m3fn: 1 / 15}.get(pool_dtype, 2**-7)
    assert ((got[0, :9] - want).abs() <= want.abs().amax(-1, keepdim=True) * step).all()


def test_a_block_size_that_is_no_power_of_two():
    key, value = torch.randn(30, 2, 32, device=DEVICE), torch.randn(30, 2, 32, device=DEVICE)
    slots = torch.arange(30, device=DEVICE) + 17
    for transposed in (False, True):
        got, want = (
            new_pools(2, 32, 32, torch.int8, num_blocks=3, block_size=20, transposed=transposed) for _ in range(2)
        )
        written(write_kv, key, value, slots, got)
        assert_same(got, written(reference_write_kv, key, value, slots, want))


def test_no_tokens():
    pools = new_pools(2, 32, 32, torch.int8)
    new, slots = torch.zeros(0, 2, 32), torch.zeros(0, dtype=torch.int64)
    assert write_kv(new, new, slot_mapping=slots, **pools) is None
    turned = write_kv(new, new, slot_mapping=slots, **pools, turn_factor=torch.ones(2, 32), query=torch.zeros(0, 6, 32))
    assert turned.shape == (0, 6, 32)
    assert (pools["k_scale"] == -1).all()


def test_bad_arguments_are_named():
    key, slots = torch.zeros(3, 2, 32, device=DEVICE), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    pools = new_pools(2, 32, 32, torch.int8)
    with pytest.raises(ValueError, match="slot_mapping must be contiguous int64"):
        write_kv(key, key, slot_mapping=slots.int(), **pools)
    with pytest.raises(ValueError, match="k_scale is needed"):
        write_kv(key, key, slot_mapping=slots, **{**pools, "k_scale": None})
    with pytest.raises(ValueError, match=r"k_pool must be \[num_blocks, block_size, 2, 16\]"):
        write_kv(key[..., :16], key, slot_mapping=slots, **pools)
    with pytest.raises(ValueError, match="query is turned by turn_factor"):
        write_kv(key, key, slot_mapping=slots, **pools, query=key)
    turn = {"slot_mapping": slots, **pools, "turn_factor": torch.ones(2, 32, device=DEVICE)}
    with pytest.raises(ValueError, match=r"query must be \[3, a multiple of 2, 32\], got \[3, 3, 32\]"):
        write_kv(key, key, **turn, query=torch.zeros(3, 3, 32, device=DEVICE))
    with pytest.raises(ValueError, match="query must be float32, bfloat16 or float16"):
        write_kv(key, key, **turn, query=key.double())
    with pytest.raises(ValueError, match="query must be contiguous in head_dim"):
        write_kv(key, key, **turn, query=torch.zeros(3, 32, 4, device=DEVICE).transpose(1, 2))
    assert math.isclose(float(pools["k_scale"].flatten()[0]), -1.0)
