"""Our perplexity beside that of the package `evaluate`, whose metric is a script that is fetched when it is used.

What its documentation and its script say (metrics/perplexity, `compute(predictions, model_id, add_start_token=True)`):
each string is tokenised on its own, without the tokenizer's special tokens; BOS is put before it; it is cut at
`max_length`; all tokens after BOS are scored in one pass; a string's perplexity is exp of its mean negative
log-likelihood, and `mean_perplexity` is the mean of the strings' perplexities.
"""

import math

import pytest
import torch

from eval import perplexity
from eval.windows import windows_of
from tests.eval.stand_ins import Exact, byte_tokenizer

BOS = 256
STRINGS = ["the quick brown fox jumps over the lazy dog", "lorem ipsum dolor sit amet", "Happy birthday to you!"]


def as_evaluate_does(model, tokenizer, strings, max_length=None):
    """(the strings' perplexities, their mean), by the convention above."""
    model.set_attn_implementation("eager")
    perplexities = []
    for string in strings:
        ids = tokenizer(string, add_special_tokens=False, return_tensors="pt").input_ids[0]
        ids = torch.cat([torch.tensor([BOS]), ids[: max_length - 1 if max_length else None]])
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        perplexities.append(torch.nn.functional.cross_entropy(logits, ids[1:]).exp().item())
    return perplexities, sum(perplexities) / len(perplexities)


def ours(model, ids, window, bos=BOS):
    records = [perplexity.measure(model, piece, [Exact()]) for piece in windows_of(ids, window, window, bos)]
    return perplexity.summarise(records)[1]["perplexity"]


def ids_of(string):
    return byte_tokenizer()(string, return_tensors="pt").input_ids[0].long()


@pytest.mark.parametrize("string", STRINGS)
def test_of_one_string_within_a_window_both_say_the_same(tiny, string):
    (theirs,), _ = as_evaluate_does(tiny, byte_tokenizer(), [string])
    assert ours(tiny, ids_of(string), 128) == pytest.approx(theirs, rel=1e-5)


def test_a_text_is_one_mean_and_not_a_mean_of_perplexities(tiny):
    """Windows that end where the strings do: ours is the geometric mean of theirs, weighted by length."""
    strings = [string[:20] for string in STRINGS]
    theirs, mean = as_evaluate_does(tiny, byte_tokenizer(), strings)
    text = ours(tiny, ids_of("".join(strings)), 21)
    assert text == pytest.approx(math.exp(sum(map(math.log, theirs)) / 3), rel=1e-5)
    assert text < mean, "an arithmetic mean of exponentials is above the exponential of the mean"


def test_a_long_text_is_moved_through_and_not_cut(tiny):
    text = "".join(STRINGS)
    (cut,), _ = as_evaluate_does(tiny, byte_tokenizer(), [text], max_length=44)
    assert cut == pytest.approx(ours(tiny, ids_of(text)[:43], 44), rel=1e-5)
    assert ours(tiny, ids_of(text), 44) != pytest.approx(cut, rel=1e-3)


def test_without_bos_the_first_token_is_not_scored(tiny):
    """Where a tokenizer opens texts with no BOS ours adds none; the metric always adds one."""
    ids = ids_of(STRINGS[0])
    tiny.set_attn_implementation("eager")
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(tiny(ids[None]).logits[0, :-1], ids[1:])
    assert ours(tiny, ids, 128, bos=None) == pytest.approx(loss.exp().item(), rel=1e-5)
