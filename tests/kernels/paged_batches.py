"""Ragged paged batches, and attention on them computed without the package: dense, in float64, one query at a time."""

import math
from dataclasses import dataclass, field

import torch

from hf_paged_attention.kernels import reference_write_kv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Against float64; a 16-bit query's output is itself rounded, and so are its probabilities.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class Batch:
    """Keys and values scattered over a pool whose free blocks hold NaN, and the dense entries they should decode to."""

    query: torch.Tensor
    keys: list
    values: list
    args: dict
    lens: list
    query_lens: list
    group: int
    options: dict = field(default_factory=dict)

    def run(self, kernel, **more):
        """The kernel's output and log-sum-exps, both poisoned before the call."""
        q = self.query
        out = torch.full((*q.shape[:2], self.args["v_pool"].shape[-1]), math.nan, dtype=q.dtype, device=DEVICE)
        lse = torch.full(q.shape[:2], math.nan, device=DEVICE)
        result = kernel(q, **self.args, **self.options, out=out, lse=lse, **more)
        assert result is out
        return out, lse

    def expected(self):
        """Output and log-sum-exps in float64."""
        scale, window, softcap = (self.options.get(name) for name in ("scale", "window", "softcap"))
        sinks, kv_start = (self.options.get(name) for name in ("sinks", "kv_start"))
        heads, dim = self.query.shape[1], self.values[0].shape[-1]
        out = torch.zeros(len(self.query), heads, dim, dtype=torch.float64, device=DEVICE)
        lse = torch.full((len(self.query), heads), -math.inf, dtype=torch.float64, device=DEVICE)
        row = 0
        for r, (length, new) in enumerate(zip(self.lens, self.query_lens, strict=True)):
            for position in range(length - new, length):
                first = 0 if window is None else max(0, position - window + 1)
                if kv_start is not None:
                    first = max(first, int(kv_start[r]))
                k = self.keys[r][first : position + 1].repeat_interleave(self.group, 1)
                v = self.values[r][first : position + 1].repeat_interleave(self.group, 1)
                q = self.query[row].double()
                logits = torch.einsum("hd,jhd->hj", q, k) * scale
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                if sinks is not None:
                    logits = torch.cat([logits, sinks.double()[:, None]], 1)
                if logits.shape[1]:
                    weights = logits.softmax(1)[:, : len(k)]
                    out[row] = torch.einsum("hj,jhd->hd", weights, v)
                    lse[row] = logits.logsumexp(1)
                row += 1
        return out, lse

    def check(self, kernel, tolerance=None, **more):
        out, lse = self.run(kernel, **more)
        want, want_lse = self.expected()
        used = sum(self.query_lens)
        tolerance = tolerance or TOLERANCE[self.query.dtype]
        size = max(1.0, float(want.abs().max())) if want.numel() else 1.0
        torch.testing.assert_close(out[:used].double(), want[:used], atol=tolerance * size, rtol=0)
        lse_size = max(1.0, float(want_lse[want_lse.isfinite()].abs().max())) if want_lse.isfinite().any() else 1.0
        lse_tolerance = TOLERANCE[torch.float32]
        if self.query.dtype.itemsize == 2:
            # A query in 8-bit pieces; tensor cores sum products of float8 with some 13 bits.
            lse_tolerance = {torch.int8: 1e-4, torch.float8_e4m3fn: 2e-3}.get(self.args["k_pool"].dtype, lse_tolerance)
        torch.testing.assert_close(lse[:used].double(), want_lse[:used], atol=lse_tolerance * lse_size, rtol=0)
        return out


def make_batch(
    lens,
    query_lens=None,
    *,
    kv_heads=2,
    group=1,
    head_dim=32,
    value_dim=None,
    block_size=16,
    dtype=torch.float32,
    pool_dtype=None,
    transposed_values=False,
    seed=0,
    key=lambda x: x,
    value=lambda x: x,
    scale=None,
    **options,
) -> Batch:
    """A batch whose request r holds lens[r] keys, the last query_lens[r] (1) new; `key`, `value` edit the entries."""
    g = torch.Generator().manual_seed(seed)
    query_lens = query_lens or [1] * len(lens)
    value_dim = value_dim or head_dim
    pool_dtype = pool_dtype or dtype
    blocks_of = [-(-n // block_size) for n in lens]
    max_blocks = max([*blocks_of, 1]) + 1
    num_blocks = sum(blocks_of) + 3
    order = torch.randperm(num_blocks, generator=g).tolist()
    quantized = pool_dtype.itemsize == 1

    def pool(dim, transposed):
        # Memory is [Hkv, block, slot, dim], or [Hkv, block, dim, slot]: kernels must go by the strides.
        shape = (kv_heads, num_blocks, dim, block_size) if transposed else (kv_heads, num_blocks, block_size, dim)
        memory = (
            torch.full(shape, 0x7F, dtype=torch.uint8).view(pool_dtype) if quantized else torch.full(shape, math.nan)
        )
        memory = memory if quantized else memory.to(pool_dtype)
        return memory.permute(1, 3, 0, 2) if transposed else memory.permute(1, 2, 0, 3)

    k_pool, v_pool = pool(head_dim, False), pool(value_dim, transposed_values)
    scales = [torch.full((kv_heads, num_blocks, block_size), math.nan).permute(1, 2, 0) for _ in range(2)]
    k_scale, v_scale = scales if quantized else (None, None)
    # Entries past a request's blocks name no block at all: nothing may look there.
    table = torch.full((len(lens), max_blocks), 2**30, dtype=torch.int32)
    keys, values = [], []
    for r, length in enumerate(lens):
        blocks = [order.pop() for _ in range(blocks_of[r])]
        table[r, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        position = torch.arange(length)
        slots = table[r].long()[position // block_size] * block_size + position % block_size
        k = key(torch.randn(length, kv_heads, head_dim, generator=g))
        v = value(torch.randn(length, kv_heads, value_dim, generator=g))
        reference_write_kv(k, v, k_pool, v_pool, slots, k_scale=k_scale, v_scale=v_scale)
        at = slots // block_size, slots % block_size
        for stored, pool_, scale_ in ((keys, k_pool, k_scale), (values, v_pool, v_scale)):
            entries = pool_.view(torch.uint8)[at].view(pool_dtype) if quantized else pool_[at]
            entries = entries.double()
            stored.append((entries * scale_[at][..., None].double() if quantized else entries).to(DEVICE))
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    query = torch.randn(sum(query_lens), kv_heads * group, head_dim, generator=g).to(dtype)
    # .to(device) keeps strides.
    args = {
        "k_pool": k_pool, "v_pool": v_pool, "k_scale": k_scale, "v_scale": v_scale, "query_start_loc": starts,
        "seq_lens": torch.tensor(lens, dtype=torch.int32), "block_table": table,
    }  # fmt: skip
    args = {name: x if x is None else x.to(DEVICE) for name, x in args.items()}
    args |= {"max_query_len": max(query_lens), "max_seq_len": max(lens)}
    options = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    options["scale"] = head_dim**-0.5 if scale is None else scale
    return Batch(query.to(DEVICE), keys, values, args, list(lens), list(query_lens), group, options)
