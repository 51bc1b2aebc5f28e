"""What a cache was asked for that is not about storage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    backend: str = "auto"
    on_unsupported: str = "warn"
