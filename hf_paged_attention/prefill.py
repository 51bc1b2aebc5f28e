"""Prefill that computes nothing twice: like rows once, a beginning that all rows share once, a known one not at all.

`enable` puts this in the place of `generate`'s own prefill step. Blocks are shared, so memory falls with the work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .cache import PagedCache
from .cache.cache import real_tokens
from .compat import CACHE_ARGUMENT

# What the outputs would have to be expanded for besides logits; with any of these the rows are computed one by one.
_ROW_OUTPUTS = ("output_attentions", "output_hidden_states")


def shared_prefill(
    model: Any, prefill: Callable[..., Any], input_ids: torch.Tensor, config: Any, model_kwargs: dict, **kwargs: Any
) -> Any:
    """`model._prefill(input_ids, generation_config, model_kwargs, ...)` with the work of like rows shared."""
    cache = model_kwargs.get(CACHE_ARGUMENT)
    if not _applies(cache, input_ids, config, model_kwargs):
        return prefill(input_ids, config, model_kwargs, **kwargs)
    recorded = cache.sequences.record_past
    try:
        return _shared(model, prefill, input_ids, config, model_kwargs, **kwargs)
    except BaseException:
        # The beginning that was shared is of this prompt alone: the cache was empty, and is so again.
        cache.reset(keep_prefixes=True)
        raise
    finally:
        cache.sequences.record_past = recorded


def _shared(model, prefill, input_ids, config, model_kwargs, **kwargs) -> Any:
    cache, mask = model_kwargs[CACHE_ARGUMENT], model_kwargs.get("attention_mask")
    known = cache.match_prefix(input_ids, mask) if cache.sequences.prefixes is not None else 0
    unique, copies = _unique_rows(input_ids, mask)
    if len(unique) < len(copies) and known:
        cache.batch_select_indices(torch.tensor(unique))
    if len(unique) > 1 and not known:
        _prefill_common_beginning(model, cache, input_ids[unique], None if mask is None else mask[unique])
    if len(unique) == len(copies):
        outputs = prefill(input_ids, config, model_kwargs, **kwargs)
    else:
        rows = torch.tensor(unique, device=input_ids.device)
        fewer = {name: _select(value, rows, len(copies)) for name, value in model_kwargs.items()}
        outputs = prefill(input_ids[rows], config, fewer, **kwargs)
        cache.batch_select_indices(torch.tensor(copies))
        outputs.logits = outputs.logits.index_select(0, torch.tensor(copies, device=outputs.logits.device))
    cache.remember(input_ids, mask)
    return outputs


def _applies(cache: Any, input_ids: torch.Tensor, config: Any, model_kwargs: dict) -> bool:
    return (
        isinstance(cache, PagedCache)
        and cache.can_share_prefixes
        and cache.sequences.batch_size is None
        and input_ids.dim() == 2
        and input_ids.shape[1] > 1
        # Transformers 5.17 counts chunks from 0 also where the cache holds a beginning.
        and getattr(config, "prefill_chunk_size", None) is None
        and model_kwargs.get("inputs_embeds") is None
        and not any(getattr(config, name, None) for name in _ROW_OUTPUTS)
        # Inputs of other kinds (images, audio) make rows differ that have the same tokens.
        and set(model_kwargs) <= {CACHE_ARGUMENT, "attention_mask", "position_ids", "use_cache", "logits_to_keep"}
        and _counts_from_left_padding(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"))
    )


def _counts_from_left_padding(input_ids: torch.Tensor, mask: Any, positions: torch.Tensor | None) -> bool:
    """Whether rows differ in nothing but their tokens: padded on the left only, their positions 0, 1, 2, ..."""
    if mask is None:
        mask = torch.ones_like(input_ids)
    elif not isinstance(mask, torch.Tensor) or mask.shape != input_ids.shape:
        return False
    real = mask.bool()
    if (real[:, :-1] & ~real[:, 1:]).any():
        return False
    if positions is None:
        return True
    if positions.dim() != 2 or positions.shape[1] != input_ids.shape[1]:
        return False
    return not ((positions.to(real.device) != real.cumsum(1) - 1) & real).any()


def _unique_rows(input_ids: torch.Tensor, mask: torch.Tensor | None) -> tuple[list[int], list[int]]:
    """(first row of each kind, which of those each row is)."""
    first: dict[tuple, int] = {}
    marks = None if mask is None else mask.tolist()
    copies = []
    for row, tokens in enumerate(input_ids.tolist()):
        key = (tuple(tokens), None if marks is None else tuple(marks[row]))
        copies.append(first.setdefault(key, len(first)))
    return [copies.index(kind) for kind in range(len(first))], copies


def _select(value: Any, rows: torch.Tensor, batch: int) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == batch:
        return value.index_select(0, rows.to(value.device))
    return value


def _prefill_common_beginning(
    model: Any, cache: PagedCache, input_ids: torch.Tensor, mask: torch.Tensor | None
) -> None:
    """Compute the tokens that all prompts begin with in one row, and let every row start with its blocks."""
    prompts, padding = real_tokens(input_ids, mask)
    common = 0
    for tokens in zip(*prompts, strict=False):
        if len(set(tokens)) > 1:
            break
        common += 1
    columns = min(min(padding) + common, input_ids.shape[1] - 1)
    if common < cache.block_size or columns <= max(padding):
        return
    beginning = torch.tensor([prompts[0][:common]], device=input_ids.device)
    recorded, cache.sequences.record_past = cache.sequences.record_past, True
    with torch.no_grad():
        model(input_ids=beginning, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
    lengths = [columns - pad for pad in padding]
    rows = [cache.sequences.beginning(0, length) for length in lengths]
    valid = torch.arange(columns).unsqueeze(0) >= torch.tensor(padding).unsqueeze(1)
    cache.sequences.record_past = recorded
    cache.adopt(rows, lengths, valid)
