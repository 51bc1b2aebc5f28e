"""The backends by name, and the choice among them."""

from __future__ import annotations

import os

import torch

from ..log import info_once, warn_once
from ..types import AttentionSpec, PagedKV
from .base import Backend
from .reference import ReferenceBackend
from .triton import TritonBackend

ENVIRONMENT = "HF_PAGED_ATTENTION_BACKEND"

# In the order of preference.
_BACKENDS: dict[str, Backend] = {}


def register_backend(backend: Backend) -> None:
    """Make `backend` selectable by its name; asked after those registered before it."""
    _BACKENDS[backend.name] = backend


register_backend(TritonBackend())
register_backend(ReferenceBackend())


def backend_names() -> tuple[str, ...]:
    return tuple(_BACKENDS)


def get_backend(name: str) -> Backend:
    if name not in _BACKENDS:
        raise ValueError(f"backend={name!r} is not registered. Use 'auto' or one of {', '.join(map(repr, _BACKENDS))}.")
    return _BACKENDS[name]


def check_backend_name(name: str) -> None:
    """`ValueError` unless `name`, or what HF_PAGED_ATTENTION_BACKEND makes of "auto", is a registered backend's."""
    _named(name)


def _named(name: str) -> Backend | None:
    """The backend asked for by `name`, or by the environment variable where that is "auto"; None: any that runs."""
    asked = os.environ.get(ENVIRONMENT, "auto") if name == "auto" else name
    if asked == "auto" or asked in _BACKENDS:
        return _BACKENDS.get(asked)
    source = f"the environment variable {ENVIRONMENT}={asked!r}" if name == "auto" else f"backend={asked!r}"
    raise ValueError(f"{source} names no registered backend. Use 'auto' or one of {', '.join(map(repr, _BACKENDS))}.")


def select(
    query: torch.Tensor, kv: PagedKV, spec: AttentionSpec, name: str = "auto", on_unsupported: str = "warn"
) -> Backend:
    """The backend for one layer's call; what was chosen, and why not a faster one, is logged once.

    name "auto" takes the environment variable HF_PAGED_ATTENTION_BACKEND, else the first that runs here. A named
    backend that cannot run the layer is an error; so is a fallback under on_unsupported="error".
    """
    backend = _named(name)
    if backend is not None:
        reason = backend.why_not(query.device) or backend.why_not_this(query, kv, spec)
        if reason:
            raise NotImplementedError(f"backend={backend.name!r} cannot run this layer: {reason}. Use backend='auto'.")
        return backend
    passed_over = []
    for backend in _BACKENDS.values():
        absent = backend.why_not(query.device)
        reason = absent or backend.why_not_this(query, kv, spec)
        if reason is None:
            # A choice that is not the first is worth a warning: it is slower.
            say = warn_once if passed_over else info_once
            say(f"attention on {query.device.type} runs on backend {backend.name!r}{'; '.join(['', *passed_over])}")
            return backend
        if not absent and on_unsupported == "error":
            raise NotImplementedError(
                f"backend {backend.name!r} cannot run this layer: {reason}. Build the cache with on_unsupported='warn' "
                "to let a slower backend run it."
            )
        passed_over.append(f"{backend.name!r} does not: {reason}")
    raise NotImplementedError(f"no backend runs on {query.device}: {'; '.join(passed_over)}")


def availability(device: torch.device) -> dict[str, str]:
    """Each backend and "usable" or why it is not, on `device`."""
    return {name: backend.why_not(device) or "usable" for name, backend in _BACKENDS.items()}
