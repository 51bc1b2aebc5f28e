"""Lengths and block tables at fixed addresses on the device: what a captured or compiled decode step reads and
advances.

The host goes on deciding which blocks a row holds (`Sequences.enter_together`); `follow` brings its decisions here,
without waiting, when they changed. Everything else of a step happens on the device.
"""

from __future__ import annotations

from typing import Any

import torch

from .sequences import Sequences
from .table import BlockTable, to_device
from .tail import EXACT_TOKENS

TAIL = "tail"  # beside the windows, by which the tables of keys that stay are known


class DeviceState:
    """For rows like those of `sequences`, one new token a row and step, up to `max_length` tokens a row."""

    def __init__(self, sequences: Sequences, max_length: int, device: torch.device):
        rows = sequences.batch_size
        width = -(-max_length // sequences.block_size)
        self.block_size = sequences.block_size
        self.seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)  # stored tokens, the step's own included
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)  # of the step's tokens: seq_lens - 1
        self.columns = torch.zeros((), dtype=torch.int64, device=device)  # Transformers' sequence length
        self.tables: dict[Any, torch.Tensor] = {
            window: torch.zeros(rows, width, dtype=torch.int32, device=device) for window in sequences.tables
        }
        self.slots: dict[Any, torch.Tensor] = {
            window: torch.zeros(rows, dtype=torch.int64, device=device) for window in sequences.tables
        }
        self.query_start_loc = torch.arange(rows + 1, dtype=torch.int32, device=device)
        # int4 keys: how far each row is encoded, and the block that the step encodes, or -1.
        self.sealed_lens = self.seal_blocks = None
        if sequences.tail is not None:
            self.tables[TAIL] = torch.zeros(rows, width, dtype=torch.int32, device=device)
            self.slots[TAIL] = torch.zeros(rows, dtype=torch.int64, device=device)
            self.sealed_lens = torch.zeros(rows, dtype=torch.int32, device=device)
            self.seal_blocks = torch.full((rows,), -1, dtype=torch.int32, device=device)
            self.requests = torch.arange(rows, dtype=torch.int32, device=device)
        for table in self.tables.values():
            # A compiled step must serve any table width, or each prompt length would compile it anew.
            torch._dynamo.maybe_mark_dynamic(table, 1)
        self._versions: dict[Any, int] = {}
        self._followed: list[int] | None = None  # the host's lengths, the very object, after the last step
        self.restart(sequences)

    def fits(self, sequences: Sequences, max_length: int) -> bool:
        """Whether these tensors can serve `sequences` up to `max_length` tokens a row."""
        return (
            self.seq_lens.shape[0] == sequences.batch_size
            and self.block_size == sequences.block_size
            and self.tables.keys() == {*sequences.tables, *([] if sequences.tail is None else [TAIL])}
            and all(table.shape[1] * self.block_size >= max_length for table in self.tables.values())
        )

    def is_behind(self, sequences: Sequences) -> bool:
        """Whether lengths changed on the host other than by this state's steps. Every change makes a new list."""
        return self._followed is not sequences.lengths

    def restart(self, sequences: Sequences) -> None:
        """Take lengths and tables over from the host: between steps, when nothing is in flight that reads them."""
        lengths = torch.tensor(sequences.lengths, dtype=torch.int32)
        self.seq_lens.copy_(to_device(lengths, self.seq_lens.device), non_blocking=True)
        self.positions.copy_(self.seq_lens).sub_(1)
        self.columns.fill_(sequences.columns)
        self._versions = {}
        self.follow(sequences)
        if sequences.tail is not None:
            sealed = torch.tensor(sequences.tail.sealed, dtype=torch.int32)
            self.sealed_lens.copy_(to_device(sealed, self.sealed_lens.device), non_blocking=True)

    def follow(self, sequences: Sequences) -> None:
        """Copy the tables that changed on the host since the last call, without waiting."""
        self._followed = sequences.lengths
        tables: dict[Any, BlockTable] = dict(sequences.tables)
        if sequences.tail is not None:
            tables[TAIL] = sequences.tail
        for window, table in tables.items():
            if self._versions.get(window) != table.version:
                table.copy_into(self.tables[window])
                self._versions[window] = table.version

    def advance(self) -> None:
        """One token more a row: device operations only, fit for capture. Slots are where the new tokens go.

        As few operations as can be: in a graph each costs about 2 µs, whatever it does.
        """
        self.seq_lens.add_(1)
        self.positions.add_(1)
        self.columns.add_(1)
        index = (self.positions // self.block_size).unsqueeze(1)
        offset = self.positions % self.block_size
        for window, table in self.tables.items():
            block = table.gather(1, index).squeeze(1)
            torch.add(offset, block, alpha=self.block_size, out=self.slots[window])
        if self.sealed_lens is not None:
            full = (self.seq_lens - EXACT_TOKENS).clamp_min(0) // self.block_size * self.block_size
            sealed = torch.maximum(self.sealed_lens, full)
            self.seal_blocks.copy_(torch.where(sealed > self.sealed_lens, self.sealed_lens // self.block_size, -1))
            self.sealed_lens.copy_(sealed)
