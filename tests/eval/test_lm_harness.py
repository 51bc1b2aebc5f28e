"""lm-evaluation-harness, where it is installed: every request reads the cache."""

import pytest
import torch

import hf_paged_attention
from tests.eval.stand_ins import byte_tokenizer, tiny_model

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from eval.lm_harness import PagedHFLM

PAIRS = [("the quick brown fox jumps over", " the lazy dog"), ("a longer context than the other one, and", " its end")]
# More than a block and the 64 newest tokens, which an int4 cache keeps as they arrived.
LONG_PAIRS = [(context * 4, end) for context, end in PAIRS]


def requests(kind, arguments):
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def log_likelihoods(lm, pairs=PAIRS):
    return [value for value, _ in lm.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)]


@pytest.fixture
def options():
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "<pad>"
    yield {"pretrained": tiny_model(), "tokenizer": tokenizer, "device": "cpu", "batch_size": 2}
    hf_paged_attention.disable(tiny_model())
    tiny_model().set_attn_implementation("eager")


@pytest.mark.parametrize("chunk", [0, 7])
def test_an_exact_format_gives_the_harness_own_log_likelihoods(options, chunk):
    want = log_likelihoods(HFLM(**options))
    assert log_likelihoods(PagedHFLM(kv_dtype="auto", chunk=chunk, **options)) == pytest.approx(want, abs=1e-3)


def test_a_log_likelihood_reads_the_cache_only_under_our_model(options):
    want = log_likelihoods(HFLM(**options))
    hf_paged_attention.enable(options["pretrained"], kv_dtype="int8")
    assert log_likelihoods(HFLM(**options)) == pytest.approx(want, abs=1e-3), "generate alone builds the cache"
    int8 = log_likelihoods(PagedHFLM(kv_dtype="int8", **options))
    assert all(abs(a - b) > 1e-2 for a, b in zip(int8, want, strict=True))


@pytest.mark.parametrize("chunk", [0, 7])
def test_a_pair_of_formats_is_neither_of_them(options, chunk):
    found = {}
    for kv_dtype in ("auto", "int8", "int8:int4", "int4:int8", "int4"):
        lm = PagedHFLM(kv_dtype=kv_dtype, block_size=32, chunk=chunk, **options)
        found[kv_dtype] = log_likelihoods(lm, LONG_PAIRS)
    assert len({tuple(values) for values in found.values()}) == len(found)


@pytest.mark.parametrize(("kv_dtype", "asked_for"), [("int8", "int8"), ("int8:int4", ("int8", "int4"))])
def test_generation_reads_the_cache(options, monkeypatch, kv_dtype, asked_for):
    caches = []
    original = hf_paged_attention.generation.PagedCache

    def counted(*arguments, **keywords):
        caches.append(keywords)
        return original(*arguments, **keywords)

    lm = PagedHFLM(kv_dtype=kv_dtype, **options)
    monkeypatch.setattr(hf_paged_attention.generation, "PagedCache", counted)
    asked = requests("generate_until", [(prompt, {"until": ["\n\n"], "max_gen_toks": 8}) for prompt, _ in PAIRS])
    with torch.no_grad():
        assert len(lm.generate_until(asked, disable_tqdm=True)) == 2
    assert [keywords["kv_dtype"] for keywords in caches] == [asked_for]


@pytest.mark.parametrize("kv_dtype", ["int3", "int8:int3", "int8:int4:int8"])
def test_an_unknown_format_is_refused(options, kv_dtype):
    with pytest.raises(ValueError, match="is not a cache format"):
        PagedHFLM(kv_dtype=kv_dtype, **options)
