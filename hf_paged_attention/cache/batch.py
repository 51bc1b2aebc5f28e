"""One forward pass over the cache: which tokens are real, where they go, and what the kernels are told."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..types import BatchMetadata, TailBatch
from .table import BlockCopy, BlockTable, to_device
from .tail import TailTable


class ForwardPass:
    """The tokens that one forward pass of a model brings, the same for each of its layers."""

    def __init__(self, lengths: list[int], query_lens: list[int], width: int, valid: torch.Tensor | None):
        self.lengths = lengths  # before the pass
        self.query_lens = query_lens
        self.width = width  # columns a row brings, padding included
        self.valid = valid  # bool [batch, width] on the CPU, False for padding; None when all are real
        self.entered: set[int] = set()  # layers that have brought their tokens
        self.copies: dict[int | None, list[BlockCopy]] = {}
        self.tail_copies: list[BlockCopy] = []
        self._tail: TailTable | None = None
        self._sealed_before: list[int] = []
        self._tails: dict[torch.device, TailBatch] = {}
        self._metadata: dict[tuple[int | None, torch.device, int], BatchMetadata] = {}
        self._token_index: dict[tuple[torch.device, int], torch.Tensor] = {}

    def extend_tail(self, tail: TailTable) -> None:
        """Let the tail grow by the pass's tokens; see `TailTable.extend`."""
        self._tail, self._sealed_before = tail, list(tail.sealed)
        self.tail_copies = tail.extend(self.lengths, self.query_lens)

    def undo_tail(self) -> None:
        """The pass did not reach every layer: what it sealed counts as not sealed."""
        if self._tail is not None:
            self._tail.undo(self.tail_copies)
            self._tail.sealed = self._sealed_before

    def metadata(self, table: BlockTable, device: torch.device, width: int) -> BatchMetadata:
        """What the kernels are told of the newest `width` columns: those of the pass, or fewer.

        Fewer: layers that only read another layer's keys may skip the prompt's tokens but the last (Gemma 4).
        """
        key = (table.window, device, width)
        if key not in self._metadata:
            if width == self.width:
                self._metadata[key] = self._build(table, device)
            else:
                self._metadata[key] = self._newest(self.metadata(table, device, self.width), device, width)
        return self._metadata[key]

    def real_tokens(self, device: torch.device, width: int) -> torch.Tensor | None:
        """Flat indices `[N]` of the real tokens among batch * `width`, the newest columns; None when all are real."""
        if self.valid is None:
            return None
        key = (device, width)
        if key not in self._token_index:
            newest = self.valid[:, self.width - width :]
            self._token_index[key] = to_device(newest.flatten().nonzero().squeeze(1), device)
        return self._token_index[key]

    def _newest(self, batch: BatchMetadata, device: torch.device, width: int) -> BatchMetadata:
        rows = len(self.query_lens)
        query_lens = [width] * rows if self.valid is None else self.valid[:, self.width - width :].sum(1).tolist()
        starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return replace(
            batch,
            query_start_loc=to_device(starts, device),
            query_lens=query_lens,
            max_query_len=max(query_lens, default=0),
            slot_mapping=None,
        )

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
            tail=None if self._tail is None else self._tail_batch(device),
        )

    def _tail_batch(self, device: torch.device) -> TailBatch:
        """The same for the layers of every window."""
        if device in self._tails:
            return self._tails[device]
        tail, size, rows = self._tail, self._tail.block_size, len(self.lengths)
        seals = [
            (row, block)
            for row in range(rows)
            for block in range(self._sealed_before[row] // size, tail.sealed[row] // size)
        ]
        numbers = to_device(torch.tensor([*tail.sealed, *sum(zip(*seals, strict=True), ())], dtype=torch.int32), device)
        slots = [
            tail.slots(row, length, new).masked_fill_(torch.arange(length, length + new) < tail.sealed[row], -1)
            for row, (length, new) in enumerate(zip(self.lengths, self.query_lens, strict=True))
            if new
        ]
        slots = torch.cat(slots or [torch.zeros(0, dtype=torch.long)])
        self._tails[device] = TailBatch(
            sealed_lens=numbers[:rows],
            block_table=tail.tensor(device),
            slot_mapping=to_device(slots, device) if (slots >= 0).any() else None,
            seal_requests=numbers[rows : rows + len(seals)],
            seal_blocks=numbers[rows + len(seals) :],
            host_sealed=list(tail.sealed),
            host_blocks=[list(row) for row in tail.rows] if device.type == "cpu" else None,
        )
        return self._tails[device]
