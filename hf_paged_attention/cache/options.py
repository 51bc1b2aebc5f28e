"""What a cache was asked for that is not about storage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    backend: str = "auto"
    on_unsupported: str = "warn"

    def __post_init__(self) -> None:
        if self.on_unsupported not in ("error", "warn"):
            raise ValueError(f"on_unsupported={self.on_unsupported!r} must be 'error' or 'warn'.")
