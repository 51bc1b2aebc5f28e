import math

import pytest
import torch
from paged_batches import DEVICE, make_batch

from hf_paged_attention.kernels import (
    decode_attention,
    reference_attention,
    unified_attention,
)
from hf_paged_attention.kernels.launch import FEWEST_BYTES, DecodePlan, UnifiedPlan

ON_GPU = DEVICE == "cuda"
KERNELS = {"unified": unified_attention, "decode": decode_attention}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EIGHT_BIT = [torch.int8, torch.float8_e4m3fn]
# Small tiles and splits, so that short tests have many of both.
FINE_DECODE = DecodePlan(16, 4, 2, 4, 1)
FINE_UNIFIED = UnifiedPlan(16, 16, 4, 2)


def big(*params):
    """Cases for a GPU; minutes in the interpreter."""
    return pytest.param(*params, marks=() if ON_GPU else pytest.mark.slow)


@pytest.fixture(params=["unified", "decode"])
def kernel(request):
    return KERNELS[request.param]


@pytest.mark.parametrize("context", [1, 15, 16, 17, 127, big(4096)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_query_over_a_context(kernel, dtype, context):
    make_batch([context], group=2, dtype=dtype).check(kernel)


@pytest.mark.parametrize(
    ("lens", "query_lens"),
    [
        pytest.param([1], [1], id="one token"),
        pytest.param([16], [16], id="a prompt of exactly one block"),
        pytest.param([17], [17], id="a last block with one token"),
        pytest.param([33, 1, 80, 5], [1, 1, 40, 5], id="decodes and prefills mixed"),
        pytest.param([70, 70], [3, 9], id="chunks on top of cached keys"),
        pytest.param([20, 9, 5], [4, 0, 5], id="a request without new tokens"),
        pytest.param([0, 12], [0, 12], id="a request without keys"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_batch(lens, query_lens, dtype):
    make_batch(lens, query_lens, group=3, dtype=dtype).check(unified_attention)


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (4, 1), (1, 8), (2, 3), (1, 6), (2, 7), (1, 9), (1, 71)])
def test_any_group(kernel, kv_heads, group):
    make_batch([40, 23], kv_heads=kv_heads, group=group).check(kernel)
    if kernel is unified_attention:
        make_batch([40, 23], [7, 20], kv_heads=kv_heads, group=group).check(kernel)


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_head_dim(kernel, head_dim, dtype):
    make_batch([37, 20], group=2, head_dim=head_dim, dtype=dtype).check(kernel)
    if kernel is unified_attention:
        make_batch([37, 20], [20, 20], group=2, head_dim=head_dim, dtype=dtype).check(kernel)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (48, 32), (32, 64)])
def test_values_of_another_head_dim(kernel, head_dim, value_dim):
    make_batch([37, 20], group=2, head_dim=head_dim, value_dim=value_dim).check(kernel)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_any_block_size(kernel, block_size):
    make_batch([150, 64, 3], group=2, block_size=block_size).check(kernel)


@pytest.mark.parametrize(
    ("window", "block_size"), [(1, 16), (5, 64), (16, 16), (17, 16), (17, 64), (100, 64), (1000, 16)]
)
def test_window(kernel, window, block_size):
    make_batch([150, 64, 3], group=3, block_size=block_size, window=window).check(kernel)
    if kernel is unified_attention:
        batch = make_batch([110, 40, 3], [12, 40, 2], kv_heads=1, group=3, block_size=block_size, window=window)
        batch.check(kernel, plan=FINE_UNIFIED)


def test_blocks_behind_the_window_are_not_read(kernel):
    batch = make_batch([150, 90], block_size=16, window=20)
    table = batch.args["block_table"]
    table[0, : (150 - 20) // 16] = 2**30
    table[1, : (90 - 20) // 16] = 2**30
    batch.check(kernel)
    batch.check(kernel, plan=FINE_UNIFIED if kernel is unified_attention else FINE_DECODE)


@pytest.mark.parametrize("softcap", [1.0, 50.0])
def test_softcap(kernel, softcap):
    make_batch([70, 9], group=2, softcap=softcap, scale=1.0).check(kernel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sinks(kernel, dtype):
    sinks = torch.tensor([-20.0, -1.0, 0.0, 3.0, 30.0, 1.0]).to(dtype)
    make_batch([70, 9, 300], group=3, dtype=dtype, sinks=sinks).check(kernel)


def test_a_query_without_keys_gives_its_sink(kernel):
    batch = make_batch([5], group=1, sinks=torch.tensor([0.5, -1.0]), kv_start=torch.tensor([5], dtype=torch.int32))
    out, lse = batch.run(kernel)
    assert (out == 0).all()
    torch.testing.assert_close(lse.cpu(), torch.tensor([[0.5, -1.0]]))


@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0])
def test_free_scale(kernel, scale):
    make_batch([70, 9], group=2, scale=scale).check(kernel)


def test_everything_at_once(kernel):
    batch = make_batch(
        [150, 64, 30],
        group=3,
        pool_dtype=torch.int8,
        window=40,
        softcap=5.0,
        sinks=torch.randn(6),
        kv_start=torch.tensor([0, 40, 3], dtype=torch.int32),
    )
    batch.check(kernel)


def test_a_row_of_nothing_but_padding_gives_zeros(kernel):
    batch = make_batch([40, 40], group=2, kv_start=torch.tensor([40, 25], dtype=torch.int32))
    out = batch.check(kernel)
    assert (out[0] == 0).all()


def test_left_padding_of_a_prompt():
    make_batch([40, 40], [40, 40], group=2, kv_start=torch.tensor([7, 25], dtype=torch.int32)).check(unified_attention)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_of_ten_thousand(kernel, dtype):
    # With one winner a row the softmax is exact however coarse the logits.
    out, _ = (batch := make_batch([70, 9], group=2, dtype=dtype, key=lambda k: k.round() * 2000)).run(kernel)
    batch.query.copy_(batch.query.round())
    out, _ = batch.run(kernel)
    want, _ = batch.expected()
    assert out.isfinite().all()
    torch.testing.assert_close(out.double(), want, atol=3e-2, rtol=0)


@pytest.mark.parametrize("pool_dtype", EIGHT_BIT, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestEightBit:
    def test_decode_and_prefill(self, dtype, pool_dtype):
        make_batch([70, 9, 33], group=2, dtype=dtype, pool_dtype=pool_dtype).check(decode_attention)
        batch = make_batch([70, 9, 33], [20, 9, 33], group=2, dtype=dtype, pool_dtype=pool_dtype, block_size=64)
        batch.check(unified_attention)

    def test_transposed_values(self, kernel, dtype, pool_dtype):
        batch = make_batch([150, 9], group=4, dtype=dtype, pool_dtype=pool_dtype, transposed_values=True, block_size=64)
        assert batch.args["v_pool"].stride(1) == 1
        batch.check(kernel)

    @pytest.mark.parametrize("size", [1e4, 1e-4])
    def test_values_of_any_size(self, kernel, dtype, pool_dtype, size):
        batch = make_batch([70, 9], group=2, dtype=dtype, pool_dtype=pool_dtype, value=lambda v: v * size)
        out, _ = batch.run(kernel)
        want, _ = batch.expected()
        torch.testing.assert_close(out.double() / size, want / size, atol=3e-2, rtol=0)

    def test_all_zero_keys(self, kernel, dtype, pool_dtype):
        batch = make_batch([70, 9], group=2, dtype=dtype, pool_dtype=pool_dtype, key=torch.zeros_like)
        batch.check(kernel)


def test_pool_of_another_float_dtype_than_the_query(kernel):
    make_batch([70, 9], group=2, dtype=torch.float32, pool_dtype=torch.bfloat16).check(kernel)


@pytest.mark.parametrize("length", [5, 100, 128])
def test_a_contiguous_cache_is_one_block_a_request(kernel, length):
    # [B, Hkv, L, D] as Transformers' caches hold it, L any number; the kernels must stay inside it.
    batch = make_batch([length, length], group=2, block_size=max(16, 2 ** math.ceil(math.log2(length))))
    for name in ("k_pool", "v_pool"):
        pool = batch.args[name][batch.args["block_table"][:, 0].long()][:, :length]
        batch.args[name] = pool.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
    batch.args["block_table"] = torch.arange(2, dtype=torch.int32, device=DEVICE)[:, None]
    batch.check(kernel)


def test_strided_query_and_output(kernel):
    batch = make_batch([70, 9], group=3)
    # A slice of a fused projection, [N, 3 * Hq, D].
    batch.query = torch.cat([batch.query] * 3, 1)[:, 6:12]
    want, _ = batch.expected()
    out = torch.full((2, 12, 32), math.nan, device=DEVICE)[:, ::2]
    kernel(batch.query, **batch.args, **batch.options, out=out)
    torch.testing.assert_close(out.double(), want, atol=2e-5, rtol=0)


def test_no_tokens_and_tokens_past_the_last_request():
    batch = make_batch([20], [4], group=2)
    empty = {**batch.args, **batch.options, "query_start_loc": torch.zeros(2, dtype=torch.int32, device=DEVICE)}
    assert unified_attention(batch.query[:0], **empty).shape == (0, 4, 32)
    batch.query = torch.cat([batch.query, batch.query])
    out, _ = batch.run(unified_attention)
    assert out[:4].isfinite().all()
    assert out[4:].isnan().all()


def plan_with(products, *, pieces=2, descriptors=False, block_n=None):
    block_n = block_n or (FEWEST_BYTES if products == "bytes" else 32)
    return DecodePlan(block_n, 4, 2, 4, 1, products=products, pieces=pieces, descriptors=descriptors)


def features(requests):
    """Everything a call may ask for: nothing, all of it, and what all of it hides."""
    return [
        {},
        {
            "window": 40,
            "softcap": 5.0,
            "sinks": torch.tensor([-20.0, -1.0, 0.0, 3.0, 30.0, 1.0]),
            "kv_start": torch.tensor([3, 20, *[0] * (requests - 2)], dtype=torch.int32),
        },
        {"scale": -0.3},
    ]


# e4m3 pieces: two leave 2^-8 of a query's element, three 2^-12.
ERROR_OF_PIECES = {(torch.int8, 2): 1e-4, (torch.int8, 3): 2e-5, (torch.float8_e4m3fn, 2): 2e-2}
ERROR_OF_PIECES[torch.float8_e4m3fn, 3] = 1e-3


class TestProducts:
    """Whichever operand is the left one, and however it is loaded, the answer is the same."""

    @pytest.mark.parametrize("descriptors", [False, True])
    @pytest.mark.parametrize("block_size", [16, 64])
    def test_keys_left(self, block_size, descriptors):
        for options in features(3):
            batch = make_batch([90, 32, 1], group=3, block_size=block_size, **options)
            batch.check(decode_attention, plan=plan_with("keys", descriptors=descriptors))

    @pytest.mark.parametrize("descriptors", [False, True])
    @pytest.mark.parametrize("block_size", [16, 64])
    @pytest.mark.parametrize(("pool_dtype", "pieces"), list(ERROR_OF_PIECES), ids=str)
    def test_bytes_left(self, pool_dtype, pieces, block_size, descriptors):
        for options in features(3):
            batch = make_batch(
                [90, 32, 1],
                group=3, dtype=torch.float16, pool_dtype=pool_dtype, block_size=block_size, transposed_values=True,
                **options,
            )  # fmt: skip
            plan = plan_with("bytes", pieces=pieces, descriptors=descriptors)
            out, lse = batch.run(decode_attention, plan=plan)
            want, want_lse = batch.expected()
            allowed = ERROR_OF_PIECES[pool_dtype, pieces]
            torch.testing.assert_close(out.double(), want, atol=max(allowed, 4e-3), rtol=0)
            held = want_lse.isfinite()
            torch.testing.assert_close(lse.double()[held], want_lse[held], atol=allowed * 10, rtol=allowed)

    @pytest.mark.parametrize(("kv_heads", "group"), [(4, 1), (1, 8), (1, 9), (1, 32), (1, 71)])
    @pytest.mark.parametrize("products", ["keys", "bytes"])
    def test_any_group(self, products, kv_heads, group):
        batch = make_batch(
            [70, 23], kv_heads=kv_heads, group=group, dtype=torch.float16, pool_dtype=torch.int8, transposed_values=True
        )
        batch.check(decode_attention, plan=plan_with(products, pieces=3))

    @pytest.mark.parametrize(("head_dim", "value_dim"), [(16, 16), (80, 80), (192, 128), (32, 64), (256, 256)])
    @pytest.mark.parametrize("products", ["keys", "bytes"])
    @pytest.mark.parametrize("descriptors", [False, True])
    def test_any_head_dim(self, products, head_dim, value_dim, descriptors):
        batch = make_batch(
            [70, 23],
            group=2, head_dim=head_dim, value_dim=value_dim, block_size=64, dtype=torch.float16, pool_dtype=torch.int8,
            transposed_values=True,
        )  # fmt: skip
        batch.check(decode_attention, plan=plan_with(products, pieces=3, descriptors=descriptors))

    def test_values_that_slots_do_not_follow_are_converted_instead(self):
        batch = make_batch([70, 23], group=2, dtype=torch.float16, pool_dtype=torch.int8)
        batch.check(decode_attention, plan=plan_with("bytes"))

    def test_a_contiguous_cache_of_any_length(self):
        batch = make_batch([100, 100], group=2, block_size=128)
        for name in ("k_pool", "v_pool"):
            pool = batch.args[name][batch.args["block_table"][:, 0].long()][:, :100]
            batch.args[name] = pool.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
        batch.args["block_table"] = torch.arange(2, dtype=torch.int32, device=DEVICE)[:, None]
        batch.check(decode_attention, plan=plan_with("keys", descriptors=True))
        batch.check(unified_attention, plan=UnifiedPlan(16, 16, 4, 2, True))

    @pytest.mark.parametrize("size", [1e4, 1e-4])
    @pytest.mark.parametrize("pool_dtype", EIGHT_BIT, ids=str)
    def test_value_scales_far_from_one(self, pool_dtype, size):
        # One token in three is tiny: its scale is what the probabilities are compared in.
        def value(v):
            return torch.where(torch.arange(len(v))[:, None, None] % 3 == 0, v * 1e-6, v) * size

        batch = make_batch(
            [150, 9], group=2, dtype=torch.bfloat16, pool_dtype=pool_dtype, transposed_values=True, value=value
        )
        out, _ = batch.run(decode_attention, plan=plan_with("bytes", pieces=3))
        want, _ = batch.expected()
        torch.testing.assert_close(out.double() / size, want / size, atol=3e-2, rtol=0)

    def test_many_keys_of_little_weight_are_not_lost(self):
        # One key holds half of the weight, the others share the rest: each is far below one 8-bit step of it.
        batch = make_batch([2000], kv_heads=1, dtype=torch.float16, pool_dtype=torch.int8, transposed_values=True)
        scores = torch.einsum("hd,jhd->j", batch.query[0].double(), batch.keys[0]) * batch.options["scale"]
        strongest = int(scores.argmax())
        boost = float(scores.logsumexp(0) - scores[strongest]) / float(scores[strongest])
        slot = batch.args["block_table"][0, strongest // 16].long(), strongest % 16
        batch.args["k_scale"][slot] *= 1 + boost
        batch.keys[0][strongest] *= 1 + boost
        batch.check(decode_attention, plan=plan_with("bytes", block_n=128), tolerance=4e-3)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("pool_dtype", [None, *EIGHT_BIT], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_prefill_through_descriptors(block_size, pool_dtype, transposed):
    if transposed and pool_dtype is None:
        pytest.skip("16-bit values are not transposed")
    for options in features(3):
        batch = make_batch(
            [70, 20, 1],
            [30, 20, 1],
            group=3, pool_dtype=pool_dtype, block_size=block_size, transposed_values=transposed, **options,
        )  # fmt: skip
        batch.check(unified_attention, plan=UnifiedPlan(16, 16, 4, 2, True))


class TestDecodeSplits:
    @pytest.mark.parametrize("programs", [1, 3, 8, 64])
    @pytest.mark.parametrize(("merge_splits", "team"), [(2, 2), (2, 6), (16, 16), (4, 64)])
    def test_any_number_of_splits(self, programs, merge_splits, team):
        batch = make_batch([1, 15, 16, 17, 127, 300, 0], group=3)
        batch.check(decode_attention, plan=DecodePlan(16, 4, 2, programs, 1, merge_splits, team))

    def test_sinks_count_once(self):
        batch = make_batch([200, 30], group=2, sinks=torch.tensor([3.0, -1.0, 0.0, 5.0]))
        batch.check(decode_attention, plan=DecodePlan(16, 4, 2, 16, 1))

    def test_window_and_first_key_inside_a_split(self):
        batch = make_batch([300, 200], group=2, window=150, kv_start=torch.tensor([0, 77], dtype=torch.int32))
        batch.check(decode_attention, plan=DecodePlan(16, 4, 2, 6, 1))

    def test_twice_gives_the_same(self):
        # The counters of the first call are back at zero.
        batch = make_batch([300, 20], group=2)
        first, _ = batch.run(decode_attention, plan=FINE_DECODE)
        second, _ = batch.run(decode_attention, plan=FINE_DECODE)
        assert torch.equal(first, second)

    def test_without_query_start(self):
        batch = make_batch([33, 20], group=2)
        batch.args["query_start_loc"] = None
        batch.check(decode_attention)

    def test_requests_without_a_token_are_skipped(self):
        make_batch([40, 20, 0, 100], [1, 0, 0, 1], group=2).check(decode_attention, plan=FINE_DECODE)

    def test_more_than_one_query_a_request_is_refused(self):
        batch = make_batch([20], [2])
        with pytest.raises(ValueError, match="max_query_len=2"):
            batch.run(decode_attention)


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.gpu
class TestOnTheGpu:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("pool_dtype", [None, *EIGHT_BIT], ids=str)
    @pytest.mark.parametrize("block_size", [16, 64])
    def test_model_shapes(self, kernel, dtype, pool_dtype, block_size):
        for group, kv_heads, head_dim in ((4, 8, 128), (6, 2, 128), (2, 4, 256), (1, 16, 64)):
            batch = make_batch(
                [1000, 77, 4096],
                kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype, pool_dtype=pool_dtype,
                block_size=block_size,
            )  # fmt: skip
            batch.check(kernel)

    def test_a_captured_decode_follows_the_lengths(self):
        batch = make_batch([4000, 300], group=4, head_dim=128, kv_heads=8, dtype=torch.bfloat16)
        out, _ = batch.run(decode_attention)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decode_attention(batch.query, **batch.args, **batch.options, out=out)
        for lens in ([4000, 300], [17, 299], [1, 1]):
            batch.args["seq_lens"].copy_(torch.tensor(lens, dtype=torch.int32))
            batch.lens = lens
            out.fill_(math.nan)
            graph.replay()
            torch.testing.assert_close(out.double(), batch.expected()[0], atol=3e-2, rtol=0)


def test_the_reference_is_the_dense_formula():
    for options in ({}, {"window": 9}, {"softcap": 2.0}, {"sinks": torch.randn(6)}, {"pool_dtype": torch.int8}):
        make_batch([33, 1, 80, 5], [1, 1, 40, 5], group=3, **options).check(reference_attention)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "window must be positive or None, got 0"),
        ({"softcap": -1.0}, "softcap must be positive or None, got -1.0"),
        ({"seq_lens": torch.tensor([20])}, "seq_lens must be int32, got torch.int64"),
        ({"k_scale": torch.ones(1)}, "k_scale belongs to int8 and float8_e4m3fn pools; this pool is torch.float32"),
        ({"kv_start": torch.tensor([0, 0], dtype=torch.int32)}, r"kv_start must have shape \[1\], got \[2\]"),
        ({"k_pool": torch.zeros(4, 24, 2, 32), "v_pool": torch.zeros(4, 24, 2, 32)}, "power of two .* got 24"),
    ],
)
def test_bad_arguments_are_named(kernel, change, message):
    batch = make_batch([20], group=2)
    with pytest.raises(ValueError, match=message):
        kernel(batch.query, **{**batch.args, **batch.options, **change})
