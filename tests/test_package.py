"""What a first look at the package meets: its names, its registration, `info()`."""

from __future__ import annotations

import subprocess
import sys

import torch
import transformers
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, Cache
from transformers.masking_utils import AttentionMaskInterface

import hf_paged_attention
from hf_paged_attention import CacheFullError, PagedCache
from tests.families.models import COMMON, prompts


def test_public_names():
    assert {"CacheFullError", "PagedCache", "disable", "enable", "info"} <= set(hf_paged_attention.__all__)
    assert all(hasattr(hf_paged_attention, name) for name in hf_paged_attention.__all__)
    assert issubclass(PagedCache, Cache)
    assert issubclass(CacheFullError, RuntimeError)


def test_importing_registers_attention_and_mask():
    """An implementation without a mask function is never told about padding."""
    assert "paged_triton" in AttentionInterface()
    assert "paged_triton" in AttentionMaskInterface()


def test_info_has_versions_device_backends_and_formats():
    info = hf_paged_attention.info()
    assert info["versions"]["transformers"] == transformers.__version__
    assert info["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert info["backends"]["reference"] == "usable"
    assert {"auto", "bf16", "fp16", "int8", "fp8"} <= set(info["kv_dtypes"])
    assert info["device"]


def test_the_first_lines_of_the_readme():
    config = AutoConfig.for_model("qwen3", **COMMON)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="paged_triton").eval()
    inputs = prompts(9)
    plain = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    cache = PagedCache(model.config, kv_dtype="int8")
    assert model.generate(**inputs, past_key_values=cache, max_new_tokens=5, do_sample=False).shape == plain.shape
    hf_paged_attention.enable(model)
    assert torch.equal(model.generate(**inputs, max_new_tokens=5, do_sample=False), plain)
    hf_paged_attention.disable(model)
    assert model.config._attn_implementation == "paged_triton", "as it was before enable"


def test_the_command_prints_info():
    call = [sys.executable, "-m", "hf_paged_attention.cli", "info"]
    out = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    assert "transformers" in out
    assert "reference" in out
