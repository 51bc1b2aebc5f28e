"""An answer counts as right exactly when greedy decoding gives it."""

import random

import pytest
import torch

from eval import answers, tasks
from eval.answers import Question
from eval.continuations import continuation
from tests.eval.stand_ins import Exact, Int8, ScalesDropped, byte_tokenizer, tokens


@pytest.fixture
def prompt():
    return tokens(40)


@pytest.fixture
def greedy(tiny, prompt):
    return torch.tensor(continuation(tiny, prompt, 6).tokens)


@pytest.mark.parametrize("chunk", [0, 7])
def test_the_greedy_continuation_is_right(tiny, prompt, greedy, chunk):
    record = answers.ask(tiny, prompt, greedy, [Exact()], chunk)
    assert record["exact"]["right"]
    assert record["exact-cache"]["right"]
    assert record["exact-cache"]["nll"] == pytest.approx(record["exact"]["nll"], abs=1e-5)


@pytest.mark.parametrize("wrong", [0, 3, 5])
def test_one_wrong_token_is_a_wrong_answer(tiny, prompt, greedy, wrong):
    answer = greedy.clone()
    answer[wrong] = (answer[wrong] + 1) % 250
    record = answers.ask(tiny, prompt, answer, [Exact()])
    assert not record["exact"]["right"]
    assert record["exact"]["tokens_right"] <= 5 / 6
    assert record["exact-cache"]["tokens_right"] == record["exact"]["tokens_right"]


def test_the_likelihood_is_that_of_the_full_text(tiny, prompt, greedy):
    tiny.set_attn_implementation("eager")
    with torch.no_grad():
        logits = tiny(torch.cat([prompt, greedy])[None]).logits[0, len(prompt) - 1 : -1].double()
    loss = torch.nn.functional.cross_entropy(logits, greedy).item()
    assert answers.ask(tiny, prompt, greedy, [])["exact"]["nll"] == pytest.approx(loss, abs=1e-6)


def test_dropped_scales_make_the_answer_less_likely(tiny, prompt, greedy):
    record = answers.ask(tiny, prompt, greedy, [Int8(), ScalesDropped()])
    off = {name: abs(record[name]["nll"] - record["exact"]["nll"]) for name in ("int8", "scales dropped")}
    assert off["scales dropped"] > 10 * off["int8"]


def test_prompt_and_answer_are_the_tokens_of_the_whole():
    class JoinsPairs:
        """A tokenizer that joins two characters into a token, so that a prompt's last one depends on what follows."""

        def __call__(self, text, return_tensors):
            pairs = [text[i : i + 2] for i in range(0, len(text), 2)]
            ids = torch.tensor([[sum(map(ord, pair)) * len(pair) for pair in pairs]])
            return type("Encoding", (), {"input_ids": ids})

    prompt, answer = answers.encoded(Question("abc", "de"), JoinsPairs())
    assert (len(prompt), len(answer)) == (1, 2)
    assert torch.cat([prompt, answer]).tolist() == JoinsPairs()("abcde", "pt").input_ids[0].tolist()


@pytest.mark.parametrize("task", [tasks.lookup, tasks.copying])
def test_a_tasks_answer_stands_in_its_prompt(task):
    for seed in range(20):
        question = task(random.Random(seed), 12)
        asked = question.prompt.splitlines()[-1]
        assert f"{asked}{question.answer}" in question.prompt
        prompt, answer = answers.encoded(question, byte_tokenizer())
        assert byte_tokenizer().decode(torch.cat([prompt, answer])) == question.prompt + question.answer
