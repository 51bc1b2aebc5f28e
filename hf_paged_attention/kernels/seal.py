"""Full blocks of the tail, and of keys that have just arrived, encoded into the pools whose keys are int4."""

import torch

from .int4 import quantize_keys
from .reference import write_rows


def reference_seal_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    *,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor | None,
    k_tail: torch.Tensor,
    v_tail: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    tail_table: torch.Tensor,
    seal_requests: torch.Tensor,
    seal_blocks: torch.Tensor,
) -> None:
    """What `seal_kv` does; see there for shapes. Reads the lengths on the host."""
    size = k_pool.shape[1]
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for row, index in zip(seal_requests.tolist(), seal_blocks.tolist(), strict=True):
        if index < 0:
            continue
        old = lengths[row] - (starts[row + 1] - starts[row])
        first = starts[row] + index * size - old  # token of the block's first position, where it is new
        new = slice(max(first, starts[row]), first + size)
        held = size - (new.stop - new.start) if new.stop > new.start else size
        block = int(block_table[row, index])
        keys, values = key[new].float(), value[new].float()
        if held:
            tail = int(tail_table[row, index])
            keys = torch.cat([k_tail[tail, :held].float(), keys[: size - held]])
            values = torch.cat([v_tail[tail, :held].float(), values[: size - held]])
        k_pool[block], k_scale[block] = quantize_keys(keys)
        slots = torch.arange(block * size, (block + 1) * size, device=key.device)
        write_rows(values, v_pool, v_scale, slots)
