"""Greedy continuations of a prompt, and how far two of them are from each other."""

from dataclasses import dataclass
from difflib import SequenceMatcher

import torch

from eval.formats import refusals_as_bad_input
from hf_paged_attention.compat import CACHE_ARGUMENT


@dataclass
class Continuation:
    """What was generated: token ids, and where eager chose them the logits `[n, V]` it chose by."""

    tokens: list[int]
    logits: torch.Tensor | None = None


@torch.no_grad()
def continuation(model, ids: torch.Tensor, new_tokens: int, fmt=None, logits: bool = True) -> Continuation:
    """Greedy tokens after the prompt `ids [T]`: eager's, with their logits where wanted, or those of a format."""
    options = {"max_new_tokens": new_tokens, "do_sample": False, "num_beams": 1, "return_dict_in_generate": True}
    if model.generation_config.pad_token_id is None:
        eos = model.generation_config.eos_token_id
        options["pad_token_id"] = (eos[0] if isinstance(eos, list) else eos) or 0
    if fmt is None:
        model.set_attn_implementation("eager")
        options["output_logits"] = logits
    else:
        model.set_attn_implementation(fmt.attn_implementation)
        options[CACHE_ARGUMENT] = fmt.new_cache(model)
    with refusals_as_bad_input(f"--kv-dtype {fmt.name}" if fmt else "the exact model"):
        out = model.generate(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], **options)
    return Continuation(
        out.sequences[0, len(ids) :].tolist(), torch.cat(out.logits) if fmt is None and logits else None
    )


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many tokens two texts share from their start."""
    shared = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        shared += 1
    return shared


def in_common(a: list[int], b: list[int]) -> float:
    """Share of the longer text's tokens that lie in blocks which both have in the same order."""
    blocks = SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks) / max(len(a), len(b), 1)


def edit_distance(a: list[int], b: list[int]) -> int:
    """Fewest insertions, deletions and substitutions of a token that make `b` of `a` (Levenshtein)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]
