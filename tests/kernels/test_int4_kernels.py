"""int4 and mixed formats in the kernels: the codes are the reference's, attention is over what they decode to."""

import itertools
import math

import pytest
import torch
from paged_batches import DEVICE, TOLERANCE

from hf_paged_attention.kernels import (
    decode_attention,
    decode_keys,
    decode_values,
    reference_attention,
    reference_seal_kv,
    reference_write_kv,
    seal_kv,
    unified_attention,
    write_kv,
)
from hf_paged_attention.kernels.int4 import value_groups
from hf_paged_attention.kernels.launch import DecodePlan, UnifiedPlan

INT4 = torch.uint8
# Small tiles and splits, so that short tests have many of both.
PLANS = {
    "unified": [UnifiedPlan(16, 32, 4, 2), UnifiedPlan(32, 128, 4, 2)],
    "decode": [DecodePlan(32, 4, 2, 4, 1), DecodePlan(128, 4, 2, 4, 1, products="bytes")],
}
KERNELS = {"unified": unified_attention, "decode": decode_attention}
PAIRS = [
    (INT4, INT4),
    (INT4, torch.int8),
    (INT4, torch.float8_e4m3fn),
    (INT4, torch.bfloat16),
    (torch.int8, INT4),
    (torch.bfloat16, INT4),
    (torch.bfloat16, torch.int8),
    (torch.float8_e4m3fn, torch.int8),
    (torch.int8, torch.float16),
]


def scale_of(kind, heads, blocks, size, dim, dtype):
    """Scales of a pool, NaN, as readers see them; None where the dtype has none."""
    if dtype == INT4 and kind == "k":
        memory = torch.full((heads, blocks, size // 32, 2, dim), math.nan, dtype=torch.float16)
    elif dtype == INT4:
        memory = torch.full((heads, blocks, size, 2, value_groups(dim)), math.nan, dtype=torch.float16)
    elif dtype.itemsize == 1:
        memory = torch.full((heads, blocks, size), math.nan)
    else:
        return None
    return memory.movedim(0, 2).to(DEVICE)


def pool_of(heads, blocks, size, dim, dtype, transposed=False):
    """A pool whose every slot is the worst that it could hold by chance."""
    dim = dim // 2 if dtype == INT4 else dim
    shape = (heads, blocks, dim, size) if transposed else (heads, blocks, size, dim)
    if dtype.itemsize == 1:
        memory = torch.full(shape, 0x7F, dtype=torch.uint8).view(dtype)
    else:
        memory = torch.full(shape, math.nan).to(dtype)
    return (memory.permute(1, 3, 0, 2) if transposed else memory.movedim(0, 2)).to(DEVICE)


class Case:
    """Requests of `lens` keys, the last `query_lens` of which are new, `sealed` of them encoded (int4 keys)."""

    def __init__(
        self, lens, query_lens=None, *, pools=(INT4, INT4), heads=1, group=2, head_dim=64, value_dim=None,
        block_size=32, dtype=torch.float32, exact=0, transposed=False, seed=0, sinks=False, **options,
    ):  # fmt: skip
        g = torch.Generator().manual_seed(seed)
        value_dim, size = value_dim or head_dim, block_size
        query_lens = query_lens or [1] * len(lens)
        blocks_of = [-(-n // size) for n in lens]
        blocks, width = sum(blocks_of) + 3, max([*blocks_of, 1]) + 1
        k_dtype, v_dtype = pools
        self.has_tail = k_dtype == INT4
        self.sealed = [max(0, n - exact) // size * size for n in lens]
        self.tables = []
        for _ in range(2):  # entries past a request's blocks, or of the other table's, name no block at all
            order = torch.randperm(blocks, generator=g).to(torch.int32)
            table, at = torch.full((len(lens), width), 2**30, dtype=torch.int32), 0
            for row, count in enumerate(blocks_of):
                table[row, :count] = order[at : at + count]
                at += count
            self.tables.append(table)
        self.new = [torch.randn(sum(query_lens), heads, dim, generator=g) for dim in (head_dim, value_dim)]
        self.args = {
            "k_pool": pool_of(heads, blocks, size, head_dim, k_dtype),
            "v_pool": pool_of(heads, blocks, size, value_dim, v_dtype, transposed),
            "k_scale": scale_of("k", heads, blocks, size, head_dim, k_dtype),
            "v_scale": scale_of("v", heads, blocks, size, value_dim, v_dtype),
            "query_start_loc": torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32).to(DEVICE),
            "seq_lens": torch.tensor(lens, dtype=torch.int32).to(DEVICE),
            "block_table": self.tables[0].to(DEVICE),
        }
        self.tail = {}
        if self.has_tail:
            self.tail = {
                "k_tail": pool_of(heads, blocks, size, head_dim, dtype),
                "v_tail": pool_of(heads, blocks, size, value_dim, dtype),
                "tail_table": self.tables[1].to(DEVICE),
            }
        self.lens, self.query_lens, self.size, self.heads, self.group = lens, query_lens, size, heads, group
        old = [
            torch.randn(n - q, heads, head_dim + value_dim, generator=g) for n, q in zip(lens, query_lens, strict=True)
        ]
        self.old = [row.split([head_dim, value_dim], -1) for row in old]
        self.query = torch.randn(sum(query_lens), heads * group, head_dim, generator=g).to(dtype).to(DEVICE)
        self.options = {"scale": head_dim**-0.5, **options}
        if sinks:
            self.options["sinks"] = torch.randn(heads * group, generator=g).to(DEVICE)
        self.new = [each.to(dtype).to(DEVICE) for each in self.new]
        self.dtype = dtype

    def seals(self):
        """(request, block) of the blocks that hold new tokens or were left in the tail, and are to be encoded now."""
        return [(row, block) for row, sealed in enumerate(self.sealed) for block in range(sealed // self.size)]

    def slots(self, table, row, positions):
        return table[row].long()[positions // self.size] * self.size + positions % self.size

    def store(self, seal=reference_seal_kv, write=reference_write_kv):
        """All tokens where they belong: older ones through the tail, new ones by the functions under test."""
        starts = self.args["query_start_loc"].tolist()
        pools = {name: self.args[name] for name in ("k_pool", "v_pool", "k_scale", "v_scale")}
        for row, (length, new) in enumerate(zip(self.lens, self.query_lens, strict=True)):
            old = torch.arange(length - new)
            fresh = torch.arange(length - new, length)
            tokens = slice(starts[row], starts[row + 1])
            key, value = (
                torch.cat([o.to(self.dtype).to(DEVICE), n[tokens]])
                for o, n in zip(self.old[row], self.new, strict=True)
            )
            if not self.has_tail:
                slots = self.slots(self.tables[0], row, torch.cat([old, fresh])).to(DEVICE)
                write(key, value, slot_mapping=slots, **pools)
                continue
            tail = {"k_pool": self.tail["k_tail"], "v_pool": self.tail["v_tail"]}
            where = torch.cat([old, fresh[fresh >= self.sealed[row]]])
            slots = self.slots(self.tables[1], row, where).to(DEVICE)
            write(key[where], value[where], slot_mapping=slots, **tail)
        if self.has_tail:
            seals = [*self.seals(), (0, -1)]
            seal_requests, seal_blocks = torch.tensor(seals, dtype=torch.int32).T.contiguous().to(DEVICE)
            seal(*self.new, **self.args, **self.tail, seal_requests=seal_requests, seal_blocks=seal_blocks)
        return self

    def arguments(self):
        more = dict(self.tail)
        if self.has_tail:
            more["sealed_lens"] = torch.tensor(self.sealed, dtype=torch.int32).to(DEVICE)
        return {
            **self.args,
            **more,
            **self.options,
            "max_query_len": max(self.query_lens),
            "max_seq_len": max(self.lens),
        }

    def check(self, kernel, plan=None):
        out = torch.full((len(self.query), self.heads * self.group, self.new[1].shape[-1]), math.nan, dtype=self.dtype)
        out, lse = out.to(DEVICE), torch.full((len(self.query), self.heads * self.group), math.nan, device=DEVICE)
        kernel(self.query, **self.arguments(), out=out, lse=lse, **({} if plan is None else {"plan": plan}))
        want, want_lse = torch.empty_like(out, dtype=torch.float64), torch.empty_like(lse, dtype=torch.float64)
        reference_attention(self.query.double(), **self.arguments(), out=want, lse=want_lse)
        tolerance = TOLERANCE[self.dtype] * max(1.0, float(want.abs().max()))
        torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=0)
        torch.testing.assert_close(lse.double(), want_lse, atol=2e-2 if self.dtype.itemsize == 2 else 1e-4, rtol=1e-4)


@pytest.fixture(params=["unified", "decode"])
def kernel(request):
    return request.param


def check(kernel, lens, query_lens, plan=None, **arguments):
    """Decodes under the decode kernel, prompts (and decodes among them) under the unified one."""
    Case(lens, query_lens if kernel == "unified" else None, **arguments).store().check(KERNELS[kernel], plan)


@pytest.mark.parametrize("context", [1, 31, 32, 33, 63, 64, 65, 127])
@pytest.mark.parametrize("block_size", [32, 64])
def test_contexts(kernel, context, block_size):
    for plan in PLANS[kernel]:
        check(kernel, [context, 70], [min(context, 40), 1], plan, block_size=block_size)


@pytest.mark.parametrize("pools", PAIRS, ids=lambda pair: "-".join(str(dtype)[6:] for dtype in pair))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_pairs_of_formats(kernel, pools, dtype):
    check(kernel, [150, 33], [20, 1], pools=pools, dtype=dtype)


@pytest.mark.parametrize("pools", [(INT4, torch.int8), (torch.bfloat16, torch.int8)], ids=str)
def test_values_transposed_in_their_page(kernel, pools):
    check(kernel, [150, 64, 33], [20, 64, 1], pools=pools, block_size=64, transposed=True)


@pytest.mark.parametrize("head_dim", [16, 32, 36, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("pools", [(INT4, INT4), (torch.int8, INT4)], ids=["int4", "int8-int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_head_dim(kernel, head_dim, pools, dtype):
    check(kernel, [75, 40], [20, 40], head_dim=head_dim, pools=pools, dtype=dtype)


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e6, 1e30])
@pytest.mark.parametrize("pools", [(INT4, INT4), (torch.int8, torch.int8)], ids=["int4", "int8"])
def test_queries_that_float16_does_not_hold(kernel, pools, size):
    """bfloat16 queries meet these keys in float16."""
    query_lens = [20, 40] if kernel == "unified" else None
    case = Case([75, 40], query_lens, pools=pools, dtype=torch.bfloat16, transposed=False, scale=0.125 / size).store()
    case.query *= size
    for plan in (None, PLANS[kernel][0]):
        case.check(KERNELS[kernel], plan)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("pools", [(INT4, INT4), (torch.int8, torch.int8)], ids=["int4", "int8"])
def test_a_query_that_is_not_finite_spoils_no_other(kernel, pools, bad):
    case = Case([75, 40], [20, 40] if kernel == "unified" else None, pools=pools, dtype=torch.bfloat16).store()
    case.query[0, 0, 3] = bad
    got, want = torch.zeros_like(case.query), torch.zeros_like(case.query, dtype=torch.float64)
    KERNELS[kernel](case.query, **case.arguments(), out=got)
    reference_attention(case.query.double(), **case.arguments(), out=want)
    assert not got[0, 0].isfinite().any()
    got[0, 0] = want[0, 0] = 0
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[torch.bfloat16], rtol=0)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (64, 32), (32, 80)])
def test_values_of_another_head_dim(kernel, head_dim, value_dim):
    check(kernel, [75, 40], [20, 40], head_dim=head_dim, value_dim=value_dim)


@pytest.mark.parametrize(("heads", "group"), [(1, 3), (2, 7), (3, 1)])
def test_any_group(kernel, heads, group):
    check(kernel, [75, 40], [20, 40], heads=heads, group=group)


@pytest.mark.parametrize("block_size", [32, 64, 128, 256])
@pytest.mark.parametrize("exact", [0, 64])
def test_any_block_size(kernel, block_size, exact):
    """Tiles within a page and over several; tails shorter and longer than a tile."""
    for plan in PLANS[kernel]:
        check(kernel, [300, 256, 64, 3], [7, 40, 64, 3], plan, block_size=block_size, exact=exact)


@pytest.mark.parametrize("window", [1, 5, 31, 32, 33, 100, 1000])
@pytest.mark.parametrize("block_size", [32, 128])
def test_window(kernel, window, block_size):
    for plan, exact in zip(PLANS[kernel], (64, 0), strict=True):
        case = {"window": window, "block_size": block_size, "group": 3, "exact": exact}
        check(kernel, [150, 64, 3, 256], [12, 40, 2, 30], plan, **case)


def test_softcap_sinks_and_a_negative_scale(kernel):
    check(kernel, [150, 64, 30], [20, 64, 1], softcap=5.0, sinks=True, window=70, group=3)
    check(kernel, [150, 64, 30], [20, 64, 1], scale=-0.3, pools=(INT4, torch.float8_e4m3fn))


def test_blocks_that_are_gone_are_not_looked_up(kernel):
    """Behind the window, of sealed blocks in the tail, and of unsealed ones in the pools."""
    case = Case([200, 90], [3, 1] if kernel == "unified" else None, window=40, exact=40).store()
    for row, length in enumerate(case.lens):
        first = (length - 3 - 40) // 32
        case.args["block_table"][row, :first] = 2**30
        case.args["block_table"][row, case.sealed[row] // 32 :] = 2**30
        case.tail["tail_table"][row, : case.sealed[row] // 32] = 2**30
    for plan in PLANS[kernel]:
        case.check(KERNELS[kernel], plan)


# Writing --------------------------------------------------------------------------------------------------------------


def assert_same_pools(got, want):
    for name in ("k_pool", "v_pool", "k_scale", "v_scale"):
        a, b = got.args[name], want.args[name]
        if a is None:
            continue
        if a.dtype == torch.bfloat16 and DEVICE == "cpu":
            # The interpreter cuts a float32 where the hardware rounds it.
            torch.testing.assert_close(a, b, rtol=2**-7, atol=0, equal_nan=True)
            continue
        if a.dtype.itemsize == 1:
            a, b = a.view(torch.uint8), b.view(torch.uint8)
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("pools", PAIRS, ids=lambda pair: "-".join(str(dtype)[6:] for dtype in pair))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("head_dim", "value_dim", "block_size"), [(64, 64, 32), (80, 48, 64), (96, 128, 128)])
def test_codes_are_the_references(pools, dtype, head_dim, value_dim, block_size):
    """Blocks from the tail, from new tokens, and from both."""
    case = {"pools": pools, "dtype": dtype, "head_dim": head_dim, "value_dim": value_dim, "block_size": block_size}
    lens, new = [300, 128, 160, 5], [300, 1, 100, 5]
    got = Case(lens, new, **case).store(seal=seal_kv, write=write_kv)
    assert_same_pools(got, Case(lens, new, **case).store())


@pytest.mark.parametrize("transposed", [False, True])
def test_sealed_values_transposed_in_their_page(transposed):
    case = {"pools": (INT4, torch.int8), "block_size": 64, "transposed": transposed}
    got = Case([130, 64], [100, 64], **case).store(seal=seal_kv, write=write_kv)
    assert_same_pools(got, Case([130, 64], [100, 64], **case).store())


@pytest.mark.parametrize("size", [0.0, 1e-8, 1e4, 1e6])
def test_any_size_is_encoded_as_the_reference_does(size):
    got, want = Case([64], [64]), Case([64], [64])
    for case in (got, want):
        for new in case.new:
            new.mul_(size)
    got.store(seal=seal_kv)
    assert_same_pools(got, want.store())
    keys = decode_keys(got.args["k_pool"], got.args["k_scale"])[case.tables[0][0, :2].long()].flatten(0, 1)
    values = decode_values(got.args["v_pool"], got.args["v_scale"])[case.tables[0][0, :2].long()].flatten(0, 1)
    for held, new in ((keys, got.new[0]), (values, got.new[1])):
        new = new.clamp(-65408, 65408)
        assert held.abs().max() < 65520  # rounds to a float16, not to infinity
        assert ((held - new).abs() <= 0.2 * new.abs().max() + 1e-7).all()


def test_a_block_of_minus_one_is_left_out():
    case = Case([64], [64])
    nothing = torch.tensor([0], dtype=torch.int32, device=DEVICE), torch.tensor([-1], dtype=torch.int32, device=DEVICE)
    seal_kv(*case.new, **case.args, **case.tail, seal_requests=nothing[0], seal_blocks=nothing[1])
    assert case.args["k_scale"].isnan().all()


def test_wrong_scales_are_seen(kernel):
    """What compares with the reference can fail: a kernel that reads other scales, or none of the tail."""
    case = Case([150, 70]).store()
    arguments = case.arguments()
    want = KERNELS[kernel](case.query, **arguments)
    for name in ("k_scale", "v_scale", "v_tail"):
        other = KERNELS[kernel](case.query, **{**arguments, name: torch.nan_to_num(arguments[name]) * 2})
        assert (other - want).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sealed_lens": None}, "int4 keys need k_tail, v_tail, tail_table and sealed_lens"),
        ({"k_scale": None}, "k_scale is needed for a pool of torch.uint8"),
        ({"k_scale": torch.zeros(7, 1, 1, 2, 64)}, "k_scale must be float16, got torch.float32"),
        ({"v_scale": torch.zeros(7, 32, 1, 2, 1).half()}, r"v_scale must have shape \[\d+, 32, 1, 2, 2\]"),
        ({"k_tail": torch.zeros(7, 16, 1, 64)}, r"k_tail must be a float \[num_blocks, 32, 1, 64\], got .*16"),
        ({"k_pool": torch.zeros(7, 16, 1, 32, dtype=torch.uint8), "v_pool": torch.zeros(7, 16, 1, 64)}, "at least 32"),
        ({"v_pool": torch.zeros(7, 32, 1, 64, dtype=torch.int16)}, "v_pool must be .* got torch.int16"),
    ],
)
def test_bad_arguments_are_named(kernel, change, message):
    case = Case([70]).store()
    change = {name: x if x is None else x.to(DEVICE) for name, x in change.items()}
    if change.get("k_pool") is None and "v_pool" in change:
        change["v_pool"] = torch.zeros(*case.args["k_pool"].shape[:3], 64, dtype=torch.int16, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        KERNELS[kernel](case.query, **{**case.arguments(), **change})


@pytest.mark.parametrize("name", ["k_pool", "v_pool", "k_scale", "v_scale"])
def test_rows_that_do_not_begin_at_words_are_refused(kernel, name):
    """Kernels read four bytes at a time."""
    case = Case([70]).store()
    tensor = case.arguments()[name]
    bytes_apart = torch.zeros(*tensor.shape[:2], tensor[0, 0].numel() + 1, dtype=tensor.dtype, device=DEVICE)
    apart = bytes_apart[..., :-1].unflatten(2, tensor.shape[2:]).copy_(tensor)
    with pytest.raises(ValueError, match="multiples of four bytes"):
        KERNELS[kernel](case.query, **{**case.arguments(), name: apart})


def test_int4_keys_are_not_written_a_token_at_a_time():
    case = Case([70], [70])
    pools = {name: case.args[name] for name in ("k_pool", "v_pool", "k_scale", "v_scale")}
    with pytest.raises(ValueError, match="use seal_kv"):
        write_kv(*case.new, slot_mapping=torch.arange(70, device=DEVICE), **pools)
