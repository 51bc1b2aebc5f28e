"""Attention calls to measure: shapes by name, caches with their pages at random, and the float64 answer to each.

A case has several layers, each with pools of its own, so that calls one after another read cold memory.
"""

import math
from dataclasses import dataclass, field, replace

import torch

from hf_paged_attention.cache.formats import CacheFormat, Format, get_format
from hf_paged_attention.cache.tail import EXACT_TOKENS
from hf_paged_attention.kernels import decode_attention, decode_keys, decode_values, unified_attention
from hf_paged_attention.kernels.int4 import GROUP, LARGEST_CODE, value_groups

FORMATS = {"auto": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
# Attention takes more: keys of int4 are not written a token at a time.
ATTENTION_FORMATS = (*FORMATS, "int4", "int8:int4")
# Relative to float64 on the same stored values, in the 2-norm: a bfloat16 output and bfloat16 probabilities.
ALLOWED_ERROR = 1e-2
# A row's worst element, against the largest element of the answer.
ALLOWED_WORST = 5e-2


@dataclass(frozen=True)
class Shape:
    """Query heads, KV heads, head size."""

    query_heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads

    def __str__(self) -> str:
        return f"{self.query_heads}/{self.kv_heads}/{self.head_dim}"


SHAPES = {
    "qwen3-8b": Shape(32, 8, 128),
    "qwen2.5-1.5b": Shape(12, 2, 128),
    "gemma3-4b": Shape(8, 4, 256),
    "mha": Shape(16, 16, 64),
    "qwen2.5-7b": Shape(28, 4, 128),
    "group-9": Shape(36, 4, 128),
}


@dataclass(frozen=True)
class Spec:
    """What to run: request r holds contexts[r] keys, the last new[r] of them with queries.

    `label` says contexts and new tokens for people; `format` is one of ATTENTION_FORMATS; the rest as the kernels take
    it.
    """

    shape: str
    label: str
    contexts: tuple[int, ...]
    new: tuple[int, ...]
    format: str = "auto"
    block_size: int = 64
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    transposed_values: bool = True  # of 8-bit formats: the layout that their decode wants

    @property
    def sizes(self) -> Shape:
        return SHAPES[self.shape]

    @property
    def stored(self) -> CacheFormat:
        return format_named(self.format)

    @property
    def decode(self) -> bool:
        return max(self.new) == 1

    @property
    def extras(self) -> str:
        parts = [
            f"window {self.window}" if self.window else "",
            "softcap" if self.softcap else "",
            "sinks" if self.sinks else "",
        ]
        return ", ".join(part for part in parts if part)

    def seen(self, context: int, new: int) -> int:
        """Query-key pairs of a request, a head."""
        if self.window is None:
            return new * context - new * (new - 1) // 2
        return sum(min(self.window, position + 1) for position in range(context - new, context))

    def sealed(self, context: int) -> int:
        """Tokens of a request that are encoded; the newest wait in the tail where keys are int4, as a cache has it."""
        if not self.stored.needs_tail:
            return context
        return max(0, context - EXACT_TOKENS) // self.block_size * self.block_size

    @property
    def bytes_read(self) -> int:
        """Keys and values that a call must read, once each, with their scales."""
        encoded = exact = 0
        for context, new in zip(self.contexts, self.new, strict=True):
            first = max(0, context - self.window - new + 1) if self.window else 0
            encoded += max(0, self.sealed(context) - first)
            exact += context - max(first, self.sealed(context))
        dim = self.sizes.head_dim
        stored, arrived = (f.bytes_per_head(dim, dim, torch.bfloat16) for f in (self.stored, format_named("auto")))
        return self.sizes.kv_heads * (encoded * stored + exact * arrived)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the two products over the pairs that are seen."""
        pairs = sum(self.seen(c, n) for c, n in zip(self.contexts, self.new, strict=True))
        return 4 * pairs * self.sizes.query_heads * self.sizes.head_dim

    def small(self) -> "Spec":
        """The same on a few tokens, for Triton's interpreter."""
        few = [(min(c, 150 + 7 * i), n) for i, (c, n) in enumerate(zip(self.contexts, self.new, strict=True))][-2:]
        contexts = tuple(c for c, _ in few)
        new = tuple(min(n, 40, c) for c, n in few)
        window = None if self.window is None else min(self.window, 50)
        return replace(self, contexts=contexts, new=new, window=window, block_size=min(self.block_size, 64))


def format_named(name: str) -> CacheFormat:
    """One of ATTENTION_FORMATS, keys:values where they differ."""
    return get_format(tuple(name.split(":")) if ":" in name else name)


def even(shape: str, batch: int, context: int, new: int = 1, **options) -> Spec:
    label = (
        f"{batch} × {context:,}"
        if new == 1
        else f"{batch} × {new:,}" + (f" on {context - new:,}" if context > new else "")
    )
    return Spec(shape, label, (context,) * batch, (new,) * batch, **options)


def ragged(shape: str, **options) -> Spec:
    """One long request beside many short ones."""
    return Spec(shape, "131,072 + 31 × 1,024", (1024,) * 16 + (131072,) + (1024,) * 15, (1,) * 32, **options)


def mixed(shape: str, **options) -> Spec:
    """Two prefill chunks beside a batch of decodes."""
    return Spec(shape, "2 × 512 + 30 decodes at 4,096", (4096,) * 30 + (512, 512), (1,) * 30 + (512, 512), **options)


@dataclass
class Case:
    """Tensors of a spec. `layers` entries of k, v, k_scale, v_scale, query, out and tail; the block tables are shared.

    An entry of `tail` is the arguments k_tail and v_tail, or nothing where keys are not int4.
    """

    spec: Spec
    layers: int
    query: list
    k: list
    v: list
    k_scale: list
    v_scale: list
    out: list
    tail: list
    shared: dict = field(default_factory=dict)

    def run(self, layer: int, plan=None) -> torch.Tensor:
        kernel = decode_attention if self.spec.decode else unified_attention
        return kernel(
            self.query[layer],
            self.k[layer],
            self.v[layer],
            k_scale=self.k_scale[layer],
            v_scale=self.v_scale[layer],
            out=self.out[layer],
            plan=plan,
            **self.tail[layer],
            **self.shared,
        )

    def poison(self) -> None:
        for out in self.out:
            out.fill_(math.nan)


def scatter(counts: list[int], generator: torch.Generator, device: torch.device) -> tuple[torch.Tensor, int]:
    """A block table of requests with `counts` blocks, in an order drawn at random, and how many blocks a pool has."""
    num_blocks = sum(counts) + 1
    order = torch.randperm(num_blocks, generator=generator, device=device).to(torch.int32)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
    used = 0
    for request, count in enumerate(counts):
        table[request, :count] = order[used : used + count]
        used += count
    return table, num_blocks


def make_case(spec: Spec, device: torch.device, *, layers: int = 1, empty: bool = False, seed: int = 0) -> Case:
    """The case's tensors. empty: without values and without cached keys, to compile the kernel that the case takes."""
    sizes, stored = spec.sizes, spec.stored
    generator = torch.Generator(device).manual_seed(seed)
    table, num_blocks = scatter([-(-context // spec.block_size) for context in spec.contexts], generator, device)

    def pool(format: Format, blocks: int = num_blocks, *, transposed: bool = False) -> torch.Tensor:
        dtype, row = format.storage_dtype(torch.bfloat16), format.row(sizes.head_dim)
        inner = (row, spec.block_size) if transposed else (spec.block_size, row)
        shape = (sizes.kv_heads, blocks, *inner)
        if empty:
            memory = torch.empty(shape, dtype=dtype, device=device)
        elif format.packed:
            memory = torch.randint(256, shape, generator=generator, device=device, dtype=dtype)
        else:
            memory = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
            if dtype == torch.int8:
                memory = (memory * 40).clamp_(-127, 127).to(dtype)
            elif format.scaled:
                memory = (memory * 100).clamp_(-448, 448).to(dtype)
        return memory.permute(1, 3, 0, 2) if transposed else memory.permute(1, 2, 0, 3)

    # Keys and values of about one, as the 16-bit ones are.
    def scales(format: Format, groups: tuple[int, ...]) -> torch.Tensor | None:
        shape = (sizes.kv_heads, num_blocks)
        if format.scaled:
            memory = torch.rand(*shape, spec.block_size, generator=generator, device=device)
            return ((memory + 0.5) / (40 if format.dtype == torch.int8 else 100)).permute(1, 2, 0)
        if format.packed:
            scale = (torch.rand(*shape, *groups, generator=generator, device=device) + 0.5) / 5
            zero = -scale * LARGEST_CODE.value / 2
            return torch.stack([scale, zero], -2).half().movedim(0, 2)
        return None

    dim, tokens = sizes.head_dim, sum(spec.new)
    rows = (tokens, sizes.query_heads, dim)
    by_slot = stored.value.scaled and spec.transposed_values
    tail_table, tail_blocks = None, 0
    if stored.needs_tail:
        counts = [-(-context // spec.block_size) - spec.sealed(context) // spec.block_size for context in spec.contexts]
        newest, tail_blocks = scatter(counts, generator, device)
        tail_table = torch.zeros_like(table)
        for request, (context, count) in enumerate(zip(spec.contexts, counts, strict=True)):
            first = spec.sealed(context) // spec.block_size
            tail_table[request, first : first + count] = newest[request, :count]
    case = Case(spec, layers, [], [], [], [], [], [], [])
    for _ in range(layers):
        case.query.append(torch.randn(rows, generator=generator, device=device).to(torch.bfloat16))
        case.k.append(pool(stored.key))
        case.v.append(pool(stored.value, transposed=by_slot))
        case.k_scale.append(scales(stored.key, (spec.block_size // GROUP, dim)))
        case.v_scale.append(scales(stored.value, (spec.block_size, value_groups(dim))))
        case.out.append(torch.empty(rows, dtype=torch.bfloat16, device=device))
        arrived = format_named("auto").key
        tails = ("k_tail", "v_tail") if stored.needs_tail else ()
        case.tail.append({name: pool(arrived, tail_blocks) for name in tails})
    lens = spec.new if empty else spec.contexts
    starts = torch.tensor([0, *torch.tensor(spec.new).cumsum(0).tolist()], dtype=torch.int32, device=device)
    case.shared = {
        "query_start_loc": starts,
        "seq_lens": torch.tensor(lens, dtype=torch.int32, device=device),
        "block_table": table,
        "max_query_len": max(spec.new),
        "max_seq_len": max(spec.contexts),
        "scale": sizes.head_dim**-0.5,
        "window": spec.window,
        "softcap": spec.softcap,
        "sinks": torch.randn(sizes.query_heads, generator=generator, device=device) if spec.sinks else None,
    }
    if stored.needs_tail:
        sealed = torch.tensor([spec.sealed(length) for length in lens], dtype=torch.int32, device=device)
        case.shared |= {"tail_table": tail_table, "sealed_lens": sealed}
    return case


def entries(case: Case, layer: int, request: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A request's keys and values [context, D] of one KV head as float64, from the pools and the tail."""
    spec, context = case.spec, case.spec.contexts[request]
    sealed, last = spec.sealed(context), -(-context // spec.block_size)
    blocks = case.shared["block_table"][request, : -(-sealed // spec.block_size)].long()
    heads = slice(head, head + 1)
    found = []
    for decode, pool, scales, tail in (
        (decode_keys, case.k[layer], case.k_scale[layer], "k_tail"),
        (decode_values, case.v[layer], case.v_scale[layer], "v_tail"),
    ):
        scales = None if scales is None else scales[blocks][:, :, heads]
        rows = decode(pool[blocks][:, :, heads], scales, torch.float64)[:, :, 0].flatten(0, 1)[:sealed]
        if spec.stored.needs_tail:
            newest = case.shared["tail_table"][request, sealed // spec.block_size : last].long()
            exact = case.tail[layer][tail][newest][:, :, head].double().flatten(0, 1)[: context - sealed]
            rows = torch.cat([rows, exact])
        found.append(rows)
    return found[0], found[1]


def error_of(case: Case, layer: int, *, requests: int = 3, rows: int = 12) -> tuple[float, float]:
    """A layer's output against float64: error in the 2-norm over the answer's, and the worst element.

    Looks at a few requests, query rows and KV heads, the first and the last of each among them; that no element was
    left unwritten is checked everywhere.

    Raises:
        AssertionError: an element was not written, is not finite, or an error is larger than rounding allows.
    """
    spec, sizes, shared = case.spec, case.spec.sizes, case.shared
    out = case.out[layer]
    assert out.isfinite().all(), f"{spec}: {int((~out.isfinite()).sum())} elements not written or not finite"
    count = len(spec.contexts)
    long = max(range(count), key=lambda r: spec.contexts[r] * spec.new[r])
    chosen = sorted({0, count - 1, long, *range(0, count, max(1, count // requests))})[: requests + 2]
    difference = answer = worst = largest = 0.0
    for request in chosen:
        context, new = spec.contexts[request], spec.new[request]
        picked = sorted({0, new - 1, *range(0, new, max(1, new // rows))})
        picked = torch.tensor(picked, device=out.device)
        positions = context - new + picked
        key_positions = torch.arange(context, device=out.device)
        seen = key_positions <= positions[:, None]
        if spec.window:
            seen &= key_positions > positions[:, None] - spec.window
        first = sum(spec.new[:request])
        for head in {0, sizes.kv_heads - 1}:
            k, v = entries(case, layer, request, head)
            heads = slice(head * sizes.group, (head + 1) * sizes.group)
            q = case.query[layer][first + picked, heads].double()
            logits = torch.einsum("tgd,sd->gts", q, k) * shared["scale"]
            if spec.softcap:
                logits = spec.softcap * torch.tanh(logits / spec.softcap)
            logits = logits.masked_fill(~seen, -math.inf)
            if shared["sinks"] is not None:
                sinks = shared["sinks"][heads].double()[:, None, None].expand(-1, len(picked), 1)
                logits = torch.cat([logits, sinks], -1)
            weights = logits.softmax(-1)[..., :context]
            want = torch.einsum("gts,sd->tgd", weights, v)
            got = out[first + picked, heads].double()
            difference += float((got - want).square().sum())
            answer += float(want.square().sum())
            worst = max(worst, float((got - want).abs().max()))
            largest = max(largest, float(want.abs().max()))
    error, worst = math.sqrt(difference / answer), worst / largest
    assert max(error / ALLOWED_ERROR, worst / ALLOWED_WORST) < 1, f"{spec}: error {error:.1e}, worst {worst:.1e}"
    return error, worst
