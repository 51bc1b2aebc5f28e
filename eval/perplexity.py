"""Perplexity of a text under each cache format, beside the exact model's.

    python eval/perplexity.py --model demo --kv-dtype bf16 int8 fp8
    python eval/perplexity.py --model Qwen/Qwen3-0.6B --dataset wikitext-2 --window 2048 --stride 1024 --device cuda
    accelerate launch --num_processes 2 eval/perplexity.py ...      # one process a GPU, the same numbers

The exact model is the same weights under eager attention without a cache. Under a format every key and value that
attention reads comes out of the cache: written, then read back, in a one-pass prefill too.
"""

import argparse
import math
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from eval import divergence, windows
from eval.logits import cached_logits, exact_logits
from eval.means import mean_and_error, percentile
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

WINDOW = 1024  # tokens, where --window is not given

COLUMNS = [
    Column("kv_dtype", "cache"),
    Column("perplexity", "perplexity", ".3f", "perplexity_error"),
    Column("nll_more", "nats more than exact", ".2e", "nll_more_error", terminal=False),
    Column("kl_mean", "KL mean", ".2e", "kl_mean_error"),
    Column("kl_p99", "99th %", ".2e"),
    Column("kl_max", "worst", ".2e"),
    Column("agreement", "top-1", ".1%"),
    Column("bytes_per_token", "B/token", ",d"),
    Column("seconds", "s", ".1f"),
]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="perplexity", description=paragraph(__doc__, 0), epilog=paragraph(windows.windows_of.__doc__, 1)
    )
    add_model_arguments(parser)
    add_format_arguments(parser, ["bf16", "int8", "fp8"])
    add_text_arguments(parser)
    parser.add_argument(
        "--window", type=count(2), help="tokens that the model sees at once (1024, or a shorter text's)"
    )
    parser.add_argument("--stride", type=count(1), default=None, help="tokens from window to window (--window)")
    parser.add_argument("--chunk", type=count(0), default=0, help="tokens fed at a time; 0: a window in one pass")
    parser.add_argument("--max-windows", type=count(1), default=None, help="measure no more windows than this")
    parser.add_argument("--max-tokens", type=count(2), default=None, help="read no more of the text than this")
    parser.add_argument("--max-kl", type=float, default=None, help="exit status 1 if a format's mean KL is above this")
    add_output_arguments(parser)
    args = parser.parse_args(argv)
    if args.stride and args.stride > (args.window or WINDOW):
        raise BadInput(
            f"--stride {args.stride}: leaves tokens between windows of {args.window or WINDOW} out; at most --window"
        )
    return args


def measure(model, window: windows.Window, formats, chunk: int = 0, advance=lambda name: None) -> dict:
    """What one window says: `{name: {"nll": [...], "kl": [...], "agree": [...], "seconds": s, "bytes_per_token": b}}`.

    The exact model goes by the name "exact" and has neither KL nor bytes. `advance(name)` is called after each.
    """
    ids = window.ids.to(model.device)
    begun = time.perf_counter()
    exact = exact_logits(model, ids)
    nll = divergence.nll(exact[window.first - 1 : -1], window.targets.to(exact.device))
    record = {"exact": {"nll": nll, "seconds": time.perf_counter() - begun}}
    advance("exact")
    for fmt in formats:
        begun = time.perf_counter()
        cache = fmt.new_cache(model)
        scores = divergence.Scores([], [], [])
        for start, logits in cached_logits(model, ids, fmt, cache, chunk):
            skipped = max(window.first - 1 - start, 0)
            rows = slice(start + skipped, min(start + len(logits), len(ids) - 1))
            if rows.start < rows.stop:
                scores.extend(
                    divergence.score(
                        exact[rows],
                        logits[skipped : skipped + rows.stop - rows.start],
                        ids[rows.start + 1 : rows.stop + 1],
                    )
                )
        record[fmt.name] = {
            "nll": scores.nll,
            "kl": scores.kl,
            "agree": scores.agree,
            "seconds": time.perf_counter() - begun,
            "bytes_per_token": cache.bytes_per_token,
        }
        advance(fmt.name)
    return record


def summarise(records: list[dict]) -> list[dict]:
    """One row a format over all windows' records, the exact model first.

    Perplexity is exp of the mean negative log-likelihood over all tokens; its error is the mean's times the perplexity.
    "Nats more" pairs each token with itself under the exact model, so its error is far smaller than that of a
    difference of two perplexities.
    """
    rows = []
    for name in records[0]:
        parts = [record[name] for record in records]
        mean, error = mean_and_error([part["nll"] for part in parts])
        row = {"kv_dtype": name, "perplexity": math.exp(mean), "perplexity_error": math.exp(mean) * error}
        if name != "exact":
            more = [
                [a - b for a, b in zip(record[name]["nll"], record["exact"]["nll"], strict=True)] for record in records
            ]
            row["nll_more"], row["nll_more_error"] = mean_and_error(more)
            row["kl_mean"], row["kl_mean_error"] = mean_and_error([part["kl"] for part in parts])
            flat = [(kl, index, at) for index, part in enumerate(parts) for at, kl in enumerate(part["kl"])]
            row["kl_p99"] = percentile([kl for kl, _, _ in flat], 99)
            row["kl_max"], window, at = max(flat)
            row["kl_max_at"] = {"window": window, "scored_token": at}
            row["agreement"] = sum(sum(part["agree"]) for part in parts) / len(flat)
            row["bytes_per_token"] = parts[0]["bytes_per_token"]
        row["seconds"] = sum(part["seconds"] for part in parts)
        rows.append(row)
    return rows


@answers_bad_input
def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    from eval import models
    from eval.run import Run
    from eval.texts import chosen, tokens_of

    run = Run("perplexity", args)
    text = chosen(args)
    model, tokenizer = run.load(f"text {text.name}")
    longest = models.longest_context(model)
    if longest and args.window and args.window > longest:
        raise BadInput(f"--window {args.window}: {args.model} was made for {longest} tokens; give at most that")
    wanted = args.window or min(WINDOW, longest or WINDOW)
    max_tokens = args.max_tokens
    if args.max_windows:
        enough = wanted + (args.max_windows - 1) * min(args.stride or wanted, wanted) + 1  # one more for BOS
        max_tokens = min(enough, max_tokens or enough)
    ids, digest = tokens_of(text, tokenizer, max_tokens)
    opening = tokenizer("").input_ids
    bos = opening[0] if opening and opening[0] == tokenizer.bos_token_id else None
    if args.window and len(ids) < args.window:
        raise BadInput(
            f"--window {args.window}: {text.name} has {len(ids)} tokens; give a longer text or a smaller window"
        )
    window = min(wanted, max(len(ids), 2))
    stride = min(args.stride or window, window)
    pieces = windows.windows_of(ids, window, stride, bos)[: args.max_windows]

    records = run.records(
        pieces,
        lambda piece, advance: measure(model, piece, run.formats, args.chunk, advance),
        lambda piece: f"window {piece.index} (token {piece.start} of the text)",
        window=window,
        stride=stride,
        text=text.name,
        text_sha256=digest,
        tokens=len(ids),
    )
    rows = summarise(records)
    scored = sum(len(piece.targets) for piece in pieces)
    title = f"{scored:,} tokens scored in {len(pieces)} window{'s' * (len(pieces) > 1)}"
    run.finish(title, rows, COLUMNS, scored_tokens=scored, windows=len(pieces))
    worst = max(row.get("kl_mean", 0.0) for row in rows)
    if args.max_kl is not None and not worst <= args.max_kl:
        run.say(f"a mean KL of {worst:.2e} is above --max-kl {args.max_kl:g}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
