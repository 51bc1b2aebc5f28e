"""What a model's config says of its layers: which are paged, and whether a model that runs is the one it is of."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from ..compat import (
    asks_the_cache_for_states,
    caches_latents,
    heads_of_layers,
    known_layer_types,
    layer_types_and_arguments,
)
from ..log import info_once
from .unfinished import PassWatch

PAGED_TYPES = ("full_attention", "sliding_attention")
# Layers of attention and of a state of another kind at once.
HYBRID_TYPES = ("hybrid", "hybrid_sliding")
# Layers that no forward pass brings to the cache.
STATELESS_TYPES = ("dummy", "moe", "mlp")
WITHOUT_KEYS = (*STATELESS_TYPES, "conv", "linear_attention")
# In a plan, the layers whose keys are paged.
KEYS_IN_BLOCKS = ("paged", "hybrid")


def plan_of(config: Any) -> list[tuple[str, Any]]:
    """For each layer ("paged", window), ("hybrid", (window, states)) or (Transformers' layer type, its arguments)."""
    latents = caches_latents(config)
    plan: list[tuple[str, Any]] = []
    for layer_type, arguments in layer_types_and_arguments(config):
        if layer_type in PAGED_TYPES and not latents:
            plan.append(("paged", arguments.get("sliding_window") if layer_type == "sliding_attention" else None))
        elif layer_type in HYBRID_TYPES and not latents:
            window = arguments.get("sliding_window") if layer_type == "hybrid_sliding" else None
            plan.append(("hybrid", (window, arguments.get("number_of_states", 1))))
        elif layer_type == "chunked_attention" or layer_type not in known_layer_types():
            raise NotImplementedError(
                f"PagedCache does not know layers of type {layer_type!r} ({config.model_type}). Generate without "
                'PagedCache and with attn_implementation="sdpa".'
            )
        else:
            why = "its cache holds latents, not keys" if latents else f"type {layer_type!r}"
            info_once(f"{config.model_type}: layers kept as Transformers keeps them ({why})")
            plan.append((layer_type, arguments))
    return plan


def watch_of(plan: list[tuple[str, Any]], config: Any) -> PassWatch | None:
    """None where every layer can be put back as it was before a pass that an exception ended."""
    if all(kind in ("paged", *STATELESS_TYPES) for kind, _ in plan):
        return None
    last = max(index for index, (kind, _) in enumerate(plan) if kind not in STATELESS_TYPES)
    kind = plan[last][0]
    parts = set() if kind in WITHOUT_KEYS else {(last, "keys")}
    if kind in (*WITHOUT_KEYS, "hybrid"):
        parts.add((last, "states"))
    return PassWatch(parts, functools.partial(asks_the_cache_for_states, config))


class BuiltFor:
    """The config that a cache was built from, to tell another model's by."""

    def __init__(self, config: Any):
        self.config = config
        self._accepted = config  # the last one that was compared

    def refuse_another(self, config: Any) -> None:
        """Raise `ValueError` for the config of a model whose layers are not those of this cache.

        An equal config is fine (a fine-tuned copy), and so is one that differs in what a cache does not hold.
        """
        if config is self._accepted:
            return
        if config is not self.config:
            mine, other = _shape(self.config), _shape(config)
            differ = [name for name in mine if name in other and mine[name] != other[name]]
            if differ:
                raise ValueError(
                    f"This cache was built for a model of type {self.config.model_type!r} with "
                    f"{_words(mine, differ)}, but the model that runs is of type {config.model_type!r} with "
                    f"{_words(other, differ)}: it belongs to another model. Build a PagedCache from this model's "
                    "config."
                )
        self._accepted = config


def _shape(config: Any) -> dict[str, Any]:
    """What a cache's layers follow from, as far as the config tells."""
    shape: dict[str, Any] = {}
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        planned = layer_types_and_arguments(config)
        shape["layers"] = config.num_hidden_layers
        shape["layer types and windows"] = [
            (kind, arguments.get("sliding_window")) if "sliding" in kind else (kind,) for kind, arguments in planned
        ]
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        for name, values in zip(("KV heads", "head_dim"), zip(*heads_of_layers(config), strict=True), strict=True):
            shape[name] = values[0] if len(set(values)) == 1 else values
    return shape


def _words(shape: dict[str, Any], names: list[str]) -> str:
    if "layers" in names:  # what is listed a layer then differs too, which says no more
        names = [name for name in names if not isinstance(shape[name], (tuple, list))]
    return ", ".join(f"{name} = {shape[name]}" for name in names)
