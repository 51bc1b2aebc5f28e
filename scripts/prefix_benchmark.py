"""Time to first token of a prompt whose beginning was seen before: random weights of a model's shape.

    python scripts/prefix_benchmark.py --json results/prefix.json

A first call brings a shared beginning and some tokens; then each repetition brings the same beginning and other tokens.
Timed is `generate(max_new_tokens=1)`, the search for known blocks included, with the device synchronised before and
after; the table gives medians. `computed` are the columns that the model's forward passes brought. `same` is the share
of repetitions whose token is sdpa's: random weights have near ties in bf16. Without a GPU everything shrinks, runs in
float32, and the exit status is 1 if a token differs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

import hf_paged_attention
from hf_paged_attention import PagedCache
from hf_paged_attention.compat import CACHE_ARGUMENT
from scripts.step_benchmark import SHAPES, build

METHODS = ("sdpa, DynamicCache", "paged", "paged, prefix reuse")


class Columns:
    """Counts the columns that a model's forward passes bring."""

    def __init__(self, model):
        self.count = 0
        self._handle = model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, module, args, kwargs):
        self.count += kwargs["input_ids"].shape[1]

    def stop(self):
        self._handle.remove()


def prompts(vocabulary: int, shared: int, own: int, count: int, device: torch.device) -> list[torch.Tensor]:
    """`count` prompts `[1, shared + own]` that begin alike."""
    generator = torch.Generator().manual_seed(1)
    beginning = torch.randint(3, vocabulary, (1, shared), generator=generator)
    own_tokens = torch.randint(3, vocabulary, (count, own), generator=generator)
    return [torch.cat([beginning, tokens.unsqueeze(0)], 1).to(device) for tokens in own_tokens]


def measure(model, method: str, texts: list[torch.Tensor], warm_up: int) -> dict:
    """The first of `texts` is the earlier call, the next `warm_up` are not timed."""
    hf_paged_attention.disable(model)
    cache = None
    if method.startswith("paged"):
        hf_paged_attention.enable(model)
        cache = PagedCache(model.config, prefix_caching="prefix" in method)
    else:
        model.set_attn_implementation("sdpa")
    synchronize = torch.cuda.synchronize if model.device.type == "cuda" else lambda: None
    columns, times, computed, tokens = Columns(model), [], [], []
    for ids in texts:
        arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 1, "do_sample": False}
        if cache is not None:
            cache.reset(keep_prefixes=True)
            arguments[CACHE_ARGUMENT] = cache
        columns.count = 0
        synchronize()
        start = time.perf_counter()
        out = model.generate(**arguments)
        synchronize()
        times.append((time.perf_counter() - start) * 1e3)
        computed.append(columns.count)
        tokens.append(out[0, -1].item())
    columns.stop()
    hf_paged_attention.disable(model)
    timed = slice(1 + warm_up, None)
    return {
        "method": method,
        "ms": statistics.median(times[timed]),
        "spread": [min(times[timed]), max(times[timed])],
        "computed": statistics.median(computed[timed]),
        "tokens": tokens[timed],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", nargs="+", choices=sorted(SHAPES), help="default: qwen3-0.6b qwen3-8b; tiny on a CPU"
    )
    parser.add_argument("--prefix", type=int, help="tokens of the shared beginning (4,096; 256 on a CPU)")
    parser.add_argument("--own", type=int, nargs="+", help="other tokens after it (64 512; 8 32 on a CPU)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    device, dtype = (torch.device("cuda"), torch.bfloat16) if gpu else (torch.device("cpu"), torch.float32)
    models = options.model or (["qwen3-0.6b", "qwen3-8b"] if gpu else ["tiny"])
    shared, warm_up = options.prefix or (4096 if gpu else 256), 3 if gpu else 1
    rows, different = [], 0
    print("| model | prompt | method | first token (ms) | least - most | computed | same |")
    print("|:--|:--|:--|--:|--:|--:|--:|")
    for name in models:
        model = build("qwen3-0.6b" if name == "tiny" else name, device, dtype, shrunk=not gpu)
        for own in options.own or ([64, 512] if gpu else [8, 32]):
            texts = prompts(model.config.vocab_size, shared, own, 1 + warm_up + options.repeats, device)
            expected = None
            for method in METHODS:
                row = measure(model, method, texts, warm_up)
                tokens = row.pop("tokens")
                expected = expected or tokens
                same = sum(a == b for a, b in zip(tokens, expected, strict=True))
                different += len(tokens) - same
                rows.append({"model": name, "shared": shared, "own": own, "same": same / len(tokens), **row})
                print(
                    f"| {name} | {shared:,} + {own} | {method} | {row['ms']:.1f} | {row['spread'][0]:.1f} - "
                    f"{row['spread'][1]:.1f} | {row['computed']:,.0f} | {same / len(tokens):.0%} |",
                    flush=True,
                )
        del model
        gc.collect()
        if gpu:
            torch.cuda.empty_cache()
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1))
    return 1 if different and not gpu else 0


if __name__ == "__main__":
    sys.exit(main())
