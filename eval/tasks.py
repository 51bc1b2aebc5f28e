"""Small tasks with a right answer, which a small model does by attending to the right place in its context."""

import random

from eval.answers import Question

_NOUNS = (
    "apple river stone cloud horse bread chair glass tiger music paper clock green silver garden window summer winter "
    "doctor planet coffee orange bridge castle island forest desert rocket violin camera mirror ladder button pocket "
    "basket candle carpet copper cotton dragon engine feather finger flower hammer jacket kitchen lemon market monkey "
    "needle number ocean pencil pepper rabbit saddle school shadow spider temple ticket valley yellow"
)
WORDS = _NOUNS.split()


SHOWN = 3  # answers that a lookup shows before it asks


def lookup(draw: random.Random, words: int) -> Question:
    """`words` lines of a word and its number, three of them again in another order, and a fourth word: which number?"""
    chosen = draw.sample(WORDS, words)
    numbers = [str(number) for number in draw.sample(range(100, 1000), words)]
    lines = [f"{word}: {number}\n" for word, number in zip(chosen, numbers, strict=True)]
    *shown, asked = draw.sample(range(words), SHOWN + 1)
    again = "".join(lines[i] for i in shown)
    return Question(f"{''.join(lines)}\n{again}{chosen[asked]}:", f" {numbers[asked]}")


def copying(draw: random.Random, words: int) -> Question:
    """`words` words in a random order, twice, and the first of them: how does it go on?"""
    chosen = draw.sample(WORDS, words)
    line = ", ".join(chosen)
    return Question(f"{line}.\n{line}.\n{chosen[0]}", f", {', '.join(chosen[1:])}")
