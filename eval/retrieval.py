"""A passkey hidden in filler: does a model still find it when its cache is of this format?

    python eval/retrieval.py --model demo --kv-dtype auto int8 fp8 --lengths 256 512 1024
    python eval/retrieval.py --model Qwen/Qwen3-0.6B --lengths 2048 8192 32768 --depths 11 --trials 5 --device cuda

The passkey test of Mohtashami and Jaggi (arXiv:2305.16300): five digits in a sentence of their own, at a depth of 0 to
100 % of a text of a few sentences repeated, and the question at its end. Found means that greedy decoding gives all
digits. How likely they were (nats a token) moves before that does. A heat map of depth against length goes beside the
JSON, a panel a format, the exact model first.
"""

import argparse
import importlib.util
import random
import sys
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from eval import answers
from eval.answers import Question
from eval.program import (
    BadInput,
    Parser,
    add_format_arguments,
    add_model_arguments,
    add_output_arguments,
    answers_bad_input,
    count,
    paragraph,
)
from eval.report import Column

OPENING = (
    "There is an important piece of information hidden in a lot of irrelevant text. Find it and remember it. "
    "You will be asked about it.\n\n"
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
KEY = "The pass key is {key}. Remember it. {key} is the pass key. "
QUESTION = "\n\nWhat is the pass key? The pass key is"

COLUMNS = [
    Column("kv_dtype", "cache"),
    Column("found", "found", ".1%"),
    Column("tokens_right", "digits right", ".1%"),
    Column("nll", "nats a token", ".3f"),
    Column("nll_more", "more than exact", ".3f"),
    Column("bytes_per_token", "B/token", ",d"),
    Column("seconds", "s", ".1f"),
]


@dataclass(frozen=True)
class Cell:
    """One question: `length` tokens of text at most, the passkey at `depth` per cent of the filler."""

    length: int
    depth: float
    trial: int


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="retrieval", description=paragraph(__doc__, 0), epilog=paragraph(__doc__, 2))
    add_model_arguments(parser)
    add_format_arguments(parser, ["auto", "int8", "fp8"])
    parser.add_argument(
        "--lengths", type=count(1), nargs="+", default=[256, 512, 1024], help="tokens of text, question and all"
    )
    parser.add_argument("--depths", type=count(1), default=5, help="how many, spread evenly from 0 to 100 %%")
    parser.add_argument("--trials", type=count(1), default=1, help="passkeys a cell")
    parser.add_argument("--chunk", type=count(0), default=0, help="tokens fed at a time; 0: a text in one pass")
    parser.add_argument("--seed", type=int, default=0, help="of the passkeys")
    add_output_arguments(parser)
    return parser.parse_args(argv)


def text_with_key(tokenizer, cell: Cell, key: str) -> Question:
    """The text of a cell, as much filler in it as its length has room for.

    Raises:
        BadInput: the length has no room for the question itself.
    """

    def question(repeats: int) -> Question:
        before = round(repeats * cell.depth / 100)
        text = OPENING + FILLER * before + KEY.format(key=key) + FILLER * (repeats - before) + QUESTION
        return Question(text, f" {key}")

    def tokens(repeats: int) -> int:
        asked = question(repeats)
        return len(tokenizer(asked.prompt + asked.answer, verbose=False).input_ids)

    bare = tokens(0)
    if bare > cell.length:
        raise BadInput(f"--lengths {cell.length}: the question alone has {bare} tokens; give at least that")
    repeats = int((cell.length - bare) // max((tokens(8) - bare) / 8, 1))
    while repeats and tokens(repeats) > cell.length:
        repeats -= 1
    return question(repeats)


def summarise(records: list[dict], cells: list[Cell]) -> list[dict]:
    """One row a format over all cells, the exact model first; `cells` of a row holds what its heat map shows."""
    rows = []
    for name in records[0]:
        entries = [record[name] for record in records]

        def mean(key: str, entries=entries) -> float:
            return sum(entry[key] for entry in entries) / len(entries)

        row = {"kv_dtype": name, "found": mean("right"), "tokens_right": mean("tokens_right"), "nll": mean("nll")}
        if name != "exact":
            row["nll_more"] = row["nll"] - rows[0]["nll"]
            row["bytes_per_token"] = entries[0]["bytes_per_token"]
        row["seconds"] = sum(entry["seconds"] for entry in entries)
        row["cells"] = []
        for length, depth in dict.fromkeys((cell.length, cell.depth) for cell in cells):
            here = [e for e, cell in zip(entries, cells, strict=True) if (cell.length, cell.depth) == (length, depth)]
            row["cells"].append(
                {
                    "length": length,
                    "depth": depth,
                    "found": sum(entry["right"] for entry in here) / len(here),
                    "nll": sum(entry["nll"] for entry in here) / len(here),
                }
            )
        rows.append(row)
    return rows


@answers_bad_input
def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    from eval import models
    from eval.run import Run

    run = Run("retrieval", args)
    lengths = sorted(set(args.lengths))
    model, tokenizer = run.load(f"passkeys in texts of {', '.join(map(str, lengths))} tokens")
    longest = models.longest_context(model)
    if longest and lengths[-1] > longest:
        raise BadInput(f"--lengths {lengths[-1]}: {args.model} was made for {longest} tokens; give at most that")
    depths = [50.0] if args.depths == 1 else [100 * i / (args.depths - 1) for i in range(args.depths)]
    cells = [Cell(length, depth, t) for length in lengths for depth in depths for t in range(args.trials)]
    text_with_key(tokenizer, cells[0], "12345")  # the shortest length is refused now, not in the middle

    def measure(cell: Cell, advance) -> dict:
        draw = random.Random(f"{args.seed} {cell}")
        question = text_with_key(tokenizer, cell, str(draw.randrange(10_000, 100_000)))
        return answers.ask(model, *answers.encoded(question, tokenizer), run.formats, args.chunk, advance)

    records = run.records(cells, measure, lambda cell: f"length {cell.length}, depth {cell.depth:g} %")
    rows = summarise(records, cells)
    run.finish(f"{len(cells)} passkeys", rows, COLUMNS, questions=len(cells))
    if importlib.util.find_spec("matplotlib") is None:
        run.say("no heat map: it needs a package: pip install 'hf-paged-attention[eval]'")
    elif run.shards.is_main:
        from eval import figures

        run.say(f"drawn: {figures.heat_maps(rows, run.path.with_suffix('.png'), args.model)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
