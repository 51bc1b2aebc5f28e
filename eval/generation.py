"""Greedy continuations under each cache format against the exact model's, and two tasks with a right answer.

    python eval/generation.py --model demo --kv-dtype auto int8 fp8
    python eval/generation.py --model Qwen/Qwen3-0.6B --dataset wikitext-2 --prompts 100 --questions 100 --device cuda

Prompts are pieces of a text, spread evenly over what is read of it. The exact continuation is that of eager attention
with Transformers' own cache. Greedy texts that part once stay apart, often at a near tie that says little, so beside
them stand two tasks whose answers are right or wrong: looking up a word's number among lines of both, and repeating
words in a random order. `scripts/generate_diff.py` shows single continuations and judges the exact formats.
"""

import argparse
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from eval import answers, tasks
from eval.continuations import common_prefix, continuation, edit_distance, in_common
from eval.program import (
    BadInput,
    Parser,
    add_format_arguments,
    add_model_arguments,
    add_output_arguments,
    add_text_arguments,
    answers_bad_input,
    count,
    paragraph,
)
from eval.report import Column

COLUMNS = [
    Column("kv_dtype", "cache"),
    Column("identical", "same text", ".0%"),
    Column("common_prefix", "same from start", ".1f", terminal=False),
    Column("in_common", "in common", ".1%", terminal=False),
    Column("edit_distance", "edits", ".1%"),
    Column("lookup", "lookup", ".1%"),
    Column("lookup_nll", "lookup, nats a token", ".3f", terminal=False),
    Column("copying", "copying", ".1%"),
    Column("copying_nll", "copying, nats a token", ".3f", terminal=False),
    Column("bytes_per_token", "B/token", ",d"),
    Column("seconds", "s", ".1f"),
]


@dataclass(frozen=True)
class Piece:
    """A prompt to continue (`ids [T]`), or a question of a task."""

    kind: str  # "prompt", "lookup" or "copying"
    number: int
    ids: torch.Tensor | None = None


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="generation", description=paragraph(__doc__, 0), epilog=paragraph(__doc__, 2))
    add_model_arguments(parser)
    add_format_arguments(parser, ["auto", "int8", "fp8"])
    add_text_arguments(parser)
    parser.add_argument("--prompts", type=count(0), default=8, help="prompts to continue")
    parser.add_argument("--prompt-tokens", type=count(1), default=128, help="tokens a prompt")
    parser.add_argument("--max-new-tokens", type=count(1), default=48, help="tokens to generate")
    parser.add_argument("--questions", type=count(0), default=16, help="questions a task")
    parser.add_argument(
        "--words", type=count(tasks.SHOWN + 1), default=24, help=f"words a question holds, at most {len(tasks.WORDS)}"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the questions")
    add_output_arguments(parser)
    args = parser.parse_args(argv)
    if args.words > len(tasks.WORDS):
        raise BadInput(f"--words {args.words}: there are {len(tasks.WORDS)} different ones; give at most that")
    if not args.prompts and not args.questions:
        raise BadInput("--prompts 0 --questions 0: nothing is left to measure; give one of them")
    return args


def prompts_from(ids: torch.Tensor, prompts: int, tokens: int, name: str) -> list[torch.Tensor]:
    """`prompts` pieces of `tokens` tokens each, spread evenly over the text `ids [N]`, none of them overlapping.

    Raises:
        BadInput: the text is too short for that.
    """
    if len(ids) < prompts * tokens:
        raise BadInput(
            f"--prompts {prompts} of --prompt-tokens {tokens}: {name} has {len(ids)} tokens; ask for fewer, or give a "
            "longer text"
        )
    apart = len(ids) // max(prompts, 1)
    return [ids[i * apart : i * apart + tokens] for i in range(prompts)]


def continue_prompt(model, ids: torch.Tensor, formats, new_tokens: int, advance=lambda name: None) -> dict:
    """`{name: {"tokens", "identical", "common_prefix", "in_common", "edit_distance", "seconds"}}` of one prompt.

    The edit distance is a share of the exact continuation's tokens.
    """
    ids = ids.to(model.device)
    begun = time.perf_counter()
    exact = continuation(model, ids, new_tokens, logits=False).tokens
    record = {"exact": {"tokens": exact, "seconds": time.perf_counter() - begun}}
    advance("exact")
    for fmt in formats:
        begun = time.perf_counter()
        tokens = continuation(model, ids, new_tokens, fmt).tokens
        record[fmt.name] = {
            "tokens": tokens,
            "identical": tokens == exact,
            "common_prefix": common_prefix(exact, tokens),
            "in_common": in_common(exact, tokens),
            "edit_distance": edit_distance(exact, tokens) / len(exact),
            "seconds": time.perf_counter() - begun,
        }
        advance(fmt.name)
    return record


def summarise(records: list[dict], pieces: list[Piece], bytes_per_token: dict[str, int]) -> list[dict]:
    """One row a format, the exact model first; a measure that nothing was asked for is left out."""
    rows = []
    for name in records[0]:
        row = {"kv_dtype": name, "bytes_per_token": bytes_per_token.get(name)}
        entries = {
            kind: [record[name] for record, piece in zip(records, pieces, strict=True) if piece.kind == kind]
            for kind in ("prompt", "lookup", "copying")
        }
        if entries["prompt"] and name != "exact":
            for key in ("identical", "common_prefix", "in_common", "edit_distance"):
                row[key] = sum(entry[key] for entry in entries["prompt"]) / len(entries["prompt"])
        for kind, key in (("lookup", "right"), ("copying", "tokens_right")):
            if entries[kind]:
                row[kind] = sum(entry[key] for entry in entries[kind]) / len(entries[kind])
                row[f"{kind}_nll"] = sum(entry["nll"] for entry in entries[kind]) / len(entries[kind])
        row["seconds"] = sum(record[name]["seconds"] for record in records)
        rows.append(row)
    return rows


@answers_bad_input
def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    from eval import models, texts
    from eval.run import Run

    run = Run("generation", args)
    text = texts.chosen(args)
    model, tokenizer = run.load(f"{args.prompts} prompts from {text.name}, {args.questions} questions a task")
    longest = models.longest_context(model)
    if longest and args.prompt_tokens + args.max_new_tokens > longest:
        raise BadInput(
            f"--prompt-tokens {args.prompt_tokens} and --max-new-tokens {args.max_new_tokens}: {args.model} was made "
            f"for {longest} tokens; give fewer"
        )
    found, pieces = {}, []
    if args.prompts:
        ids, digest = texts.tokens_of(text, tokenizer, 4 * args.prompts * args.prompt_tokens)
        prompts = prompts_from(ids, args.prompts, args.prompt_tokens, text.name)
        pieces += [Piece("prompt", number, prompt) for number, prompt in enumerate(prompts)]
        found = {"text": text.name, "text_sha256": digest}
    pieces += [Piece(task, number) for task in ("lookup", "copying") for number in range(args.questions)]

    def measure(piece: Piece, advance) -> dict:
        if piece.kind == "prompt":
            return continue_prompt(model, piece.ids, run.formats, args.max_new_tokens, advance)
        draw = random.Random(f"{args.seed} {piece.kind} {piece.number}")
        question = getattr(tasks, piece.kind)(draw, args.words)
        return answers.ask(model, *answers.encoded(question, tokenizer), run.formats, advance=advance)

    records = run.records(pieces, measure, lambda piece: f"{piece.kind} {piece.number}", **found)
    sizes = {fmt.name: fmt.new_cache(model).bytes_per_token for fmt in run.formats}
    rows = summarise(records, pieces, sizes)
    continuations = [record for record, piece in zip(records, pieces, strict=True) if piece.kind == "prompt"]
    title = f"{args.prompts} prompts continued by {args.max_new_tokens} tokens, {args.questions} questions a task"
    run.finish(title, rows, COLUMNS, continuations=continuations)
    return 0


if __name__ == "__main__":
    sys.exit(main())
