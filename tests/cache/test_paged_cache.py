"""`PagedCache` as a user and Transformers see it: sizes, rows, crop, copies, and what it refuses."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from transformers import AutoConfig

from hf_paged_attention import CacheFullError, PagedCache
from tests.cache.paged_passes import (
    BLOCK,
    DIM,
    HEADS,
    LAYERS,
    WINDOW,
    Interrupted,
    check_contents,
    check_counts,
    expected_outputs,
    run_pass,
    small_cache,
    small_config,
)
from tests.families.models import build, prompts


def tokens(*lengths, start=0):
    """Rows of that many new tokens, each token once."""
    rows, at = [], start
    for length in lengths:
        rows.append(list(range(at, at + length)))
        at += length
    return rows


def assert_outputs(got, past, new):
    for have, want in zip(got, expected_outputs(past, new), strict=True):
        torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-5)


# Sizes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "per_head"),
    [
        ("auto", torch.float32, 8 * DIM),
        ("auto", torch.bfloat16, 4 * DIM),
        ("bf16", torch.float32, 4 * DIM),
        ("fp16", torch.float32, 4 * DIM),
        ("int8", torch.bfloat16, 2 * DIM + 8),
        ("fp8", torch.bfloat16, 2 * DIM + 8),
        (("int8", "auto"), torch.bfloat16, 3 * DIM + 4),
        # 4 bits; for a key a 32nd of its channels' scales and zero points, for a value those of one group.
        ("int4", torch.bfloat16, DIM + 4 * DIM // 32 + 4),
    ],
)
def test_bytes_of_a_token(kv_dtype, dtype, per_head):
    cache = small_cache(kv_dtype=kv_dtype, dtype=dtype, block_size=32)
    assert cache.bytes_per_token == LAYERS * HEADS * per_head


@pytest.mark.parametrize("kv_dtype", ["auto", "bf16", "fp16", "int8", "fp8"])
def test_the_memory_taken_is_what_the_format_says(kv_dtype):
    cache = small_cache(kv_dtype=kv_dtype, max_blocks=5)
    run_pass(cache, tokens(70))
    storage = cache.layers[1].storage
    assert storage.bytes == storage.num_blocks * BLOCK * storage.bytes_per_token
    assert cache.bytes_per_token == sum(layer.storage.bytes_per_token for layer in cache.layers)


def test_stats_count_blocks_tokens_and_shared_ones():
    cache = small_cache()
    run_pass(cache, tokens(20))
    assert cache.stats()["tokens"] == 20
    full = cache.layers[1]
    assert full.num_blocks_in_use == 2
    cache.batch_repeat_interleave(4)
    stats = cache.stats()
    assert full.num_blocks_in_use == 2, "samples of one prompt share its blocks"
    assert (stats["sequences"], stats["tokens"]) == (4, 80)
    assert stats["blocks_shared"] == stats["blocks_used"] == 6
    run_pass(cache, tokens(1, 1, 1, 1, start=20))
    assert full.num_blocks_in_use == 1 + 4, "each sample has its own last block"
    assert cache.stats()["bytes_used"] <= cache.stats()["bytes_reserved"]


def test_padding_takes_no_block():
    cache = small_cache()
    row = [None] * 60 + [0, 1, 2, 3]
    run_pass(cache, [row, list(range(4, 68))])
    assert cache.sequences.lengths == [4, 64]
    assert cache.layers[1].num_blocks_in_use == 1 + 4
    assert cache.get_seq_length() == 64


def test_a_sliding_layer_gives_its_blocks_back():
    cache = small_cache()
    past = [[]]
    for step in range(25):
        new = tokens(8, start=8 * step)
        assert_outputs(run_pass(cache, new), past, new)
        past = [past[0] + new[0]]
        assert cache.layers[0].num_blocks_in_use <= math.ceil(WINDOW / BLOCK) + 1
    assert cache.layers[1].num_blocks_in_use == 200 // BLOCK + 1


# Contexts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [1, 15, 16, 17, 127, 4096])
def test_contexts(context):
    cache = small_cache()
    first, second = tokens(context), tokens(1, start=context)
    assert_outputs(run_pass(cache, first), [[]], first)
    assert_outputs(run_pass(cache, second), first, second)


def test_rows_of_nothing_but_padding_give_zeros():
    cache = small_cache()
    new = [[None] * 20, tokens(20)[0]]
    outputs = run_pass(cache, new)
    assert_outputs(outputs, [[], []], new)
    assert all((out[0] == 0).all() for out in outputs)
    decode = [[None], [20]]
    assert_outputs(run_pass(cache, decode), [[], new[1]], decode)


@pytest.mark.parametrize("kv_dtype", ["auto", "bf16", "fp16", "int8", "fp8", "int4"])
def test_a_batch_of_nothing_but_padding(kv_dtype):
    cache = small_cache(kv_dtype=kv_dtype, block_size=32)
    assert all((out == 0).all() for out in run_pass(cache, [[None] * 5, [None] * 5]))
    assert cache.stats()["blocks_used"] == 0


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8", "int4"])
def test_a_step_of_nothing_but_padding_after_a_prompt(kv_dtype):
    cache = small_cache(kv_dtype=kv_dtype, block_size=32)
    run_pass(cache, tokens(80))
    assert all((out == 0).all() for out in run_pass(cache, [[None] * 6]))
    assert cache.get_seq_length() == 86
    assert cache.sequences.lengths == [80]


@pytest.mark.parametrize("where", ["right", "inside", "left and right"])
def test_padding_anywhere(where):
    real = tokens(30)[0]
    row = {
        "right": real[:22] + [None] * 8,
        "inside": [None if index % 3 == 1 else token for index, token in enumerate(real)],
        "left and right": [None] * 3 + real[:20] + [None] * 7,
    }[where]
    new = [row, [100 + token for token in real]]
    cache = small_cache()
    assert_outputs(run_pass(cache, new), [[], []], new)
    past = [[token for token in r if token is not None] for r in new]
    assert_outputs(run_pass(cache, [[200], [201]]), past, [[200], [201]])


# Crop -----------------------------------------------------------------------------------------------------------------


def test_crop_over_padding_takes_columns():
    cache = small_cache()
    new = [[0, 1, 2, None, 3, 4, None, 5], [6, 7, 8, 9, 10, 11, 12, 13]]
    run_pass(cache, new)
    cache.crop(-3)
    assert cache.get_seq_length() == 5
    assert cache.sequences.lengths == [4, 5]
    check_contents(cache, [[0, 1, 2, 3], [6, 7, 8, 9, 10]])


def test_crop_past_the_window_needs_the_past_recorded():
    cache = small_cache()
    run_pass(cache, tokens(100))
    before = copy.deepcopy(cache.sequences.tables[WINDOW].rows), cache.sequences.lengths
    with pytest.raises(RuntimeError, match=r"crop\(-40\).*activate_past_recording"):
        cache.crop(-40)
    assert (cache.sequences.tables[WINDOW].rows, cache.sequences.lengths) == before
    check_counts(cache)


def test_crop_past_the_window_with_the_past_recorded():
    cache = small_cache()
    cache.activate_past_recording()
    run_pass(cache, tokens(100))
    cache.crop(-40)
    past, new = tokens(60), tokens(5, start=500)
    assert_outputs(run_pass(cache, new), past, new)
    assert cache.layers[0].num_blocks_in_use < 100 // BLOCK


def test_crop_takes_tensors_and_refuses_positive_numbers():
    cache = small_cache()
    run_pass(cache, tokens(10))
    cache.crop(torch.tensor(-4))
    assert cache.get_seq_length() == 6
    with pytest.raises(ValueError, match=r"crop\(3\).*negative"):
        cache.crop(3)
    cache.crop(0)
    assert cache.get_seq_length() == 6


def test_crop_of_everything_leaves_an_empty_cache():
    cache = small_cache()
    run_pass(cache, tokens(10))
    cache.crop(-10)
    assert cache.get_seq_length() == 0
    assert cache.stats()["blocks_used"] == 0
    new = tokens(3, 3, start=50)
    assert_outputs(run_pass(cache, new), [[], []], new)


# Rows -----------------------------------------------------------------------------------------------------------------


def test_reordered_rows_share_until_they_write():
    cache = small_cache()
    rows = tokens(20, 20, 20)
    run_pass(cache, rows)
    used = cache.layers[1].num_blocks_in_use
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    rows = [rows[2], rows[2], rows[0]]
    check_contents(cache, rows)
    assert cache.layers[1].num_blocks_in_use == used - 2
    new = tokens(1, 1, 1, start=100)
    assert_outputs(run_pass(cache, new), rows, new)
    check_counts(cache)


def test_select_takes_numbers_and_booleans():
    for chosen in (torch.tensor([1, 2]), torch.tensor([False, True, True])):
        cache = small_cache()
        rows = tokens(17, 17, 17)
        run_pass(cache, rows)
        cache.batch_select_indices(chosen)
        check_contents(cache, rows[1:])
        check_counts(cache)
        assert cache.batch_size == 2


def test_select_out_of_range_is_named():
    cache = small_cache()
    run_pass(cache, tokens(5, 5))
    with pytest.raises(IndexError, match=r"\[2\].*2 sequences"):
        cache.batch_select_indices(torch.tensor([0, 2]))
    check_contents(cache, tokens(5, 5))


def test_another_batch_size_is_refused_and_nothing_is_lost():
    cache = small_cache()
    rows = tokens(5, 5)
    run_pass(cache, rows)
    with pytest.raises(ValueError, match=r"3 rows .* 2 sequences.*reset\(\)"):
        run_pass(cache, tokens(1, 1, 1, start=50))
    check_contents(cache, rows)
    new = tokens(1, 1, start=60)
    assert_outputs(run_pass(cache, new), rows, new)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_goes_its_own_way(copied):
    cache = small_cache()
    rows = tokens(20)
    run_pass(cache, rows)
    other = copied(cache)
    another = copied(cache)
    first, then = tokens(5, start=300), tokens(90, start=400)
    run_pass(another, first)
    assert_outputs(run_pass(another, then), [rows[0] + first[0]], then)
    run_pass(cache, tokens(5, start=100))
    new = tokens(3, start=200)
    assert_outputs(run_pass(other, new), rows, new)
    check_contents(cache, [rows[0] + tokens(5, start=100)[0]])


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8", "int4"])
def test_reset_gives_everything_back_and_starts_over(kv_dtype):
    cache = small_cache(kv_dtype=kv_dtype, block_size=32)
    rows = tokens(140, 140)
    first = run_pass(cache, rows)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.stats()["blocks_used"] == 0
    for again, before in zip(run_pass(cache, rows), first, strict=True):
        assert torch.equal(again, before)


# Faults ---------------------------------------------------------------------------------------------------------------


def test_a_full_cache_keeps_what_it_held():
    cache = small_cache(max_blocks=4)
    rows = tokens(40)
    run_pass(cache, rows)
    with pytest.raises(CacheFullError, match="max_blocks=4"):
        run_pass(cache, tokens(60, start=100))
    assert cache.get_seq_length() == 40
    check_counts(cache)
    check_contents(cache, rows)
    new = tokens(4, start=200)
    assert_outputs(run_pass(cache, new), rows, new)


def test_a_first_pass_that_does_not_fit_leaves_an_empty_cache():
    cache = small_cache(max_blocks=2)
    with pytest.raises(CacheFullError):
        run_pass(cache, tokens(40, 40))
    assert cache.get_seq_length() == 0
    assert cache.stats()["blocks_used"] == 0
    new = tokens(10)
    assert_outputs(run_pass(cache, new), [[]], new)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("moment", ["before", "after", "writing"])
@pytest.mark.parametrize(("kv_dtype", "broken"), [("auto", 7), ("int8", 7), ("int4", 7), ("int4", 40)])
def test_an_exception_in_a_pass_leaves_the_cache_as_before_it(layer, moment, kv_dtype, broken):
    cache, undisturbed = (small_cache(kv_dtype=kv_dtype, block_size=32 if kv_dtype == "int4" else BLOCK) for _ in "12")
    rows = tokens(90)
    for each in (cache, undisturbed):
        run_pass(each, rows)
        each.batch_repeat_interleave(2)
    with pytest.raises(Interrupted):
        run_pass(cache, tokens(broken, broken, start=300), stop_at=(layer, moment))
    assert cache.get_seq_length() == 90
    new = tokens(9, 9, start=100)
    for got, want in zip(run_pass(cache, new), run_pass(undisturbed, new), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    check_counts(cache)


def test_passes_that_keep_breaking_say_so():
    cache = small_cache()
    for _ in range(2):
        with pytest.raises(Interrupted):
            run_pass(cache, tokens(7), stop_at=(1, "before"))
    with pytest.raises(RuntimeError, match=r"layers \[1, 2\].*reset\(\)"):
        run_pass(cache, tokens(7))
    cache.reset()
    assert_outputs(run_pass(cache, tokens(7)), [[]], tokens(7))


# What it refuses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"kv_dtype": "int3"}, ["kv_dtype", "'int3'", "'int8'"]),
        ({"kv_dtype": None}, ["kv_dtype", "None", "'auto'"]),
        ({"block_size": 24}, ["block_size", "24", "power of two"]),
        ({"block_size": 0}, ["block_size", "0", "16"]),
        ({"block_size": 8}, ["block_size", "8", "16"]),
        ({"block_size": 512}, ["block_size", "512", "256"]),
        ({"block_size": 16.0}, ["block_size", "16.0"]),
        ({"max_blocks": 0}, ["max_blocks", "0"]),
        ({"max_blocks": -3}, ["max_blocks", "-3"]),
        ({"on_unsupported": "ignore"}, ["on_unsupported", "'ignore'", "warn"]),
    ],
)
def test_bad_arguments_are_named_with_their_value_and_the_way_out(arguments, said):
    with pytest.raises(ValueError, match=next(iter(arguments))) as info:
        PagedCache(small_config(), **arguments)
    for word in said:
        assert word in str(info.value)


def test_an_unknown_backend_is_named_before_a_cache_is_built():
    with pytest.raises(ValueError, match=r"backend='cuda'.*'reference'"):
        small_cache(backend="cuda")


@pytest.mark.parametrize("family", ["Llama", "Gemma 4", "Falcon-H1"])
def test_bytes_a_token_are_known_before_the_first_pass(family):
    """Also where layers have heads of different sizes (Gemma 4)."""
    model = build(family)
    model.set_attn_implementation("paged_triton")
    cache = PagedCache(model.config, kv_dtype="int8", block_size=16)
    before = cache.bytes_per_token
    model.generate(**prompts(5), past_key_values=cache, max_new_tokens=2)
    assert cache.bytes_per_token == before > 0


def test_an_encoder_decoder_config_is_refused():
    with pytest.raises(ValueError, match=r"encoder-decoder model .*bart"):
        PagedCache(AutoConfig.for_model("bart"))


def test_layers_of_unknown_kind_are_refused():
    config = AutoConfig.for_model("llama4_text", num_hidden_layers=2)
    with pytest.raises(NotImplementedError, match=r"chunked_attention.*sdpa"):
        PagedCache(config)


def test_the_keys_of_another_model_are_refused():
    cache = small_cache()
    run_pass(cache, tokens(5))
    other = torch.zeros(1, HEADS + 1, 1, DIM)
    with pytest.raises(ValueError, match="another model"):
        cache.update(other, other, 0)


def test_a_layer_that_the_cache_does_not_have_is_refused():
    keys = torch.zeros(1, HEADS, 1, DIM)
    with pytest.raises(ValueError, match=f"layer {LAYERS}.*{LAYERS} layers.*another model"):
        small_cache().update(keys, keys, LAYERS)


def test_keys_that_attention_never_saw_are_an_error():
    """A model that does not run `paged_triton` would attend to its new keys alone."""
    cache = small_cache()
    keys = torch.zeros(1, HEADS, 1, DIM)
    cache.update(keys, keys, 0)
    with pytest.raises(RuntimeError, match="set_attn_implementation"):
        cache.update(keys, keys, 1)


def test_the_config_of_a_vision_language_model_gives_its_text_part():
    text = small_config()
    config = AutoConfig.for_model("gemma3", text_config=text.to_dict())
    assert len(PagedCache(config).layers) == LAYERS


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_a_cache_outlives_the_inference_mode_that_filled_it(kv_dtype):
    """What torch.inference_mode() allocates could not be written outside of it."""
    cache = small_cache(kv_dtype=kv_dtype)
    with torch.inference_mode():
        run_pass(cache, tokens(20))
        run_pass(cache, [[100]])
    run_pass(cache, [[200]])
    cache.reset()
    run_pass(cache, tokens(20))
    with torch.inference_mode():
        run_pass(cache, [[100]])
    run_pass(cache, [[200]])
    assert cache.get_seq_length() == 22


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": None}, r"config is a NoneType.*model\.config"),
        ({"config": torch.nn.Linear(1, 1)}, r"config is a Linear.*model\.config"),
        ({"dtype": "bfloat16"}, r"dtype='bfloat16' is a str.*torch\.dtype"),
    ],
)
def test_arguments_of_a_wrong_type(arguments, message):
    with pytest.raises(TypeError, match=message):
        PagedCache(**{"config": small_config(), **arguments})


@pytest.mark.parametrize("family", ["Llama", "Falcon-H1", "Qwen3-Next", "LFM2"])
def test_another_batch_size_is_refused_by_name(family):
    """Also where a state of Transformers' own would meet it first."""
    model = build(family)
    model.set_attn_implementation("paged_triton")
    cache = PagedCache(model.config, block_size=16)
    model.generate(**prompts(5, 17), past_key_values=cache, max_new_tokens=3)
    with pytest.raises(ValueError, match=r"batch has 3 rows but the cache holds 2 sequences.*reset\(\)"):
        model.generate(**prompts(30, 31, 32), past_key_values=cache, max_new_tokens=3)
