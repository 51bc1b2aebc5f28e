"""Next-token logits of a text, from the exact model and from a model that reads a cache."""

import inspect
from collections.abc import Iterator

import torch

from eval.formats import refusals_as_bad_input
from eval.program import BadInput
from hf_paged_attention.compat import CACHE_ARGUMENT


@torch.no_grad()
def exact_logits(model, ids: torch.Tensor, last: int = 0) -> torch.Tensor:
    """Logits `[T, V]` of `ids [T]` (or of the `last` ones only) by eager attention in one pass, no cache anywhere."""
    model.set_attn_implementation("eager")
    logits = _forward(model, ids, last, "the exact model", use_cache=False)
    _refuse_nan(logits, len(ids) - len(logits), "the exact model", "try --dtype float32, or another model")
    return logits


@torch.no_grad()
def cached_logits(
    model, ids: torch.Tensor, fmt, cache, chunk: int = 0, last: int = 0
) -> Iterator[tuple[int, torch.Tensor]]:
    """Logits of `ids [T]` fed `chunk` tokens at a time (0: all at once) through `cache`.

    `last`: of that many at the end of each chunk only. Yields (position of the first row, logits `[≤ chunk, V]`). What
    attention reads has been through the cache, also within one pass: that is the plugin's contract, and what makes a
    one-pass perplexity a fair one.

    Raises:
        BadInput: the plugin refuses the model or the device, cache or memory is full, or a logit is not a number.
    """
    model.set_attn_implementation(fmt.attn_implementation)
    who = f"--kv-dtype {fmt.name}"
    chunk = chunk or len(ids)
    begun = cache.get_seq_length()
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        logits = _forward(model, part, last, who, use_cache=True, **{CACHE_ARGUMENT: cache})
        first = start + len(part) - len(logits)
        _refuse_nan(logits, begun + first, who, "store more bits, or try --dtype float32")
        yield first, logits


def exact_answer_logits(model, prompt: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """Logits `[A, V]` by which the exact model, after `prompt [T]`, foretells each token of `answer [A]`."""
    return exact_logits(model, torch.cat([prompt, answer]), last=len(answer) + 1)[:-1]


def answer_logits(model, prompt: torch.Tensor, answer: torch.Tensor, fmt, cache, chunk: int = 0) -> torch.Tensor:
    """The same out of an empty `cache`: the prompt `chunk` tokens at a time, then the answer token by token."""
    *_, (_, after_prompt) = cached_logits(model, prompt, fmt, cache, chunk, last=1)
    steps = [logits for _, logits in cached_logits(model, answer[:-1], fmt, cache, 1)] if len(answer) > 1 else []
    return torch.cat([after_prompt, *steps])


def _forward(model, ids: torch.Tensor, last: int, who: str, **arguments) -> torch.Tensor:
    if last and "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = last  # a prompt's other logits are large and not wanted
    with refusals_as_bad_input(who):
        return model(ids[None], **arguments).logits[0, -last:]


def _refuse_nan(logits: torch.Tensor, start: int, who: str, way_out: str) -> None:
    bad = logits.isnan().any(-1)
    if bad.any():
        position = start + int(bad.nonzero()[0])
        raise BadInput(f"{who}: NaN logits at position {position} of the context ({int(bad.sum())} such); {way_out}")
