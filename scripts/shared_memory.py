"""What sharing blocks saves: peak key/value bytes and blocks of three ways to call `generate`, beside DynamicCache's.

    python scripts/shared_memory.py --json results/shared_memory.json

A tiny random model: bytes are counted, not timed, and scale with layers, heads and head size alike in every column.
DynamicCache's bytes are those of its tensors after the same call. Runs on a CPU in a minute or two.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import hf_paged_attention
from hf_paged_attention import PagedCache
from hf_paged_attention.compat import CACHE_ARGUMENT

NEW_TOKENS = 32
BLOCK_SIZE = 64


def build():
    config = AutoConfig.for_model(
        "llama",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    model.generation_config.pad_token_id = 0
    return model


def prompts(rows: int, shared: int, own: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    beginning = torch.randint(3, 256, (1, shared), generator=generator).expand(rows, -1)
    ids = torch.cat([beginning, torch.randint(3, 256, (rows, own), generator=generator)], 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


CASES = {
    "4 beams × 2,048 tokens": (prompts(1, 2048, 0), {"num_beams": 4, "do_sample": False}),
    "8 samples of one prompt of 2,048": (prompts(1, 2048, 0), {"num_return_sequences": 8, "do_sample": True}),
    "32 prompts that share 1,500 tokens, 100 of their own": (prompts(32, 1500, 100), {"do_sample": False}),
}


class Peak:
    """Follows a cache's blocks in use through a call: they are most right after a forward pass took its own."""

    def __init__(self, cache: PagedCache):
        self.cache, self.blocks, self.bytes = cache, 0, 0
        begin = cache.sequences._begin

        def watched(*arguments):
            begin(*arguments)
            stats = cache.stats()
            self.blocks = max(self.blocks, stats["blocks_used"])
            self.bytes = max(self.bytes, stats["bytes_used"])

        cache.sequences._begin = watched


def measure(model, inputs: dict, options: dict) -> dict:
    torch.manual_seed(0)
    dynamic = DynamicCache(config=model.config)
    model.generate(**inputs, **options, max_new_tokens=NEW_TOKENS, **{CACHE_ARGUMENT: dynamic})
    plain = sum(layer.keys.nbytes + layer.values.nbytes for layer in dynamic.layers)
    hf_paged_attention.enable(model)
    cache = PagedCache(model.config, block_size=BLOCK_SIZE)
    peak = Peak(cache)
    model.generate(**inputs, **options, max_new_tokens=NEW_TOKENS, **{CACHE_ARGUMENT: cache})
    hf_paged_attention.disable(model)
    rows = cache.sequences.batch_size
    unshared = rows * -(-max(cache.sequences.lengths) // BLOCK_SIZE) * len(cache.layers)
    return {"blocks": peak.blocks, "unshared_blocks": unshared, "bytes": peak.bytes, "dynamic_bytes": plain}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model = build()
    results = {}
    print("| call | blocks at the peak | without sharing | KV bytes | DynamicCache's | share |")
    print("|:--|--:|--:|--:|--:|--:|")
    for name, (inputs, options) in CASES.items():
        row = results[name] = measure(model, inputs, options)
        share = row["bytes"] / row["dynamic_bytes"]
        print(
            f"| {name} | {row['blocks']:,} | {row['unshared_blocks']:,} | {row['bytes']:,} | {row['dynamic_bytes']:,} "
            f"| {share:.0%} |",
            flush=True,
        )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
