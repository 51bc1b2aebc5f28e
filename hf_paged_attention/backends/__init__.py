"""Implementations of attention over pages, by name; see `base.Backend`."""

from .base import AttentionSpec, Backend
from .registry import availability, backend_names, get_backend, register_backend, select

__all__ = ["AttentionSpec", "Backend", "availability", "backend_names", "get_backend", "register_backend", "select"]
