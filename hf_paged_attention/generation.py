"""`enable(model)`: from then on every `generate` builds a `PagedCache` itself. `disable(model)`: as before."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from .attention import NAME
from .cache import PagedCache
from .compat import CACHE_ARGUMENT, attention_configs
from .graph_decoding import GraphDecoder
from .log import warn_once
from .prefill import generate_and_remember, shared_prefill

_STATE = "_hf_paged_attention"


def enable(
    model: PreTrainedModel, *, decode: str = "plain", compile: bool = True, **cache_arguments: Any
) -> PreTrainedModel:
    """Set `attn_implementation="paged_triton"` and let `model.generate` build `PagedCache(config, **cache_arguments)`.

    decode="graph" also replaces the decoding loop of greedy search and sampling by one captured CUDA graph a step, its
    forward compiled by `torch.compile` unless compile=False. What cannot be captured (beams, assisted decoding,
    scores in the output, processors and stopping criteria with host code) runs as plain `generate`, and a log line
    says why.

    A cache that a call passes itself, `use_cache=False` and a `cache_implementation` other than the default are left
    alone. Calling it again replaces the arguments. Returns the model.

    Raises `TypeError` for a model without `generate`, `ValueError` for arguments that `PagedCache` refuses.
    """
    if not isinstance(model, GenerationMixin):
        raise TypeError(f"model is a {type(model).__name__}, which has no generate(). Pass a causal language model.")
    if decode not in ("plain", "graph"):
        raise ValueError(f"decode={decode!r} must be 'plain' or 'graph'.")
    PagedCache(model.config, **cache_arguments)  # refuses bad arguments now rather than in the first generate
    if hasattr(model, _STATE):
        disable(model)
    before = [(config, config._attn_implementation) for config in attention_configs(model)]
    model.set_attn_implementation(NAME)
    # Partials of methods, not closures: a deep copy of the model then has its own, and a pickled one too.
    model._prepare_cache_for_generation = functools.partial(
        _prepare_cache, model._prepare_cache_for_generation, cache_arguments
    )
    model._prefill = functools.partial(shared_prefill, model, model._prefill)
    if decode == "graph":
        decoder = GraphDecoder(model, compile_forward=compile)
        model.generate = functools.partial(_generate_by_graph, model.generate, decoder)
    remembering = functools.partial(generate_and_remember, model.generate)
    # Its signature and its text, not its annotations, which cannot be pickled.
    model.generate = functools.update_wrapper(remembering, type(model).generate, assigned=("__doc__",), updated=())
    setattr(model, _STATE, before)
    return model


def _prepare_cache(original: Any, cache_arguments: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """In the place of the method `original` of a model: the cache that `generate` is to use, if it has none."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    generation_config, model_kwargs = given["generation_config"], given["model_kwargs"]
    wants_default = generation_config.use_cache is not False and generation_config.cache_implementation in (
        None,
        "dynamic",
    )
    if not wants_default or model_kwargs.get(CACHE_ARGUMENT) is not None:
        return original(*args, **kwargs)
    cache = PagedCache(original.__self__.config, **cache_arguments)
    if getattr(generation_config, "is_assistant", False):
        cache.activate_past_recording()
        cache.sequences.is_draft = True
    model_kwargs[CACHE_ARGUMENT] = cache
    return None


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `enable`: the attention implementation and the caches are what they were. Does nothing if not enabled."""
    before = getattr(model, _STATE, None)
    if before is None:
        return model
    for config, implementation in before:
        config._attn_implementation = implementation
    delattr(model, _STATE)
    del model._prepare_cache_for_generation, model._prefill, model.generate
    return model


# Arguments of `generate` that Transformers does not hand on to a custom decoding method.
_NOT_HANDED_ON = ("assistant_model", "assistant_tokenizer", "tokenizer", "synced_gpus", "custom_generate")


def _generate_by_graph(plain: Any, decoder: GraphDecoder, *args: Any, **kwargs: Any) -> Any:
    """The method `plain` with `decoder` as its decoding method, where the call's arguments reach such a method."""
    lost = [name for name in _NOT_HANDED_ON if kwargs.get(name)]
    if lost:
        warn_once(f"decode='graph' does not run this call: {', '.join(lost)} is given; plain generate does")
        return plain(*args, **kwargs)
    if not decoder.is_of(plain.__self__):  # both are copies: the decoder's is still of the original
        decoder.__init__(plain.__self__, compile_forward=decoder.compile_forward)
    streamer = kwargs.pop("streamer", None)
    return plain(*args, custom_generate=functools.partial(decoder, streamer=streamer), **kwargs)
