"""Prefill that computes nothing twice: like rows once, a beginning that all rows share once, a known one not at all.

`enable` puts this in the place of `generate`'s own prefill step. Blocks are shared, so memory falls with the work.
`generate_and_remember` tells the cache the answers too, which a chat's next turn brings again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from .cache import PagedCache
from .cache.cache import real_tokens
from .cache.sequences import RIGHT_PADDING
from .compat import CACHE_ARGUMENT

# What the outputs would have to be expanded for besides logits; with any of these the rows are computed one by one.
_ROW_OUTPUTS = ("output_attentions", "output_hidden_states")
# What rows are told apart by; inputs of other kinds make rows differ that have the same tokens.
_TOKENS_AND_PADDING = {CACHE_ARGUMENT, "attention_mask", "position_ids", "use_cache", "logits_to_keep"}


@dataclass(frozen=True)
class _Prompts:
    """What a call of `generate` prefilled: the columns of its rows, and how many of each are padding."""

    cache: PagedCache
    rows: list[list[int]]
    padding: list[int]


# The prompts of the call of `generate` that runs in this context.
_prefilled: ContextVar[list[_Prompts] | None] = ContextVar("prefilled", default=None)


def generate_and_remember(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`generate(...)`; its cache can then find the blocks of prompts and answers by their tokens."""
    noted: list[_Prompts] = []
    token = _prefilled.set(noted)
    try:
        out = generate(*args, **kwargs)
    finally:
        _prefilled.reset(token)
    for prompts in noted:
        _remember_answers(prompts, getattr(out, "sequences", out))
    return out


def _remember_answers(prompts: _Prompts, answers: Any) -> None:
    stored = prompts.cache.sequences
    if not isinstance(answers, torch.Tensor) or answers.dim() != 2 or answers.shape[0] != stored.batch_size:
        return
    rows = answers[:, : stored.columns].tolist()
    if [stored.columns - padding for padding in prompts.padding] != stored.lengths:
        return
    if any(row[: len(prompt)] != prompt for row, prompt in zip(rows, prompts.rows, strict=True)):
        return
    stored.remember([row[padding:] for row, padding in zip(rows, prompts.padding, strict=True)])


def _note(cache: Any, input_ids: torch.Tensor, mask: Any, config: Any, model_kwargs: dict) -> None:
    """Note the prompts if every token that the cache will hold after this call is one of the call's output."""
    noted = _prefilled.get()
    if noted is None or not isinstance(cache, PagedCache) or cache.sequences.prefixes is None:
        return
    if config.num_beams > 1 or not cache.can_share_prefixes or model_kwargs.get("inputs_embeds") is not None:
        return
    if not set(model_kwargs) <= _TOKENS_AND_PADDING or not _counts_from_left_padding(
        input_ids, mask, model_kwargs.get("position_ids")
    ):
        return
    prompts, padding = real_tokens(input_ids, mask)
    known = cache.sequences.known_tokens()
    if known is None:
        return
    if all(prompt[: len(told)] == told for prompt, told in zip(prompts, known, strict=False)):
        noted.append(_Prompts(cache, input_ids.tolist(), padding))


def shared_prefill(
    model: Any, prefill: Callable[..., Any], input_ids: torch.Tensor, config: Any, model_kwargs: dict, **kwargs: Any
) -> Any:
    """`model._prefill(input_ids, generation_config, model_kwargs, ...)` with the work of like rows shared.

    Raises `ValueError` for right padding, before anything is computed.
    """
    cache, mask = model_kwargs.get(CACHE_ARGUMENT), model_kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        mask = mask.cpu()  # only looked at: one wait for the device instead of several
    if not getattr(config, "is_assistant", False):
        _refuse_right_padding(mask)
    _note(cache, input_ids, mask, config, model_kwargs)
    if not _applies(cache, input_ids, mask, config, model_kwargs):
        return prefill(input_ids, config, model_kwargs, **kwargs)
    recorded = cache.sequences.record_past
    try:
        return _shared(model, prefill, input_ids, mask, config, model_kwargs, **kwargs)
    except BaseException:
        # The beginning that was shared is of this prompt alone: the cache was empty, and is so again.
        cache.reset(keep_prefixes=True)
        raise
    finally:
        cache.sequences.record_past = recorded


def _refuse_right_padding(mask: Any) -> None:
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or not mask.shape[1]:
        return
    bad = mask.any(1) & (mask[:, -1] == 0)
    if bad.any():
        raise ValueError(RIGHT_PADDING.format(rows=bad.nonzero().flatten().tolist()))


def _shared(model, prefill, input_ids, mask, config, model_kwargs, **kwargs) -> Any:
    cache = model_kwargs[CACHE_ARGUMENT]
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


def _applies(cache: Any, input_ids: torch.Tensor, mask: Any, config: Any, model_kwargs: dict) -> bool:
    return (
        isinstance(cache, PagedCache)
        and cache.can_share_prefixes
        and cache.sequences.is_empty()
        and input_ids.dim() == 2
        and input_ids.shape[1] > 1
        # Transformers 5.17 counts chunks from 0 also where the cache holds a beginning.
        and getattr(config, "prefill_chunk_size", None) is None
        and model_kwargs.get("inputs_embeds") is None
        and not any(getattr(config, name, None) for name in _ROW_OUTPUTS)
        and set(model_kwargs) <= _TOKENS_AND_PADDING
        and _counts_from_left_padding(input_ids, mask, model_kwargs.get("position_ids"))
    )


def _counts_from_left_padding(input_ids: torch.Tensor, mask: Any, positions: torch.Tensor | None) -> bool:
    """Whether rows differ in nothing but their tokens: padded on the left only, their positions 0, 1, 2, ..."""
    if mask is None:
        mask = torch.ones(input_ids.shape, dtype=torch.bool)
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
    if input_ids.shape[0] == 1:
        return [0], [0]
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
