"""`generate`'s automatic compilation over a `PagedCache`: its own loop, each step's forward compiled and captured.

Transformers compiles a model's forward when the cache says that it can be (`_valid_auto_compile_criteria`), and calls
the result for each new token (`get_compiled_call`). A paged cache needs the host between steps, to allocate blocks, so
an enabled model answers both calls itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.configuration_utils import CompileConfig, GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from .arena import ArenaKeeper
from .cache import PagedCache
from .cache.layer import PagedLayer
from .captured_step import RESERVATION, CapturedStep, model_state, must_run_eagerly
from .compat import CACHE_ARGUMENT
from .log import warn_once

# Modes of torch.compile in which Inductor captures CUDA graphs, and what is left of them without that: steps are
# captured here, because Inductor copies every input whose address it does not know.
_CAPTURING_MODES = {"reduce-overhead": None, "max-autotune": "max-autotune-no-cudagraphs"}

# For one row: a product with one row is then a reduction of Inductor's own, tuned until it reads at the memory's speed,
# where cuBLAS reads the small matrices of a small model at a fifth of it.
TUNED = {"coordinate_descent_tuning": True}

# Ways of compiling one forward (batch sizes, formats) that are kept at most.
BATCH_SIZES = 128


class CompiledForward:
    """A model's forward compiled, once for each way of compiling; compiles=False: as it is."""

    def __init__(self, compiles: bool = True):
        self.compiles = compiles
        self._compiled: dict[str, Any] = {}

    def __reduce__(self) -> Any:
        """Copied and pickled without what was compiled: it is another model's then."""
        return CompiledForward, (self.compiles,)

    def get(self, model: Any, rows: int, config: CompileConfig | None = None) -> Any:
        """The forward to call for a step of `rows` rows, compiled as `config` says: whole (fullgraph) and static where
        it is None."""
        if not self.compiles:
            return model
        options = {"fullgraph": True, "dynamic": False}
        if config is not None:
            options = config.to_dict()
            options["mode"] = _CAPTURING_MODES.get(options["mode"], options["mode"])
            options["dynamic"] = bool(options["dynamic"])  # None would compile a prompt of another length anew
            if options["options"] is not None:
                options.pop("mode")  # torch.compile takes one of them
        if rows == 1 and options.get("backend", "inductor") == "inductor" and not _chooses(options):
            options["options"] = TUNED
        key = repr(sorted(options.items(), key=str))
        if key not in self._compiled:
            self._compiled[key] = _with_many_batch_sizes(torch.compile(model.__call__, **options))
        return self._compiled[key]


def _chooses(options: dict[str, Any]) -> bool:
    """Whether the caller has chosen how Inductor is to compile."""
    return options.get("mode") is not None or options.get("options") is not None


def _with_many_batch_sizes(compiled: Any) -> Any:
    """Each batch size is compiled once, and whole: the compiler's own limit of 8 would be an error in the ninth."""

    @functools.wraps(compiled)
    def call(**inputs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=BATCH_SIZES):
            return compiled(**inputs)

    return call


def why_not_captured(model: Any, cache: Any, generation_config: Any) -> str | None:
    """None if decode steps over `cache` can be compiled and captured, else the reason in words."""
    if not isinstance(cache, PagedCache):
        return "the cache is not a PagedCache"
    if any(type(layer) is not PagedLayer for layer in cache.layers):
        return "some layers of the cache are not paged"
    if generation_config.num_beams > 1:
        return f"num_beams={generation_config.num_beams}"
    if generation_config.prompt_lookup_num_tokens is not None or getattr(generation_config, "is_assistant", False):
        return "assisted decoding"
    if len(set(getattr(model, "hf_device_map", {"": model.device}).values())) > 1:
        return "the model is spread over several devices"
    return None


class AutomaticCompilation:
    """Stands in for a model's two methods of automatic compilation; `enable(model, decode="compile")` installs it."""

    def __init__(self, model: Any, forward: CompiledForward, arenas: ArenaKeeper):
        self.forward = forward
        self.arenas = arenas
        # The model's own methods, which name the model too: a deep copy's then name the copy.
        self._criteria = model._valid_auto_compile_criteria
        self._compiled_call = model.get_compiled_call

    @property
    def _model(self) -> Any:
        return self._criteria.__self__

    def valid_auto_compile_criteria(self, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        """Transformers' own criteria (device, quantiser, offloading, `disable_compile`), and ours for the cache."""
        cache = model_kwargs.get(CACHE_ARGUMENT)
        if not isinstance(cache, PagedCache):
            return self._criteria(model_kwargs, generation_config)
        if not cache.may_compile:
            return False
        with cache.compileable():
            valid = self._criteria(model_kwargs, generation_config)
        if not valid and not generation_config.disable_compile:
            device = self._model.device.type
            warn_once(
                f"automatic compilation does not run this call: Transformers does not compile this model on {device} "
                "(the device itself, a quantiser or offloading); the eager forward does"
            )
        return valid

    def look_at(self, cache: PagedCache, generation_config: Any, generation_mode: Any) -> bool:
        """At the start of a call: whether its steps over `cache` can be compiled; where not, a log line says why."""
        reason = why_not_captured(self._model, cache, generation_config)
        if reason is None and generation_mode == GenerationMode.ASSISTED_GENERATION:
            reason = "assisted decoding"
        if reason is not None:
            warn_once(f"automatic compilation does not run this call: {reason}; the eager forward does")
        cache.may_compile = reason is None
        return cache.may_compile

    def get_compiled_call(self, compile_config: CompileConfig | None) -> Callable[..., Any]:
        return functools.partial(self._call, compile_config)

    def _call(self, compile_config: CompileConfig | None, **inputs: Any) -> Any:
        """One forward pass as `generate` makes it: a step of one token a row is compiled, any other is not."""
        model, cache = self._model, inputs.get(CACHE_ARGUMENT)
        if not isinstance(cache, PagedCache):
            return self._compiled_call(compile_config)(**inputs)
        token = inputs.get("input_ids")
        if token is None or token.shape[1] != 1 or cache.get_seq_length() == 0 or must_run_eagerly(cache):
            return model(**inputs)
        tensors, rest = _split(inputs)
        if tensors is None:
            warn_once(f"automatic compilation does not run this call: its steps have {rest}; the eager forward does")
            return model(**inputs)
        arena = self.arenas.of(cache)
        mode = "reduce-overhead" if compile_config is None else compile_config.mode
        captures = token.device.type == "cuda" and mode in _CAPTURING_MODES
        step: _ForwardStep | None = arena.parts.get("forward step")
        if step is None or step.captures != captures or not step.takes(tensors):
            step = arena.parts["forward step"] = _ForwardStep(captures, tensors)
        if not step.is_ready_for(cache):
            held, longest = max(cache.sequences.lengths), cache.sequences.longest or 0
            if held >= longest:  # generate counts no tokens that came as embeddings
                longest = held + RESERVATION
            step.prepare(cache, longest, (model_state(model), repr(compile_config), repr(rest)))
        logits = step(cache, self.forward.get(model, token.shape[0], compile_config), tensors, rest)
        self.arenas.hold(arena, cache)
        return CausalLMOutputWithPast(logits=logits, **{CACHE_ARGUMENT: cache})


class _ForwardStep(CapturedStep):
    """A captured forward, its inputs copied to fixed addresses first."""

    def __init__(self, captures: bool, like: dict[str, torch.Tensor]):
        super().__init__(captures)
        self._inputs = {name: torch.empty_like(tensor) for name, tensor in like.items()}
        self._logits: torch.Tensor | None = None

    def takes(self, tensors: dict[str, torch.Tensor]) -> bool:
        mine = self._inputs
        return mine.keys() == tensors.keys() and all(mine[name].shape == t.shape for name, t in tensors.items())

    def __call__(self, cache: PagedCache, forward: Any, tensors: dict[str, torch.Tensor], rest: dict) -> torch.Tensor:
        """Logits `[B, 1, vocabulary]`, overwritten by the next step."""
        for name, tensor in tensors.items():
            self._inputs[name].copy_(tensor, non_blocking=True)

        found = []

        def work() -> None:
            self.state.advance()
            inputs = dict(self._inputs)
            if "position_ids" not in inputs:
                inputs["position_ids"] = self.state.positions.unsqueeze(1)
            with torch.no_grad():
                found.append(forward(**inputs, **rest, **{CACHE_ARGUMENT: cache}).logits)

        self.run(cache, work)
        if found:
            self._logits = found[-1]  # of the capture, which has computed nothing yet: the step's own are the first
            return found[0]
        return self._logits


def _split(inputs: dict[str, Any]) -> tuple[dict[str, torch.Tensor] | None, Any]:
    """(tensors that change from step to step, the other arguments), or (None, what cannot be captured).

    Left out are the attention mask (older padding was never stored, and a new token is real) and how many logits to
    keep of the one token: with them, the other decoding loop would not share what is compiled.
    """
    tensors, rest = {}, {}
    for name, value in inputs.items():
        if name in ("attention_mask", "logits_to_keep", CACHE_ARGUMENT):
            continue
        if name in ("input_ids", "position_ids") and isinstance(value, torch.Tensor):
            tensors[name] = value
        elif value is None or isinstance(value, (bool, int, float, str)):
            rest[name] = value
        else:
            return None, name
    for name in ("output_attentions", "output_hidden_states"):
        if rest.get(name):
            return None, name
    return tensors, rest
