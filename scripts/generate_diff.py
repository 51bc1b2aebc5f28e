"""The same prompts under eager attention and under the plugin, side by side: where they part, and whether they may.

    python scripts/generate_diff.py --model demo --kv-dtype auto int8 fp8
    python scripts/generate_diff.py --model Qwen/Qwen3-0.6B --prompts-file prompts.txt --max-new-tokens 256

Greedy decoding. Where two greedy texts part, everything after differs, so what counts is the first difference: there
both are scored again on the same tokens. An exact format (one that stores keys and values in the model's own dtype)
may part from eager only at a near tie: where eager's own logits of the two tokens are no further apart than rounding
moves them. How far rounding moves them is measured on eager itself: the largest difference, over the tokens so far,
between its logits token by token with a cache and in one pass without, and never less than one unit in the last place
of the largest logit. Two logits may each move that far, and twice that is allowed: gap ≤ 4 x rounding. A wider gap is
a fault, and the exit status is 1.
"""

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from eval.continuations import Continuation, common_prefix, continuation, in_common
from eval.logits import cached_logits, exact_logits
from eval.program import (
    BadInput,
    Parser,
    add_format_arguments,
    add_model_arguments,
    answers_bad_input,
    count,
    paragraph,
)
from eval.report import Column

ALLOWED = 4  # times the rounding measured: two logits, each moving by it, and a factor of two

SUMMARY = [
    Column("kv_dtype", "cache"),
    Column("identical", "identical"),
    Column("near_ties", "near ties"),
    Column("faults", "faults"),
    Column("mean_common_prefix", "same from start", ".1f"),
    Column("in_common", "in common", ".1%"),
    Column("worst_logit_difference", "logits moved", ".2e"),
]


@dataclass
class Difference:
    """One prompt under one format, against eager.

    `first` is the index of the first generated token that differs (None: none does). `gap` is eager's logit of its own
    token less that of the format's, both after the tokens they share; `rounding` what eager's logits move by of
    themselves; `logit_difference` the largest between eager's and the format's logits at that place.
    """

    kv_dtype: str
    exact: bool
    verdict: str  # "identical", "near tie", "fault", or for a format that is not exact "parts"
    tokens: list[int]
    in_common: float
    first: int | None = None
    eager_token: int | None = None
    format_token: int | None = None
    gap: float | None = None
    rounding: float | None = None
    logit_difference: float | None = None


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="diff", description=paragraph(__doc__, 0), epilog=paragraph(__doc__, 2))
    add_model_arguments(parser)
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", action="append", help="a prompt; may be given several times")
    prompts.add_argument("--prompts-file", help="a UTF-8 file with one prompt a line")
    add_format_arguments(parser, ["auto", "int8", "fp8"])
    parser.add_argument("--max-new-tokens", type=count(1), default=48, help="tokens to generate")
    parser.add_argument("--json", metavar="FILE", help="write everything there too")
    return parser.parse_args(argv)


def prompts_of(args: argparse.Namespace) -> list[str]:
    """The prompts asked for; without any, two short ones and one longer than the demo model's window."""
    if args.prompts_file:
        file = Path(args.prompts_file).expanduser()
        if not file.is_file():
            raise BadInput(f"--prompts-file {args.prompts_file}: no such file; give a text file with one prompt a line")
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise BadInput(f"--prompts-file {args.prompts_file}: not UTF-8 (byte {error.start}); convert it") from error
        prompts = [line for line in lines if line.strip()]
        if not prompts:
            raise BadInput(f"--prompts-file {args.prompts_file}: holds no prompt; give one a line")
        return prompts
    if args.prompt:
        for prompt in args.prompt:
            if not prompt.strip():
                raise BadInput(f"--prompt {prompt!r}: empty; give at least one word")
        return args.prompt
    from pydoc_data.topics import topics

    # 591 tokens for the demo model: its sliding layers see 512.
    return ["The history of the Roman Empire began when", "def fibonacci(n):\n", topics["debugger"][:2400]]


def compare(model, ids: torch.Tensor, eager: Continuation, fmt, new_tokens: int) -> Difference:
    """Generate under `fmt` and judge where it parts from eager."""
    tokens = continuation(model, ids, new_tokens, fmt).tokens
    exact = fmt.is_exact(model.dtype)
    share = in_common(eager.tokens, tokens)
    shared = common_prefix(eager.tokens, tokens)
    if shared == len(eager.tokens) or shared == len(tokens):
        # Equal, or one was stopped by its length: the same end-of-text token would have stopped both.
        return Difference(fmt.name, exact, "identical", tokens, share)

    prefix = torch.cat([ids, ids.new_tensor(eager.tokens[:shared])])
    alone = exact_logits(model, prefix)[len(ids) - 1 :].float()
    stepwise = eager.logits[: shared + 1].float().to(alone.device)
    ulp = torch.finfo(model.dtype).eps * alone.abs().max()
    rounding = max((alone - stepwise).abs().max().item(), ulp.item())
    read_back = torch.cat([logits for _, logits in cached_logits(model, prefix, fmt, fmt.new_cache(model))])[-1].float()
    theirs, ours = eager.tokens[shared], tokens[shared]
    gap = (alone[-1, theirs] - alone[-1, ours]).item()
    verdict = "parts" if not exact else "near tie" if gap <= ALLOWED * rounding else "fault"
    return Difference(
        fmt.name,
        exact,
        verdict,
        tokens,
        share,
        first=shared,
        eager_token=theirs,
        format_token=ours,
        gap=gap,
        rounding=rounding,
        logit_difference=(read_back - alone[-1]).abs().max().item(),
    )


def summarise(differences: list[Difference], lengths: list[int]) -> dict:
    """One row of the summary: all prompts of one format; `lengths` are those of eager's continuations."""
    firsts = [length if d.first is None else d.first for d, length in zip(differences, lengths, strict=True)]
    moved = [d.logit_difference for d in differences if d.logit_difference is not None]
    verdicts = [d.verdict for d in differences]
    return {
        "kv_dtype": differences[0].kv_dtype,
        "exact": differences[0].exact,
        "prompts": len(differences),
        "identical": f"{verdicts.count('identical')} of {len(differences)}",
        "near_ties": verdicts.count("near tie") if differences[0].exact else None,
        "faults": verdicts.count("fault") if differences[0].exact else None,
        "mean_common_prefix": sum(firsts) / len(firsts),
        "in_common": sum(d.in_common for d in differences) / len(differences),
        "worst_logit_difference": max(moved, default=None),
    }


def shown(eager: list[int], difference: Difference, tokenizer):
    """For the terminal: one line where the texts are the same, else both side by side, coloured after."""
    from rich.table import Table
    from rich.text import Text

    verdict = Text(f"{difference.kv_dtype}: ", style="bold").append(
        _verdict(difference, len(eager), tokenizer), "not bold"
    )
    if difference.first is None:
        return verdict
    table = Table(title=verdict, title_justify="left", title_style="", expand=True)
    table.add_column("eager", ratio=1)
    table.add_column(f"paged_triton, {difference.kv_dtype}", ratio=1)

    def text(tokens: list[int], style: str) -> Text:
        before = tokenizer.decode(tokens[: difference.first])
        return Text(before).append(tokenizer.decode(tokens)[len(before) :], style)

    table.add_row(text(eager, "green"), text(difference.tokens, "red" if difference.verdict == "fault" else "yellow"))
    return table


def _short(prompt: str) -> str:
    line = " ".join(prompt.split())
    return line if len(line) <= 70 else f"{line[:35]} ... {line[-30:]}"


def _verdict(d: Difference, length: int, tokenizer) -> str:
    if d.first is None:
        return f"identical: {length} tokens"
    line = (
        f"{d.verdict}: first at token {d.first + 1} of {length}, {tokenizer.decode([d.eager_token])!r} against "
        f"{tokenizer.decode([d.format_token])!r}; logit gap {d.gap:.2e}, logits differ by {d.logit_difference:.2e}"
    )
    if d.exact:
        line += f", rounding explains {ALLOWED * d.rounding:.2e}"
    return f"{line}; {d.in_common:.0%} of the tokens in common"


@answers_bad_input
def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    prompts = prompts_of(args)
    from rich.console import Console
    from rich.text import Text

    from eval import models, progress, report
    from eval.formats import formats_named

    console = Console()
    formats = formats_named(args.kv_dtype, args.block_size, args.exact_layers)
    device = models.device_named(args.device)
    dtype = models.dtype_named(args.dtype, device)
    path = report.writable(args.json) if args.json else None
    model, tokenizer = models.load(args.model, device, dtype, args.key_outliers)
    for fmt in formats:
        fmt.new_cache(model)  # what a format refuses of this model is said before anything is generated
    longest = models.longest_context(model)
    encoded = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids[0].long().to(device)
        if longest and len(ids) + args.max_new_tokens > longest:
            raise BadInput(
                f"--max-new-tokens {args.max_new_tokens}: with a prompt of {len(ids)} tokens more than the "
                f"{longest} that {args.model} was made for; ask for fewer, or shorten the prompt"
            )
        encoded.append(ids)
    console.print(f"{args.model}, {dtype} on {device}, {args.max_new_tokens} tokens a prompt", highlight=False)

    everything: list[dict] = []
    differences: dict[str, list[Difference]] = {fmt.name: [] for fmt in formats}
    lengths = []
    with progress.bar(console) as bar:
        task = bar.add_task("eager", total=len(prompts) * (1 + len(formats)))
        for prompt, ids in zip(prompts, encoded, strict=True):
            bar.update(task, description="eager")
            eager = continuation(model, ids, args.max_new_tokens)
            console.rule(Text(_short(prompt)), align="left")
            console.print(Text(tokenizer.decode(eager.tokens)))
            lengths.append(len(eager.tokens))
            bar.advance(task)
            entry = {"prompt": prompt, "prompt_tokens": len(ids), "eager": eager.tokens, "formats": []}
            for fmt in formats:
                bar.update(task, description=fmt.name)
                difference = compare(model, ids, eager, fmt, args.max_new_tokens)
                differences[fmt.name].append(difference)
                entry["formats"].append(asdict(difference) | {"text": tokenizer.decode(difference.tokens)})
                bar.advance(task)
                console.print(shown(eager.tokens, difference, tokenizer))
            everything.append(entry)
    rows = [summarise(each, lengths) for each in differences.values()]
    console.print(report.terminal_table("Summary", rows, SUMMARY))
    if path:
        settings = vars(args) | {"dtype": str(dtype), "device": str(device)}
        report.write(path, "generate_diff", settings, models.device_name(device), rows, SUMMARY, prompts=everything)
        console.print(f"written: {path} and {path.with_suffix('.md').name}", highlight=False)
    faults = sum(row["faults"] or 0 for row in rows)
    if faults:
        console.print(f"{faults} continuation(s) of an exact format part from eager where rounding does not explain it")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
