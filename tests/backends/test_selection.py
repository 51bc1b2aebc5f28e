"""Which backend answers, and what is said about it."""

from __future__ import annotations

import pytest
import torch

from hf_paged_attention import PagedCache
from hf_paged_attention.attention import NAME
from hf_paged_attention.backends import (
    Backend,
    availability,
    backend_names,
    get_backend,
    register_backend,
    registry,
    select,
)
from hf_paged_attention.backends.reference import ReferenceBackend
from hf_paged_attention.types import AttentionSpec, PagedKV
from tests.families.models import build, prompts

SPEC = AttentionSpec(scale=1.0)


def layer(dim=32, dtype=torch.float32, device="cpu"):
    pool = torch.zeros(2, 16, 2, dim, dtype=dtype, device=device)
    return torch.zeros(3, 4, dim, dtype=dtype, device=device), PagedKV(pool, pool)


@pytest.fixture
def unset(monkeypatch):
    monkeypatch.delenv(registry.ENVIRONMENT, raising=False)


@pytest.fixture
def no_gpu(unset, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_names():
    assert backend_names()[:2] == ("triton", "reference")
    with pytest.raises(ValueError, match=r"backend='cuda'.*'auto'.*'triton'.*'reference'"):
        get_backend("cuda")


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_the_reference_answers_and_the_reason_is_given():
    assert select(*layer(), SPEC).name == "reference"
    reasons = availability(torch.device("cpu"))
    assert reasons["reference"] == "usable"
    assert "TRITON_INTERPRET=1" in reasons["triton"]


@pytest.mark.usefixtures("no_gpu")
def test_a_named_backend_that_cannot_run_is_an_error():
    with pytest.raises(NotImplementedError, match=r"backend='triton' cannot run.*no GPU.*backend='auto'"):
        select(*layer(), SPEC, "triton")


@pytest.mark.usefixtures("unset")
def test_the_interpreter_makes_triton_usable_on_the_cpu(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert select(*layer(), SPEC).name == "triton"


@pytest.mark.usefixtures("unset")
def test_a_layer_that_triton_does_not_take_is_an_error_or_a_slower_backend_as_asked(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    wide = layer(dim=1024)
    assert select(*wide, SPEC, on_unsupported="warn").name == "reference"
    with pytest.raises(NotImplementedError, match=r"head size 1024.*on_unsupported='warn'"):
        select(*wide, SPEC, on_unsupported="error")
    with pytest.raises(NotImplementedError, match=r"float64"):
        select(*layer(dtype=torch.float64), SPEC, on_unsupported="error")


def test_the_environment_picks_where_the_caller_does_not(monkeypatch):
    monkeypatch.setenv(registry.ENVIRONMENT, "reference")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert select(*layer(), SPEC).name == "reference"
    assert select(*layer(), SPEC, "triton").name == "triton"
    monkeypatch.setenv(registry.ENVIRONMENT, "no such")
    with pytest.raises(ValueError, match="'no such'"):
        select(*layer(), SPEC)


def test_a_backend_of_ones_own(monkeypatch):
    calls = []

    class Counting(ReferenceBackend):
        name = "counting"

        def attend(self, *arguments):
            calls.append(arguments)
            return super().attend(*arguments)

    monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))
    register_backend(Counting())
    model, inputs = build("Llama"), prompts(9)
    want = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    model.set_attn_implementation(NAME)
    cache = PagedCache(model.config, backend="counting")
    assert torch.equal(model.generate(**inputs, past_key_values=cache, max_new_tokens=3, do_sample=False), want)
    assert len(calls) == 3 * len(cache.layers)


@pytest.mark.parametrize("kv_dtype", ["int8", ("int8", "int4"), "auto"])
def test_a_backend_that_cannot_turn_queries_is_given_the_factor(kv_dtype, monkeypatch):
    seen = []

    class Mine(Backend):
        """As docs/extending.md walks through it, from the protocol itself."""

        name = "mine"
        _reference = ReferenceBackend()

        def why_not(self, device):
            return None

        def why_not_this(self, query, kv, spec):
            return None

        def write(self, key, value, kv, slot_mapping):
            self._reference.write(key, value, kv, slot_mapping)

        def attend(self, query, kv, batch, spec):
            seen.append(kv.turn_factor is not None)
            return self._reference.attend(query, kv, batch, spec)

    monkeypatch.setitem(registry._BACKENDS, "mine", Mine())
    model, new = build("Llama"), {"max_new_tokens": 4, "do_sample": False}
    model.set_attn_implementation(NAME)
    tokens = [
        model.generate(**prompts(9), past_key_values=PagedCache(model.config, kv_dtype=kv_dtype, backend=name), **new)
        for name in ("reference", "mine")
    ]
    assert torch.equal(*tokens)
    assert set(seen) == {kv_dtype != "auto"}
