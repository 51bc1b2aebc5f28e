"""Milliseconds a decode step of `model.generate`, as a user calls it: random weights of a model's shape.

    python scripts/step_benchmark.py --model qwen3-0.6b --case 1x512 16x4096 --method sdpa static graph graph-int8

A step is the difference of two calls that generate different numbers of tokens, divided by the difference: prefill,
capture and Python's set-up fall out. The first call's seconds beyond a later one's are the compile time. Peak memory
is that of the longer call. Tokens are compared with those of the first method: random weights have near ties, so
`same` counts the tokens before the rows part, as a share.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hf_paged_attention

SHAPES = {
    "qwen3-0.6b": dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, intermediate_size=3072),
    "qwen3-8b": dict(hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, intermediate_size=12288),
    "tiny": dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, vocab_size=512),
}
COMMON = dict(vocab_size=151936, num_key_value_heads=8, head_dim=128, max_position_embeddings=131072)
METHODS = ("eager", "sdpa", "static", "plain", "plain-int8", "graph", "graph-int8", "graph-fp8", "graph-nocompile")
COPY_BANDWIDTH = 4.27e12  # bytes a second; measured on an H200


def build(name: str, device: torch.device, dtype: torch.dtype):
    options = {**COMMON, **SHAPES[name]}
    if name == "tiny":
        options.update(num_key_value_heads=2, head_dim=32)
    config = AutoConfig.for_model("qwen3", **options, tie_word_embeddings=name == "qwen3-0.6b")
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prepare(model, method: str) -> dict:
    """Set the model up for a method; returns the arguments of `generate`."""
    hf_paged_attention.disable(model)
    name, _, kv_dtype = method.partition("-")
    if name in ("plain", "graph"):
        compiles = kv_dtype != "nocompile"
        hf_paged_attention.enable(
            model,
            decode=name,
            compile=compiles,
            kv_dtype=kv_dtype if kv_dtype in ("int8", "fp8") else "auto",
        )
        return {}
    model.set_attn_implementation("eager" if name == "eager" else "sdpa")
    return {"cache_implementation": "static"} if name == "static" else {}


def timed(model, ids: torch.Tensor, new: int, arguments: dict) -> tuple[float, torch.Tensor]:
    cuda = ids.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    mask = torch.ones_like(ids)
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **arguments)
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start, out


def measure(model, method: str, batch: int, context: int, few: int, many: int, repeats: int) -> dict:
    device = model.device
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, model.config.vocab_size, (batch, context), generator=generator).to(device)
    arguments = prepare(model, method)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    first, _ = timed(model, ids, many, arguments)
    ttft = min(timed(model, ids, 1, arguments)[0] for _ in range(2))
    steps, long_calls = [], []
    for _ in range(repeats):
        short, _ = timed(model, ids, few, arguments)
        long, out = timed(model, ids, many, arguments)
        steps.append((long - short) / (many - few) * 1e3)
        long_calls.append(long)
    steps.sort()
    weights = sum(p.numel() * p.element_size() for p in {id(p): p for p in model.parameters()}.values())
    config = model.config
    per_token = config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * 2
    return {
        "method": method,
        "batch": batch,
        "context": context,
        "ms_per_step": steps[len(steps) // 2],
        "spread": [steps[0], steps[-1]],
        "tokens_per_s": batch / steps[len(steps) // 2] * 1e3,
        "ttft_s": ttft,
        "compile_s": first - min(long_calls),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None,
        "floor_ms_bf16": (weights + batch * context * per_token) / COPY_BANDWIDTH * 1e3,
        "tokens": out[:, context:].tolist(),
    }


def agreement(tokens: list[list[int]], expected: list[list[int]]) -> float:
    same = 0
    for row, wanted in zip(tokens, expected, strict=True):
        for a, b in zip(row, wanted, strict=True):
            if a != b:
                break
            same += 1
    return same / sum(map(len, expected))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--case", nargs="+", default=["1x512", "1x32768", "16x4096"], help="batch x context")
    parser.add_argument("--method", nargs="+", choices=METHODS, default=["sdpa", "static", "graph", "graph-int8"])
    parser.add_argument("--few", type=int, default=16, help="tokens of the shorter call")
    parser.add_argument("--many", type=int, default=80, help="tokens of the longer call")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(arguments.model, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    rows = []
    for case in arguments.case:
        batch, context = map(int, case.split("x"))
        expected = None
        for method in arguments.method:
            try:
                row = measure(model, method, batch, context, arguments.few, arguments.many, arguments.repeats)
            except torch.OutOfMemoryError:
                print(f"{arguments.model} {case:>9} {method:<16} out of memory", flush=True)
                continue
            tokens = row.pop("tokens")
            expected = expected or tokens
            row["same"] = agreement(tokens, expected)
            rows.append({"model": arguments.model, **row})
            peak = "" if row["peak_gb"] is None else f"{row['peak_gb']:6.1f} GB"
            print(
                f"{arguments.model} {case:>9} {method:<16} {row['ms_per_step']:8.2f} ms [{row['spread'][0]:.2f}, "
                f"{row['spread'][1]:.2f}]  floor {row['floor_ms_bf16']:.2f}  ttft {row['ttft_s']:.3f} s  compile "
                f"{row['compile_s']:.1f} s  {peak}  same {row['same']:.0%}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
