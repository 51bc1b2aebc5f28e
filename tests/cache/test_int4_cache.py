"""int4: keys a channel over 32 tokens, values a token over 32 channels, the newest as they arrived; and pairs."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig

from hf_paged_attention import PagedCache
from hf_paged_attention.cache.table import FREED
from hf_paged_attention.cache.tail import EXACT_TOKENS, TailTable
from hf_paged_attention.kernels import decode_keys, decode_values, unrotate_heads
from hf_paged_attention.kernels.int4 import dequantize_keys, dequantize_values, quantize_keys, quantize_values
from tests.cache.paged_passes import (
    DIM,
    GROUP,
    HEADS,
    LAYERS,
    WINDOWS,
    check_contents,
    check_counts,
    expected_outputs,
    run_pass,
    small_cache,
    small_config,
    states,
    stored_slots,
)
from tests.cache.test_paged_cache import tokens

SIZE = 32


def int4_cache(**arguments) -> PagedCache:
    return small_cache(**{"kv_dtype": "int4", "block_size": SIZE, **arguments})


def decoded(cache, layer) -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]:
    """Key and value `[Hkv, D]` of every (row, position) that the layer holds, as its codes or its tail say."""
    held = {}
    for kv, stored in stored_slots(cache, layer):
        keys, values = decode_keys(kv.k_pool, kv.k_scale), decode_values(kv.v_pool, kv.v_scale)
        if kv.turn_factor is not None:
            keys = unrotate_heads(keys.flatten(0, 1), kv.turn_factor).view_as(keys)
        for at, slot in stored.items():
            place = slot // cache.block_size, slot % cache.block_size
            held[at] = keys[place], values[place]
    return held


def attention_over_what_is_stored(cache, index, rows, new):
    """Layer `index`'s output `[B, T, Hq, D]` for the newest tokens `new` of `rows`."""
    held, window = decoded(cache, cache.layers[index]), WINDOWS[index]
    out = torch.zeros(len(rows), len(new[0]), HEADS * GROUP, DIM)
    for row, seen in enumerate(rows):
        for column, token in enumerate(new[row]):
            position = len(seen) - len(new[row]) + column
            first = 0 if window is None else max(0, position - window + 1)
            k, v = (torch.stack(e, 1) for e in zip(*(held[row, at] for at in range(first, position + 1)), strict=True))
            query = states(token, index)[0].unflatten(0, (HEADS, GROUP))
            weights = (torch.einsum("hgd,hsd->hgs", query, k) * DIM**-0.5).softmax(-1)
            out[row, column] = torch.einsum("hgs,hsd->hgd", weights, v).flatten(0, 1)
    return out


# The codes ------------------------------------------------------------------------------------------------------------


def test_codes_are_within_half_a_step_of_what_was_stored():
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(3, 64, 2, 80, generator=generator)
    keys[..., 5] = keys[..., 5] * 30 + 200  # an outlier channel, with a bias
    got = dequantize_keys(*quantize_keys(keys))
    groups = keys.unflatten(1, (2, 32))
    step = ((groups.amax(2) - groups.amin(2)) / 15).repeat_interleave(32, 1)
    # The zero point is a float16, half a unit of which is 2^-12 of the channel's magnitude.
    assert ((got - keys).abs() <= step * 0.505 + keys.abs() * 2**-11).all()
    values = torch.randn(7, 2, 80, generator=generator) * torch.tensor([1.0, 50.0]).view(2, 1)
    packed, scales = quantize_values(values)
    assert packed.shape == (7, 2, 40)
    assert scales.shape == (7, 2, 2, 3)
    got = dequantize_values(packed, scales)
    for group in range(3):
        part = slice(32 * group, min(32 * group + 32, 80))
        step = (values[..., part].amax(-1) - values[..., part].amin(-1)) / 15
        assert ((got[..., part] - values[..., part]).abs() <= step.unsqueeze(-1) * 0.505 + 2e-3 * 50).all()


@pytest.mark.parametrize("fill", [0.0, -3.0, 1e-8, 1e9])
def test_groups_of_one_number(fill):
    """A group without a range has scale 0; what float16 cannot hold saturates."""
    want = min(fill, 65408.0)
    got = dequantize_keys(*quantize_keys(torch.full((32, 1, 4), fill)))
    torch.testing.assert_close(got, torch.full((32, 1, 4), want), atol=1e-7, rtol=0)
    got = dequantize_values(*quantize_values(torch.full((1, 36), fill)))
    torch.testing.assert_close(got, torch.full((1, 36), want), atol=1e-7, rtol=0)


# Sizes ----------------------------------------------------------------------------------------------------------------


def test_bytes_of_a_token_in_the_shape_of_qwen3_8b():
    config = AutoConfig.for_model("qwen3", num_hidden_layers=36, num_key_value_heads=8, head_dim=128)
    assert PagedCache(config, kv_dtype="int4").bytes_per_token == 46_080
    assert PagedCache(config, kv_dtype=("int8", "int4")).bytes_per_token == 36 * 8 * (128 + 4 + 64 + 16)
    assert PagedCache(config, kv_dtype=("fp16", "int4")).bytes_per_token == 36 * 8 * (256 + 64 + 16)


def test_of_a_long_prompt_only_the_newest_tokens_are_held_as_they_arrived():
    cache = int4_cache()
    rows = tokens(1000, 1000)
    run_pass(cache, rows)
    tail = cache.sequences.tail
    assert tail.sealed == [928, 928]  # the newest 64, and 8 of a block that they share
    assert tail.pool.capacity == 2 * 3
    assert cache.stats()["tail_blocks"] == 2 * 3 * LAYERS
    storage = cache.layers[1].storage
    pools = storage.num_blocks * SIZE * storage.bytes_per_token
    assert storage.bytes == pools + 6 * SIZE * storage.tail_bytes_per_token
    assert cache.stats()["bytes_used"] <= cache.stats()["bytes_reserved"]
    check_contents(cache, rows, 0.3)
    for step in range(70):
        run_pass(cache, [[2000 + step], [3000 + step]])
        assert tail.sealed == [(1001 + step - EXACT_TOKENS) // SIZE * SIZE] * 2
    assert tail.pool.capacity <= tail.capacity_one_by_one() == 2 * 4


def test_the_newest_tokens_are_as_they_arrived():
    cache = int4_cache(block_size=64)
    rows = [[]]
    for width in (1, 30, 1, 31, 1, 63, 1, 200):
        new = tokens(width, start=len(rows[0]))
        run_pass(cache, new)
        rows = [rows[0] + new[0]]
        held = decoded(cache, cache.layers[1])
        exact = [
            all(torch.equal(a, b) for a, b in zip(held[0, at], states(token, 1)[1:], strict=True))
            for at, token in enumerate(rows[0])
        ]
        unfinished = len(rows[0]) - max(0, len(rows[0]) - EXACT_TOKENS) // 64 * 64
        assert all(exact[-unfinished:])
        assert not any(exact[:-unfinished])


# What attention sees --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [1, 31, 32, 33, 63, 64, 65, 127])
@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize(
    "kv_dtype", ["int4", ("int4", "int8"), ("int8", "int4"), ("bf16", "int4"), ("fp8", "fp16"), ("int4", "auto")]
)
def test_attention_is_over_what_is_stored(kv_dtype, block_size, context):
    cache = int4_cache(kv_dtype=kv_dtype, block_size=block_size)
    before = tokens(70, 70, start=5000)
    run_pass(cache, before)
    rows = before
    for new in (tokens(context, context), [[1000], [1001]]):
        got = run_pass(cache, new)
        rows = [row + more for row, more in zip(rows, new, strict=True)]
        # Layers with windows have given back what the first of many queries saw.
        for index in (1,) if len(new[0]) > 1 else range(LAYERS):
            want = attention_over_what_is_stored(cache, index, rows, new)
            torch.testing.assert_close(got[index], want, atol=1e-5, rtol=1e-5)


def test_a_dropped_scale_shows(monkeypatch):
    """The checks of this file can fail: codes without their scales are far from what was stored."""
    cache, rows = int4_cache(), tokens(200)
    run_pass(cache, rows)
    check_contents(cache, rows, 0.3)
    cache.layers[1].storage._k_scale[:, :, :, 0] = 1.0
    with pytest.raises(AssertionError):
        check_contents(cache, rows, 0.3)


@pytest.mark.parametrize(("key", "value"), [("int8", "int4"), ("int4", "int8"), ("bf16", "int8"), ("fp8", "auto")])
def test_keys_and_values_of_a_pair_are_what_each_is_alone(key, value):
    """The codes of a mixed cache are those of the two caches that it mixes."""
    rows = tokens(150, 90 + 60)
    pair, keys, values = (int4_cache(kv_dtype=kv_dtype) for kv_dtype in ((key, value), key, value))
    for cache in (pair, keys, values):
        run_pass(cache, rows)
    assert pair.kv_dtype == (key, value)
    mixed, sealed = decoded(pair, pair.layers[1]), 64
    for which, alone in ((0, keys), (1, values)):
        held = decoded(alone, alone.layers[1])
        for row in range(2):
            for at in range(sealed):
                torch.testing.assert_close(mixed[row, at][which], held[row, at][which], atol=1e-6, rtol=1e-6)


# Layers that are left exact -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [(0, -1), [0, 2], {2, 0}])
@pytest.mark.parametrize("kv_dtype", ["int4", "int8", ("int8", "int4")])
def test_exact_layers_store_what_arrives(kv_dtype, exact):
    cache = int4_cache(kv_dtype=kv_dtype, exact_layers=exact)
    past, rows = tokens(100, 100), [[500], [501]]
    run_pass(cache, past)
    got, want = run_pass(cache, rows), expected_outputs(past, rows)
    for layer in (0, 2):
        torch.testing.assert_close(got[layer], want[layer], atol=1e-5, rtol=1e-5)
    assert (got[1] - want[1]).abs().max() > 1e-3
    exact_bytes, other = 8 * DIM * HEADS, int4_cache(kv_dtype=kv_dtype, dtype=torch.float32).bytes_per_token // LAYERS
    assert cache.bytes_per_token == 2 * exact_bytes + other


def test_a_cache_whose_int4_layers_are_all_excepted_has_no_tail():
    assert int4_cache(exact_layers=range(LAYERS)).sequences.tail is None


# Crop -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("removed", [1, 5, 20, EXACT_TOKENS])
@pytest.mark.parametrize("length", [96, 97, 127, 128, 150, 160])
def test_a_crop_of_a_few_tokens_goes_on_from_what_arrived(length, removed):
    """As if the tokens had never come: attention sees what it sees where they did not."""
    cropped, never = int4_cache(), int4_cache()
    for cache in (cropped, never):
        cache.activate_past_recording()
    rows = tokens(length)
    run_pass(cropped, rows)
    cropped.crop(-removed)
    run_pass(never, [rows[0][: length - removed]])
    check_counts(cropped)
    held, want = decoded(cropped, cropped.layers[1]), decoded(never, never.layers[1])
    sealed = cropped.sequences.tail.sealed[0]
    assert set(held) == set(want)
    for at in range(sealed, length - removed):
        assert torch.equal(held[0, at][0], states(rows[0][at], 1)[1])
    check_contents(cropped, [rows[0][: length - removed]], 0.3)


@pytest.mark.parametrize("removed", [70, 95, 96, 130, 199])
def test_a_deep_crop_opens_an_encoded_block(removed):
    cache = int4_cache()
    cache.activate_past_recording()
    rows = tokens(200, 200)
    run_pass(cache, rows)
    before = decoded(cache, cache.layers[1])
    cache.crop(-removed)
    check_counts(cache)
    left = [row[: 200 - removed] for row in rows]
    after = decoded(cache, cache.layers[1])
    for at, (key, value) in after.items():
        torch.testing.assert_close(key, before[at][0])
        torch.testing.assert_close(value, before[at][1])
    new = tokens(100, 100, start=1000)
    got = run_pass(cache, new)[1]
    left = [row + more for row, more in zip(left, new, strict=True)]
    torch.testing.assert_close(got, attention_over_what_is_stored(cache, 1, left, new), atol=1e-5, rtol=1e-5)
    check_contents(cache, left, 0.5)


# Rows -----------------------------------------------------------------------------------------------------------------


def test_rows_share_their_newest_block_until_they_write():
    cache = int4_cache()
    rows = tokens(100)
    run_pass(cache, rows)
    tail = cache.sequences.tail
    used = tail.pool.num_used
    cache.batch_repeat_interleave(3)
    assert tail.pool.num_used == used
    rows = rows * 3
    for width in (1, 1, 90):  # the last one seals what the rows shared, and what they did not
        new = tokens(width, width, width, start=1000 * width)
        run_pass(cache, new)
        rows = [row + more for row, more in zip(rows, new, strict=True)]
        check_counts(cache)
        check_contents(cache, rows, 0.3)
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    check_contents(cache, [rows[2], rows[2], rows[0]], 0.3)


def test_a_deep_copy_goes_its_own_way():
    cache, rows = int4_cache(), tokens(100)
    run_pass(cache, rows)
    other = copy.deepcopy(cache)
    new, others = tokens(60, start=500), tokens(80, start=700)
    run_pass(cache, new)
    run_pass(other, others)
    check_contents(cache, [rows[0] + new[0]], 0.3)
    check_contents(other, [rows[0] + others[0]], 0.3)


def test_a_known_prompt_begins_in_the_middle_of_an_encoded_block():
    cache = int4_cache(prefix_caching=True)
    rows = tokens(200)
    run_pass(cache, rows)
    cache.remember(torch.tensor(rows))
    assert len(cache.sequences.prefixes) == (200 - EXACT_TOKENS) // SIZE, "only encoded blocks are shared"
    cache.reset(keep_prefixes=True)
    # Of two rows the shorter beginning counts, which ends in the other's last known block.
    prompts = torch.tensor([rows[0][:150], [0] * 10 + rows[0][:140]])
    mask = torch.ones_like(prompts)
    mask[1, :10] = 0
    assert cache.match_prefix(prompts, mask) == 128
    assert cache.sequences.lengths == [128, 118]
    assert cache.sequences.tail.sealed == [128, 96]
    new = tokens(70, 70, start=500)
    past = [rows[0][:128], rows[0][:118]]
    got = run_pass(cache, new)[1]
    full = [row + more for row, more in zip(past, new, strict=True)]
    torch.testing.assert_close(got, attention_over_what_is_stored(cache, 1, full, new), atol=1e-5, rtol=1e-5)
    check_contents(cache, full, 0.5)


def test_a_sealed_block_needs_no_copy():
    """Two rows that share an unfinished block and fill it at once each encode it from the shared one."""
    tail = TailTable(32)
    tail.start(1)
    tail.extend([0], [40])
    tail.select([0, 0])
    assert not tail.extend([40, 40], [EXACT_TOKENS + 24] * 2)
    assert tail.sealed == [64, 64]
    tail.release_sealed()
    assert [row[:2] for row in tail.rows] == [[FREED, FREED]] * 2


# What it refuses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"block_size": 16}, ["block_size=16", "'int4'", "32"]),
        ({"block_size": 16, "kv_dtype": ("int4", "int8")}, ["block_size=16", "int4", "32"]),
        ({"kv_dtype": ("int8",)}, ["kv_dtype=('int8',)", "pair"]),
        ({"kv_dtype": ("int8", "int3")}, ["kv_dtype=('int8', 'int3')", "'int4'"]),
        ({"kv_dtype": ("int8", "int4", "int4")}, ["kv_dtype=", "pair"]),
        ({"exact_layers": (0, 3)}, ["exact_layers=(0, 3)", "layer 3", "3 layers", "-3 to 2"]),
        ({"exact_layers": (-4,)}, ["exact_layers=(-4,)", "layer -4"]),
        ({"exact_layers": 0}, ["exact_layers=0", "(0, -1)"]),
        ({"exact_layers": (True,)}, ["exact_layers=(True,)"]),
        ({"exact_layers": "0"}, ["exact_layers='0'"]),
    ],
)
def test_bad_arguments_are_named_with_their_value_and_the_way_out(arguments, said):
    with pytest.raises(ValueError, match=r"kv_dtype|exact_layers|block_size") as info:
        PagedCache(small_config(), **{"kv_dtype": "int4", **arguments})
    for word in said:
        assert word in str(info.value)


def test_values_alone_need_no_large_blocks():
    PagedCache(small_config(), kv_dtype=("int8", "int4"), block_size=16)


def test_an_odd_head_size_is_refused_before_anything_is_stored():
    cache = int4_cache()
    keys = torch.zeros(1, HEADS, 3, 9)
    with pytest.raises(ValueError, match=r"kv_dtype='int4'.*keys have head size 9.*'int8'"):
        cache.update(keys, keys, 0)
    assert cache.get_seq_length() == 0
