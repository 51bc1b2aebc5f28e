"""Tiny random float32 models of every decoder family that is tested, and prompts of unequal length.

Sizes are small but awkward on purpose: a window of 16 that the prompts run past, two query heads a KV head, weights
large enough that greedy tokens follow the context.
"""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 211

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.25,
}
WINDOW = 16
SLIDING = {"sliding_window": WINDOW}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], **SLIDING}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
TWO_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 24,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
# The last layer reads the keys and values of an earlier one.
SHARED_KV = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    **SLIDING,
}

# Name in docs/families.md: (model_type, what its config needs beyond COMMON).
FAMILIES: dict[str, tuple[str, dict]] = {
    "Llama": ("llama", {}),
    "SmolLM": (
        "llama",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 96, "tie_word_embeddings": True},
    ),
    "Qwen2": ("qwen2", {"use_sliding_window": False}),
    "Qwen3": ("qwen3", {}),
    "Qwen3-MoE": ("qwen3_moe", TWO_EXPERTS),
    "Qwen3-Next": ("qwen3_next", {**LINEAR, **TWO_EXPERTS, "shared_expert_intermediate_size": 32}),
    "Qwen3.5": ("qwen3_5_text", LINEAR),
    "Mistral": ("mistral", SLIDING),
    "Ministral": ("ministral", MIXED),
    "Ministral 3": ("ministral3", {}),
    "Mixtral": ("mixtral", {"num_local_experts": 2, "num_experts_per_tok": 1, **SLIDING}),
    "Gemma": ("gemma", {}),
    "Gemma 2": (
        "gemma2",
        {"query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0, **SLIDING},
    ),
    "Gemma 3": ("gemma3_text", {"query_pre_attn_scalar": 32, **MIXED}),
    "Gemma 3n": ("gemma3n_text", {**SHARED_KV, "laurel_rank": 8, "altup_num_inputs": 2}),
    "Gemma 4": ("gemma4_text", {**SHARED_KV, "global_head_dim": 64}),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1, **MIXED}),
    "Phi-3": ("phi3", SLIDING),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": ("olmo3", MIXED),
    "Cohere": ("cohere", {}),
    "Cohere 2": ("cohere2", MIXED),
    "GLM-4": ("glm4", {}),
    "Granite": ("granite", {"attention_multiplier": 0.17}),
    "StarCoder2": ("starcoder2", SLIDING),
    "SmolLM3": ("smollm3", {}),
    "Falcon-H1": (
        "falcon_h1",
        {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8},
    ),
    "LFM2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "DeepSeek-V3": ("deepseek_v3", LATENT),
}


def build(family: str, seed: int = 0, **overrides):
    """A random float32 model of `family` under eager attention; the same weights for the same arguments."""
    model_type, options = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **{**COMMON, **options, **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompts(*lengths: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """Left-padded random prompts: input_ids and attention_mask `[len(lengths), max(lengths)]`."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(3, VOCABULARY, (length,), generator=generator)
        mask[row, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}
