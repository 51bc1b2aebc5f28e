"""Implementations of attention over pages, by name; see `base.Backend`."""

from .base import Backend
from .registry import availability, backend_names, check_backend_name, get_backend, register_backend, select

__all__ = [
    "Backend",
    "availability",
    "backend_names",
    "check_backend_name",
    "get_backend",
    "register_backend",
    "select",
]
