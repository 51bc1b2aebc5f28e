"""A family that nobody listed works or is refused by name, never wrong.

Every causal language model of the installed Transformers that can be built small from its default config generates
eager's tokens, or one of the package's own errors is raised.
"""

from __future__ import annotations

import traceback

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_paged_attention import PagedCache
from hf_paged_attention.attention import NAME
from tests.families.models import COMMON, prompts
from tests.families.modes import BATCH

# Sizes under their other names.
SIZES = {
    **COMMON,
    "sliding_window": 16,
    **dict.fromkeys(("n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers"), 3),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim"), 96),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 2),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "state_size", "rotary_dim"), 16),
    "n_positions": 512,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
LARGEST = 30e6
# Outside the protocol: these never take the cache that they are given, or have no generate of the usual kind.
FOREIGN = ("openai-gpt", "xlm", "rwkv", "minimax")


def small_model(model_type: str):
    """A model of at most LARGEST parameters; the test is skipped where the default config cannot be made small."""
    try:
        default = CONFIG_MAPPING[model_type]()
        options = {name: value for name, value in SIZES.items() if hasattr(default, name)}
        if getattr(default, "sliding_window", None) is None:
            options.pop("sliding_window", None)
        for name in ("layer_types", "mlp_layer_types"):
            kinds = list(dict.fromkeys(getattr(default, name, None) or []))
            if kinds:
                options[name] = (kinds * 3)[:3]
        config = AutoConfig.for_model(model_type, **{**options, "eos_token_id": None, "pad_token_id": 0})
        with torch.device("meta"):
            size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
        if size > LARGEST:
            pytest.skip(f"{size / 1e6:.0f}M parameters")
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        return model, generated(model)
    except Exception as error:
        pytest.skip(f"not small, or eager itself fails: {type(error).__name__}: {str(error)[:80]}")


def generated(model, **arguments):
    return model.generate(**prompts(*BATCH), max_new_tokens=10, do_sample=False, **arguments)


def is_named(error: Exception) -> bool:
    """Raised by the package, in words that say what to do."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    way_out = ("attn_implementation", "PagedCache", "reset()")
    return "hf_paged_attention" in last and any(word in str(error) for word in way_out)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(FOREIGN)))
def test_any_family_works_or_is_refused_by_name(model_type, record_property):
    model, want = small_model(model_type)
    model.set_attn_implementation(NAME)
    record_property("family", model_type)
    for mode in ("name alone", "PagedCache"):
        try:
            arguments = {} if mode == "name alone" else {"past_key_values": PagedCache(model.config, block_size=16)}
            got = generated(model, **arguments)
        except (ValueError, NotImplementedError, RuntimeError) as error:
            if not is_named(error):
                raise
            record_property(mode, str(error))
        else:
            assert torch.equal(got, want), mode
            record_property(mode, "yes")


def test_a_family_that_changes_values_after_caching_them_is_refused():
    config = AutoConfig.for_model("diffllama", **COMMON)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval()
    with pytest.raises((NotImplementedError, RuntimeError), match="changes values after caching"):
        generated(model, past_key_values=PagedCache(config))


@pytest.mark.parametrize("model_type", ["bloom", "mpt", "xglm", "gpt_neox_japanese"])
@pytest.mark.parametrize("lengths", [(20,), BATCH], ids=["one row", "batch"])
def test_families_with_an_attention_of_their_own_are_refused(model_type, lengths):
    """They would take the 2D mask for theirs, and see the future where it happens to fit."""
    options = {name: value for name, value in SIZES.items() if hasattr(CONFIG_MAPPING[model_type](), name)}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**options), attn_implementation=NAME).eval()
    with pytest.raises(NotImplementedError, match=f"'{model_type}' run an attention of their own"):
        model.generate(**prompts(*lengths), max_new_tokens=3)


def test_masks_that_a_family_computes_with_are_refused():
    config = AutoConfig.for_model("doge", **COMMON)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval()
    with pytest.raises(NotImplementedError, match="'doge' compute with the attention mask"):
        generated(model)


def test_what_a_family_passes_to_attention_beyond_the_usual_is_refused():
    """An ignored position bias would be wrong without a sign."""
    from transformers.models.t5 import modeling_t5

    from hf_paged_attention.compat import extra_attention_arguments

    if not hasattr(modeling_t5, "eager_attention_forward"):
        pytest.skip("T5 has no attention function in this version")
    assert "position_bias" in extra_attention_arguments(modeling_t5.T5Attention)
