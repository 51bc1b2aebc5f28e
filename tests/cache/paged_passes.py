"""Forward passes over a small `PagedCache` without a model, and a plain-Python model of what it must hold.

A token is a number; its keys, values and queries in each layer follow from that number alone, so that whatever is read
back can be compared with what was written.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter

import torch
from transformers import AutoConfig

from hf_paged_attention import PagedCache
from hf_paged_attention.attention import paged_attention
from hf_paged_attention.cache.device_state import DeviceState
from hf_paged_attention.cache.table import FREED
from hf_paged_attention.kernels import decode_keys, decode_values, unrotate_heads
from hf_paged_attention.types import PagedKV

BLOCK, WINDOW, HEADS, GROUP, DIM = 16, 24, 2, 2, 8
WINDOWS = (WINDOW, None, WINDOW)
LAYERS = len(WINDOWS)


class Interrupted(Exception):
    """What a user's hook raises in the middle of a forward pass."""


class Attention(torch.nn.Module):
    is_causal = True


def small_config(**overrides):
    kinds = {WINDOW: "sliding_attention", None: "full_attention"}
    options = {
        "hidden_size": HEADS * GROUP * DIM,
        "num_attention_heads": HEADS * GROUP,
        "num_key_value_heads": HEADS,
        "head_dim": DIM,
        "num_hidden_layers": LAYERS,
        "layer_types": [kinds[window] for window in WINDOWS],
        "sliding_window": WINDOW,
    }
    return AutoConfig.for_model("gemma3_text", **{**options, **overrides})


def small_cache(**arguments) -> PagedCache:
    return PagedCache(small_config(), **{"block_size": BLOCK, **arguments})


@functools.cache
def states(token: int, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query `[Hq, D]`, key and value `[Hkv, D]` of a token in a layer."""
    generator = torch.Generator().manual_seed(token * LAYERS + layer)
    return tuple(torch.randn(heads, DIM, generator=generator) for heads in (HEADS * GROUP, HEADS, HEADS))


def run_pass(cache: PagedCache, tokens: list[list[int | None]], stop_at: tuple[int, str] | None = None):
    """One forward pass of rows of tokens (None: padding). Returns each layer's output `[B, T, Hq, D]`.

    stop_at: (layer, "before" or "after" its keys were handed on, or "writing") is where `Interrupted` is raised.
    """
    rows, width = len(tokens), len(tokens[0])
    mask = torch.tensor([[token is not None for token in row] for row in tokens])
    outputs = []
    for layer in range(LAYERS):
        query, key, value = (torch.full((rows, heads, width, DIM), 7.0) for heads in (HEADS * GROUP, HEADS, HEADS))
        for row in range(rows):
            for column, token in enumerate(tokens[row]):
                if token is not None:
                    query[row, :, column], key[row, :, column], value[row, :, column] = states(token, layer)
        if stop_at == (layer, "before"):
            raise Interrupted
        key, value = cache.update(key, value, layer)
        if stop_at == (layer, "after"):
            raise Interrupted
        if stop_at == (layer, "writing"):
            with _no_memory(cache.layers[layer]):
                paged_attention(Attention(), query, key, value, mask)
        outputs.append(paged_attention(Attention(), query, key, value, mask)[0])
    return outputs


@contextlib.contextmanager
def device_steps(cache: PagedCache, count: int):
    """As captured decode steps are run: yields a function that does one of `count` of them with a token a row."""
    sequences = cache.sequences
    cache.reserve(count)
    state = DeviceState(sequences, max(sequences.lengths) + count, torch.device("cpu"))

    def step(tokens: list[int]) -> list[torch.Tensor]:
        sequences.enter_together()
        state.follow(sequences)
        state.advance()
        return run_pass(cache, [[token] for token in tokens])

    sequences.device_state = state
    try:
        yield step
    finally:
        sequences.device_state = None


class _no_memory:
    """The layer's pool cannot grow: what running out of memory does."""

    def __init__(self, layer):
        self.storage = layer.storage

    def __enter__(self):
        def ensure(*args):
            raise Interrupted

        self.storage.ensure = ensure

    def __exit__(self, *error):
        del self.storage.ensure


def expected_outputs(past: list[list[int]], tokens: list[list[int | None]]) -> list[torch.Tensor]:
    """What attention over the real tokens gives, each layer `[B, T, Hq, D]`; zeros for padding."""
    outputs = []
    for layer, window in enumerate(WINDOWS):
        out = torch.zeros(len(tokens), len(tokens[0]), HEADS * GROUP, DIM)
        for row, new in enumerate(tokens):
            real = [column for column, token in enumerate(new) if token is not None]
            if not real:
                continue
            seen = past[row] + [new[column] for column in real]
            query, key, value = (torch.stack([states(token, layer)[part] for token in seen], 1) for part in range(3))
            position = torch.arange(len(seen))
            hidden = position > position[:, None]
            if window is not None:
                hidden |= position <= position[:, None] - window
            key, value = key.repeat_interleave(GROUP, 0), value.repeat_interleave(GROUP, 0)
            weights = (query @ key.transpose(1, 2) * DIM**-0.5).masked_fill(hidden, float("-inf")).softmax(-1)
            out[row, real] = (weights @ value)[:, -len(real) :].transpose(0, 1)
        outputs.append(out)
    return outputs


def remembered_blocks(cache: PagedCache, window: int | None) -> list[int]:
    """The blocks of one table that the cache's prefix index holds."""
    index = cache.sequences.prefixes
    return [] if index is None else [node.blocks[window] for node in index._nodes.values()]


def check_counts(cache: PagedCache) -> None:
    """Every block is free or held, and held exactly as often as the tables' entries say."""
    tail = cache.sequences.tail
    for table in [*cache.sequences.tables.values(), *([] if tail is None else [tail])]:
        pool = table.pool
        entries = Counter(block for row in table.rows for block in row if block != FREED)
        if table is not tail:
            entries.update(remembered_blocks(cache, table.window))
        assert {b: n for b, n in enumerate(pool.reference_counts) if n} == dict(entries)
        assert sorted(pool._free) == [b for b, n in enumerate(pool.reference_counts) if n == 0]
        assert pool.num_used + pool.num_free == pool.capacity
        assert pool.num_shared == sum(n > 1 for n in entries.values())
        assert pool.max_blocks is None or pool.num_used <= pool.max_blocks
    if tail is not None and cache.get_seq_length():
        for sealed, length in zip(tail.sealed, cache.sequences.lengths, strict=True):
            assert sealed % cache.block_size == 0
            assert sealed <= length


def live_slots(table, lengths) -> dict[tuple[int, int], int]:
    """(row, position) of every token that the table still holds, and its slot."""
    size = table.block_size
    return {
        (row, position): blocks[position // size] * size + position % size
        for row, (blocks, length) in enumerate(zip(table.rows, lengths, strict=True))
        for position in range(length)
        if blocks[position // size] != FREED
    }


def stored_slots(cache: PagedCache, layer) -> list[tuple[PagedKV, dict[tuple[int, int], int]]]:
    """Where the layer's tokens are: each of its pools, and the slot there of every (row, position)."""
    kv, lengths = layer.kv(), cache.sequences.lengths
    slots = live_slots(layer.table, lengths)
    if kv.tail is None:
        return [(kv, slots)]
    tail = cache.sequences.tail
    newest = live_slots(tail, lengths)
    assert set(newest) == {(row, at) for row, n in enumerate(lengths) for at in range(tail.sealed[row], n)}
    return [(kv, {key: slot for key, slot in slots.items() if key not in newest}), (kv.tail, newest)]


def check_contents(cache: PagedCache, rows: list[list[int]], tolerance: float = 0.0) -> None:
    """Every token that the next query may see is held, and everything held reads back as it was written."""
    assert cache.sequences.lengths == [len(row) for row in rows]
    size = cache.block_size
    for index, layer in enumerate(cache.layers):
        slots = live_slots(layer.table, cache.sequences.lengths)
        for row, tokens in enumerate(rows):
            first = 0 if layer.window is None else max(0, len(tokens) - layer.window + 1)
            assert all((row, position) in slots for position in range(first, len(tokens)))
        if not slots:
            continue
        for kv, stored in stored_slots(cache, layer):
            if not stored:
                continue
            where = torch.tensor(list(stored.values()))
            want = [states(rows[row][position], index) for row, position in stored]
            for part, held in ((1, decode_keys(kv.k_pool, kv.k_scale)), (2, decode_values(kv.v_pool, kv.v_scale))):
                held = held[where // size, where % size]
                written = torch.stack([s[part] for s in want])
                if part == 1 and kv.turn_factor is not None:
                    # Turning spreads a vector's error over its channels: it is bounded as a vector, in units of the
                    # factor.
                    error = (unrotate_heads(held, kv.turn_factor) - written) / kv.turn_factor
                    assert (error.norm(dim=-1) <= tolerance * (written / kv.turn_factor).norm(dim=-1)).all()
                else:
                    torch.testing.assert_close(held, written, atol=tolerance, rtol=tolerance)


def poison(cache: PagedCache) -> None:
    """NaN in every slot that holds no token: whoever reads it shows."""
    size = cache.block_size
    for layer in cache.layers:
        if layer.storage is None:
            continue
        for kv, stored in stored_slots(cache, layer):
            free = torch.ones(kv.k_pool.shape[0] * size, dtype=torch.bool)
            free[list(stored.values())] = False
            if kv is layer.kv():
                free.view(-1, size)[remembered_blocks(cache, layer.window)] = False
            blocks, offsets = free.nonzero().squeeze(1) // size, free.nonzero().squeeze(1) % size
            for memory in (kv.k_pool, kv.v_pool, kv.k_scale, kv.v_scale):
                if memory is None or memory.dtype in (torch.int8, torch.uint8):
                    continue
                if memory.shape[1] == size:
                    raw = memory.view(torch.uint8) if memory.dtype.itemsize == 1 else memory
                    raw[blocks, offsets] = 0x7F if raw.dtype == torch.uint8 else float("nan")  # e4m3's NaN is 0x7F
                else:  # a scale a group of tokens, in whole blocks
                    memory[free.view(-1, size).all(1)] = float("nan")
