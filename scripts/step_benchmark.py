"""`benchmark.py step`: a decode step of `model.generate`, as a user calls it, by method.

A step is the difference of two calls that generate different numbers of tokens, divided by the difference: prefill,
capture and Python's set-up fall out. The first call's seconds beyond a later one's are the compile time; the time to
the first token is a call of one. Peak memory is that of all calls of a row, prefill with its activations included
(`--prefill-chunk` bounds those). `anew` is what a first call with a prompt of another length takes beyond a second one
like it: what is compiled or captured for it. `capture` is the same for a call whose graph was thrown away before: what
the graph that an earlier call left behind saves. Models have random weights of a shape, or are whatever `--model`
finds. Random weights have near ties: `same` is the share of tokens before rows part from those of the case's first
method.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, CompileConfig, LogitsProcessor

import hf_paged_attention
from eval.models import device_named, load
from eval.program import BadInput, count
from hf_paged_attention.backends.registry import ENVIRONMENT

SHAPES = {
    "qwen3-0.6b": dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, intermediate_size=3072),
    "qwen3-8b": dict(hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, intermediate_size=12288),
}
COMMON = dict(vocab_size=151936, num_key_value_heads=8, head_dim=128, max_position_embeddings=131072)
TINY = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, vocab_size=512)
TINY |= dict(num_key_value_heads=2, head_dim=32, initializer_range=0.25)  # so that tokens follow the context

# How `generate` is called, by method; the format of the cache comes after one of ours, as in "graph-int8".
PEERS = ("eager", "sdpa", "static")
OURS = {"plain": "plain", "generate-auto": "compile", "graph": "graph", "graph-nocompile": "graph"}
FORMATS = ("int8", "fp8", "int4")
METHODS = (*PEERS, *(f"{name}{suffix}" for name in OURS for suffix in ("", *(f"-{format}" for format in FORMATS))))
BANDWIDTH = 4.27e12  # bytes a second of a large copy on an H200: what the floor divides by

# (model, batch, context, method): what was seen to end in "out of memory" on 141 GB, or is larger than that.
TOO_LARGE = {
    ("qwen3-0.6b", 1, 32768, "eager"): "its attention weights, 16 · 32,768² in float32, take 69 GB a copy",
    ("qwen3-8b", 1, 32768, "eager"): "its attention weights, 32 · 32,768² in float32, take 137 GB",
    ("qwen3-8b", 16, 4096, "eager"): "seen to run out of memory",
    ("qwen3-8b", 16, 4096, "static"): "seen to run out of memory",
}


@dataclass
class Row:
    """One line of the table; milliseconds, seconds, bytes."""

    model: str
    batch: int
    context: int
    method: str
    ms: float | None = None
    spread: tuple[float, float] | None = None
    tokens_per_s: float | None = None
    first_token_s: float | None = None
    compile_s: float | None = None
    anew_s: float | None = None
    capture_s: float | None = None
    peak: int | None = None
    floor_ms: float | None = None
    same: float | None = None
    why_not: str | None = None
    profile: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        head = f"{self.model:<11} {self.batch:>3} × {self.context:<7,} {self.method:<20}"
        if self.why_not:
            return f"{head} {self.why_not}"
        if self.ms is None:
            return f"{head} same tokens {self.same:.0%}"
        over = "" if self.floor_ms is None else f"  floor {self.floor_ms:5.2f} (× {self.ms / self.floor_ms:4.1f})"
        peak = "" if self.peak is None else f"  peak {self.peak / 1e9:6.2f} GB"
        anew = "" if self.anew_s is None else f"  anew {self.anew_s:6.3f} s"
        capture = "" if self.capture_s is None else f"  capture {self.capture_s:6.3f} s"
        return (
            f"{head} {self.ms:8.2f} ms [{self.spread[0]:.2f}, {self.spread[1]:.2f}]  {self.tokens_per_s:8.1f} tokens/s"
            f"  first token {self.first_token_s:6.3f} s  compile {self.compile_s:5.1f} s{anew}{capture}{peak}{over}"
            f"  same {self.same:.0%}"
        )


def add_arguments(command: Any) -> None:
    command.add_argument(
        "--model",
        nargs="+",
        default=["qwen3-0.6b"],
        help=f"random weights of a shape ({', '.join(SHAPES)}), or a model as the other programs take it",
    )
    command.add_argument("--case", nargs="+", default=["1x512", "1x32768", "16x4096"], help="batch x context")
    command.add_argument(
        "--method", nargs="+", choices=METHODS, default=["sdpa", "static", "generate-auto", "graph", "graph-int8"]
    )
    command.add_argument("--device", default="auto", help="cpu asks for times on the CPU; auto gives none there")
    command.add_argument("--few", type=count(2), default=16, help="tokens of the shorter call")
    command.add_argument("--many", type=count(3), default=80, help="tokens of the longer call")
    command.add_argument("--repeats", type=count(1), default=3)
    command.add_argument("--prefill-chunk", type=count(1), metavar="N", help="generate's prefill_chunk_size")
    command.add_argument("--threads", type=count(1), help="of PyTorch on the CPU")
    command.add_argument("--profile", action="store_true", help="also where a step's time goes, by kernel")
    command.add_argument("--seconds", type=float, help="start no row after this time")
    command.add_argument("--json", metavar="FILE", help="write the rows there, after each of them")


def build(name: str, device: torch.device, dtype: torch.dtype, shrunk: bool) -> Any:
    """A model of random weights, made on its device; shrunk to two small layers where only tokens are compared."""
    if name not in SHAPES:
        return load(name, device, dtype)[0]
    options = {**COMMON, **SHAPES[name], **(TINY if shrunk else {})}
    config = AutoConfig.for_model("qwen3", **options, tie_word_embeddings=name == "qwen3-0.6b")
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def prepare(model: Any, method: str, shrunk: bool) -> dict[str, Any]:
    """Set the model up for a method; returns arguments of `generate`."""
    hf_paged_attention.disable(model)
    if method in PEERS:
        model.set_attn_implementation("eager" if method == "eager" else "sdpa")
        if method != "static":
            return {}
        return {"cache_implementation": "static", "disable_compile": shrunk}
    name, kv_dtype = method, "auto"
    for format in FORMATS:
        if method.endswith(f"-{format}"):
            name, kv_dtype = method.removesuffix(f"-{format}"), format
    compiles = name != "graph-nocompile" and not shrunk
    hf_paged_attention.enable(model, decode=OURS[name], compile=compiles, kv_dtype=kv_dtype)
    if name != "generate-auto" or model.device.type == "cuda":
        return {}
    config = CompileConfig(fullgraph=True)
    config._compile_all_devices = True
    return {"compile_config": config}


class StepClock(LogitsProcessor):
    """Notes when each step of a call has its logits: on a CPU, when they are computed."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.at.append(time.perf_counter())
        return scores

    @property
    def steps(self) -> list[float]:
        """Milliseconds of each step but the first, which sets things up."""
        return [(b - a) * 1e3 for a, b in zip(self.at[1:], self.at[2:], strict=False)]


class Calls:
    """Timed calls of `generate` for one case."""

    def __init__(self, model: Any, batch: int, context: int, prefill_chunk: int | None = None):
        self.model = model
        self.prefill_chunk = prefill_chunk
        generator = torch.Generator().manual_seed(1)
        vocabulary = model.config.get_text_config().vocab_size
        self.ids = torch.randint(3, vocabulary, (batch, context), generator=generator).to(model.device)
        self.mask = torch.ones_like(self.ids)
        self.arguments: dict[str, Any] = {}
        self.tokens: torch.Tensor | None = None

    def __call__(self, new: int, clock: StepClock | None = None) -> float:
        """Seconds of a call that generates `new` tokens, which are in `tokens` after. clock: also of its steps."""
        self._wait()
        start = time.perf_counter()
        out = self.model.generate(
            input_ids=self.ids,
            attention_mask=self.mask,
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            prefill_chunk_size=self.prefill_chunk,
            logits_processor=[clock] if clock else None,
            **self.arguments,
        )
        self._wait()
        self.tokens = out[:, self.ids.shape[1] :]
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.ids.device.type == "cuda":
            torch.cuda.synchronize()


def floor_ms(model: Any, batch: int, context: int, method: str) -> float:
    """(weights + keys and values) / bandwidth, in milliseconds."""
    parameters = {p.data_ptr(): p for p in model.parameters()}.values()
    weights = sum(p.numel() * p.element_size() for p in parameters)
    if not model.config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.nbytes  # a step reads a row of it
    kv_dtype = next((format for format in FORMATS if method.endswith(format)), "auto")
    cache = hf_paged_attention.PagedCache(model.config, kv_dtype=kv_dtype, dtype=model.dtype)
    return (weights + batch * context * cache.bytes_per_token) / BANDWIDTH * 1e3


def measure(row: Row, calls: Calls, args: Any) -> None:
    """Fill `row` with the times of its method."""
    calls.arguments = prepare(calls.model, row.method, shrunk=False)
    cuda = calls.ids.device.type == "cuda"
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    first = calls(args.many)
    row.first_token_s = min(calls(1) for _ in range(2))
    short, long = [], []
    for _ in range(args.repeats):
        short.append(calls(args.few))
        long.append(calls(args.many))
    steps = sorted((b - a) / (args.many - args.few) * 1e3 for a, b in zip(short, long, strict=True))
    row.ms, row.spread = steps[len(steps) // 2], (steps[0], steps[-1])
    row.compile_s = first - min(long)
    row.tokens_per_s = row.batch / row.ms * 1e3
    if cuda:
        row.peak = torch.cuda.max_memory_allocated()
    measure_anew(row, calls, args.few)
    if cuda:
        row.floor_ms = floor_ms(calls.model, row.batch, row.context, row.method)
    if args.profile:
        row.profile = profile_step(calls, row.ms)


def measure_anew(row: Row, calls: Calls, new: int) -> None:
    """Fill in what compiling and capturing cost a later call; `calls.tokens` stays."""
    tokens = calls.tokens
    if row.method.startswith("graph"):
        kept = calls(new)
        Calls(calls.model, row.batch + 1, 4)(1)  # other rows: what earlier calls left behind is let go of
        row.capture_s = calls(new) - kept
    shorter = Calls(calls.model, row.batch, row.context - row.context // 8, calls.prefill_chunk)
    shorter.arguments = calls.arguments
    row.anew_s = shorter(new) - shorter(new)
    calls.tokens = tokens


def measure_in_turn(rows: list[Row], calls: Calls, args: Any, say: Any) -> None:
    """The same on a machine that does other things too: methods in turn, and the least tenth of all their steps."""
    steps: dict[str, list[float]] = {row.method: [] for row in rows}
    firsts: dict[str, list[float]] = {row.method: [] for row in rows}
    warm_up, tokens = {}, {}
    for repeat in range(args.repeats + 1):
        for row in rows:
            calls.arguments = prepare(calls.model, row.method, shrunk=False)
            clock, start = StepClock(), time.perf_counter()
            seconds = calls(args.many, clock)
            tokens[row.method] = calls.tokens
            if repeat:
                steps[row.method] += clock.steps
                firsts[row.method].append(clock.at[0] - start)
                warm_up[row.method] = min(warm_up[row.method], seconds)
            else:
                warm_up[row.method], row.compile_s = float("inf"), seconds
    for row in rows:
        mine = sorted(steps[row.method])
        row.ms = mine[len(mine) // 10]
        row.spread = (mine[0], mine[len(mine) // 2])
        row.first_token_s = min(firsts[row.method])
        row.compile_s -= warm_up[row.method]
        row.tokens_per_s = row.batch / row.ms * 1e3
        row.same = agreement(tokens[row.method], tokens[rows[0].method])
        say(f"{row}  × {row.ms / rows[0].ms:.2f} of {rows[0].method}")


def compare(row: Row, calls: Calls, args: Any) -> None:
    """Tokens alone, where times would say nothing."""
    calls.arguments = prepare(calls.model, row.method, shrunk=True)
    if "compile_config" in calls.arguments:
        calls.arguments["compile_config"].backend = "eager"
    calls(args.many)


def profile_step(calls: Calls, wall_ms: float, few: int = 4, many: int = 20) -> dict[str, Any]:
    """Device (on a CPU: host) milliseconds of one step by kernel: two profiled calls' difference, a step's share."""
    cuda = calls.ids.device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]

    def by_name(new: int) -> dict[str, tuple[float, int]]:
        with profile(activities=activities) as profiler:
            calls(new)
        found: dict[str, tuple[float, int]] = {}
        for event in profiler.key_averages():
            microseconds = event.self_device_time_total if cuda else event.self_cpu_time_total
            if microseconds:
                found[event.key] = (microseconds / 1e3, event.count)
        return found

    before, after, steps = by_name(few), by_name(many), many - few
    kernels = []
    for name, (ms, launches) in after.items():
        earlier_ms, earlier_launches = before.get(name, (0.0, 0))
        if launches > earlier_launches:
            kernels.append((name, (ms - earlier_ms) / steps, (launches - earlier_launches) / steps))
    kernels.sort(key=lambda kernel: -kernel[1])
    busy = sum(ms for _, ms, _ in kernels)
    return {
        "device_ms": busy,
        "wall_ms": wall_ms,
        "launches": sum(launches for _, _, launches in kernels),
        "kernels": [{"name": name, "ms": ms, "launches": launches} for name, ms, launches in kernels[:25]],
    }


def profile_lines(row: Row) -> list[str]:
    found = row.profile
    lines = [
        f"    {found['device_ms']:.3f} ms of kernels in {found['launches']:.0f} launches a step, "
        f"of {found['wall_ms']:.3f} ms: idle {max(0.0, 1 - found['device_ms'] / found['wall_ms']):.0%}"
    ]
    for kernel in found["kernels"][:12]:
        lines.append(f"    {kernel['ms']:8.4f} ms  {kernel['launches']:5.1f} ×  {kernel['name'][:90]}")
    return lines


def agreement(tokens: torch.Tensor, expected: torch.Tensor) -> float:
    """Share of `expected` before each row of `tokens` parts from it."""
    return float((tokens == expected).int().cumprod(1).float().mean())


def case_of(text: str) -> tuple[int, int]:
    batch, _, context = text.partition("x")
    if not (batch.isdigit() and context.isdigit() and int(batch) and int(context)):
        raise BadInput(f"--case {text}: give a batch and a context as 16x4096")
    return int(batch), int(context)


def run(args: Any, say: Any) -> int:
    if args.many <= args.few:
        raise BadInput(f"--many {args.many}: must be more than --few {args.few}")
    device = device_named(args.device)
    shrunk = device.type == "cpu" and args.device == "auto"
    if args.threads:
        torch.set_num_threads(args.threads)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cases = [case_of(text) for text in args.case]
    if shrunk:
        args.few, args.many = 2, 8
        cases = list(dict.fromkeys((min(batch, 3), min(context, 80)) for batch, context in cases))
    if device.type == "cpu":
        # `benchmark.py` asks for Triton's interpreter, which checks kernels; a step is to be what a user gets.
        os.environ.setdefault(ENVIRONMENT, "reference")
    rows: list[Row] = []
    settings = {"device": str(device), "torch": torch.__version__, "few": args.few, "many": args.many}
    settings |= {"prefill_chunk": args.prefill_chunk}

    def keep() -> None:
        if args.json:
            path = Path(args.json)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({**settings, "rows": [row.__dict__ for row in rows]}, indent=1))

    for name in args.model:
        start = time.perf_counter()
        model = build(name, device, dtype, shrunk)
        say(f"{name}: built in {time.perf_counter() - start:.0f} s")
        for batch, context in cases:
            calls = Calls(model, batch, context, args.prefill_chunk)
            mine = [Row(name, batch, context, method) for method in args.method]
            if device.type == "cpu" and not shrunk:
                measure_in_turn(mine, calls, args, say)
                rows += mine
                keep()
                continue
            expected = None
            for row in mine:
                if args.seconds and time.monotonic() - args.started > args.seconds:
                    row.why_not = f"not started after {args.seconds:.0f} s"
                else:
                    row.why_not = TOO_LARGE.get((name, batch, context, row.method))
                if row.why_not is None:
                    try:
                        (compare if shrunk else measure)(row, calls, args)
                        expected = calls.tokens if expected is None else expected
                        row.same = agreement(calls.tokens, expected)
                    except torch.OutOfMemoryError:
                        row.why_not = "out of memory"
                    except Exception as error:  # the other rows are worth having
                        row.why_not = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:100]}"
                rows.append(row)
                keep()
                say(str(row))
                for line in profile_lines(row) if row.profile else []:
                    say(line)
        hf_paged_attention.disable(model)
        del model, calls
        torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    failed = [row for row in rows if row.why_not and row.why_not.startswith("failed")]
    apart = [row for row in rows if shrunk and row.same is not None and row.same < 1 and row.method in EXACT]
    return 1 if failed or apart else 0


# In float32 these give the first method's tokens; 8-bit formats may not.
EXACT = tuple(itertools.chain(PEERS, OURS))
