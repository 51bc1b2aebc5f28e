"""Have a backend write new tokens, and turn their queries in the same launch where it can."""

from __future__ import annotations

from typing import Any

import torch

from ..types import PagedKV


def write_beside(
    backend: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv: PagedKV,
    slot_mapping: torch.Tensor,
) -> tuple[torch.Tensor, PagedKV]:
    """Write keys `[N, Hkv, D]` and values `[N, Hkv, Dv]` into slots `[N]`.

    Returns what is to attend: the queries `[N, Hq, D]`, and the pages as these meet them.
    """
    if kv.turn_factor is not None and hasattr(backend, "write_turning"):
        return backend.write_turning(query, key, value, kv, slot_mapping), kv.met
    backend.write(key, value, kv, slot_mapping)
    return query, kv
