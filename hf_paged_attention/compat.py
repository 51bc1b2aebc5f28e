"""What differs between the versions of Transformers that we run on (5.17 to 5.x)."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import transformers
from transformers import PreTrainedModel
from transformers import cache_utils as _cache_utils
from transformers.generation import utils as _generation_utils

# The name of generate's and forward's cache argument: `past_key_values` until 5.2x, `cache` after.
CACHE_ARGUMENT = (
    "cache"
    if "cache" in inspect.signature(transformers.GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)


def layer_types_and_arguments(config: Any) -> list[tuple[str, dict[str, Any]]]:
    """The type of each cached layer of a decoder's config, and what its cache layer's class is built with."""
    types, arguments = _cache_utils.get_layer_types_and_kwargs(config)
    if isinstance(arguments, dict):  # 5.17: one for all layers
        return [(layer_type, arguments) for layer_type in types]
    return list(zip(types, arguments, strict=True))


def heads_of_layers(config: Any) -> list[tuple[int, int]]:
    """(KV heads, head size) of each layer, as its config says: the same in all but a few families (Gemma 4)."""
    each = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    heads = []
    for one in each:
        kv_heads = getattr(one, "num_key_value_heads", None) or one.num_attention_heads
        heads.append((kv_heads, getattr(one, "head_dim", None) or one.hidden_size // one.num_attention_heads))
    return heads


def transformers_layer(layer_type: str, arguments: dict[str, Any]) -> Any:
    """The cache layer that Transformers itself would build: for layers that are not attention over keys."""
    return _cache_utils.DYNAMIC_LAYER_TYPE_MAPPING[layer_type](**arguments)


def known_layer_types() -> tuple[str, ...]:
    return tuple(_cache_utils.DYNAMIC_LAYER_TYPE_MAPPING)


def caches_latents(config: Any) -> bool:
    """Whether the family keeps compressed latents in the cache and expands them after (MLA).

    Attention then never sees what was cached, so such layers stay as Transformers keeps them.
    """
    return getattr(config, "kv_lora_rank", None) is not None


def cannot_crop(layer: Any) -> str | None:
    """Why a layer that Transformers keeps cannot take its newest tokens back; None where it can."""
    if any(getattr(layer, "is_recurrent_states_initialized", {}).values()):
        return "a recurrent state cannot be taken back"
    if hasattr(layer, "conv_states") and not layer.record_past:
        return "activate_past_recording() was not called before the forward passes that are to be undone"
    return None


def asks_the_cache_for_states(config: Any) -> bool:
    """Whether the family's code tells the cache as it comes to a layer's state; RecurrentGemma keeps its own."""
    code = sys.modules.get(type(config).__module__.replace("configuration_", "modeling_"))
    try:
        source = inspect.getsource(code)
    except (OSError, TypeError):
        return True
    return any(name in source for name in ("has_previous_state(", "get_conv_state(", "update_conv_state("))


# Their models index the mask that is made for attention, or compute with it, as [batch, heads, queries, keys].
_COMPUTE_WITH_THE_MASK = ("deepseek_v4", "doge", "hy_v4")


def computes_with_the_mask(config: Any) -> bool:
    return str(getattr(config, "model_type", "")).startswith(_COMPUTE_WITH_THE_MASK)


def runs_its_own_attention(config: Any) -> bool:
    """Whether the family's code never asks Transformers' table of attention functions, whatever its name says.

    Such a model would take our 2D mask for its own and lose causality, which for one row raises nothing.
    """
    code = sys.modules.get(type(config).__module__.replace("configuration_", "modeling_"))
    return (
        code is not None and code.__name__ != type(config).__module__ and not hasattr(code, "ALL_ATTENTION_FUNCTIONS")
    )


def slices_the_mask(config: Any) -> bool:
    """Whether the model cuts old queries off the mask `[batch, heads, queries, keys]` on the way (Gemma 4)."""
    return bool(getattr(config, "num_kv_shared_layers", None))


# The arguments of Transformers' eager attention that `paged_attention` computes too.
_KNOWN_ARGUMENTS = {"module", "query", "key", "value", "attention_mask", "kwargs"}
_KNOWN_ARGUMENTS |= {"scaling", "dropout", "sliding_window", "softcap", "s_aux"}


@functools.cache
def extra_attention_arguments(attention: type) -> frozenset[str]:
    """What a family's own eager attention takes beyond the usual: ignored, results would be wrong without a sign."""
    own = getattr(sys.modules.get(attention.__module__), "eager_attention_forward", None)
    return frozenset() if own is None else frozenset(set(inspect.signature(own).parameters) - _KNOWN_ARGUMENTS)


def describe_mask_function(mask_function: Any) -> tuple[str, int | None]:
    """("causal", None), ("sliding", window) or (what it is, None), from the closures that a mask is built of."""
    parts = _parts(mask_function)
    names = [part.__qualname__ for part in parts]
    windows = [
        _closure(part)["sliding_window"]
        for part in parts
        if part.__qualname__ == "sliding_window_overlay.<locals>.inner_mask"
    ]
    others = [
        name for name in names if name not in ("causal_mask_function", "sliding_window_overlay.<locals>.inner_mask")
    ]
    if others or "causal_mask_function" not in names:
        return " and ".join(name.removesuffix(".<locals>.inner_mask") for name in others or names), None
    return ("sliding", min(windows)) if windows else ("causal", None)


def _closure(function: Any) -> dict[str, Any]:
    return {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    }


def _parts(function: Any) -> list[Any]:
    """The mask functions that an intersection is made of; anything else is itself."""
    if function.__qualname__ == "and_masks.<locals>.and_mask":
        return [part for inner in _closure(function)["mask_functions"] for part in _parts(inner)]
    return [function]


def attention_configs(model: PreTrainedModel) -> list[Any]:
    """The config of the model and those of its parts, each of which names an attention implementation."""
    configs = [model.config]
    for config in configs:
        for name in config.sub_configs:
            inner = getattr(config, name, None)
            if inner is not None and inner not in configs:
                configs.append(inner)
    return configs


def decoding_method(model: Any, generation_config: Any) -> Any:
    """The function that `generate` would call for this configuration, taking the model as its first argument."""
    mode = generation_config.get_generation_mode()
    return getattr(type(model), _generation_utils.GENERATION_MODES_MAPPING[mode])


def decoder_only_output(sequences: Any, cache: Any) -> Any:
    """What `generate` returns under `return_dict_in_generate=True`."""
    return _generation_utils.GenerateDecoderOnlyOutput(sequences=sequences, **{CACHE_ARGUMENT: cache})
