"""Next-token logits of a text, from the exact model and from a model that reads a cache."""

from collections.abc import Iterator

import torch

from eval.program import BadInput
from hf_paged_attention.compat import CACHE_ARGUMENT


@torch.no_grad()
def exact_logits(model, ids: torch.Tensor) -> torch.Tensor:
    """Logits `[T, V]` of `ids [T]` by eager attention in one pass, no cache anywhere."""
    model.set_attn_implementation("eager")
    logits = model(ids[None], use_cache=False).logits[0]
    _refuse_nan(logits, 0, "the exact model", "try --dtype float32, or another model")
    return logits


@torch.no_grad()
def cached_logits(model, ids: torch.Tensor, fmt, cache, chunk: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
    """Logits of `ids [T]` fed `chunk` tokens at a time (0: all at once) through `cache`.

    Yields (position of the first row, logits `[≤ chunk, V]`). What attention reads has been through the cache, also
    within one pass: that is the plugin's contract, and what makes a one-pass perplexity a fair one.

    Raises:
        BadInput: the plugin refuses the model or the device, the cache is full, or a logit is not a number.
    """
    model.set_attn_implementation(fmt.attn_implementation)
    chunk = chunk or len(ids)
    for start in range(0, len(ids), chunk):
        try:
            logits = model(ids[None, start : start + chunk], use_cache=True, **{CACHE_ARGUMENT: cache}).logits[0]
        except NotImplementedError as error:
            raise BadInput(f"--kv-dtype {fmt.name}: {error}") from error
        _refuse_nan(logits, start, f"--kv-dtype {fmt.name}", "store more bits, or try --dtype float32")
        yield start, logits


def _refuse_nan(logits: torch.Tensor, start: int, who: str, way_out: str) -> None:
    bad = logits.isnan().any(-1)
    if bad.any():
        position = start + int(bad.nonzero()[0])
        raise BadInput(f"{who}: NaN logits at position {position} of the window ({int(bad.sum())} such); {way_out}")
