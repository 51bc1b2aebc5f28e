"""`enable(model, decode="compile")`: the automatic compilation of `generate`, on the CPU where it must be asked for."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import CompileConfig

import hf_paged_attention
from hf_paged_attention import PagedCache, captured_step, log
from hf_paged_attention.compiled_forward import TUNED, CompiledForward
from tests.families.models import build, prompts

NEW = {"max_new_tokens": 12, "do_sample": False}
FORMATS = ["auto", "int8", "fp8", "int4"]


@pytest.fixture(autouse=True)
def forget_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def config(backend: str = "eager", **options) -> CompileConfig:
    """Traced whole, as always; run without a compiler's minute unless `backend` says otherwise."""
    made = CompileConfig(fullgraph=True, backend=backend, **options)
    made._compile_all_devices = True
    return made


def pair(family: str, **arguments):
    """The same model twice: stepping eagerly, and compiled."""
    size = 32 if arguments.get("kv_dtype") == "int4" else 16
    return tuple(
        hf_paged_attention.enable(build(family), block_size=size, decode=decode, **arguments)
        for decode in ("plain", "compile")
    )


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("family", ["Qwen3", "Gemma 3"])
def test_eager_tokens_and_one_compilation_whatever_the_prompt(family, kv_dtype):
    eager, compiled = pair(family, kv_dtype=kv_dtype)
    before = graphs()
    # Long enough for windows to be passed and factors to be fitted; the second call's shapes are all others.
    for lengths, new in (((70, 66), 12), ((130, 90), 20), ((66, 66), 7)):
        arguments = {**prompts(*lengths), "do_sample": False, "max_new_tokens": new}
        want = eager.generate(**arguments)
        stance = "fail_on_recompile" if lengths[0] != 70 else "default"
        with torch.compiler.set_stance(stance):
            assert torch.equal(compiled.generate(**arguments, compile_config=config()), want)
    assert graphs() - before == 1


def test_any_number_of_batch_sizes_each_compiled_once():
    model = hf_paged_attention.enable(build("Llama", num_hidden_layers=1), block_size=16, decode="compile")
    before = graphs()
    for _ in range(2):
        for rows in range(1, 12):
            model.generate(**prompts(*[9] * rows), do_sample=False, max_new_tokens=3, compile_config=config())
    assert graphs() - before == 11


def test_matrices_meet_one_row_in_kernels_that_are_tuned(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked.append(options) or function)
    forward, model = CompiledForward(), build("Llama", num_hidden_layers=1)
    forward.get(model, 1)
    forward.get(model, 2)
    forward.get(model, 1, CompileConfig())  # generate's own, whose mode captures
    for chosen in (CompileConfig(mode="max-autotune"), CompileConfig(options={"shape_padding": True}), config()):
        forward.get(model, 1, chosen)
    assert [options.get("options") for options in asked] == [
        TUNED, None, TUNED, None, {"shape_padding": True}, None
    ]  # fmt: skip
    assert all(options.get("mode") is None or options.get("options") is None for options in asked)


def test_inductor_gives_the_tokens_too():
    eager, compiled = pair("Gemma 3")
    want = eager.generate(**prompts(30, 20), **NEW)
    assert torch.equal(compiled.generate(**prompts(30, 20), **NEW, compile_config=config("inductor")), want)


def test_both_decoding_loops_share_what_is_compiled():
    model, before = build("Gemma 3"), graphs()
    arguments = {**prompts(30, 20), **NEW}
    hf_paged_attention.enable(model, block_size=16, decode="compile")
    want = model.generate(**arguments, compile_config=config("inductor", dynamic=False))
    hf_paged_attention.enable(model, block_size=16, decode="graph")
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(model.generate(**arguments), want)
    assert graphs() - before == 1


def test_short_prompts_of_8_bit_caches_step_eagerly_until_their_factors_are_fitted():
    eager, compiled = pair("Gemma 3", kv_dtype="int8")
    arguments = {**prompts(1, 2, 3), "do_sample": False, "max_new_tokens": 80}
    before = graphs()
    assert torch.equal(compiled.generate(**arguments, compile_config=config()), eager.generate(**arguments))
    assert graphs() - before == 1


@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": True, "top_k": 20},
        {"num_return_sequences": 2, "do_sample": True},
        {"output_scores": True, "return_dict_in_generate": True},
        {"repetition_penalty": 1.2},
        {"prefill_chunk_size": 8},
    ],
    ids=["sampling", "samples share blocks", "scores", "penalty", "chunked prefill"],
)
def test_what_generate_can_do(how):
    found, before = [], graphs()
    for model in pair("Gemma 3"):
        torch.manual_seed(0)
        out = model.generate(**prompts(30, 20), **NEW | how, compile_config=config())
        found.append(getattr(out, "sequences", out))
    assert torch.equal(*found)
    assert graphs() > before


def test_embeddings_for_a_prompt(monkeypatch):
    eager, compiled = pair("Llama")
    ids, mask = prompts(30, 20).values()
    embeds = eager.get_input_embeddings()(ids).detach()
    arguments = {"inputs_embeds": embeds, "attention_mask": mask, **NEW}
    prepared, prepare = [], captured_step.CapturedStep.prepare
    monkeypatch.setattr(
        captured_step.CapturedStep, "prepare", lambda step, *rest: (prepared.append(1), prepare(step, *rest))
    )
    assert torch.equal(compiled.generate(**arguments, compile_config=config()), eager.generate(**arguments))
    assert len(prepared) == 1


def test_the_users_cache_goes_on_in_the_next_call():
    eager, compiled = pair("Gemma 3")
    cache = PagedCache(compiled.config, block_size=16)
    text, mask = prompts(30, 20).values()
    before = graphs()
    for turn in range(3):
        want = eager.generate(text, attention_mask=mask, **NEW)
        got = compiled.generate(text, attention_mask=mask, **NEW, compile_config=config(), past_key_values=cache)
        assert torch.equal(got, want)
        assert cache.get_seq_length() == want.shape[1] - 1
        text = torch.cat([want, prompts(5 + turn, 5 + turn)["input_ids"]], 1)
        mask = torch.cat([mask, torch.ones(2, text.shape[1] - mask.shape[1], dtype=torch.long)], 1)
    assert graphs() - before == 1


def test_what_is_not_compiled_says_so_and_runs(caplog):
    log.warn_once.cache_clear()
    eager, compiled = pair("Llama")
    assert not PagedCache(compiled.config).is_compileable
    before = graphs()
    with caplog.at_level(logging.WARNING, "hf_paged_attention"):
        for how in (
            {"num_beams": 2, "compile_config": config()},
            {"assistant_model": build("Llama", num_hidden_layers=1), "compile_config": config()},
            {"disable_compile": True, "compile_config": config()},
            {"compile_config": None},
        ):
            inputs = prompts(9)
            assert torch.equal(compiled.generate(**inputs, **NEW, **how), eager.generate(**inputs, **NEW, **how))
    assert graphs() == before
    for reason in ("num_beams=2", "assisted decoding", "does not compile this model on cpu"):
        assert reason in caplog.text


def test_disable_puts_the_methods_back():
    model = build("Llama")
    before = dict(vars(model))
    hf_paged_attention.disable(hf_paged_attention.enable(model, decode="compile"))
    assert dict(vars(model)) == before


def test_a_static_cache_is_compiled_as_ever():
    model = hf_paged_attention.enable(build("Llama"), decode="compile")
    model.set_attn_implementation("eager")
    want = build("Llama").generate(**prompts(9), **NEW)
    made = CompileConfig(backend="eager")
    made._compile_all_devices = True
    assert torch.equal(model.generate(**prompts(9), **NEW, cache_implementation="static", compile_config=made), want)


def test_an_exception_in_a_step_loses_that_step_alone():
    eager, compiled = pair("Mistral")
    inputs, calls = prompts(5, 17, 40), []

    def processor(ids, scores):
        calls.append(ids.shape[1])
        if len(calls) == 6:
            raise InterruptedError
        return scores

    cache = PagedCache(compiled.config, block_size=16)
    arguments = {**NEW, "compile_config": config(), "past_key_values": cache}
    with pytest.raises(InterruptedError):
        compiled.generate(**inputs, **arguments, logits_processor=[processor])
    want = eager.generate(**inputs, **NEW)
    assert cache.get_seq_length() == 45
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 6, dtype=torch.long)], 1)
    rest = {**arguments, "max_new_tokens": 6}
    assert torch.equal(compiled.generate(want[:, :46], attention_mask=mask, **rest), want)
