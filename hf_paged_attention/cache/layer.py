"""One attention layer of a paged cache, as Transformers sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from ..kernels import quantize, reference_rotate_heads, unrotate_heads
from ..types import BatchMetadata, PagedKV
from .batch import ForwardPass
from .formats import CacheFormat
from .sequences import Sequences
from .storage import GROWTH, Memory, Storage
from .table import BlockTable
from .tail import Unsealed
from .writing import write_beside

# Which layer's keys the code that is being traced holds. A compiler follows a thread's own variable, not an attribute
# of a tensor; outside of tracing nothing reads it.
traced = threading.local()


class PagedLayer(CacheLayerMixin):
    """Keys and values of one layer in blocks. `update` only hands the new ones on; `store` writes them.

    Writing waits for the attention function, which alone knows from the mask which tokens are real.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, index: int, sequences: Sequences, format: CacheFormat, window: int | None):
        super().__init__()
        self.index = index  # among the paged layers of the cache
        self.sequences = sequences
        self.format = format
        self.window = window
        # What the attention function worked out for this layer: (what was asked, spec, backend).
        self.call: tuple[Any, ...] | None = None
        self.is_sliding = window is not None
        if self.is_sliding:
            self.sliding_window = window
        self.storage: Storage | None = None
        self.lent: Memory | None = None  # of a cache that is gone: the storage begins with it
        self._arrived: torch.Tensor | None = None  # keys that `update` handed on and that are not stored yet

    def __repr__(self) -> str:
        return f"PagedLayer(kv_dtype={self.format.name!r}, window={self.window}, blocks={self.num_blocks_in_use})"

    @property
    def table(self) -> BlockTable:
        return self.sequences.tables[self.window]

    @property
    def num_blocks_in_use(self) -> int:
        return self.table.pool.num_used

    # Transformers' protocol -----------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.storage = Storage(self.format, self.sequences.block_size, key_states, value_states, self.lent)
        self.lent = None
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mark the new keys as this layer's and return them: the attention function stores and attends.

        key_states `[B, Hkv, T, D]`, value_states `[B, Hkv, T, Dv]`. Raises `RuntimeError` if the keys of the previous
        layer never reached the attention function: the model would attend to new keys alone. Raises `ValueError` if
        the shape is another model's.
        """
        if torch.compiler.is_compiling() and self.sequences.device_state is not None:
            traced.layer = self
            return key_states, value_states
        return self._hand_on(key_states, value_states)

    @torch.compiler.disable
    def _hand_on(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.sequences.device_state is not None:
            key_states.paged_layer = self
            return key_states, value_states
        self.sequences.expect_attention(self.index)
        if self.storage is None or not self.storage.num_blocks:  # nothing stored: a refused model's shape does not bind
            self.lazy_initialization(key_states, value_states)
        else:
            self._check_shape(key_states, value_states)
        self._arrived = key_states
        # The tensor itself says whose it is: that holds under threads, nested models and layers that read another
        # layer's keys (Gemma 3n), and is lost exactly when a model changes keys or values after caching them.
        key_states.paged_layer = value_states.paged_layer = self
        return key_states, value_states

    def _check_shape(self, key: torch.Tensor, value: torch.Tensor) -> None:
        held = self.storage
        expected = (held.num_heads, held.key_dim, held.value_dim)
        given = (key.shape[1], key.shape[-1], value.shape[-1])
        if given != expected:
            raise ValueError(
                f"This cache holds (KV heads, key size, value size) = {expected} but the keys and values that arrive "
                f"have {given}: it belongs to another model. Build a PagedCache from this model's config."
            )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the columns of the mask that matter: the new ones; older padding was never stored."""
        return query_length, self.sequences.columns

    def get_seq_length(self) -> int:
        return self.sequences.columns

    def get_max_length(self) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        return -1 if self.sequences.batch_size is None else self.sequences.batch_size

    @property
    def record_past(self) -> bool:
        return self.sequences.record_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.sequences.record_past = value

    def activate_past_recording(self) -> None:
        self.sequences.record_past = True

    def reset(self) -> None:
        self.forget()

    def forget(self, keep_fit: bool = False) -> None:
        self._arrived = None
        if self.storage is not None and not keep_fit:
            self.storage.forget_fit()

    # For the attention function ---------------------------------------------------------------------------------------

    @property
    def has_arrived(self) -> bool:
        """Whether keys were handed on that are not stored yet (a layer that shares these keys comes later)."""
        return self._arrived is not None

    def enter(self, batch_size: int, width: int, valid: Callable[[], torch.Tensor | None]) -> ForwardPass:
        """The forward pass that the keys in hand belong to; see `Sequences.enter`."""
        if not self.has_arrived:
            return self.sequences.current
        try:
            return self.sequences.enter(self.index, batch_size, width, valid)
        except Exception:
            self._arrived = None
            raise

    def store(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: ForwardPass, batch: BatchMetadata,
        backend,
    ) -> tuple[torch.Tensor, PagedKV]:  # fmt: skip
        """Let the backend write the real tokens' keys `[N, Hkv, D]` and values `[N, Hkv, Dv]`.

        They go into their slots, or into the tail and the blocks that they complete. Returns what is to attend: the
        queries `[N, Hq, D]`, and the pages as these meet them.
        """
        self._arrived = None
        self.sequences.awaited = None
        self.storage.ensure(self.table.pool.capacity, self.table.pool.max_blocks, self.blocks_to_come)
        copies = step.copies[self.window]
        if copies:
            self.storage.copy_blocks([copy.source for copy in copies], [copy.destination for copy in copies])
        if not self.storage.is_fitted and key.shape[0]:
            previous = self.storage.fit(key)
            if previous is not None:
                self._encode_anew(previous)
        if self.format.needs_tail:
            self._store_in_tail(key, value, step, batch, backend)
        kv = self.storage.kv()
        if key.shape[0] and not self.format.needs_tail:
            query, kv = write_beside(backend, query, key, value, kv, batch.slot_mapping)
        self.sequences.leave(self.index)
        return query, kv

    def blocks_to_come(self) -> int | None:
        """Blocks that the table will have when rows are as long as the present call of `generate` can make them."""
        sequences = self.sequences
        # With an index blocks stay when their rows are gone.
        if sequences.longest is None or sequences.prefixes is not None:
            return None
        # Many short calls (a draft's, a token at a time) would copy everything for every block that they add.
        if sequences.longest - sequences.began < sequences.began * GROWTH:
            return None
        more = sequences.longest - sequences.columns_given
        return self.table.capacity_for(sequences.lengths, more, sequences.keeps_past) if more >= 0 else None

    def _store_in_tail(self, key, value, step: ForwardPass, batch: BatchMetadata, backend) -> None:
        self.storage.ensure_tail(self.sequences.tail.pool.capacity)
        if step.tail_copies:
            copies = step.tail_copies
            self.storage.copy_tail_blocks([copy.source for copy in copies], [copy.destination for copy in copies])
        if not key.shape[0]:
            return
        kv = self.storage.kv()
        if batch.tail.slot_mapping is not None:
            backend.write(key, value, kv.tail, batch.tail.slot_mapping)
        if batch.tail.seal_blocks.shape[0]:
            backend.seal(key, value, kv, batch)

    def unseal(self, opened: list[Unsealed]) -> None:
        """Decode the blocks that a crop opened into the tail."""
        if not self.format.needs_tail or not opened:
            return
        self.storage.ensure_tail(self.sequences.tail.pool.capacity)
        rows = self.table.rows
        self.storage.unseal([rows[each.row][each.index] for each in opened], [each.block for each in opened])

    def kv(self) -> PagedKV:
        return self.storage.kv()

    def _encode_anew(self, previous: torch.Tensor) -> None:
        """Keys stored under the `previous` factor `[Hkv, D]` are stored under the present one."""
        held = [block for block, count in enumerate(self.table.pool.reference_counts) if count]
        kv = self.storage.kv()
        stored = kv.k_pool.view(torch.uint8)  # float8 cannot be indexed everywhere; bytes can
        turned = stored[held].view(kv.k_pool.dtype).float() * kv.k_scale[held].unsqueeze(-1)
        blocks, size, heads, dim = turned.shape
        unturned = unrotate_heads(turned.reshape(blocks * size, heads, dim), previous)
        again = reference_rotate_heads(unturned, kv.turn_factor, divide=True).view(blocks, size, heads, dim)
        codes, kv.k_scale[held] = quantize(again, kv.k_pool.dtype)
        stored[held] = codes.view(torch.uint8)
