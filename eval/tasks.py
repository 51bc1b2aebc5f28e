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


def lookup(draw: random.Random, pairs: int) -> Question:
    """`pairs` lines of a word and its number, all different, and then one of the words again: which number?"""
    words = draw.sample(WORDS, pairs)
    numbers = [str(number) for number in draw.sample(range(100, 1000), pairs)]
    asked = draw.randrange(pairs)
    lines = "".join(f"{word}: {number}\n" for word, number in zip(words, numbers, strict=True))
    return Question(f"{lines}{words[asked]}:", f" {numbers[asked]}")


def copying(draw: random.Random, words: int) -> Question:
    """`words` words in a random order, twice: the second time from the third word on is the answer."""
    chosen = draw.sample(WORDS, words)
    return Question(f"{' '.join(chosen)}\n{' '.join(chosen[:2])}", f" {' '.join(chosen[2:])}")
