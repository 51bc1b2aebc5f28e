"""`PagedCache`: the cache that a user passes to `generate`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ..backends import check_backend_name
from ..compat import cannot_crop, heads_of_layers, transformers_layer
from ..kernels.int4 import GROUP
from .formats import AS_THEY_ARRIVE, CacheFormat, get_format
from .hybrid import PagedHybridLayer
from .layer import PagedLayer
from .options import Options
from .plan import KEYS_IN_BLOCKS, BuiltFor, plan_of, watch_of
from .sequences import Beginning, Sequences


class PagedCache(Cache):
    """A Transformers cache whose keys and values lie in blocks, optionally in 8 or 4 bits.

    Args:
        config: the model's config (or its text part).
        kv_dtype: "auto" (as keys and values arrive), "bf16", "fp16", "int8" or "fp8" (e4m3), both with turned keys and
            one scale a token and KV head, or "int4", with a scale and a zero point for 32 tokens of a key's channel and
            for 32 channels of a value; the newest 64 tokens of each sequence, and those of a block that is not full,
            are then held as they arrived. A pair stores keys and values differently: ("int8", "int4").
        exact_layers: layers that store keys and values as they arrive whatever kv_dtype says, by their index in the
            cache; negative ones count from the last: (0, -1).
        block_size: tokens a block, a power of two from 16 to 256; None picks the default, 64, or 128
            where keys and values have 8 bits.
        max_blocks: bound of the blocks of one layer; None: as many as memory holds.
        dtype: the dtype in which keys will arrive, for `bytes_per_token` before the first forward pass.
        backend: "auto", or the name of a registered backend.
        prefix_caching: keep the full blocks of earlier prompts and answers findable by their tokens, also after
            `reset(keep_prefixes=True)`. `enable(model)` makes `generate` look and tell; without it call `match_prefix`
            and `remember`. Sliding layers then keep every block. Least recently used blocks go first when
            `max_blocks` presses.
        on_unsupported: what to do when the preferred backend cannot run a layer: "warn" (take a slower one, in a log
            line) or "error".

    Padding is neither stored nor attended. Layers that are not softmax attention over keys (linear attention,
    convolutions, MLA's latents) stay as Transformers keeps them.

    Raises:
        TypeError: for a config that is none, or a dtype that is none.
        ValueError: for an argument that is not one of the above, or an encoder-decoder config; from a forward pass of
            a model of another shape than the config's.
        CacheFullError: from a forward pass, when `max_blocks` is too small; nothing of that pass is stored. Recurrent
            states that Transformers keeps are overwritten by then: such a cache refuses to go on until `reset()`.
    """

    def __init__(
        self,
        config: Any,
        *,
        kv_dtype: str | tuple[str, str] = "auto",
        exact_layers: Sequence[int] = (),
        block_size: int | None = None,
        max_blocks: int | None = None,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
        prefix_caching: bool = False,
        on_unsupported: str = "warn",
    ):
        format = get_format(kv_dtype)
        check_backend_name(backend)
        _check_arguments(config, block_size, max_blocks, dtype)
        _check_groups(kv_dtype, format, block_size or format.block_size)
        self.text_config = config.get_text_config(decoder=True)
        self.kv_dtype = format.name
        self.dtype = dtype
        self.block_size = block_size or format.block_size
        self._plan = plan = plan_of(self.text_config)
        windows = [argument[0] if kind == "hybrid" else argument for kind, argument in plan if kind in KEYS_IN_BLOCKS]
        self.exact_layers = _layer_indices(exact_layers, len(plan))
        formats = [AS_THEY_ARRIVE if index in self.exact_layers else format for index in range(len(plan))]
        options = Options(backend, on_unsupported)
        self.sequences = Sequences(
            self.block_size,
            set(windows),
            max_blocks,
            len(windows),
            options,
            prefix_caching=prefix_caching,
            has_tail=any(
                each.needs_tail for each, (kind, _) in zip(formats, plan, strict=True) if kind in KEYS_IN_BLOCKS
            ),
        )
        self.sequences.built_for = BuiltFor(self.text_config)
        layers: list[Any] = []
        for (kind, argument), layer_format in zip(plan, formats, strict=True):
            index = sum(isinstance(layer, PagedLayer) for layer in layers)
            if kind == "paged":
                layers.append(PagedLayer(index, self.sequences, layer_format, argument))
            elif kind == "hybrid":
                layers.append(PagedHybridLayer(index, self.sequences, layer_format, *argument))
            else:
                layers.append(transformers_layer(kind, argument))
        self.format = format
        # What captured decode steps keep with this cache (`hf_paged_attention.arena`), and whose cache it is.
        self.arena: Any = None
        self.is_built_by_generate = False
        self.may_compile = False  # whether the steps of the present call of `generate` can be
        self._compiles = False
        self._watch = watch_of(plan, self.text_config)
        super().__init__(layers=layers)

    def __repr__(self) -> str:
        return f"PagedCache(kv_dtype={self.kv_dtype!r}, block_size={self.block_size}, layers={len(self.layers)})"

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile its forward over this cache.

        Only while an enabled model asks for it (`enable(model, decode="compile")`): blocks are allocated on the host
        between steps, and a cache by itself has no place there.
        """
        return self._compiles

    @contextlib.contextmanager
    def compileable(self) -> Iterator[None]:
        """Within it the cache says that it is compileable."""
        self._compiles = True
        try:
            yield
        finally:
            self._compiles = False

    @property
    def _paged(self) -> list[PagedLayer]:
        return [layer for layer in self.layers if isinstance(layer, PagedLayer)]

    @property
    def _others(self) -> list[Any]:
        """Layers that Transformers keeps, and hybrid ones, whose states it keeps."""
        return [layer for layer in self.layers if type(layer) is not PagedLayer]

    # Transformers' protocol: what concerns the sequences is done once, not once a layer -------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand keys and values `[B, Hkv, T, D]` to layer `layer_idx`; see `PagedLayer.update`."""
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"Keys of layer {layer_idx} arrive, but this cache has {len(self.layers)} layers: it belongs to "
                "another model. Build a PagedCache from this model's config."
            )
        if self._watch is not None:
            self._watch.ask(layer_idx, "keys", ("keys", layer_idx))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    # States that Transformers keeps: where a pass is, is all that we learn from these

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """As in Transformers; 5.17's models ask it once a pass and layer."""
        if self._watch is not None and layer_idx is not None:
            self._watch.ask(layer_idx, "states", ("has", layer_idx, state_idx))
        return super().has_previous_state(layer_idx, state_idx)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """As in Transformers (newer than 5.17), whose models ask it once a pass and layer."""
        if self._watch is not None:
            self._watch.ask(layer_idx, "states", ("conv", layer_idx, state_idx))
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        if self._watch is not None:
            self._watch.ask(layer_idx, "states", ("recurrent", layer_idx, state_idx))
        return super().get_recurrent_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        recurrent = any(any(getattr(one, "is_recurrent_states_initialized", {}).values()) for one in self._others)
        if self._watch is not None and not recurrent:  # else the update of that state is to come
            self._watch.reach(layer_idx, "states")
        self.sequences.check_batch(conv_states.shape[0])
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if self._watch is not None:
            self._watch.reach(layer_idx, "states")
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens a row that the cache has been given, padding included."""
        if self.sequences.device_state is not None:
            return self.sequences.device_state.columns  # a number would be captured
        if self._paged:
            return self.sequences.columns
        return super().get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(length, offset) of the columns that a mask must describe: those of the new tokens."""
        if self.sequences.device_state is not None:
            return query_length, 0
        if self._watch is not None:
            self._watch.sizes_asked(layer_idx, query_length)
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if isinstance(layer, CacheLayerMixin) and not isinstance(layer, PagedLayer):
            return layer.get_mask_sizes(query_length)
        if self._paged:
            return query_length, self.sequences.columns
        return super().get_mask_sizes(query_length, layer_idx)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Where the new tokens stand among the columns that `get_mask_sizes` speaks of."""
        return 0 if self.sequences.device_state is not None else self.get_seq_length(layer_idx)

    def reserve(self, tokens: int) -> None:
        """Memory for `tokens` more tokens a row, so that pools keep their addresses while these are written."""
        for layer in self._paged:
            table = layer.table
            blocks = table.capacity_for(self.sequences.lengths, tokens, self.sequences.keeps_past)
            wanted = max(blocks, layer.storage.num_blocks)
            layer.storage.ensure(wanted, table.pool.max_blocks, layer.blocks_to_come)
            if self.sequences.tail is not None:
                layer.storage.ensure_tail(self.sequences.tail.capacity_one_by_one())
            layer.storage.keeps_memory = True
            layer.storage.serve_any_size()

    def reset(self, keep_prefixes: bool = False) -> None:
        """Forget every sequence and give all blocks back, but those that keep_prefixes=True leaves to be found."""
        kept = keep_prefixes and self.sequences.prefixes is not None
        self.sequences.reset(keep_prefixes=kept)
        if self._watch is not None:
            self._watch.clear()
        for index, layer in enumerate(self.layers):
            if isinstance(layer, PagedLayer):
                layer.forget(keep_fit=kept)
            else:  # a new one: Transformers 5.17 only zeroes what such a layer holds, and its length stays
                self.layers[index] = transformers_layer(*self._plan[index])
                if getattr(layer, "record_past", False):
                    self.layers[index].activate_past_recording()

    @property
    def can_share_prefixes(self) -> bool:
        """Whether a row can begin with another's blocks: every layer's past lies in them."""
        return self._watch is None

    def match_prefix(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> int:
        """Begin the sequences with the stored blocks of the longest known beginnings of the prompts.

        input_ids and attention_mask `[B, T]` (left padding allowed), for an empty cache. Returns the number of columns
        that the cache now holds (0: nothing was known): give the model the rest, as `generate` does by itself. At
        least one column is left. Raises `ValueError` without `prefix_caching=True` or where the cache is not empty.
        """
        index = self.sequences.prefixes
        if index is None:
            raise ValueError("match_prefix needs PagedCache(..., prefix_caching=True).")
        if not self.sequences.is_empty():
            raise ValueError("match_prefix needs an empty cache: call reset(keep_prefixes=True) first.")
        if not self.can_share_prefixes:
            return 0
        prompts, padding = real_tokens(input_ids, attention_mask)
        found = [index.match(tokens) for tokens in prompts]
        columns = min(pad + len(blocks) * self.block_size for pad, blocks in zip(padding, found, strict=True))
        columns = min(columns, input_ids.shape[1] - 1)
        lengths = [max(0, columns - pad) for pad in padding]
        if columns <= 0 or not any(lengths):
            return 0
        rows = []
        for blocks, length in zip(found, lengths, strict=True):
            needed = blocks[: -(-length // self.block_size)]
            blocks = {window: [by_table[window] for by_table in needed] for window in self.sequences.tables}
            rows.append(Beginning(blocks, sealed=len(needed) * self.block_size))
        valid = torch.arange(columns).unsqueeze(0) >= torch.tensor(padding).unsqueeze(1)
        self.adopt(rows, lengths, valid)
        self.sequences.remember(prompts)
        return columns

    def adopt(self, rows: list[Beginning], lengths: list[int], valid: torch.Tensor) -> None:
        """Begin with stored blocks; see `Sequences.adopt`."""
        opened = self.sequences.adopt(rows, lengths, valid)
        for layer in self._paged:
            layer.unseal(opened)

    def remember(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> None:
        """Make the full blocks of the present rows findable by their tokens `[B, T]`, T at least what is stored."""
        if self.sequences.prefixes is None:
            return
        self.sequences.remember(real_tokens(input_ids, attention_mask)[0])

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` tokens of each row.

        With int4 keys the newest 64 tokens are held as they arrived, and a crop of fewer goes on from those. A larger
        one may end in a block that was encoded: its tokens then go on as what their codes say.

        Raises, changing nothing, `ValueError` for a positive number and `RuntimeError` where a sliding layer no longer
        has the keys or a linear-attention layer its state.
        """
        tokens_to_remove = int(tokens_to_remove)  # a tensor on transformers 5.17
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number.")
        if self._watch is not None:
            self._watch.begin()
        for layer in self._others:
            reason = cannot_crop(layer) if tokens_to_remove else None
            if reason:
                raise RuntimeError(f"crop({tokens_to_remove}) on a {type(layer).__name__}: {reason}.")
        opened = self.sequences.crop(-tokens_to_remove)
        for layer in self._paged:
            layer.unseal(opened)
        for layer in self._others:
            layer.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i becomes row `beam_idx[i]`: block tables change, blocks are shared, nothing is copied."""
        self.sequences.select(beam_idx.tolist())
        for layer in self._others:
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes `repeats` rows that share its blocks."""
        if self.batch_size is not None and self.batch_size > 0:
            self._select([row for row in range(self.batch_size) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` (numbers, or a boolean mask)."""
        rows = torch.as_tensor(indices)
        self._select((rows.nonzero().flatten() if rows.dtype == torch.bool else rows).tolist())

    def _select(self, rows: list[int]) -> None:
        self.sequences.select(rows)
        for layer in self._others:
            if hasattr(layer, "conv_states"):  # Transformers knows reordering alone for these; it selects as well
                layer.reorder_cache(torch.tensor(rows))
            else:
                layer.batch_select_indices(torch.tensor(rows))

    @property
    def batch_size(self) -> int:
        if self._paged:
            return self._paged[0].batch_size
        return super().batch_size

    # What it costs ----------------------------------------------------------------------------------------------------

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all paged layers, scales and zero points included.

        With int4 keys those of a token that is encoded; the newest ones are held as they arrived, beside the others.
        """
        return sum(self._bytes_per_token(layer) for layer in self._paged)

    def _bytes_per_token(self, layer: PagedLayer) -> int:
        if layer.storage is not None:
            return layer.storage.bytes_per_token
        config = self.text_config
        heads, dim = heads_of_layers(config)[self.layers.index(layer)]
        arriving = self.dtype or getattr(config, "dtype", None) or torch.get_default_dtype()
        return heads * layer.format.bytes_per_head(dim, dim, arriving)

    def stats(self) -> dict[str, Any]:
        """Numbers of the moment, over all paged layers.

        `blocks_used`, `blocks_free`, `blocks_shared` count a block once a layer; `bytes_used` are those of the blocks
        in use and `bytes_reserved` those of the pools; `tokens` are those of all rows (padding is not stored);
        `fragmentation` is the share of the slots in use that hold no token (1 - tokens / slots; shared blocks make it
        negative), for the layers that keep every token. `tail_blocks` are those of int4 keys' newest tokens, held as
        they arrived beside the others; their bytes are in `bytes_used`.
        """
        used = free = shared = bytes_used = reserved = tail_blocks = 0
        for layer in self._paged:
            pool = layer.table.pool
            used, free, shared = used + pool.num_used, free + pool.num_free, shared + pool.num_shared
            bytes_used += pool.num_used * self.block_size * self._bytes_per_token(layer)
            if layer.storage is not None:
                reserved += layer.storage.bytes
                if layer.format.needs_tail:
                    tail_blocks += self.sequences.tail.pool.num_used
                    bytes_used += (
                        self.sequences.tail.pool.num_used * self.block_size * layer.storage.tail_bytes_per_token
                    )
        tokens = sum(self.sequences.lengths)
        full = self.sequences.tables.get(None)
        slots = full.pool.num_used * self.block_size if full is not None else 0
        return {
            "blocks_used": used,
            "blocks_free": free,
            "blocks_shared": shared,
            "tail_blocks": tail_blocks,
            "bytes_used": bytes_used,
            "bytes_reserved": reserved,
            "bytes_per_token": self.bytes_per_token,
            "tokens": tokens,
            "sequences": self.sequences.batch_size or 0,
            "fragmentation": 1 - tokens / slots if slots else 0.0,
            "kv_dtype": self.kv_dtype,
            "block_size": self.block_size,
        }


def real_tokens(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> tuple[list[list[int]], list[int]]:
    """The tokens of each row of `[B, T]` behind its left padding, and the length of that padding.

    Raises `ValueError` for a mask with padding behind real tokens.
    """
    rows = input_ids.tolist()
    if attention_mask is None:
        return rows, [0] * len(rows)
    real = attention_mask[:, : input_ids.shape[1]].bool().cpu()
    if (real[:, :-1] & ~real[:, 1:]).any():
        raise ValueError("attention_mask has padding behind real tokens; prefixes are found in left-padded ones only.")
    padding = (real.int().cumsum(1) == 0).sum(1).tolist()
    return [row[pad:] for row, pad in zip(rows, padding, strict=True)], padding


def _check_groups(kv_dtype: Any, format: CacheFormat, block_size: int) -> None:
    if format.key.packed and block_size < GROUP:
        raise ValueError(
            f"block_size={block_size} is too small for kv_dtype={kv_dtype!r}: int4 keys are encoded {GROUP} tokens "
            f"together, in one block. Use block_size={GROUP} or more, or None for the default of {format.block_size}."
        )


def _layer_indices(exact_layers: Any, layers: int) -> frozenset[int]:
    given = list(exact_layers) if isinstance(exact_layers, (tuple, list, set, frozenset, range)) else None
    if given is None or any(not isinstance(index, int) or isinstance(index, bool) for index in given):
        raise ValueError(f"exact_layers={exact_layers!r} must be a sequence of layer indices, such as (0, -1).")
    for index in given:
        if not -layers <= index < layers:
            raise ValueError(
                f"exact_layers={exact_layers!r} names layer {index}, but the cache has {layers} layers: give indices "
                f"from {-layers} to {layers - 1}."
            )
    return frozenset(index % layers for index in given)


def _check_arguments(config: Any, block_size: Any, max_blocks: Any, dtype: Any) -> None:
    if not hasattr(config, "get_text_config"):
        raise TypeError(f"config is a {type(config).__name__}, not a model's config. Pass model.config.")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype={dtype!r} is a {type(dtype).__name__}; it must be a torch.dtype or None.")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"config is of an encoder-decoder model ({config.model_type}); PagedCache holds a decoder-only model's "
            "keys. Leave the cache to generate() for this model."
        )
    if block_size is not None and (
        not isinstance(block_size, int) or not 16 <= block_size <= 256 or block_size & (block_size - 1)
    ):
        raise ValueError(f"block_size={block_size!r} must be a power of two from 16 to 256, or None for the default.")
    if max_blocks is not None and (not isinstance(max_blocks, int) or max_blocks < 1):
        raise ValueError(f"max_blocks={max_blocks!r} must be a positive number of blocks, or None for no bound.")
