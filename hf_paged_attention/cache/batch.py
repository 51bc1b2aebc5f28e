"""One forward pass over the cache: which tokens are real, where they go, and what the kernels are told."""

from __future__ import annotations

import torch

from ..types import BatchMetadata
from .table import BlockCopy, BlockTable, to_device


class ForwardPass:
    """The tokens that one forward pass of a model brings, the same for each of its layers."""

    def __init__(self, lengths: list[int], query_lens: list[int], width: int, valid: torch.Tensor | None):
        self.lengths = lengths  # before the pass
        self.query_lens = query_lens
        self.width = width  # columns a row brings, padding included
        # Flat indices [N] of the real tokens among batch * width, on the CPU; None when all are real.
        self.token_index = None if valid is None else valid.flatten().nonzero().squeeze(1)
        self.copies: dict[int | None, list[BlockCopy]] = {}
        self._metadata: dict[tuple[int | None, torch.device], BatchMetadata] = {}
        self._token_index: dict[torch.device, torch.Tensor] = {}

    def metadata(self, table: BlockTable, device: torch.device) -> BatchMetadata:
        key = (table.window, device)
        if key not in self._metadata:
            self._metadata[key] = self._build(table, device)
        return self._metadata[key]

    def real_tokens(self, device: torch.device) -> torch.Tensor | None:
        """`token_index` on `device`."""
        if self.token_index is None:
            return None
        if device not in self._token_index:
            self._token_index[device] = to_device(self.token_index, device)
        return self._token_index[device]

    def _build(self, table: BlockTable, device: torch.device) -> BatchMetadata:
        seq_lens = [length + new for length, new in zip(self.lengths, self.query_lens, strict=True)]
        starts = [0]
        for new in self.query_lens:
            starts.append(starts[-1] + new)
        rows = len(seq_lens)
        numbers = to_device(torch.tensor(starts + seq_lens, dtype=torch.int32), device)
        if max(self.query_lens, default=0) == 1:
            size = table.block_size
            slots = torch.tensor(
                [
                    table.rows[r][length // size] * size + length % size
                    for r, length in enumerate(self.lengths)
                    if self.query_lens[r]
                ],
                dtype=torch.long,
            )
        else:
            slots = torch.cat(
                [table.slots(r, self.lengths[r], self.query_lens[r]) for r in range(rows)]
                or [torch.zeros(0, dtype=torch.long)]
            )
        return BatchMetadata(
            query_start_loc=numbers[: rows + 1],
            seq_lens=numbers[rows + 1 :],
            block_table=table.tensor(device),
            slot_mapping=to_device(slots, device),
            max_query_len=max(self.query_lens, default=0),
            max_seq_len=max(seq_lens, default=0),
            block_size=table.block_size,
            query_lens=self.query_lens,
            host_seq_lens=seq_lens,
            # A snapshot: blocks behind the window may be given back before the pass's last reader is through.
            host_blocks=[list(row) for row in table.rows] if device.type == "cpu" else None,
        )
