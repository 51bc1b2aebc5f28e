"""int4 in the ways to call `generate`: what a mode changes in how tokens come must not change what they say."""

from __future__ import annotations

import pytest
import torch

import hf_paged_attention
from hf_paged_attention import PagedCache
from hf_paged_attention.attention import NAME
from tests.families.models import VOCABULARY, build, prompts
from tests.families.modes import eager

NEW = {"max_new_tokens": 20, "do_sample": False}
FORMATS = ["int4", ("int8", "int4"), ("int4", "int8")]


@pytest.fixture(params=["Llama", "Gemma 3"])
def model(request):
    model = build(request.param)
    model.set_attn_implementation(NAME)
    return model


def new_cache(model, kv_dtype, **arguments):
    return PagedCache(model.config, block_size=32, kv_dtype=kv_dtype, **arguments)


def generated(model, inputs, cache, **arguments):
    return model.generate(**inputs, **{**NEW, **arguments}, past_key_values=cache)


def repeating(length: int, period: int = 11) -> dict[str, torch.Tensor]:
    """A prompt that prompt lookup finds itself in."""
    ids = prompts(period)["input_ids"].repeat(1, length // period + 1)[:, :length]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


# Not int8 keys, whose factor is fitted on all rows.
@pytest.mark.parametrize("kv_dtype", ["int4", ("int4", "int8"), ("bf16", "int4")])
def test_a_row_of_a_left_padded_batch_is_what_it_is_alone(model, kv_dtype):
    inputs = prompts(5, 90, 140)
    together = generated(model, inputs, new_cache(model, kv_dtype), max_new_tokens=40)
    for row, length in enumerate((5, 90, 140)):
        alone = {name: tensor[row : row + 1, -length:] for name, tensor in inputs.items()}
        got = generated(model, alone, new_cache(model, kv_dtype), max_new_tokens=40)
        assert torch.equal(got[0, -40:], together[row, -40:])


def test_until_a_block_is_encoded_the_tokens_are_eagers(model):
    inputs = prompts(5, 17, 70)
    cache = new_cache(model, "int4")
    got = generated(model, inputs, cache, max_new_tokens=25)
    assert cache.sequences.tail.sealed == [0, 0, 0]
    assert torch.equal(got, eager(model, inputs, max_new_tokens=25))


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_prompt_lookup_says_what_plain_decoding_says(model, kv_dtype):
    inputs = repeating(162)  # no block is encoded between 160 and 192 tokens
    want = generated(model, inputs, new_cache(model, kv_dtype))
    cache = new_cache(model, kv_dtype)
    assert torch.equal(generated(model, inputs, cache, prompt_lookup_num_tokens=4), want)


def test_prompt_lookup_over_many_blocks(model):
    """Passes of several tokens, some of which are taken back, encode blocks too: later tokens may differ, not fail."""
    cache = new_cache(model, "int4")
    got = generated(model, repeating(100), cache, prompt_lookup_num_tokens=8, max_new_tokens=120)
    assert cache.get_seq_length() >= got.shape[1] - 1
    assert cache.sequences.tail.sealed[0] >= (got.shape[1] - 1 - 64) // 32 * 32 > 64


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_an_assistant_with_an_int4_cache_of_its_own(model, kv_dtype):
    draft = hf_paged_attention.enable(build("Llama"), block_size=32, kv_dtype="int4")
    inputs = prompts(162)
    want = generated(model, inputs, new_cache(model, kv_dtype))
    assert torch.equal(generated(model, inputs, new_cache(model, kv_dtype), assistant_model=draft), want)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_beams_that_share_blocks_and_beams_that_do_not(model, kv_dtype, monkeypatch):
    inputs, arguments = prompts(5, 90, 140), {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 40}
    want = generated(model, inputs, new_cache(model, kv_dtype), **arguments)

    def by_copying(self, beam_idx):
        """The rows' own copies of every block, as a cache without sharing would make them."""
        select(self, beam_idx)
        for table in self.sequences._all_tables:
            for row in table.rows:
                for index, block in enumerate(row):
                    if block >= 0 and table.pool.is_shared(block):
                        row[index] = table.pool.allocate()
                        table.pool.release(block)
                        for layer in self.layers:
                            copy_block(self.sequences, layer, table, block, row[index])
            table._changed()

    select = PagedCache.reorder_cache
    monkeypatch.setattr(PagedCache, "reorder_cache", by_copying)
    assert torch.equal(generated(model, inputs, new_cache(model, kv_dtype), **arguments), want)


def copy_block(sequences, layer, table, source, destination):
    if table is sequences.tail:
        if layer.format.needs_tail:
            layer.storage.ensure_tail(table.pool.capacity)
            layer.storage.copy_tail_blocks([source], [destination])
    elif table is layer.table:
        layer.storage.ensure(table.pool.capacity, None)
        layer.storage.copy_blocks([source], [destination])


def test_samples_of_one_prompt(model):
    inputs, arguments = prompts(90, 140), {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 40}
    torch.manual_seed(0)
    repeated = {name: tensor.repeat_interleave(3, 0) for name, tensor in inputs.items()}
    want = generated(model, repeated, new_cache(model, "int4"), do_sample=True, max_new_tokens=40)
    hf_paged_attention.enable(model, kv_dtype="int4", block_size=32)  # computes each prompt once
    torch.manual_seed(0)
    assert torch.equal(model.generate(**inputs, **{**NEW, **arguments}), want)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_a_chat_goes_on_and_starts_over_after_reset(model, kv_dtype):
    cache = new_cache(model, kv_dtype)
    first = generated(model, prompts(100), cache, max_new_tokens=30)
    more = torch.randint(3, VOCABULARY, (1, 13), generator=torch.Generator().manual_seed(3))
    ids = torch.cat([first, more], 1)
    generated(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, cache, max_new_tokens=30)
    assert cache.get_seq_length() == 100 + 30 + 13 + 30 - 1
    cache.reset()
    assert torch.equal(generated(model, prompts(100), cache, max_new_tokens=30), first)


def test_a_known_prompt_gives_the_same_tokens(model):
    hf_paged_attention.enable(model, kv_dtype="int4", block_size=32, prefix_caching=True)
    cache = new_cache(model, "int4", prefix_caching=True)
    first = generated(model, prompts(200), cache)
    cache.reset(keep_prefixes=True)
    seen = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    assert torch.equal(generated(model, prompts(200), cache), first)
    assert seen[0] == 200 - 128, "the encoded blocks are not computed again"


def test_prompts_with_a_common_beginning(model):
    """The beginning is computed once; where a row leaves it, in a block that is encoded or not, it goes on alone."""
    hf_paged_attention.enable(model, kv_dtype="int4", block_size=32)
    common = prompts(150)["input_ids"]
    tails = torch.randint(3, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(3))
    ids = torch.cat([common.repeat(3, 1), tails], 1)
    mask = torch.ones_like(ids)
    ids[1] = torch.cat([torch.zeros(9, dtype=torch.long), common[0], tails[1, :3]])
    mask[1, :9] = 0
    out = model.generate(input_ids=ids, attention_mask=mask, **NEW, return_dict_in_generate=True, output_logits=True)
    alone = model.generate(input_ids=ids[1:2, 9:], **NEW, return_dict_in_generate=True, output_logits=True)
    torch.testing.assert_close(out.logits[0][1], alone.logits[0][0], atol=0.5, rtol=0.1)
