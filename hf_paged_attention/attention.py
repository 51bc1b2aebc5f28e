"""The attention function that Transformers calls for `attn_implementation="paged_triton"`.

The one place that speaks Transformers' call: it finds the cache layer that the keys belong to, turns mask and lengths
into a `BatchMetadata` (once a forward pass), has the keys written, and asks the selected backend for the output. Keys
of any other cache are contiguous, and a contiguous tensor is a paged one with the identity block table: the same
kernels run on it.
"""

from __future__ import annotations

from typing import Any

import torch

from . import step_op  # noqa: F401  registers the operator
from .backends import Backend, select
from .cache.device_state import TAIL, DeviceState
from .cache.layer import PagedLayer, traced
from .cache.table import to_device
from .compat import extra_attention_arguments
from .masks import Bounds, MaskInfo, contiguous_bounds
from .types import AttentionSpec, BatchMetadata, PagedKV

NAME = "paged_triton"


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of query `[B, Hq, T, D]` over cached and new keys: (`[B, T, Hq, Dv]`, None).

    key `[B, Hkv, T, D]` and value `[B, Hkv, T, Dv]` are the new tokens' where a `PagedCache` handed them on, and
    those of the whole context otherwise. attention_mask: what `masks.paged_mask` made, or a 2D padding mask.

    Raises `ValueError` or `NotImplementedError`, before anything is computed, for what cannot be done: see `_refuse`.
    """
    if torch.compiler.is_compiling():
        layer = getattr(traced, "layer", None)
        traced.layer = None
        if layer is None or layer.sequences.device_state is None:
            return _untraced(
                module, query, key, value, attention_mask, scaling, dropout, sliding_window, softcap, s_aux, **kwargs
            )
    else:
        layer = getattr(key, "paged_layer", None)
    if layer is not None and layer.sequences.device_state is not None:
        return _decode_step(layer, query, key, value, scaling, softcap, s_aux), None
    if layer is not None:
        layer.sequences.awaited = None  # the keys came here, whatever becomes of them
        if layer.sequences.built_for is not None and getattr(module, "config", None) is not None:
            layer.sequences.built_for.refuse_another(module.config)
    _refuse(module, query, attention_mask, dropout, kwargs)
    info: MaskInfo | None = getattr(attention_mask, "paged_info", None)
    if info is not None:
        window = info.window
    else:
        window = sliding_window if layer is None or sliding_window is not None else layer.window
    if layer is not getattr(value, "paged_layer", None):
        raise NotImplementedError(
            f"{type(module).__name__} changes {'keys' if layer is None else 'values'} after caching them and before "
            "attention, which a paged cache cannot follow. Use this family without PagedCache (and without enable)."
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if layer is None:
        spec = AttentionSpec(scale, window, softcap, s_aux)
        return _attend_contiguous(query, key, value, attention_mask, spec), None
    call = _call_of(layer, query, scale, window, softcap, s_aux)
    return _attend_paged(layer, query, key, value, attention_mask, call), None


# Prefill and other caches keep their state on the host, where no compiler can follow: a graph break.
_untraced = torch.compiler.disable(lambda *arguments, **named: paged_attention(*arguments, **named))


def _call_of(layer: PagedLayer, query, scale, window, softcap, sinks) -> tuple[AttentionSpec, Backend]:
    """What the layer computes and on which backend: the same in every step, so it is worked out once."""
    asked = (query.dtype, query.device, query.shape[1], query.shape[-1], scale, window, softcap)
    known = layer.call
    if known is not None and known[0] == asked and known[1].sinks is sinks:
        return known[1:]
    stored = layer.storage
    # Layers alike are answered alike: a new cache asks once a kind of layer, not once a layer.
    kind = (asked, layer.format, layer.window, stored.num_heads, stored.key_dim, stored.value_dim, stored.arriving)
    if sinks is None and kind in layer.sequences.calls:
        layer.call = layer.sequences.calls[kind]
        return layer.call[1:]
    if layer.window is not None and (window is None or window > layer.window):
        raise ValueError(
            f"This layer attends to {'all keys' if window is None else f'{window} keys'}, but the cache built from the "
            f"model's config keeps a sliding window of {layer.window}. Build the PagedCache from this model's config."
        )
    spec = AttentionSpec(scale, window, softcap, sinks)
    options = layer.sequences.options
    layer.call = (asked, spec, select(query, layer.kv(), spec, options.backend, options.on_unsupported))
    if sinks is None:
        layer.sequences.calls[kind] = layer.call
    return layer.call[1:]


def _refuse(module, query, attention_mask, dropout: float, kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions=True needs attention weights, which paged attention never forms. Use "
            'attn_implementation="eager" for them.'
        )
    if dropout:
        raise ValueError(
            f"attention dropout={dropout} (training mode) is not supported by attn_implementation={NAME!r}. Call "
            'model.eval(), set attention_dropout=0, or train with attn_implementation="sdpa".'
        )
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask of shape {tuple(attention_mask.shape)} is not a 2D padding mask [batch, tokens], and "
            f'attn_implementation={NAME!r} cannot express others. Use attn_implementation="sdpa" for it.'
        )
    unknown = [name for name in extra_attention_arguments(type(module)) if kwargs.get(name) is not None]
    if unknown:
        raise NotImplementedError(
            f"{type(module).__name__} passes {', '.join(unknown)} to attention, which attn_implementation={NAME!r} "
            'does not compute. Use attn_implementation="eager" for this model.'
        )
    if getattr(module, "is_causal", True) is False:
        raise NotImplementedError(
            f"{type(module).__name__} is not causal (bidirectional or cross-attention), which "
            f'attn_implementation={NAME!r} does not compute. Use attn_implementation="sdpa" for this model.'
        )
    if torch.is_grad_enabled() and query.requires_grad:
        raise NotImplementedError(
            f"attn_implementation={NAME!r} computes no gradients. Run under torch.no_grad(), or train with "
            'attn_implementation="sdpa".'
        )


def _attend_paged(layer: PagedLayer, query, key, value, attention_mask, call) -> torch.Tensor:
    spec, backend = call
    batch_size, query_heads, width, _ = query.shape

    def valid() -> torch.Tensor | None:
        real = _new_token_mask(attention_mask, width)
        if hasattr(attention_mask, "paged_info"):  # a model's, whose windows count columns
            layer.sequences.refuse_gaps(real)
            if width == 1:
                layer.sequences.refuse_right_padding(real)
        return real

    step = layer.enter(batch_size, width, valid)
    batch = step.metadata(layer.table, query.device, width)
    real = step.real_tokens(query.device, width)
    query = _flat(query, real)
    if layer.has_arrived:
        query, kv = layer.store(query, _flat(key, real), _flat(value, real), step, batch, backend)
    else:
        kv = layer.kv()
    if real is not None and not real.shape[0]:  # nothing but padding: no kernel is started for no token
        return query.new_zeros(batch_size, width, query_heads, value.shape[-1])
    out = backend.attend(query, kv, batch, spec)
    if real is not None:
        padded = out.new_zeros(batch_size * width, query_heads, out.shape[-1])
        out = padded.index_copy_(0, real, out)
    return out.view(batch_size, width, query_heads, -1)


def _decode_step(layer: PagedLayer, query, key, value, scaling, softcap, sinks) -> torch.Tensor:
    """The same for one new token a row, as it is captured or compiled: lengths are tensors, checks were made before."""
    state = layer.sequences.device_state
    memory = layer.storage.memory()
    return torch.ops.hf_paged_attention.decode_step(
        query,
        key,
        value,
        *memory,
        sinks,
        state.query_start_loc,
        state.seq_lens,
        state.tables[layer.window],
        state.slots[layer.window],
        *_tail_of(layer, state),
        state.block_size,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        layer.call[1].window,
        softcap,
        layer.sequences.options.backend,
    )


def _tail_of(layer: PagedLayer, state: DeviceState) -> tuple[torch.Tensor | None, ...]:
    """Sealed lengths, table, slots, and the requests and blocks to seal; Nones for layers without a tail."""
    if not layer.format.needs_tail:
        return (None,) * 5
    return state.sealed_lens, state.tables[TAIL], state.slots[TAIL], state.requests, state.seal_blocks


def _new_token_mask(attention_mask: torch.Tensor | None, width: int) -> torch.Tensor | None:
    """Which new tokens are real, bool `[B, width]` on the CPU; None when all are.

    A single new token on a GPU counts as real without a look at the mask, which would make the host wait in each decode
    step: `generate` never marks the token that it just chose as padding.
    """
    if attention_mask is None or (width == 1 and attention_mask.device.type != "cpu"):
        return None
    valid = attention_mask[:, -width:].bool().cpu()
    return None if valid.all() else valid


def _flat(states: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """`[B, H, T, D]` to the real tokens `[N, H, D]`: a view where nothing is padded and strides allow."""
    # One operation instead of two in a decode step, which calls this three times a layer.
    tokens = states.squeeze(2) if states.shape[2] == 1 else states.transpose(1, 2).flatten(0, 1)
    return tokens if real is None else tokens.index_select(0, real)


def _attend_contiguous(query, key, value, attention_mask, spec: AttentionSpec) -> torch.Tensor:
    batch_size, query_heads, width, _ = query.shape
    bounds = contiguous_bounds(attention_mask, key.shape[2], width)
    kv = PagedKV(key.transpose(1, 2), value.transpose(1, 2))
    batch = _identity_batch(bounds, batch_size, width, query.device)
    out = select(query, kv, spec).attend(_flat(query, None), kv, batch, spec)
    return out.view(batch_size, width, query_heads, -1)


def _identity_batch(bounds: Bounds, rows: int, width: int, device: torch.device) -> BatchMetadata:
    """Each row is one block, as large as the next power of two; positions past its end are never read."""
    starts = bounds.starts or [0] * rows
    numbers = torch.tensor(
        [width * i for i in range(rows + 1)] + [bounds.end] * rows + list(range(rows)) + starts, dtype=torch.int32
    )
    query_start_loc, seq_lens, blocks, kv_start = to_device(numbers, device).split([rows + 1, rows, rows, rows])
    return BatchMetadata(
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=blocks.unsqueeze(1),
        slot_mapping=None,
        max_query_len=width,
        max_seq_len=bounds.end,
        block_size=1 << max(4, (bounds.end - 1).bit_length()),
        kv_start=None if bounds.starts is None else kv_start,
        query_lens=[width] * rows,
        host_seq_lens=[bounds.end] * rows,
        host_blocks=[[row] for row in range(rows)],
        host_kv_start=bounds.starts,
    )
