"""Speed of the kernels beside other attention, each answer checked against float64 before it is timed.

    python scripts/benchmark.py decode
    python scripts/benchmark.py prefill --shape qwen3-8b --tokens 8192 32768 --json results/prefill.json
    python scripts/benchmark.py decode --format int4 int8:int4 --shape qwen3-8b --batch 16 --context 8192
    python scripts/benchmark.py write
    python scripts/benchmark.py step --model qwen3-0.6b --method sdpa static graph --json results/step.json

Times are medians over replays of one CUDA graph that runs the call on layer after layer, more bytes than the L2 cache
holds several times over; K and V lie in pages scattered at random. The floor of a decode or a write is its bytes over
the bandwidth of a large copy, measured in the same run; a prefill is given in TFLOP/s over the pairs that are seen.
Peers get contiguous K and V. On a CPU (TRITON_INTERPRET=1) the shapes are shrunk: errors, no times. `step` times whole
decode steps of `generate` by another method: see `step_benchmark.py`.
"""

import argparse
import contextlib
import functools
import importlib
import json
import os
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

if not torch.cuda.is_available():
    # Read when a kernel is defined, so it must be set before the package is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from eval.program import BadInput, Parser, answers_bad_input, count, paragraph
from hf_paged_attention.kernels import counters, reference_rotate_heads, reference_write_kv, write_kv
from scripts import step_benchmark, timing
from scripts.attention_cases import (
    ATTENTION_FORMATS,
    FORMATS,
    SHAPES,
    Spec,
    error_of,
    even,
    format_named,
    make_case,
    mixed,
    ragged,
)
from scripts.compile_ahead import compile_ahead

DECODE_ROWS = {
    "qwen3-8b": [
        (1, 1024), (1, 4096), (1, 32768), (1, 131072), (4, 32768), (16, 8192), (64, 4096), (128, 1024)
    ],
    "qwen2.5-1.5b": [(1, 1024), (1, 4096), (1, 32768)],
    "gemma3-4b": [(1, 32768), (16, 8192)],
    "mha": [(8, 8192)],
}  # fmt: skip
PREFILL_ROWS = {
    "qwen3-8b": [512, 2048, 8192, 32768],
    "qwen2.5-1.5b": [8192],
    "gemma3-4b": [8192, 32768],
}
PLOT_BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256]


@dataclass
class Row:
    """One line of the table. `times` is by name, ours first; a peer that could not run has its reason instead."""

    what: str
    case: str
    format: str
    block_size: int
    extras: str = ""
    error: float | None = None
    floor: float | None = None
    work: float = 0.0  # bytes or operations a call
    times: dict = field(default_factory=dict)
    memory: dict = field(default_factory=dict)  # by name, bytes at the peak of a call beyond its inputs

    def as_json(self) -> dict:
        times = {n: t.__dict__ if isinstance(t, timing.Time) else str(t) for n, t in self.times.items()}
        return {**self.__dict__, "times": times}

    @classmethod
    def from_json(cls, entry: dict) -> "Row":
        times = {n: timing.Time(**t) if isinstance(t, dict) else t for n, t in entry["times"].items()}
        return cls(**{**entry, "times": times})

    def take_peers(self, other: "Row") -> None:
        """Peers' times of a row on the same sizes: they know no pages and no formats."""
        self.times |= {name: time for name, time in other.times.items() if name != "ours"}
        self.memory |= {name: size for name, size in other.memory.items() if name != "ours"}


# Peers ---------------------------------------------------------------------------------------------------------------


def _contiguous(spec: Spec, layers: int) -> tuple[list, list, list]:
    """Queries [B, Hq, T, D], keys and values [B, Hkv, L, D] of a batch whose requests are alike."""
    sizes, batch = spec.sizes, len(spec.contexts)

    def new(heads, tokens):
        shape = (batch, heads, tokens, sizes.head_dim)
        return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(layers)]

    context = spec.contexts[0]
    return new(sizes.query_heads, spec.new[0]), new(sizes.kv_heads, context), new(sizes.kv_heads, context)


def sdpa_calls(spec: Spec, layers: int) -> dict:
    """PyTorch's attention, by backend: name -> call(layer)."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    if len(set(spec.contexts)) > 1 or spec.window or spec.softcap or spec.sinks:
        return {}
    q, k, v = _contiguous(spec, layers)
    chunk = 1 < spec.new[0] < spec.contexts[0]

    def call_with(backend, q=q, k=k, v=v, *, gqa=True):
        def call(layer):
            options = {"is_causal": spec.new[0] > 1}
            if chunk:
                options = {"attn_mask": causal_lower_right(spec.new[0], spec.contexts[0])}
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    q[layer], k[layer], v[layer], enable_gqa=gqa, **options
                )

        return call

    if spec.decode:
        # The heads of a group as rows of one query: all see the same keys, so it is the same attention.
        rows = [x.reshape(x.shape[0], spec.sizes.kv_heads, -1, x.shape[-1]) for x in q]
        # Memory [B, L, Hkv, D], as the flash kernel's own interface has it.
        inner = [[x.transpose(1, 2).contiguous().transpose(1, 2) for x in xs] for xs in (k, v)]
        flash = SDPBackend.FLASH_ATTENTION
        return {
            "sdpa": call_with(flash),
            "sdpa rows": call_with(flash, rows, gqa=False),
            "sdpa inner": call_with(flash, q, *inner),
        }
    calls = {"sdpa flash": call_with(SDPBackend.FLASH_ATTENTION)}
    if not chunk:
        calls["sdpa cudnn"] = call_with(SDPBackend.CUDNN_ATTENTION)
    return calls


def textbook_calls(spec: Spec, layers: int) -> dict:
    """softmax(q k^T) v as a textbook has it, with all scores in memory."""
    if spec.decode or len(spec.contexts) > 1 or spec.sinks:
        return {}
    q, k, v = _contiguous(spec, layers)
    group, new, context = spec.sizes.group, spec.new[0], spec.contexts[0]

    def call(layer):
        keys, values = k[layer].repeat_interleave(group, 1), v[layer].repeat_interleave(group, 1)
        scores = torch.matmul(q[layer], keys.transpose(2, 3)) * spec.sizes.head_dim**-0.5
        if spec.softcap:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        position = torch.arange(context - new, context, device="cuda")[:, None]
        key = torch.arange(context, device="cuda")
        seen = key <= position
        if spec.window:
            seen &= key > position - spec.window
        scores = scores.masked_fill(~seen, -torch.inf)
        return torch.matmul(scores.softmax(-1, dtype=torch.float32).to(values.dtype), values)

    return {"textbook": call}


def fa3_calls(spec: Spec, layers: int) -> dict:
    """FlashAttention 3, if its package is installed."""
    for name in ("flash_attn_interface", "fa3_fwd_interface"):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(name)
            break
    else:
        return {"fa3": "not installed"}
    if len(set(spec.contexts)) > 1 or spec.sinks:
        return {}
    q, k, v = ([x.transpose(1, 2).contiguous() for x in xs] for xs in _contiguous(spec, layers))
    options = {"causal": True, "softcap": spec.softcap or 0.0}
    if spec.window:
        options["window_size"] = (spec.window - 1, 0)
    lens = torch.tensor(spec.contexts, dtype=torch.int32, device="cuda")
    if spec.decode:
        return {"fa3": lambda i: module.flash_attn_with_kvcache(q[i], k[i], v[i], cache_seqlens=lens, **options)}
    return {"fa3": lambda i: module.flash_attn_func(q[i], k[i], v[i], **options)}


def vllm_calls(spec: Spec, layers: int) -> dict:
    """vLLM's unified Triton kernel on the same kind of pages, if vLLM is installed."""
    for name in ("vllm.v1.attention.ops.triton_unified_attention", "vllm.attention.ops.triton_unified_attention"):
        with contextlib.suppress(ImportError):
            kernel = importlib.import_module(name).unified_attention
            break
    else:
        return {"vllm": "not installed"}
    if spec.format != "auto":
        return {}
    case = make_case(spec, torch.device("cuda"), layers=layers)
    shared = case.shared
    k, v = ([x.contiguous() for x in xs] for xs in (case.k, case.v))

    def call(layer):
        return kernel(
            q=case.query[layer], k=k[layer], v=v[layer], out=case.out[layer], cu_seqlens_q=shared["query_start_loc"],
            max_seqlen_q=shared["max_query_len"], seqused_k=shared["seq_lens"], max_seqlen_k=shared["max_seq_len"],
            softmax_scale=shared["scale"], causal=True, window_size=(spec.window - 1 if spec.window else -1,
            0 if spec.window else -1), block_table=shared["block_table"], softcap=spec.softcap or 0.0,
            q_descale=None, k_descale=None, v_descale=None, sinks=shared["sinks"],
        )  # fmt: skip

    return {"vllm": call}


PEERS = {"sdpa": sdpa_calls, "textbook": textbook_calls, "fa3": fa3_calls, "vllm": vllm_calls}


# Attention -----------------------------------------------------------------------------------------------------------


def peak_of(call) -> int:
    """Bytes that a call has allocated at its peak, its result included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def measure(spec: Spec, peers: list[str], bandwidth: float | None) -> Row:
    """Check a case, time it, and time its peers on the same sizes."""
    row = Row(spec.sizes.__str__(), spec.label, spec.format, spec.block_size, spec.extras)
    if bandwidth is None:
        spec = spec.small()
        case = make_case(spec, torch.device("cpu"))
        case.poison()
        case.run(0)
        row.error, _ = error_of(case, 0)
        return row
    layers = timing.layers_for(spec.bytes_read)
    case = make_case(spec, torch.device("cuda"), layers=layers)
    case.poison()
    for layer in range(layers):
        case.run(layer)
    row.error = max(error_of(case, layer)[0] for layer in (0, layers - 1))
    row.work = spec.bytes_read if spec.decode else spec.flops
    if spec.decode:
        row.floor = spec.bytes_read / bandwidth * 1e6
    row.times["ours"] = timing.time_graph(case.run, layers)
    row.memory["ours"] = peak_of(functools.partial(case.run, 0)) + case.out[0].nbytes  # which is allocated by now
    del case
    measure_peers(spec, peers, layers, row)
    counters.forget_graphs()
    torch.cuda.empty_cache()
    return row


def measure_peers(spec: Spec, peers: list[str], layers: int, row: Row) -> None:
    """Time the peers on a case's sizes, into its row."""
    for name in peers:
        try:
            calls = PEERS[name](spec, layers)
        except Exception as error:
            calls = {name: f"{type(error).__name__}"}
        for peer, call in calls.items():
            if isinstance(call, str):
                row.times[peer] = call
                continue
            try:
                row.memory[peer] = peak_of(functools.partial(call, 0))
                row.times[peer] = timing.time_graph(call, layers)
            except Exception as error:
                row.times[peer] = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
        del calls
        call = None
    alike = [n for n in row.times if n.split()[0] == "sdpa" and isinstance(row.times[n], timing.Time)]
    if spec.decode and alike:
        # Three ways of asking for the same; the fastest counts.
        fastest = min(alike, key=lambda n: row.times[n].median)
        row.times = {n: t for n, t in row.times.items() if n not in alike} | {"sdpa": row.times[fastest]}
        row.memory = {n: m for n, m in row.memory.items() if n not in alike} | {"sdpa": row.memory[fastest]}


def block_sizes(args, fmt: str) -> list[int]:
    """Those that were asked for, or the default of a cache in this format."""
    return args.block_size or [format_named(fmt).block_size]


def decode_specs(args) -> list[Spec]:
    """The rows of the command's arguments; without any, those of docs/performance.md."""
    specs = []
    if args.shape or args.batch or args.context:
        for shape in args.shape or ["qwen3-8b"]:
            for batch in args.batch or [1]:
                for context in args.context or [4096]:
                    specs.append(even(shape, batch, context))
        specs = [
            replace(s, window=w, sinks=args.sinks, softcap=args.softcap) for s in specs for w in args.window or [None]
        ]
        if args.ragged:
            specs += [ragged(shape) for shape in args.shape or ["qwen3-8b"]]
        return [replace(s, format=f, block_size=b) for s in specs for f in args.format for b in block_sizes(args, f)]
    specs = [even(shape, batch, context) for shape, rows in DECODE_ROWS.items() for batch, context in rows]
    specs = [replace(s, format=f, block_size=b) for s in specs for f in args.format for b in block_sizes(args, f)]
    specs += [replace(ragged("qwen3-8b"), format=f, block_size=block_sizes(args, f)[0]) for f in args.format]
    plain = even("qwen3-8b", 16, 8192)
    specs += [replace(plain, block_size=16, format=f) for f in args.format]
    specs += [replace(plain, softcap=50.0), replace(plain, sinks=True), even("qwen3-8b", 16, 32768, window=1024)]
    specs += [even("qwen2.5-7b", 32, 8192), even("group-9", 32, 8192), even("qwen2.5-1.5b", 64, 8192)]
    specs += [even("qwen3-8b", 16, 1024)]  # what the window's time is measured against
    return list(dict.fromkeys(specs))


def prefill_specs(args) -> list[Spec]:
    """The rows of the command's arguments; without any, those of docs/performance.md."""
    if args.shape or args.tokens:
        specs = [even(shape, 1, n, n) for shape in args.shape or ["qwen3-8b"] for n in args.tokens or [8192]]
        specs = [
            replace(s, window=w, sinks=args.sinks, softcap=args.softcap) for s in specs for w in args.window or [None]
        ]
    else:
        specs = [even(shape, 1, n, n) for shape, rows in PREFILL_ROWS.items() for n in rows]
        specs += [even("qwen3-8b", 1, 32768, 2048), even("qwen3-8b", 1, 32768, 32768, window=1024), mixed("qwen3-8b")]
        specs += [even("qwen3-8b", 2, 512, 512), even("qwen3-8b", 30, 4096)]  # the mixed batch's parts
        if not args.block_size:
            specs.append(even("qwen3-8b", 1, 8192, 8192, block_size=16))
    rows = [replace(s, format=f, block_size=b if args.block_size or s.block_size == 64 else s.block_size)
            for s in specs for f in args.format for b in block_sizes(args, f)]  # fmt: skip
    return list(dict.fromkeys(rows))


def run_attention(args, specs: list[Spec], bandwidth: float | None, say) -> list[Row]:
    if bandwidth is not None:
        start = time.monotonic()
        errors = compile_ahead([(spec, None) for spec in specs])
        say(f"compiled {len(specs)} cases in {time.monotonic() - start:.0f} s")
        for spec, error in zip(specs, errors, strict=True):
            if error:
                say(f"  {spec.shape} {spec.label} {spec.format}: {error}")
    rows = []
    exact: dict[Spec, Row] = {}  # whose peers the same case in another format has too
    for spec in specs:
        if args.seconds and time.monotonic() - args.started > args.seconds:
            say(f"stopped after {args.seconds} s: {len(specs) - len(rows)} cases left out")
            break
        try:
            like = replace(spec, format="auto", block_size=64)
            known = exact.get(like)
            rows.append(measure(spec, [] if known else args.peer, bandwidth))
            if known:
                rows[-1].take_peers(known)
            else:
                exact[like] = rows[-1]
        except (AssertionError, RuntimeError) as error:
            rows.append(Row(str(spec.sizes), spec.label, spec.format, spec.block_size, spec.extras))
            rows[-1].times["ours"] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
        say(line_of(rows[-1]))
    return rows


# Writes --------------------------------------------------------------------------------------------------------------


def write_case(sizes, tokens: int, fmt: str, block_size: int, device, *, transposed: bool, seed: int = 0) -> dict:
    """Arguments of `write_kv` for tokens that fill blocks in order (a prompt), or one slot of each (a step).

    Keys of 8-bit formats are turned, as a cache's are.
    """
    generator = torch.Generator(device).manual_seed(seed)
    dtype = FORMATS[fmt] or torch.bfloat16
    step = tokens <= 256
    num_blocks = tokens + 8 if step else -(-tokens // block_size) + 8
    blocks = torch.randperm(num_blocks, generator=generator, device=device)
    position = torch.arange(tokens, device=device)
    slots = (
        blocks[position] * block_size + 5
        if step
        else blocks[position // block_size] * block_size + position % block_size
    )

    def pool(by_slot):
        inner = (sizes.head_dim, block_size) if by_slot else (block_size, sizes.head_dim)
        memory = torch.zeros((sizes.kv_heads, num_blocks, *inner), dtype=dtype, device=device)
        return memory.permute(1, 3, 0, 2) if by_slot else memory.permute(1, 2, 0, 3)

    def scales():
        memory = torch.full((sizes.kv_heads, num_blocks, block_size), float("nan"), device=device)
        return memory.permute(1, 2, 0) if dtype.itemsize == 1 else None

    rows = (tokens, sizes.kv_heads, sizes.head_dim)
    key, value = (torch.randn(rows, generator=generator, device=device).to(torch.bfloat16) for _ in range(2))
    powers = torch.randint(-2, 3, (sizes.kv_heads, sizes.head_dim), generator=generator, device=device)
    return {
        "turn_factor": torch.exp2(powers.float()) if dtype.itemsize == 1 else None,
        "key": key, "value": value, "k_pool": pool(False), "v_pool": pool(transposed and dtype.itemsize == 1),
        "slot_mapping": slots.to(torch.int64), "k_scale": scales(), "v_scale": scales(),
    }  # fmt: skip


def check_write(arguments: dict) -> float:
    """Difference between what was stored and the reference's, in the 2-norm over the reference's.

    Raises:
        AssertionError: it is larger than a few codes that were rounded the other way.
    """

    def stored():
        result = []
        for pool, scale in (("k_pool", "k_scale"), ("v_pool", "v_scale")):
            slots, block_size = arguments["slot_mapping"], arguments[pool].shape[1]
            at = slots // block_size, slots % block_size
            codes = (
                arguments[pool].view(torch.uint8)[at].view(arguments[pool].dtype)
                if arguments[pool].dtype.itemsize == 1
                else arguments[pool][at]
            )
            values = codes.float()
            result.append(values if arguments[scale] is None else values * arguments[scale][at][..., None])
        return result

    write_kv(**arguments)
    got = stored()
    factor = arguments["turn_factor"]
    plain = {name: value for name, value in arguments.items() if name != "turn_factor"}
    if factor is not None:
        plain["key"] = reference_rotate_heads(arguments["key"], factor, divide=True)
    reference_write_kv(**plain)
    want = stored()
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(got, want, strict=True))
    assert error < 1e-2, f"stored values differ from the reference's by {error:.1e}"
    return error


def run_write(args, bandwidth: float | None, say) -> list[Row]:
    rows = []
    device = torch.device("cuda" if bandwidth else "cpu")
    for shape in args.shape or ["qwen3-8b"]:
        sizes = SHAPES[shape]
        for tokens in args.tokens or [64, 8192]:
            for fmt in args.format:
                for block_size in block_sizes(args, fmt):
                    row = Row(str(sizes), f"{tokens:,} tokens", fmt, block_size)
                    item = FORMATS[fmt].itemsize if FORMATS[fmt] else 2
                    row.work = tokens * sizes.kv_heads * (2 * sizes.head_dim * (2 + item) + (8 if item == 1 else 0))
                    few = tokens if bandwidth else min(tokens, 40)
                    row.error = check_write(write_case(sizes, few, fmt, block_size, device, transposed=True))
                    if bandwidth:
                        row.floor = row.work / bandwidth * 1e6
                        layers = timing.layers_for(row.work)
                        cases = [
                            write_case(sizes, tokens, fmt, block_size, device, transposed=True, seed=i)
                            for i in range(layers)
                        ]
                        row.times["ours"] = timing.time_graph(lambda i, cases=cases: write_kv(**cases[i]), layers)
                        if item == 1:
                            heads = sizes.query_heads // sizes.kv_heads
                            for case in cases:
                                case["query"] = case["key"].repeat(1, heads, 1)
                            row.times["with queries"] = timing.time_graph(
                                lambda i, cases=cases: write_kv(**cases[i]), layers
                            )
                    rows.append(row)
                    say(line_of(row))
    return rows


# Tables and plots ----------------------------------------------------------------------------------------------------


def rate(row: Row, name: str = "ours") -> str:
    """GB/s, or TFLOP/s where there is no floor."""
    time = row.times.get(name)
    if not isinstance(time, timing.Time):
        return "" if time is None else str(time)
    per_second = row.work / (time.median * 1e-6)
    return f"{per_second / 1e9:,.0f}" if row.floor is not None else f"{per_second / 1e12:.0f}"


def megabytes(row: Row, name: str) -> str:
    return f"{row.memory[name] / 1e6:,.0f}" if name in row.memory else ""


def line_of(row: Row) -> str:
    times = ", ".join(
        f"{name} {time} µs ({rate(row, name)})" if isinstance(time, timing.Time) else f"{name} {time}"
        for name, time in row.times.items()
    )
    error = "" if row.error is None else f"error {row.error:.1e}"
    return "  ".join(
        x for x in (row.what, row.case, row.format, f"block {row.block_size}", row.extras, error, times) if x
    )


def table_of(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells."""
    peers = list(dict.fromkeys(name for row in rows for name in row.times if name != "ours"))
    by_bytes = any(row.floor is not None for row in rows)
    unit = "GB/s" if by_bytes else "TFLOP/s"
    headings = ["shape", "case", "format", "block", "extras", "error", "µs", "±", unit]
    with_memory = not by_bytes and any(row.memory for row in rows)
    if with_memory:
        headings.append("MB")
    if by_bytes:
        headings += ["floor µs", "over floor"]
    for peer in peers:
        headings += [f"{peer} µs", f"ours over {peer}"] if by_bytes else [f"{peer} µs", f"{peer} {unit}"]
        if with_memory:
            headings.append(f"{peer} MB")
    cells = []
    for row in rows:
        ours = row.times.get("ours")
        timed = isinstance(ours, timing.Time)
        line = [row.what, row.case, row.format, str(row.block_size), row.extras]
        line.append("" if row.error is None else f"{row.error:.1e}")
        line += [str(ours), f"{ours.spread:.1%}", rate(row)] if timed else ["" if ours is None else str(ours), "", ""]
        if with_memory:
            line.append(megabytes(row, "ours"))
        if by_bytes:
            floor = row.floor is not None and timed
            line += [f"{row.floor:.1f}", f"{ours.median / row.floor:.2f}"] if floor else ["", ""]
        for peer in peers:
            time = row.times.get(peer)
            if isinstance(time, timing.Time) and timed:
                line += [str(time), f"{ours.median / time.median:.2f}" if by_bytes else rate(row, peer)]
            else:
                line += ["" if time is None else str(time)[:24], ""]
            if with_memory:
                line.append(megabytes(row, peer))
        cells.append(line)
    return headings, cells


def show(title: str, rows: list[Row]) -> None:
    headings, cells = table_of(rows)
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
        for line in (headings, *cells):
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
        return
    table = Table(title=title, title_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < 5 else "right")
    for line in cells:
        table.add_row(*line)
    # A file or a pipe takes the whole width.
    console = Console(width=None if sys.stdout.isatty() else 220)
    console.print(table)


def bandwidth_specs(args) -> list[Spec]:
    """Batches of 1 to 256 requests of 4,096 tokens."""
    shape = (args.shape or ["qwen3-8b"])[0]
    return [
        even(shape, batch, 4096, format=fmt, block_size=block_sizes(args, fmt)[0])
        for fmt in args.format
        for batch in PLOT_BATCHES
    ]


def plot_bandwidth(path: str, rows: list[Row], bandwidth: float, device: str) -> None:
    """Bandwidth of decode over the batch at 4,096 tokens, a line a format, under the bandwidth of a copy."""
    from matplotlib import pyplot

    def points(name: str, fmt: str) -> list:
        mine = [row for row in rows if row.format == fmt and row.case.endswith("× 4,096") and not row.extras]
        timed = [row for row in mine if isinstance(row.times.get(name), timing.Time)]
        return sorted((int(row.case.split()[0]), row.work / row.times[name].median / 1e6) for row in timed)

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for fmt in dict.fromkeys(row.format for row in rows):
        if points("ours", fmt):
            axes.plot(*zip(*points("ours", fmt), strict=True), marker="o", label=f"paged, {fmt}")
    for peer, label in (("sdpa", "SDPA"), ("fa3", "FlashAttention 3")):
        if points(peer, "auto"):
            line = zip(*points(peer, "auto"), strict=True)
            axes.plot(*line, marker="x", linestyle="--", label=f"{label}, contiguous bfloat16")
    axes.axhline(bandwidth / 1e12, color="grey", linestyle=":", label="copy")
    axes.set(xscale="log", xlabel="requests, 4,096 tokens each", ylabel="TB/s of keys and values", ylim=(0, None))
    axes.set_title(f"{rows[0].what}, {device}")
    axes.legend()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", dpi=150)


def plot_rates(path: str, rows: list[Row]) -> None:
    """TFLOP/s of prefill over the tokens of a prompt, a figure a shape."""
    from matplotlib import pyplot

    whole = [row for row in rows if not row.extras and "on" not in row.case and row.case.startswith("1 ×")]
    plain = [row for row in whole if row.format == "auto" and row.block_size == whole[0].block_size]
    cases: dict[str, set] = {}
    for row in plain:
        cases.setdefault(row.what, set()).add(row.case)
    # One length alone makes no line; shapes of one are drawn where no other is there.
    shapes = [shape for shape, of in cases.items() if len(of) > 1] or list(cases)
    figure, all_axes = pyplot.subplots(1, len(shapes), figsize=(5 * len(shapes), 4), squeeze=False)
    for shape, axes in zip(shapes, all_axes[0], strict=True):
        mine = [row for row in plain if row.what == shape]
        for name in dict.fromkeys(name for row in mine for name in row.times):
            points = [(int(row.case.split("×")[1].replace(",", "")), row.work / row.times[name].median / 1e6)
                      for row in mine if isinstance(row.times.get(name), timing.Time)]  # fmt: skip
            if points:
                axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
        axes.set(title=shape, xscale="log", xlabel="tokens", ylabel="TFLOP/s", ylim=(0, None))
        axes.legend()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", dpi=150)


# The program ---------------------------------------------------------------------------------------------------------


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="bench", description=paragraph(__doc__, 0), epilog=paragraph(__doc__, 2))
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    for name, what in (
        ("decode", "one query token a request"),
        ("write", "new keys and values into the pages"),
        ("prefill", "prompts, chunks on cached keys, and mixed batches"),
    ):
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument(
            "--shape", nargs="+", choices=list(SHAPES), help="model shapes; left out: a table of several"
        )
        command.add_argument(
            "--format",
            nargs="+",
            choices=list(FORMATS if name == "write" else ATTENTION_FORMATS),
            default=["auto"] if name == "prefill" else list(FORMATS),
        )
        command.add_argument("--block-size", nargs="+", type=count(16), help="tokens a block")
        if name == "decode":
            command.add_argument("--batch", nargs="+", type=count(1), help="requests")
            command.add_argument("--context", nargs="+", type=count(1), help="cached tokens a request")
            command.add_argument(
                "--batches", action="store_true", help="batches of 1 to 256 at 4,096 tokens, as --plot"
            )
            command.add_argument("--ragged", action="store_true", help="also 131,072 tokens beside 31 × 1,024")
        else:
            command.add_argument("--tokens", nargs="+", type=count(1), help="new tokens")
        if name != "write":
            command.add_argument("--window", nargs="+", type=count(1), help="sliding windows, in tokens")
            command.add_argument("--softcap", type=float, help="logit softcap")
            command.add_argument("--sinks", action="store_true", help="a sink logit a head")
            command.add_argument(
                "--peer", nargs="*", choices=list(PEERS), default=["sdpa"], help="attention to compare with"
            )
            command.add_argument("--plot", metavar="FILE", help="draw a figure there (needs matplotlib)")
        command.add_argument("--seconds", type=float, help="start no case after this time")
        command.add_argument("--json", metavar="FILE", help="write everything there too")
    command = commands.add_parser("plot", help="the figure of a run's JSON, on any machine (needs matplotlib)")
    command.add_argument("file", metavar="JSON", help="what decode --batches or prefill wrote")
    command.add_argument("figure", metavar="FILE", help="where the figure goes")
    command = commands.add_parser(
        "step", help="a decode step of generate, by method", description=paragraph(step_benchmark.__doc__, 1)
    )
    step_benchmark.add_arguments(command)
    return parser.parse_args(argv)


def plot_file(args) -> int:
    try:
        results = json.loads(Path(args.file).read_text())
        rows = [Row.from_json(entry) for entry in results["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{args.file}: not results of decode or prefill: {error}") from error
    if results["command"] == "decode":
        plot_bandwidth(args.figure, rows, results["copy"], results["device"])
    else:
        plot_rates(args.figure, rows)
    return 0


@answers_bad_input
def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    args.started = time.monotonic()
    on_gpu = torch.cuda.is_available()
    if getattr(args, "plot", None) and not on_gpu:
        raise BadInput(f"--plot {args.plot}: needs a GPU; a CPU gives errors, no times")

    def say(line: str) -> None:
        print(line, flush=True)

    if args.command == "plot":
        return plot_file(args)
    if args.command == "step":
        where = torch.cuda.get_device_name() if on_gpu else "cpu"
        say(f"{where}, torch {torch.__version__}, {torch.get_num_threads()} threads on the host")
        return step_benchmark.run(args, say)
    device = torch.cuda.get_device_name() if on_gpu else "cpu, Triton's interpreter, shapes shrunk"
    bandwidth = timing.copy_bandwidth() if on_gpu else None
    say(f"{device}, torch {torch.__version__}" + (f", copy {bandwidth / 1e9:,.0f} GB/s" if bandwidth else ""))
    rate_of_matmul = None
    if on_gpu and args.command == "prefill":
        rate_of_matmul = timing.matmul_rate()
        say(f"bfloat16 matrix product {rate_of_matmul / 1e12:.0f} TFLOP/s")
    if args.command == "write":
        rows = run_write(args, bandwidth, say)
    elif args.command == "decode":
        specs = bandwidth_specs(args) if args.plot or args.batches else decode_specs(args)
        rows = run_attention(args, specs, bandwidth, say)
        if args.plot:
            plot_bandwidth(args.plot, rows, bandwidth, device)
    else:
        rows = run_attention(args, prefill_specs(args), bandwidth, say)
        if args.plot:
            plot_rates(args.plot, rows)
    show(f"{args.command} on {device}", rows)
    if args.json:
        path = Path(args.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        settings = {"device": device, "torch": torch.__version__, "copy": bandwidth, "matmul": rate_of_matmul}
        path.write_text(
            json.dumps({**settings, "command": args.command, "rows": [row.as_json() for row in rows]}, indent=1)
        )
    failed = [row for row in rows if isinstance(row.times.get("ours"), str)]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
