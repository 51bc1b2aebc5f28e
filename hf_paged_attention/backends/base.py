"""What a backend is: a name, what it can run, and the operations of the path."""

from __future__ import annotations

from typing import Protocol

import torch

from ..types import AttentionSpec, BatchMetadata, PagedKV


class Backend(Protocol):
    """Adding one is a file with this shape and a line in `registry.py`; docs/extending.md walks through it."""

    name: str

    def why_not(self, device: torch.device) -> str | None:
        """None if the backend runs on `device` here, else the reason in words."""

    def why_not_this(self, query: torch.Tensor, kv: PagedKV, spec: AttentionSpec) -> str | None:
        """None if it takes this layer (head sizes, dtypes, features), else the reason in words."""

    def write(self, key: torch.Tensor, value: torch.Tensor, kv: PagedKV, slot_mapping: torch.Tensor) -> None:
        """Store keys `[N, Hkv, D]` and values `[N, Hkv, Dv]` in slots `[N]`, encoding them on the way."""

    def seal(self, key: torch.Tensor, value: torch.Tensor, kv: PagedKV, batch: BatchMetadata) -> None:
        """int4 keys: encode the blocks that `batch.tail` names, from `kv.tail` and the new tokens `[N, Hkv, D]`."""

    def attend(self, query: torch.Tensor, kv: PagedKV, batch: BatchMetadata, spec: AttentionSpec) -> torch.Tensor:
        """Attention of queries `[N, Hq, D]` over the pages: `[N, Hq, Dv]` in the queries' dtype."""


class TurningBackend(Backend, Protocol):
    """One that can turn queries in the launch that writes their keys; `attend` is then given turned ones."""

    def write_turning(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv: PagedKV, slot_mapping: torch.Tensor
    ) -> torch.Tensor:
        """`write` where `kv.turn_factor` is set; returns the queries `[N, Hq, D]` turned by it (kernels/rotate.py)."""
