"""The sequences of a batch: their lengths, the blocks that hold them, and how far each layer has come.

One object for all layers of a cache, because all of them see the same tokens. A forward pass begins when the first
layer brings tokens and is complete when every layer has written them; until then `columns` still counts as before the
pass, so that an exception half-way loses nothing: the next pass drops what the broken one left.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .batch import ForwardPass
from .options import Options
from .prefixes import PrefixIndex
from .table import FREED, BlockTable
from .tail import TailTable, Unsealed

if TYPE_CHECKING:
    from .device_state import DeviceState
    from .plan import BuiltFor


RIGHT_PADDING = (
    "attention_mask is padded on the right in rows {rows}: the next token would be chosen after a padding token. "
    'Pad on the left (tokenizer.padding_side = "left").'
)


@dataclass
class Beginning:
    """Stored blocks that a row can begin with: by the window of their table, and those of the tail."""

    blocks: dict[int | None, list[int]]
    tail: list[int] = field(default_factory=list)  # FREED where the block is sealed; empty: all are
    sealed: int = 0  # tokens


class Sequences:
    """Rows of a batch for `num_layers` paged layers with the given windows (None: full attention).

    has_tail: some layer encodes its keys in groups of tokens, so that the newest ones wait (tail.py).
    """

    def __init__(
        self,
        block_size: int,
        windows: set[int | None],
        max_blocks: int | None,
        num_layers: int,
        options: Options | None = None,
        prefix_caching: bool = False,
        has_tail: bool = False,
    ):
        self.options = options or Options()
        self.block_size = block_size
        self.tables = {window: BlockTable(block_size, window, max_blocks) for window in windows}
        self.tail = TailTable(block_size) if has_tail else None
        # With an index, sliding layers keep what lies behind their windows: a later prompt may part from this one
        # there.
        self.prefixes = PrefixIndex(self.tables, block_size) if prefix_caching else None
        self.record_past = False
        # A draft's cache: `generate` takes a pad token that it proposed for padding, which only costs a proposal.
        self.is_draft = False
        self.num_layers = num_layers
        self.calls: dict[Hashable, tuple[Any, ...]] = {}  # `PagedLayer.call` by what it follows from
        self.built_for: BuiltFor | None = None  # the model that brings the tokens, where it is known
        self._forget()

    def _forget(self) -> None:
        self.batch_size: int | None = None
        # Of the present call of `generate`, where they are known: columns that it may reach, and that it began with.
        self.longest: int | None = None
        self.began = 0
        self.lengths: list[int] = []  # real tokens a row, the current pass included
        self.current: ForwardPass | None = None
        self._together: ForwardPass | None = None  # the last step of all layers at once
        self.progress = [0] * self.num_layers  # columns that each layer has stored
        self._columns = 0  # columns a row has been given, padding and the current pass included
        # The past in segments of columns: (columns, which of them are real per row, or None where all are).
        self._segments: list[tuple[int, torch.Tensor | None]] = []
        self._laggards: list[int] = []
        # The tokens of each row as far as somebody told them: `lengths` of them where all are known.
        self._tokens: list[list[int]] = []
        self.device_state: DeviceState | None = None  # while decode steps are captured or compiled
        self.awaited: int | None = None  # the layer whose new keys the attention function has yet to take

    @property
    def columns(self) -> int:
        """Columns (tokens a row, padding included) that every layer holds: Transformers' sequence length."""
        return min(self.progress, default=0)

    def expect(self, longest: int | None) -> None:
        """A call of `generate` begins that may reach `longest` columns."""
        self.longest, self.began = longest, self.columns

    @property
    def columns_given(self) -> int:
        """Columns with those of the pass that is under way."""
        return self._columns

    def is_empty(self) -> bool:
        """Whether no row holds a token, once what an exception left is dropped."""
        self._drop_unfinished()
        return self.batch_size is None

    @property
    def keeps_past(self) -> bool:
        """Whether sliding layers hold on to what falls behind their windows."""
        return self.record_past or self.prefixes is not None

    def expect_attention(self, layer: int) -> None:
        """`layer` hands new keys on. Raises `RuntimeError` if an earlier layer's were never taken.

        After a pass that an exception ended, the next one starts again at the first layer: nothing is wrong then.
        """
        awaited, self.awaited = self.awaited, layer
        if awaited is not None and (layer > awaited or (layer == awaited and self.num_layers == 1)):
            self.awaited = None
            raise RuntimeError(
                f"The keys of cache layer {awaited} never reached the attention function of PagedCache. Either the "
                'model does not run it (call model.set_attn_implementation("paged_triton")), or this family changes '
                "keys after caching them, which a paged cache cannot follow: use it without PagedCache."
            )

    # A forward pass -------------------------------------------------------------------------------------------------

    def enter(self, layer: int, batch_size: int, width: int, valid: Callable[[], torch.Tensor | None]) -> ForwardPass:
        """The pass that `layer` takes part in with `[batch_size, width]` new tokens, begun if it is the first layer.

        valid gives bool `[batch_size, width]` on the CPU, False for padding, or None when every token is real; it is
        asked once a pass.
        Raises `CacheFullError` and changes nothing if there are not enough blocks.
        """
        if self.current is not None and layer not in self.current.entered:
            self.current.entered.add(layer)
            return self.current
        # A layer that comes again begins a new pass, also where an exception ended the last one as it was writing.
        self._drop_unfinished()
        self.check_batch(batch_size)
        self._begin(batch_size, width, valid())
        self.current.entered.add(layer)
        return self.current

    def check_batch(self, batch_size: int) -> None:
        """`ValueError` if new tokens of so many rows cannot follow those that are held."""
        if self.batch_size is not None and batch_size != self.batch_size:
            raise ValueError(
                f"The batch has {batch_size} rows but the cache holds {self.batch_size} sequences. Call reset() to "
                "start over, or batch_repeat_interleave / batch_select_indices to change the rows."
            )

    def leave(self, layer: int) -> None:
        """`layer` has stored its tokens. After the last layer, blocks behind the windows are given back."""
        self.progress[layer] = self._columns
        if self.columns == self._columns:
            self._laggards = []
            if self.tail is not None:
                self.tail.release_sealed()
            if not self.keeps_past:
                self._release_behind_windows()

    def _begin(self, batch_size: int, width: int, valid: torch.Tensor | None) -> None:
        query_lens = [width] * batch_size if valid is None else valid.sum(1).tolist()
        first = self.batch_size is None
        if first:
            self.lengths = [0] * batch_size
            for table in self._all_tables:
                table.start(batch_size)
        try:
            for window, table in self.tables.items():
                self._make_room(window, table.blocks_needed(self.lengths, query_lens))
        except Exception:
            if first:
                self._clear_tables()
                self.lengths = []
            raise
        self.batch_size = batch_size
        step = ForwardPass(list(self.lengths), query_lens, width, valid)
        for window, table in self.tables.items():
            step.copies[window] = table.extend(self.lengths, query_lens)
        if self.tail is not None:
            step.extend_tail(self.tail)
        self.current = step
        self.lengths = [length + new for length, new in zip(self.lengths, query_lens, strict=True)]
        self._columns += width
        if valid is None and self._segments and self._segments[-1][1] is None:
            self._segments[-1] = (self._segments[-1][0] + width, None)
        else:
            self._segments.append((width, valid))

    def refuse_right_padding(self, valid: torch.Tensor | None) -> None:
        """`ValueError` where the one new token of a row follows a prompt that was padded on the right.

        It was chosen by the logits of a padding token, which attention computes no output for: `generate` does so.
        """
        width, prompt = self._segments[-1] if self._segments else (0, None)
        if prompt is None or width == 1 or self.is_draft:
            return
        bad = prompt.any(1) & ~prompt[:, -1]
        if valid is not None:
            bad &= valid[:, -1]
        if bad.any():
            raise ValueError(RIGHT_PADDING.format(rows=bad.nonzero().flatten().tolist()))

    def refuse_gaps(self, valid: torch.Tensor | None) -> None:
        """`ValueError` where new tokens would stand behind padding that stands behind others, and a layer has a window.

        A sliding window counts columns, and only real tokens are stored: padding between them would widen it.
        """
        if self.is_draft or not any(window is not None for window in self.tables):
            return
        # By row: 0 before any real token, 1 after one, 2 where padding followed it.
        last = self._segments[-1][1] if self._segments else None
        state = torch.tensor([min(length, 1) for length in self.lengths] or [0])
        if last is not None:
            state = torch.where((state == 1) & ~last[:, -1], 2, state)
        if valid is None:
            bad = state == 2
        else:
            seen = (valid.int().cumsum(1) > 0) | (state > 0).unsqueeze(1)
            padding = (seen & ~valid).int().cumsum(1) > 0
            bad = (valid & (padding | (state == 2).unsqueeze(1))).any(1)
        if bad.any():
            raise ValueError(
                f"attention_mask has padding between real tokens in rows {bad.nonzero().flatten().tolist()}, and this "
                "model has sliding windows, which count it. Pad on the left."
            )

    def _make_room(self, window: int | None, blocks: int) -> None:
        pool = self.tables[window].pool
        if self.prefixes is not None and pool.max_blocks is not None:
            self.prefixes.evict(window, pool.num_used + blocks - pool.max_blocks)
        pool.check(blocks)

    def _drop_unfinished(self) -> None:
        """Forget the tokens of a pass that did not reach every layer: an exception ended it."""
        lagging = self._columns - self.columns
        if not lagging:
            return
        laggards = [layer for layer, columns in enumerate(self.progress) if columns < self._columns]
        if laggards == self._laggards:
            raise RuntimeError(
                f"Two forward passes in a row did not reach the cache's layers {laggards}. If exceptions ended them, "
                "call reset(); otherwise the model has fewer attention layers than its config says, or computes some "
                "of them without the attention interface, and cannot use this cache."
            )
        self._laggards = laggards
        for window, copies in self.current.copies.items():
            self.tables[window].undo(copies)
        self.current.undo_tail()
        self._take_back(lagging)

    def enter_together(self) -> None:
        """One new real token a row that all layers will store at once, as a captured decode step does.

        Raises `CacheFullError` and changes nothing if there are not enough blocks. No row may share the block that its
        next token goes to (`shares_next_block`): nobody would make the copy.
        """
        self._drop_unfinished()
        if self.tail is not None:
            self.tail.release_sealed()
        if not self.keeps_past:
            self._release_behind_windows()
        self._begin(self.batch_size, 1, None)
        self._together, self.current = self.current, None
        self.progress = [self._columns] * self.num_layers
        self._laggards = []

    def take_back_together(self) -> None:
        """Take back what `enter_together` began: an exception ended the step, and not every layer has stored it."""
        self._together.undo_tail()
        self._take_back(1)

    @property
    def shares_next_block(self) -> bool:
        """Whether the next token of some row would go to a block that another row holds too."""
        return any(
            table.pool.is_shared(row[length // self.block_size])
            for table in self._all_tables
            for row, length in zip(table.rows, self.lengths, strict=True)
            if length // self.block_size < len(row)
        )

    # Changes between passes -----------------------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> list[Unsealed]:
        """Remove the newest `tokens_to_remove` columns (0: only give back what lies behind the windows).

        Returns the blocks whose tokens every layer must decode into the tail before the next pass.
        """
        self._drop_unfinished()
        if self.batch_size is None:
            return []
        removed = min(tokens_to_remove, self._columns)
        lengths = self._lengths_without(removed)
        for table in self.tables.values():
            for row, length in enumerate(lengths):
                if not table.can_continue_at(row, length):
                    raise RuntimeError(
                        f"crop({-tokens_to_remove}) needs keys that a layer with sliding window {table.window} has "
                        "given back. Call activate_past_recording() before the forward passes that may be undone."
                    )
        self._take_back(removed)
        self._release_behind_windows()
        return self._unseal()

    def select(self, indices: list[int]) -> None:
        """Row i becomes what row `indices[i]` was; blocks are shared, not copied."""
        self._drop_unfinished()
        if self.batch_size is None:
            return
        out_of_range = [index for index in indices if not -self.batch_size <= index < self.batch_size]
        if out_of_range:
            raise IndexError(f"indices {out_of_range} are out of range for a cache of {self.batch_size} sequences.")
        for table in self._all_tables:
            table.select(indices)
        self.lengths = [self.lengths[index] for index in indices]
        if self._tokens:
            self._tokens = [self._tokens[index] for index in indices]
        self._segments = [(n, None if real is None else real[indices]) for n, real in self._segments]
        self.batch_size = len(indices)
        self.current = None

    def adopt(self, rows: list[Beginning], lengths: list[int], valid: torch.Tensor) -> list[Unsealed]:
        """Begin with stored blocks: row r holds `lengths[r]` tokens in the blocks of `rows[r]`.

        valid: bool `[len(rows), columns]` on the CPU, whose row r has `lengths[r]` real columns. Replaces the present
        rows. Returns what `crop` returns.
        """
        for row in rows:
            for window, blocks in row.blocks.items():
                for block in blocks:
                    self.tables[window].pool.share(block)
            for block in row.tail:
                if block != FREED:
                    self.tail.pool.share(block)
        self._clear_tables()
        longest, began = self.longest, self.began
        self._forget()
        self.longest, self.began = longest, began  # prefill adopts within a call
        for window, table in self.tables.items():
            table.start(len(rows))
            table.rows = [list(row.blocks[window]) for row in rows]
        if self.tail is not None:
            blocks = [-(-length // self.block_size) for length in lengths]
            self.tail.adopt(
                [row.tail or [FREED] * count for row, count in zip(rows, blocks, strict=True)],
                [row.sealed for row in rows],
            )
        self.batch_size, self.lengths = len(rows), list(lengths)
        self._columns = valid.shape[1]
        self.progress = [self._columns] * self.num_layers
        self._segments = [(self._columns, None if valid.all() else valid)]
        self._release_behind_windows()
        return self._unseal()

    def row_blocks(self, row: int, length: int | None = None) -> dict[int | None, list[int]]:
        """The blocks of a row's first `length` tokens (all of them if None), by table."""
        tokens = self.lengths[row] if length is None else length
        return {window: table.rows[row][: -(-tokens // self.block_size)] for window, table in self.tables.items()}

    def beginning(self, row: int, length: int) -> Beginning:
        """A row's first `length` tokens, for `adopt`."""
        blocks = self.row_blocks(row, length)
        if self.tail is None:
            return Beginning(blocks)
        count = -(-length // self.block_size)
        return Beginning(blocks, self.tail.rows[row][:count], min(self.tail.sealed[row], count * self.block_size))

    def remember(self, tokens: list[list[int]]) -> None:
        """Let later prompts find the rows' full blocks by their stored tokens, told here, one list a row."""
        if self.prefixes is None:
            return
        self._tokens = [told[:length] for told, length in zip(tokens, self.lengths, strict=True)]
        for row, told in enumerate(self._tokens):
            stored = self.lengths[row] if self.tail is None else self.tail.sealed[row]
            self.prefixes.insert(told[:stored], self.row_blocks(row))

    def known_tokens(self) -> list[list[int]] | None:
        """The stored tokens of each row; None where nobody told them."""
        self._drop_unfinished()
        if [len(told) for told in self._tokens] == self.lengths:
            return [list(told) for told in self._tokens]
        return None

    def reset(self, keep_prefixes: bool = False) -> None:
        self._clear_tables()
        self._forget()
        if self.prefixes is not None and not keep_prefixes:
            self.prefixes.clear()

    # Parts ----------------------------------------------------------------------------------------------------------

    def _take_back(self, columns: int) -> None:
        self.lengths = self._lengths_without(columns)
        self._tokens = [told[:length] for told, length in zip(self._tokens, self.lengths, strict=False)]
        left = columns
        while left:
            width, real = self._segments.pop()
            if width > left:
                kept = width - left
                self._segments.append((kept, None if real is None else real[:, :kept]))
                break
            left -= width
        self._columns -= columns
        self.progress = [min(done, self._columns) for done in self.progress]
        self.current = None
        for table in self._all_tables:
            table.truncate(self.lengths)
        if self._columns == 0:
            self._clear_tables()
            self.batch_size = None
            self.lengths = self._tokens = []

    def _lengths_without(self, columns: int) -> list[int]:
        lengths, left = list(self.lengths), columns
        for width, real in reversed(self._segments):
            if not left:
                break
            taken = min(width, left)
            for row in range(len(lengths)):
                lengths[row] -= taken if real is None else int(real[row, width - taken :].sum())
            left -= taken
        return lengths

    def _release_behind_windows(self) -> None:
        if self.prefixes is not None:
            return
        for table in self.tables.values():
            table.release_behind_window(self.lengths)

    @property
    def _all_tables(self) -> list[BlockTable]:
        return [*self.tables.values(), *([] if self.tail is None else [self.tail])]

    def _unseal(self) -> list[Unsealed]:
        if self.tail is None or self.batch_size is None:
            return []
        opened = self.tail.unseal(self.lengths)
        self.tail.release_sealed()
        return opened

    def _clear_tables(self) -> None:
        for table in self._all_tables:
            table.clear()
