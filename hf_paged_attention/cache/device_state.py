"""Lengths and block tables at fixed addresses on the device: what a captured or compiled decode step reads and
advances.

The host goes on deciding which blocks a row holds (`Sequences.enter_together`); `follow` brings its decisions here,
without waiting, when they changed. Everything else of a step happens on the device.
"""

from __future__ import annotations

import torch

from .sequences import Sequences
from .table import to_device


class DeviceState:
    """For rows like those of `sequences`, one new token a row and step, up to `max_length` tokens a row."""

    def __init__(self, sequences: Sequences, max_length: int, device: torch.device):
        rows = sequences.batch_size
        width = -(-max_length // sequences.block_size)
        self.block_size = sequences.block_size
        self.seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)  # stored tokens, the step's own included
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)  # of the step's tokens: seq_lens - 1
        self.columns = torch.zeros((), dtype=torch.int64, device=device)  # Transformers' sequence length
        self.tables = {
            window: torch.zeros(rows, width, dtype=torch.int32, device=device) for window in sequences.tables
        }
        self.slots = {window: torch.zeros(rows, dtype=torch.int64, device=device) for window in sequences.tables}
        self.query_start_loc = torch.arange(rows + 1, dtype=torch.int32, device=device)
        for table in self.tables.values():
            # A compiled step must serve any table width, or each prompt length would compile it anew.
            torch._dynamo.maybe_mark_dynamic(table, 1)
        self._versions: dict[int | None, int] = {}
        self._followed: list[int] | None = None  # the host's lengths, the very object, after the last step
        self.restart(sequences)

    def fits(self, sequences: Sequences, max_length: int) -> bool:
        """Whether these tensors can serve `sequences` up to `max_length` tokens a row."""
        return (
            self.seq_lens.shape[0] == sequences.batch_size
            and self.block_size == sequences.block_size
            and self.tables.keys() == sequences.tables.keys()
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

    def follow(self, sequences: Sequences) -> None:
        """Copy the tables that changed on the host since the last call, without waiting."""
        self._followed = sequences.lengths
        for window, table in sequences.tables.items():
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
