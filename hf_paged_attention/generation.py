"""`enable(model)`: from then on every `generate` builds a `PagedCache` itself. `disable(model)`: as before."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from .arena import ArenaKeeper
from .attention import NAME
from .cache import PagedCache
from .compat import CACHE_ARGUMENT, attention_configs
from .compiled_forward import AutomaticCompilation, CompiledForward
from .graph_decoding import GraphDecoder
from .log import warn_once
from .prefill import generate_and_remember, shared_prefill

_STATE = "_hf_paged_attention"
_OF_AUTOMATIC_COMPILATION = ("_valid_auto_compile_criteria", "get_compiled_call")


def enable(
    model: PreTrainedModel, *, decode: str = "plain", compile: bool = True, **cache_arguments: Any
) -> PreTrainedModel:
    """Set `attn_implementation="paged_triton"` and let `model.generate` build `PagedCache(config, **cache_arguments)`.

    decode="compile" takes part in the automatic compilation of `generate`, as a `StaticCache` does: its own loop runs,
    and each step's forward is compiled (on the first call of a model and batch size) and replayed as a CUDA graph.
    `disable_compile=True` in the generation config leaves a call alone. Beams and assisted decoding stay eager.

    decode="graph" also replaces the decoding loop of greedy search and sampling, so that processors, token choice and
    stopping are in the graph too. What cannot be captured whole (scores in the output, processors and stopping
    criteria with host code) decodes as under "compile", and a log line says why.

    compile=False captures steps without compiling them: slower steps, and no wait for a compiler.

    Between calls the model keeps the graph and the memory of the last call's cache, for a next call with as many rows;
    `disable` and a call with another number of rows free them.

    A cache that a call passes itself, `use_cache=False` and a `cache_implementation` other than the default are left
    alone. Calling it again replaces the arguments. Returns the model.

    Raises `TypeError` for a model without `generate`, `ValueError` for arguments that `PagedCache` refuses.
    """
    if not isinstance(model, GenerationMixin):
        raise TypeError(f"model is a {type(model).__name__}, which has no generate(). Pass a causal language model.")
    if decode not in ("plain", "compile", "graph"):
        raise ValueError(f"decode={decode!r} must be 'plain', 'compile' or 'graph'.")
    PagedCache(model.config, **cache_arguments)  # refuses bad arguments now rather than in the first generate
    if hasattr(model, _STATE):
        disable(model)
    before = [(config, config._attn_implementation) for config in attention_configs(model)]
    model.set_attn_implementation(NAME)
    forward, arenas = CompiledForward(compile), ArenaKeeper()
    automatic = None if decode == "plain" else AutomaticCompilation(model, forward, arenas)
    # Partials of methods, not closures: a deep copy of the model then has its own, and a pickled one too.
    model._prepare_cache_for_generation = functools.partial(
        _prepare_cache, model._prepare_cache_for_generation, cache_arguments, automatic, arenas
    )
    model._prefill = functools.partial(shared_prefill, model, model._prefill)
    if automatic is not None:
        model._valid_auto_compile_criteria = automatic.valid_auto_compile_criteria
        model.get_compiled_call = automatic.get_compiled_call
    if decode == "graph":
        model.generate = functools.partial(_generate_by_graph, model.generate, GraphDecoder(forward, arenas))
    remembering = functools.partial(generate_and_remember, model.generate)
    # Its signature and its text, not its annotations, which cannot be pickled.
    model.generate = functools.update_wrapper(remembering, type(model).generate, assigned=("__doc__",), updated=())
    setattr(model, _STATE, before)
    return model


def _prepare_cache(
    original: Any,
    cache_arguments: dict[str, Any],
    automatic: AutomaticCompilation | None,
    arenas: ArenaKeeper,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """In the place of the method `original` of a model: the cache that `generate` is to use, if it has none."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    generation_config, model_kwargs = given["generation_config"], given["model_kwargs"]
    wants_default = generation_config.use_cache is not False and generation_config.cache_implementation in (
        None,
        "dynamic",
    )
    cache = model_kwargs.get(CACHE_ARGUMENT)
    if not wants_default or cache is not None:
        if isinstance(cache, PagedCache):
            cache.is_built_by_generate = False  # if it was, its user has it now
            cache.sequences.expect(generation_config.max_length)
            if automatic is not None:
                automatic.look_at(cache, generation_config, given["generation_mode"])
        return original(*args, **kwargs)
    cache = PagedCache(original.__self__.config, **cache_arguments)
    if getattr(generation_config, "is_assistant", False):
        cache.activate_past_recording()
        cache.sequences.is_draft = True
    cache.is_built_by_generate = True
    cache.sequences.expect(generation_config.max_length)
    model_kwargs[CACHE_ARGUMENT] = cache
    if automatic is not None and automatic.look_at(cache, generation_config, given["generation_mode"]):
        samples = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        arenas.lend_to(cache, given["batch_size"] * samples)
    else:
        arenas.forget()  # its memory would lie idle beside this call's
    return None


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `enable`: the attention implementation and the caches are what they were. Does nothing if not enabled."""
    before = getattr(model, _STATE, None)
    if before is None:
        return model
    for config, implementation in before:
        config._attn_implementation = implementation
    delattr(model, _STATE)
    for name in ("_prepare_cache_for_generation", "_prefill", "generate", *_OF_AUTOMATIC_COMPILATION):
        model.__dict__.pop(name, None)
    return model


# Arguments of `generate` that Transformers does not hand on to a custom decoding method.
_NOT_HANDED_ON = ("assistant_model", "assistant_tokenizer", "tokenizer", "synced_gpus", "custom_generate")


def _generate_by_graph(plain: Any, decoder: GraphDecoder, *args: Any, **kwargs: Any) -> Any:
    """The method `plain` with `decoder` as its decoding method, where the call's arguments reach such a method."""
    lost = [name for name in _NOT_HANDED_ON if kwargs.get(name)]
    if lost:
        warn_once(f"decode='graph' does not run this call: {', '.join(lost)} is given; plain generate does")
        return plain(*args, **kwargs)
    streamer = kwargs.pop("streamer", None)
    return plain(*args, custom_generate=functools.partial(decoder, streamer=streamer), **kwargs)
