"""Questions with a right answer, and whether a model gives it by greedy decoding under a cache format."""

import time
from dataclasses import dataclass

import torch

from eval import divergence
from eval.logits import answer_logits, exact_answer_logits


@dataclass(frozen=True)
class Question:
    """A prompt, and the text that follows it when it is read rightly."""

    prompt: str
    answer: str


def encoded(question: Question, tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids of the prompt `[T]` and of the answer `[A]`.

    The whole is tokenised at once and split where the prompt's own tokens end, or before the first one that the answer
    changes: the tokens are those of the text, whatever a tokenizer joins.
    """
    whole = tokenizer(question.prompt + question.answer, return_tensors="pt").input_ids[0].long()
    prompt = tokenizer(question.prompt, return_tensors="pt").input_ids[0].long()
    shorter = min(len(whole) - 1, len(prompt))
    differs = (whole[:shorter] != prompt[:shorter]).nonzero()
    cut = int(differs[0]) if len(differs) else shorter
    return whole[:cut], whole[cut:]


def ask(model, prompt: torch.Tensor, answer: torch.Tensor, formats, chunk: int = 0, advance=lambda name: None) -> dict:
    """`{name: {"right": bool, "tokens_right": share, "nll": nats a token, "seconds": s, "bytes_per_token": b}}`.

    Greedy decoding gives the answer if and only if each of its tokens is the most likely one after those before it, so
    the answer is fed and not generated: that also says how likely it was. Under a format the prompt goes through the
    cache `chunk` tokens at a time (0: all at once) and the answer one by one, as in generation.
    """
    prompt, answer = prompt.to(model.device), answer.to(model.device)
    record = {}
    for fmt in [None, *formats]:
        begun = time.perf_counter()
        if fmt is None:
            name, entry, logits = "exact", {}, exact_answer_logits(model, prompt, answer)
        else:
            cache = fmt.new_cache(model)
            logits = answer_logits(model, prompt, answer, fmt, cache, chunk)
            name, entry = fmt.name, {"bytes_per_token": cache.bytes_per_token}
        right = logits.argmax(-1) == answer
        nll = divergence.nll(logits, answer)
        record[name] = entry | {
            "right": bool(right.all()),
            "tokens_right": right.double().mean().item(),
            "nll": sum(nll) / len(nll),
            "seconds": time.perf_counter() - begun,
        }
        advance(name)
    return record
