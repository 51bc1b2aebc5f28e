"""Measure the kernels' launch choices on this GPU, and write the best into the table of `kernels/launch.py`.

    python scripts/tune.py decode --json results/tune-decode.json
    python scripts/tune.py prefill --json results/tune-prefill.json
    python scripts/tune.py table results/tune-decode.json results/tune-prefill.json --write

Every variant is compiled first, many at once, then checked against float64 on each case and timed as
scripts/benchmark.py times. A row of the table is the choice that loses least, over the cases of its storage and head
size, against the best of each case.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from eval.program import BadInput, Parser, answers_bad_input, paragraph
from hf_paged_attention.kernels import counters, launch
from hf_paged_attention.kernels.checks import AttentionShape
from hf_paged_attention.kernels.launch import DecodeChoice, DecodePlan, UnifiedPlan
from scripts import timing
from scripts.attention_cases import FORMATS, Spec, error_of, even, make_case
from scripts.compile_ahead import compile_ahead

STORAGE = {"auto": "16-bit", "int8": "int8", "fp8": "fp8"}
SPLITS = ("programs_per_sm", "min_tiles")  # the compiled kernel does not depend on them
PROGRAMS_PER_SM = (1, 2, 3, 4)
LAUNCH = Path(launch.__file__)
BEGIN, END = "# begin table\n", "# end table\n"


# What to try ---------------------------------------------------------------------------------------------------------


def decode_choices(fmt: str) -> list[DecodeChoice]:
    """Variants of the decode kernel for a format: products, tile, warps, stages, descriptors."""

    def choice(products, block_n, warps, stages, descriptors=False, pieces=2):
        return DecodeChoice(block_n, warps, stages, 4, 2, products, pieces, descriptors)

    if fmt == "auto":
        rows = [(64, 4, 3), (64, 4, 4), (64, 2, 4), (32, 4, 4), (32, 2, 5), (128, 4, 3)]
        keys = [(64, 4, 3), (64, 4, 4), (128, 8, 3)]
        through_descriptors = [(64, 4, 3), (64, 4, 4)]
        return [
            *(choice("rows", *v) for v in rows),
            *(choice("keys", *v) for v in keys),
            *(choice("keys", *v, True) for v in through_descriptors),
        ]
    pieces = 2 if fmt == "int8" else 3
    by_bytes = [(128, 4, 2), (128, 4, 3), (128, 4, 4), (128, 8, 3)]
    through_descriptors = [(128, 4, 2), (128, 4, 3), (128, 4, 4), (128, 8, 3)]
    return [
        *(choice("bytes", *v, pieces=pieces) for v in by_bytes),
        *(choice("bytes", *v, True, pieces=pieces) for v in through_descriptors),
        choice("rows", 64, 4, 3),
        choice("rows", 64, 4, 4),
    ]


def decode_cases(fmt: str) -> list[Spec]:
    page = 64 if fmt == "auto" else 128  # what a cache takes when nobody says
    long = [("qwen3-8b", 16, 8192), ("qwen3-8b", 1, 32768), ("gemma3-4b", 16, 8192), ("mha", 8, 8192)]
    short = [("qwen3-8b", 1, 1024), ("qwen3-8b", 1, 4096), ("gemma3-4b", 1, 4096), ("mha", 1, 2048)]
    short += [("qwen2.5-1.5b", 1, 1024), ("qwen2.5-1.5b", 1, 4096), ("qwen2.5-1.5b", 1, 32768)]
    many = [("qwen3-8b", 64, 4096), ("qwen3-8b", 128, 1024), ("gemma3-4b", 128, 2048)]
    small = [page // 2, 16] if fmt != "auto" else [16]
    return [
        *(even(*case, format=fmt, block_size=page) for case in long + short + many),
        *(even("qwen3-8b", 16, 8192, format=fmt, block_size=block) for block in small),
    ]


def regime_of(spec: Spec, gpu: launch.Gpu) -> str:
    sizes = spec.sizes
    shape = AttentionShape(
        sum(spec.new), len(spec.new), sizes.query_heads, sizes.kv_heads, sizes.head_dim, sizes.head_dim,
        spec.block_size, torch.bfloat16, *[FORMATS[spec.format] or torch.bfloat16] * 2, torch.device("cuda"),
    )  # fmt: skip
    return launch.regime(shape, max(spec.contexts), gpu) if spec.decode else launch.prefill_regime(shape, gpu)


def split_choices(choice: DecodeChoice, regime: str) -> list[DecodeChoice]:
    """The splits to try: their number where the memory bounds a call, their least size where latency does."""
    if regime == "short":
        return [replace(choice, programs_per_sm=p, min_tiles=t) for p in (0.5, 1, 2) for t in (1, 2, 4)]
    if regime in ("many", "brief"):
        return [replace(choice, programs_per_sm=p) for p in (1, 2)]
    return [replace(choice, programs_per_sm=p) for p in PROGRAMS_PER_SM]


def prefill_plans(spec: Spec) -> list[UnifiedPlan]:
    """Variants of the unified kernel: rows, keys, warps, stages."""
    wide = spec.sizes.head_dim > 128
    if wide and spec.format == "auto":
        tiles = [(128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2), (64, 32, 4, 3)]
    elif wide:
        tiles = [(128, 32, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3)]
    elif spec.format == "auto":
        tiles = [(128, 64, 4, 2), (128, 64, 4, 3), (128, 64, 4, 4), (128, 64, 8, 3), (128, 128, 8, 2), (256, 64, 8, 3)]
        tiles += [(64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4)]
    else:
        tiles = [(128, 64, 4, 2), (128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3)]
        tiles += [(256, 64, 8, 2), (256, 64, 8, 3), (256, 64, 8, 4), (256, 128, 8, 2)]
    # Pages smaller than a tile are read through pointers: a plan with descriptors would be the same kernel.
    return [UnifiedPlan(*tile, spec.block_size >= tile[1]) for tile in tiles]


def prefill_cases(fmt: str) -> list[Spec]:
    return [
        *(even(shape, 1, 8192, 8192, format=fmt) for shape in ("qwen3-8b", "gemma3-4b")),
        *(even(shape, 1, 512, 512, format=fmt) for shape in ("qwen3-8b", "gemma3-4b")),
        even("qwen3-8b", 1, 8192, 8192, format=fmt, block_size=16),
        *([even("qwen3-8b", 1, 2048, 2048)] if fmt == "auto" else []),
    ]


# Measuring -----------------------------------------------------------------------------------------------------------


def plan_of(choice: DecodeChoice, spec: Spec, sms: int) -> DecodePlan:
    return choice.plan(spec.sizes.group, spec.sizes.kv_heads, spec.sizes.head_dim, sms)


def runs_as_asked(choice: DecodeChoice, spec: Spec) -> bool:
    """Whether the case's pages let the variant be what it says, so that no kernel is measured under two names."""
    return not choice.descriptors or spec.block_size >= choice.block_n


class Sweep:
    """Results as they come: dicts with the case, the choice, its time or why there is none."""

    def __init__(self, seconds: float):
        self.deadline = time.monotonic() + seconds
        self.results: list[dict] = []
        self.skipped = 0

    def measure(self, spec: Spec, variants: list[tuple[object, object]], regime: str | None = None) -> None:
        """Check and time each (choice, plan) on one case; choices that differ in splits alone are checked once."""
        if time.monotonic() > self.deadline:
            self.skipped += len(variants)
            return
        layers = timing.layers_for(spec.bytes_read) if spec.decode else 2
        case = make_case(spec, torch.device("cuda"), layers=layers)
        checked: dict = {}
        for choice, plan in variants:
            if time.monotonic() > self.deadline:
                self.skipped += 1
                continue
            result = {"spec": asdict(spec), "choice": asdict(choice), "label": f"{spec.shape} {spec.label}"}
            result |= {"regime": regime} if regime else {}
            kernel = replace(plan, programs=1, min_tiles=1) if isinstance(plan, DecodePlan) else plan
            try:
                if kernel not in checked:
                    checked[kernel] = "failed"
                    case.poison()
                    case.run(0, plan)
                    checked[kernel] = error_of(case, 0)[0]
                if checked[kernel] == "failed":
                    continue
                timed = timing.time_graph(lambda i, plan=plan: case.run(i, plan), layers, replays=9, seconds=0.05)
                result |= {"error": checked[kernel], "us": timed.median, "low": timed.low, "high": timed.high}
                if spec.decode:
                    result["gbs"] = spec.bytes_read / timed.median / 1e3
                else:
                    result["tflops"] = spec.flops / timed.median / 1e6
            except Exception as error:
                result["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]
                if "CUDA" in result["failed"] or "Accelerator" in result["failed"]:
                    self.results.append(result)
                    raise
            self.results.append(result)
        counters.forget_graphs()


def sweep_decode(formats: list[str], seconds: float, compile_seconds: float, say) -> Sweep:
    gpu = launch.gpu_of(torch.device("cuda", 0))
    pairs = [(spec, choice) for fmt in formats for spec in decode_cases(fmt)
             for choice in decode_choices(fmt) if runs_as_asked(choice, spec)]  # fmt: skip
    sweep = Sweep(seconds)
    start = time.monotonic()
    errors = compile_ahead([(s, plan_of(c, s, gpu.sms)) for s, c in pairs], seconds=compile_seconds)
    say(f"{len(pairs)} kernels compiled in {time.monotonic() - start:.0f} s, {sum(map(bool, errors))} failed")
    for spec in dict.fromkeys(spec for spec, _ in pairs):
        mine = [c for (s, c), error in zip(pairs, errors, strict=True) if s == spec and not error]
        variants = [split for c in mine for split in split_choices(c, regime_of(spec, gpu))]
        sweep.measure(spec, [(c, plan_of(c, spec, gpu.sms)) for c in variants], regime_of(spec, gpu))
    sweep.results += [
        {"spec": asdict(s), "choice": asdict(c), "label": f"{s.shape} {s.label}", "failed": error}
        for (s, c), error in zip(pairs, errors, strict=True) if error
    ]  # fmt: skip
    return sweep


def sweep_prefill(formats: list[str], seconds: float, compile_seconds: float, say) -> Sweep:
    pairs = [(spec, plan) for fmt in formats for spec in prefill_cases(fmt) for plan in prefill_plans(spec)]
    sweep = Sweep(seconds)
    start = time.monotonic()
    errors = compile_ahead(pairs, seconds=compile_seconds)
    say(f"{len(pairs)} kernels compiled in {time.monotonic() - start:.0f} s, {sum(map(bool, errors))} failed")
    for spec in dict.fromkeys(spec for spec, _ in pairs):
        mine = [p for (s, p), error in zip(pairs, errors, strict=True) if s == spec and not error]
        sweep.measure(spec, [(plan, plan) for plan in mine], regime_of(spec, launch.gpu_of(torch.device("cuda", 0))))
    sweep.results += [
        {"spec": asdict(s), "choice": asdict(p), "label": f"{s.shape} {s.label}", "failed": error}
        for (s, p), error in zip(pairs, errors, strict=True) if error
    ]  # fmt: skip
    return sweep


# Choosing ------------------------------------------------------------------------------------------------------------


def dim_of(result: dict) -> int:
    return Spec(**_tuples(result["spec"])).sizes.head_dim


def _tuples(spec: dict) -> dict:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in spec.items()}


def _case(result: dict) -> tuple:
    spec = result["spec"]
    return result["label"], spec["format"], spec["block_size"]


def best_choice(results: list[dict]) -> dict | None:
    """The choice with the smallest geometric mean of time over each case's best, among those that ran on every case."""
    timed = [r for r in results if "us" in r]
    fastest: dict = {}
    for r in timed:
        fastest[_case(r)] = min(r["us"], fastest.get(_case(r), math.inf))
    ratios: dict = {}
    for r in timed:
        ratios.setdefault(json.dumps(r["choice"]), {})[_case(r)] = r["us"] / fastest[_case(r)]
    complete = {choice: of for choice, of in ratios.items() if len(of) == len(fastest)}
    if not complete:
        return None
    return json.loads(min(complete, key=lambda c: sum(map(math.log, complete[c].values()))))


def best_rows(results: list[dict], kind: type) -> dict:
    """The table's rows: (storage, head size, regime) -> choice."""
    groups: dict = {}
    for r in results:
        if "regime" in r:
            groups.setdefault((STORAGE[r["spec"]["format"]], dim_of(r), r["regime"]), []).append(r)
    return {key: kind(**best) for key, of in sorted(groups.items()) if (best := best_choice(of))}


def table_text(decode: dict, unified: dict) -> str:
    """Python of both tables, as launch.py holds them between its two markers."""

    def one(name: str, kind: str, table: dict) -> str:
        lines = [f"{name}: dict[str, dict[tuple, {kind}]] = {{\n"]
        for gpu, rows in table.items():
            lines.append(f'    "{gpu}": {{\n')
            for key, row in rows.items():
                values = ", ".join(f'"{v}"' if isinstance(v, str) else str(v) for v in asdict(row).values())
                name_of = ", ".join(f'"{part}"' if isinstance(part, str) else str(part) for part in key)
                lines.append(f"        ({name_of}): {kind}({values}),\n")
            lines.append("    },\n")
        return "".join([*lines, "}\n"])

    return one("DECODE", "DecodeChoice", decode) + one("UNIFIED", "UnifiedPlan", unified)


def merged_tables(files: list[dict]) -> tuple[dict, dict]:
    """Today's tables with the rows that were measured in place of their own."""
    decode = {gpu: dict(rows) for gpu, rows in launch.DECODE.items()}
    unified = {gpu: dict(rows) for gpu, rows in launch.UNIFIED.items()}
    for kind, table, name in ((DecodeChoice, decode, "decode"), (UnifiedPlan, unified, "prefill")):
        for gpu in dict.fromkeys(file["gpu"] for file in files):
            results = [r for file in files if file["gpu"] == gpu and file["command"] == name for r in file["results"]]
            if results:
                table[gpu] = dict(sorted({**table.get(gpu, {}), **best_rows(results, kind)}.items()))
    return decode, unified


def write_table(text: str) -> None:
    source = LAUNCH.read_text()
    before, rest = source.split(BEGIN)
    _, after = rest.split(END)
    LAUNCH.write_text(before + BEGIN + text + END + after)


# The program ---------------------------------------------------------------------------------------------------------


def short(choice: dict) -> str:
    """A choice in a line."""
    tile = (
        f"{choice['block_m']}x{choice['block_n']}"
        if "block_m" in choice
        else f"{choice['products']} {choice['block_n']}"
    )
    text = f"{tile} w{choice['num_warps']} s{choice['num_stages']}{' tma' if choice['descriptors'] else ''}"
    if "pieces" in choice:
        text += f" {choice['pieces']}p" if choice["products"] == "bytes" else ""
        text += f" {choice['programs_per_sm']}/SM t{choice['min_tiles']}"
    return text


def summary(results: list[dict], top: int) -> list[str]:
    """The best of each case, one line each, then how often each failure came."""
    cases: dict = {}
    for r in results:
        if "us" in r:
            cases.setdefault(_case(r), []).append(r)
    lines = []
    for (label, fmt, block), of in cases.items():
        of.sort(key=lambda r: r["us"])
        # One line a kernel: the splits that suit it best.
        kernels: dict = {}
        for r in of:
            kernels.setdefault(json.dumps({k: v for k, v in r["choice"].items() if k not in SPLITS}), r)
        shown = [
            f"{r['us']:.1f} µs ({r['gbs']:.0f} GB/s)" if "gbs" in r else f"{r['us']:.0f} µs ({r['tflops']:.0f} TF)"
            for r in kernels.values()
        ]
        best = [f"{text} {short(r['choice'])}" for text, r in zip(shown, kernels.values(), strict=True)][:top]
        lines.append(f"{label} {fmt} block {block}: " + " | ".join(best))
    failures: dict = {}
    for r in results:
        if "failed" in r:
            failures.setdefault(r["failed"], []).append(f"{r['spec']['format']} {short(r['choice'])}")
    lines += [f"failed {len(of)}: {reason} ({of[0]}; {of[-1]})" for reason, of in failures.items()]
    return lines


@answers_bad_input
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="tune", description=paragraph(__doc__, 0), epilog=paragraph(__doc__, 2))
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    for name in ("decode", "prefill"):
        command = commands.add_parser(name, help=f"measure the {name} kernel's variants")
        command.add_argument("--format", nargs="+", choices=list(STORAGE), default=list(STORAGE), help="cache formats")
        command.add_argument("--json", metavar="FILE", required=True, help="where the results go")
        command.add_argument("--seconds", type=float, default=210.0, help="start no measurement after this time")
        command.add_argument("--compile-seconds", type=float, default=110.0, help="most of it to spend on compiling")
        command.add_argument("--top", type=int, default=3, help="kernels a case to print")
    command = commands.add_parser("table", help="choose from results, and print or write the table")
    command.add_argument("files", nargs="+", metavar="FILE", help="results of decode and prefill")
    command.add_argument("--write", action="store_true", help=f"put it into {LAUNCH.name}")
    args = parser.parse_args(argv)
    if args.command == "table":
        return table(args)
    if not torch.cuda.is_available():
        raise BadInput(f"tune {args.command}: needs a GPU")

    def say(line: str) -> None:
        print(line, flush=True)

    sweep_of = {"decode": sweep_decode, "prefill": sweep_prefill}[args.command]
    sweep = sweep_of(args.format, args.seconds, args.compile_seconds, say)
    path = Path(args.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    gpu = launch.gpu_of(torch.device("cuda", 0))
    path.write_text(
        json.dumps(
            {
                "command": args.command,
                "gpu": gpu.kind,
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "results": sweep.results,
            }
        )
    )
    say(f"{torch.cuda.get_device_name()}: {len(sweep.results)} results, {sweep.skipped} left out for time")
    for line in summary(sweep.results, args.top):
        say(line)
    return 0


def table(args: argparse.Namespace) -> int:
    files = []
    for name in args.files:
        try:
            files.append(json.loads(Path(name).read_text()))
        except (OSError, json.JSONDecodeError) as error:
            raise BadInput(f"{name}: not results of tune: {error}") from error
    text = table_text(*merged_tables(files))
    if args.write:
        write_table(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
