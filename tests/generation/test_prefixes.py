"""Prompts that share a beginning: with each other, and with what the cache remembers of earlier ones."""

from __future__ import annotations

import pytest
import torch

import hf_paged_attention
from hf_paged_attention import CacheFullError, PagedCache
from tests.families.models import VOCABULARY, build, prompts

NEW = {"max_new_tokens": 24, "do_sample": False}
FAMILIES = ["Llama", "Mistral"]


def alike(*tails: int, common: int = 40) -> dict[str, torch.Tensor]:
    """Left-padded prompts of `common` like tokens and as many others as `tails` says."""
    random = torch.Generator().manual_seed(3)
    beginning = torch.randint(3, VOCABULARY, (common,), generator=random)
    width = common + max(tails)
    ids, mask = torch.zeros(len(tails), width, dtype=torch.long), torch.zeros(len(tails), width, dtype=torch.long)
    for row, tail in enumerate(tails):
        ids[row, width - common - tail :] = torch.cat(
            [beginning, torch.randint(3, VOCABULARY, (tail,), generator=random)]
        )
        mask[row, width - common - tail :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def pair(family: str, **arguments):
    return build(family), hf_paged_attention.enable(build(family), block_size=16, **arguments)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "how",
    [{}, {"num_beams": 3}, {"prefill_chunk_size": 16}, {"do_sample": True, "num_return_sequences": 2}],
    ids=["greedy", "beams", "chunks", "sampling"],
)
def test_rows_that_begin_alike_give_eagers_tokens(family, how):
    eager, paged = pair(family)
    inputs = alike(5, 9, 20)
    inputs = {name: value[[0, 1, 0, 2]] for name, value in inputs.items()}
    found = []
    for model in (eager, paged):
        torch.manual_seed(0)
        found.append(model.generate(**inputs, **NEW | how))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("family", "decode", "bounded"),
    [("Llama", "plain", True), ("Mistral", "plain", False), ("Mistral", "graph", True)],
)
def test_a_cache_that_remembers_prompts_gives_eagers_tokens(family, decode, bounded):
    """Known, partly known and unknown prompts, one after another; under `max_blocks` the oldest are forgotten."""
    eager, paged = pair(family, decode=decode, compile=False)
    new = {**NEW, "max_new_tokens": 56}  # past the window and several blocks
    cache = PagedCache(paged.config, block_size=16, prefix_caching=True, max_blocks=16 if bounded else None)
    for inputs in (alike(5, 20), alike(3, 8), prompts(50, 60), alike(3, 3)):
        cache.reset(keep_prefixes=True)
        assert cache.get_seq_length() == 0
        got = paged.generate(**inputs, past_key_values=cache, **new)
        assert torch.equal(got, eager.generate(**inputs, **new))
    assert cache.stats()["blocks_used"] > 0
    cache.reset()
    stats = cache.stats()
    assert (stats["blocks_used"], stats["blocks_shared"], stats["tokens"]) == (0, 0, 0)


def test_a_known_prompt_is_matched_up_to_its_last_full_block():
    _, paged = pair("Llama")
    cache = PagedCache(paged.config, block_size=16, prefix_caching=True)
    inputs = alike(5, 9)
    paged.generate(**inputs, past_key_values=cache, **NEW)
    cache.reset(keep_prefixes=True)
    assert cache.match_prefix(**inputs) == 36  # row 0: 4 of padding and two blocks; row 1 has three
    cache.reset(keep_prefixes=True)
    assert cache.match_prefix(**prompts(45, 49, seed=8)) == 0
    cache.reset()
    assert cache.match_prefix(**inputs) == 0


@pytest.mark.parametrize("max_blocks", [2, 3])
@pytest.mark.parametrize("decode", ["plain", "graph"])
def test_a_prompt_that_does_not_fit_leaves_an_empty_cache(max_blocks, decode):
    """Also where the common beginning did fit: another prompt must not go on from it."""
    eager, paged = pair("Llama", decode=decode, compile=False)
    cache = PagedCache(paged.config, block_size=16, max_blocks=max_blocks)
    with pytest.raises(CacheFullError):
        paged.generate(**alike(5, 9, 20), past_key_values=cache, **NEW)
    assert (cache.get_seq_length(), cache.stats()["blocks_used"]) == (0, 0)
    assert not cache.sequences.record_past
    short = {**NEW, "max_new_tokens": 8}
    inputs = prompts(20)
    assert torch.equal(paged.generate(**inputs, past_key_values=cache, **short), eager.generate(**inputs, **short))


@pytest.mark.parametrize("case", ["stretched", "rows of their own", "hole"])
def test_positions_and_padding_that_rows_do_not_share_are_kept(case):
    eager, paged = pair("Llama")
    inputs = alike(5, 9, 20)
    if case == "hole":
        inputs["attention_mask"][0, 25:28] = 0
    else:
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0) * 3
        if case == "rows of their own":  # the same tokens twice
            inputs = {name: value[[0, 0]] for name, value in inputs.items()}
            positions = torch.stack([positions[0], positions[0] * 2])
        inputs["position_ids"] = positions
    assert torch.equal(paged.generate(**inputs, **NEW), eager.generate(**inputs, **NEW))


def test_match_prefix_refuses_padding_behind_real_tokens():
    cache = PagedCache(build("Llama").config, prefix_caching=True)
    inputs = alike(5, 9)
    inputs["attention_mask"][0, -3:] = 0
    with pytest.raises(ValueError, match="left-padded"):
        cache.match_prefix(**inputs)


class Widths:
    """Counts the columns that each forward pass of a model computes."""

    def __init__(self, model):
        self.seen: list[int] = []
        model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, module, args, kwargs):
        self.seen.append(kwargs["input_ids"].shape[1])


def next_turn(out: torch.Tensor, inputs: dict[str, torch.Tensor], new: int) -> dict[str, torch.Tensor]:
    """The whole of a turn, and `new` other tokens."""
    more = torch.randint(3, VOCABULARY, (out.shape[0], new), generator=torch.Generator().manual_seed(9))
    mask = inputs["attention_mask"].repeat_interleave(out.shape[0] // inputs["attention_mask"].shape[0], 0)
    more_mask = torch.ones(out.shape[0], out.shape[1] + new - mask.shape[1], dtype=mask.dtype)
    return {"input_ids": torch.cat([out, more], 1), "attention_mask": torch.cat([mask, more_mask], 1)}


@pytest.mark.parametrize(
    ("family", "arguments", "how"),
    [
        ("Llama", {}, {}),
        ("Mistral", {"decode": "graph", "compile": False}, {}),
        ("Llama", {}, {"prefill_chunk_size": 16}),
        ("Mistral", {}, {"do_sample": True, "num_return_sequences": 2}),
    ],
    ids=["plain", "graph", "chunks", "samples"],
)
def test_the_next_turn_of_a_chat_computes_what_is_new(family, arguments, how):
    """Three turns that send the whole history again: the answers' full blocks are found, tokens are eager's."""
    eager, paged = pair(family, **arguments)
    cache, widths = PagedCache(paged.config, block_size=16, prefix_caching=True), Widths(paged)
    inputs, new = prompts(20, 33), {**NEW, "max_new_tokens": 56}  # answers of several blocks
    for turn in range(3):
        torch.manual_seed(turn)
        want = eager.generate(**inputs, **{**new, **how})
        torch.manual_seed(turn)
        widths.seen.clear()
        out = paged.generate(**inputs, past_key_values=cache, **{**new, **how})
        assert torch.equal(out, want)
        if turn and "prefill_chunk_size" not in how:  # chunks do not look, but they tell
            # Blocks count from each row's first token: the shorter row stands 13 columns further right.
            assert widths.seen[0] <= 7 + 1 + 16 + 13
        inputs = next_turn(out, inputs, 7)
        how = {name: value for name, value in how.items() if name != "num_return_sequences"}
        cache.reset(keep_prefixes=True)
    found = cache.match_prefix(**inputs)
    assert inputs["input_ids"].shape[1] - found <= 7 + 1 + 16 + 13


def test_answers_of_beams_are_not_remembered():
    _, paged = pair("Llama")
    cache, inputs = PagedCache(paged.config, block_size=16, prefix_caching=True), prompts(37)
    out = paged.generate(**inputs, past_key_values=cache, **{**NEW, "num_beams": 3})
    cache.reset(keep_prefixes=True)
    assert cache.match_prefix(**next_turn(out, inputs, 7)) == 32


def test_tokens_that_nobody_told_are_not_remembered():
    """The cache holds others than generate is given: what it then stores is not what the ids say."""
    _, paged = pair("Llama")
    cache, inputs = PagedCache(paged.config, block_size=16, prefix_caching=True), prompts(37)
    with torch.no_grad():
        paged(prompts(30, seed=5)["input_ids"], past_key_values=cache, use_cache=True)
    out = paged.generate(**inputs, past_key_values=cache, **NEW)
    cache.reset(keep_prefixes=True)
    assert cache.match_prefix(**next_turn(out, inputs, 7)) == 0


def test_a_row_that_was_cropped_is_known_as_far_as_it_goes_on():
    eager, paged = pair("Llama")
    cache, inputs = PagedCache(paged.config, block_size=16, prefix_caching=True), prompts(37)
    out = paged.generate(**inputs, past_key_values=cache, **NEW)
    cache.crop(-12)
    held = cache.get_seq_length()
    inputs = next_turn(out[:, :held], inputs, 9)
    second = paged.generate(**inputs, past_key_values=cache, **NEW)
    assert torch.equal(second, eager.generate(**inputs, **NEW))
    cache.reset(keep_prefixes=True)
    inputs = next_turn(second, inputs, 5)
    third = paged.generate(**inputs, past_key_values=cache, **NEW)
    assert torch.equal(third, eager.generate(**inputs, **NEW))
    cache.reset(keep_prefixes=True)
    assert cache.match_prefix(**inputs) == (inputs["input_ids"].shape[1] - 1) // 16 * 16
