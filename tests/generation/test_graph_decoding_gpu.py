"""What only a GPU can show of captured and compiled steps: real graphs, no waiting, nothing captured or compiled twice.

Models are tiny and in float32. Except where it is said, steps are captured without being compiled, which takes no time.
"""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from transformers import StoppingCriteria

import hf_paged_attention
from hf_paged_attention import PagedCache, captured_step, graph_decoding, log
from tests.families.models import build, prompts
from tests.families.modes import returned_cache

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NEW = {"max_new_tokens": 40, "do_sample": False}
LONG = (70, 66)  # past the tokens on which 8-bit factors are fitted
FORMATS = ["auto", "int8", "fp8", "int4"]
# Full layers; sliding and full ones. Kernels are compiled for each, which is most of what this file takes.
CASES = [("Qwen3", "auto"), *(("Gemma 3", kv_dtype) for kv_dtype in FORMATS)]


def on_gpu(inputs):
    return {name: tensor.cuda() for name, tensor in inputs.items()}


def ids(*lengths, seed=1):
    return on_gpu(prompts(*lengths, seed=seed))


def model_of(family, decode="plain", compile=False, **arguments):
    size = 32 if arguments.get("kv_dtype") == "int4" else 16
    return hf_paged_attention.enable(build(family).cuda(), block_size=size, decode=decode, compile=compile, **arguments)


@pytest.fixture
def captures(monkeypatch):
    """The graphs captured, in a list."""
    found, capture = [], captured_step.capture

    def counting(work):
        found.append(capture(work))
        return found[-1]

    monkeypatch.setattr(captured_step, "capture", counting)
    return found


def waiting_is_an_error(monkeypatch, owner, name, after):
    """From call number `after` on, `owner.name` raises where it would make the host wait for the device."""
    original, calls = getattr(owner, name), []

    def checked(*args):
        calls.append(1)
        if len(calls) <= after:
            return original(*args)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return original(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(owner, name, checked)
    return calls


@pytest.mark.parametrize("decode", ["graph", "compile"])
@pytest.mark.parametrize(("family", "kv_dtype"), CASES)
def test_the_tokens_of_plain_steps_and_one_capture_for_calls_of_like_lengths(family, kv_dtype, decode, captures):
    plain, model = model_of(family, kv_dtype=kv_dtype), model_of(family, decode, kv_dtype=kv_dtype)
    eager = build(family).cuda()
    for lengths, new, seed in ((LONG, 40, 1), ((66, 69), 30, 2), ((68, 68), 35, 3)):
        arguments = {**ids(*lengths, seed=seed), "do_sample": False, "max_new_tokens": new}
        want = plain.generate(**arguments)
        assert torch.equal(model.generate(**arguments), want)
        if kv_dtype == "auto":
            assert torch.equal(eager.generate(**arguments), want)
    assert len(captures) == 1


@pytest.mark.parametrize(("kv_dtype", "decode"), [("auto", "graph"), ("int8", "compile")])
def test_compiled_once_whatever_the_prompt(kv_dtype, decode, captures):
    torch._dynamo.reset()
    counted = torch._dynamo.utils.counters["stats"]
    plain, model = model_of("Gemma 3", kv_dtype=kv_dtype), model_of("Gemma 3", decode, True, kv_dtype=kv_dtype)
    before = counted["unique_graphs"]
    for lengths, new in ((LONG, 12), ((130, 90), 20), ((66, 66), 7)):
        arguments = {**ids(*lengths), "do_sample": False, "max_new_tokens": new}
        want = plain.generate(**arguments)
        with torch.compiler.set_stance("default" if lengths == LONG else "fail_on_recompile"):
            assert torch.equal(model.generate(**arguments), want)
    assert counted["unique_graphs"] - before == 1
    assert len(captures) <= 2  # the longer prompt moved the pools


@pytest.mark.parametrize("decode", ["graph", "compile"])
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_no_step_makes_the_host_wait(kv_dtype, decode, monkeypatch):
    calls = waiting_is_an_error(monkeypatch, captured_step.CapturedStep, "run", after=1)
    if decode == "graph":
        waiting_is_an_error(monkeypatch, graph_decoding._Watcher, "look", after=2)
    model = model_of("Gemma 3", decode, kv_dtype=kv_dtype)
    torch.manual_seed(0)
    # Blocks are allocated and tables uploaded on the way; a token that ends rows is looked for and never comes.
    model.generate(**ids(*LONG), max_new_tokens=60, do_sample=True, top_k=20, eos_token_id=[210, 209, 0])
    assert len(calls) > 10


@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "top_k": 20},
        {"repetition_penalty": 1.3},
        {"do_sample": True, "num_return_sequences": 3},
    ],
    ids=["sampling", "penalty", "samples share blocks"],
)
@pytest.mark.parametrize("decode", ["graph", "compile"])
def test_the_same_tokens_for_the_same_seed(how, decode, captures):
    plain, model = model_of("Gemma 3"), model_of("Gemma 3", decode)
    for _ in range(2):  # the second call replays the first one's graph
        found = []
        for each in (plain, model):
            torch.manual_seed(3)
            found.append(each.generate(**ids(*LONG), **NEW | how))
        assert torch.equal(*found)
    assert len(captures) == 1


@pytest.mark.parametrize("decode", ["graph", "compile"])
def test_rows_end_at_their_end_of_sequence(decode, captures):
    plain, model = model_of("Gemma 3"), model_of("Gemma 3", decode)
    free = plain.generate(**ids(5, 17, 40), **NEW)
    ends = [int(free[0, -30]), int(free[1, -20]), int(free[2, -10])]
    for more in ([], list(range(180, 210))):  # of many ids and few rows, torch.isin would sort, and wait
        how = {**NEW, "eos_token_id": ends + more}
        want = plain.generate(**ids(5, 17, 40), **how)
        cache = PagedCache(model.config, block_size=16)
        assert torch.equal(model.generate(**ids(5, 17, 40), **how, past_key_values=cache), want)
        assert cache.get_seq_length() == want.shape[1] - 1
        cache.reset()
        assert cache.stats()["blocks_used"] == 0


class Until(StoppingCriteria):
    """As stop strings do, this looks at tokens on the host."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        done = input_ids[0].tolist()[-1] >= 0 and input_ids.shape[1] >= self.length
        return torch.full((input_ids.shape[0],), done, device=input_ids.device)


def test_criteria_with_host_code_take_generates_own_loop_and_captured_steps(captures, caplog):
    log.warn_once.cache_clear()
    plain, model = model_of("Gemma 3"), model_of("Gemma 3", "graph")
    with caplog.at_level(logging.WARNING, "hf_paged_attention"):
        found = [
            each.generate(
                **ids(*LONG), **NEW, stopping_criteria=[Until(85)], output_scores=True, return_dict_in_generate=True
            )
            for each in (plain, model)
        ]
    assert torch.equal(found[0].sequences, found[1].sequences)
    torch.testing.assert_close(torch.stack(found[0].scores), torch.stack(found[1].scores), atol=1e-3, rtol=1e-3)
    assert "output_scores=True" in caplog.text
    assert len(captures) == 1


@pytest.mark.parametrize("call", [2, 3], ids=["before the capture", "within the capture"])
def test_an_exception_in_a_step_loses_that_step_alone(call, captures):
    plain, model = model_of("Mistral"), model_of("Mistral", "graph")
    inputs, calls = ids(5, 17, 40), []

    def hook(*_):
        calls.append(1)
        if len(calls) == call:
            raise InterruptedError

    cache = PagedCache(model.config, block_size=16)
    handle = model.model.layers[1].mlp.register_forward_pre_hook(hook)
    with pytest.raises(InterruptedError):
        model.generate(**inputs, past_key_values=cache, **NEW)
    handle.remove()
    want = plain.generate(**inputs, **NEW)
    assert cache.get_seq_length() == 40
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 1, dtype=torch.long, device="cuda")], 1)
    rest = {**NEW, "max_new_tokens": 39}
    assert torch.equal(model.generate(want[:, :41], attention_mask=mask, past_key_values=cache, **rest), want)


@pytest.mark.parametrize("decode", ["graph", "compile"])
def test_the_users_own_cache_replays_in_every_turn(decode, captures):
    plain, model = model_of("Gemma 3"), model_of("Gemma 3", decode)
    cache = PagedCache(model.config, block_size=16)
    text, mask = ids(*LONG).values()
    for _ in range(4):
        want = plain.generate(text, attention_mask=mask, **NEW)
        assert torch.equal(model.generate(text, attention_mask=mask, **NEW, past_key_values=cache), want)
        text = torch.cat([want, ids(4, 4)["input_ids"]], 1)
        mask = torch.cat([mask, mask.new_ones(2, text.shape[1] - mask.shape[1])], 1)
    assert len(captures) <= 2


def test_a_cache_that_is_held_is_not_overwritten(captures):
    plain, model = model_of("Gemma 3"), model_of("Gemma 3", "graph")
    kept = returned_cache(model.generate(**ids(*LONG), **NEW, return_dict_in_generate=True))
    before = [layer.storage.memory()[0].clone() for layer in kept.layers]
    assert torch.equal(model.generate(**ids(*LONG, seed=5), **NEW), plain.generate(**ids(*LONG, seed=5), **NEW))
    assert all(torch.equal(a, layer.storage.memory()[0]) for a, layer in zip(before, kept.layers, strict=True))
    assert len(captures) == 2


def test_memory_is_for_the_request_at_hand_and_is_given_back(captures):
    torch.cuda.empty_cache()
    model = model_of("Qwen3", "graph")
    model.generate(**ids(*LONG), **NEW)
    gc.collect()
    kept = torch.cuda.memory_allocated()
    for _ in range(3):
        model.generate(**ids(*LONG), **NEW)
    gc.collect()
    assert torch.cuda.memory_allocated() <= kept
    # A limit of 4,096 tokens costs no memory for them where rows end long before.
    end = int(model.generate(**ids(70), **NEW)[0, -1])
    how = {"do_sample": False, "max_new_tokens": 4096, "eos_token_id": end, "return_dict_in_generate": True}
    cache = returned_cache(model.generate(**ids(70), **how))
    assert cache.get_seq_length() < 120
    assert cache.layers[0].storage.num_blocks * 16 < 1000
    del cache
    captures.clear()
    hf_paged_attention.disable(model)
    gc.collect()
    assert torch.cuda.memory_allocated() < kept


def test_other_weights_are_captured_anew(captures):
    plain, model = model_of("Llama"), model_of("Llama", "graph")
    for each in (plain, model):
        each.generate(**ids(*LONG), **NEW)
        weight = each.model.layers[0].mlp.down_proj.weight
        each.model.layers[0].mlp.down_proj.weight = torch.nn.Parameter(weight.detach() * -1)
    assert torch.equal(model.generate(**ids(*LONG), **NEW), plain.generate(**ids(*LONG), **NEW))
    assert len(captures) == 2
