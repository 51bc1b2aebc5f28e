"""Anything that generate does to a cache, in any order, against a plain-Python model.

After every step: a block is free or held, counts match the tables, what is held reads back, outputs are attention over
the real tokens, and nothing was read before it was written (whatever holds no token is NaN).
"""

from __future__ import annotations

import copy
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_paged_attention import CacheFullError
from hf_paged_attention.cache.storage import Storage
from tests.cache.paged_passes import (
    BLOCK,
    LAYERS,
    WINDOW,
    Interrupted,
    check_contents,
    check_counts,
    device_steps,
    expected_outputs,
    poison,
    remembered_blocks,
    run_pass,
    small_cache,
)

MOST_ROWS = 5


@pytest.fixture(autouse=True, scope="module")
def fresh_memory_is_poisoned():
    """Memory that a pool has just grown by is NaN, not what the allocator happened to find."""
    ensure = Storage.ensure

    def poisoned(self, num_blocks, *bounds):
        before = self.num_blocks
        ensure(self, num_blocks, *bounds)
        kv = self.kv()
        for memory in (kv.k_pool, kv.v_pool, kv.k_scale, kv.v_scale):
            if memory is not None and memory.dtype.is_floating_point and memory.dtype.itemsize > 1:
                memory[before:] = float("nan")

    def poisoned_tail(self, num_blocks):
        before = self.kv().tail.k_pool.shape[0]
        ensure_tail(self, num_blocks)
        for memory in (self.kv().tail.k_pool, self.kv().tail.v_pool):
            memory[before:] = float("nan")

    ensure_tail = Storage.ensure_tail
    Storage.ensure, Storage.ensure_tail = poisoned, poisoned_tail
    yield
    Storage.ensure, Storage.ensure_tail = ensure, ensure_tail


class PagedCacheMachine(RuleBasedStateMachine):
    kv_dtype, tolerance, block_size, prefixes = "auto", 0.0, BLOCK, False
    bounds = (None, None, 14)

    @initialize(bound=st.integers(0, 2), record=st.booleans())
    def start(self, bound, record):
        max_blocks = self.bounds[bound]
        self.cache = small_cache(
            kv_dtype=self.kv_dtype,
            block_size=self.block_size,
            max_blocks=max_blocks,
            prefix_caching=self.prefixes,
        )
        self.next_token = 0
        self.told: list[list[int]] = []  # texts whose full blocks the prefix index may hold
        self.record = record
        if record:
            self.cache.activate_past_recording()
        self.forget()

    def forget(self):
        self.columns: list[list[int | None]] = []  # every column ever given, a row of the batch each
        self.recorded = 0  # the newest columns that a crop may still take back for certain
        self.broken = False  # an exception ended the latest pass
        self.may_break = True  # two broken passes in a row are an error

    @property
    def rows(self) -> list[list[int]]:
        return [[token for token in row if token is not None] for row in self.columns]

    def draw_tokens(self, data) -> list[list[int | None]]:
        batch = len(self.columns) or data.draw(st.integers(1, 3), label="batch")
        width = data.draw(st.one_of(st.just(1), st.integers(1, 40)), label="width")
        holes = data.draw(st.sampled_from(["none", "none", "left", "anywhere"]), label="padding")
        tokens = []
        for _ in range(batch):
            if holes == "anywhere":
                real = data.draw(st.lists(st.booleans(), min_size=width, max_size=width))
            else:
                real = [True] * width
                if holes == "left":
                    blank = data.draw(st.integers(0, width))
                    real[:blank] = [False] * blank
            row = []
            for is_real in real:
                row.append(self.next_token if is_real else None)
                self.next_token += 1
            tokens.append(row)
        return tokens

    @rule(data=st.data())
    def append(self, data):
        self.run(self.draw_tokens(data))

    def run(self, tokens):
        past = self.rows or [[] for _ in tokens]
        try:
            got = run_pass(self.cache, tokens)
        except CacheFullError:
            self.broken = False
            self.check_that_it_is_full()
            return
        self.check_outputs(got, past, tokens)
        before = self.columns or [[] for _ in tokens]
        self.columns = [old + new for old, new in zip(before, tokens, strict=True)]
        self.recorded = self.recorded + len(tokens[0]) if self.record else 0
        self.broken, self.may_break = False, True

    def check_outputs(self, got, past, tokens):
        for layer, want in enumerate(expected_outputs(past, tokens)):
            torch.testing.assert_close(got[layer], want, atol=1e-5 + 4 * self.tolerance, rtol=1e-5)

    def check_that_it_is_full(self):
        pass

    @property
    def can_be_captured(self) -> bool:
        """What `decode="graph"` asks of a cache before it captures a step."""
        layers = self.cache.layers
        ready = all(layer.call is not None and layer.storage.is_fitted for layer in layers)
        return ready and not self.broken and not self.cache.sequences.shares_next_block

    @precondition(lambda self: self.columns and self.can_be_captured)
    @rule(count=st.integers(1, 20), abandoned=st.booleans())
    def steps_on_the_device(self, count, abandoned):
        """Captured decode steps; the last may be taken back, as after an exception."""
        with device_steps(self.cache, count + abandoned) as step:
            for _ in range(count):
                tokens = list(range(self.next_token, self.next_token + len(self.columns)))
                past = self.rows
                try:
                    got = step(tokens)
                except CacheFullError:
                    self.check_that_it_is_full()
                    break
                self.next_token += len(tokens)
                self.check_outputs(got, past, [[token] for token in tokens])
                self.columns = [[*row, token] for row, token in zip(self.columns, tokens, strict=True)]
                self.recorded = self.recorded + 1 if self.record else 0
            if abandoned:
                try:
                    self.cache.sequences.enter_together()
                except CacheFullError:
                    self.check_that_it_is_full()
                else:
                    self.cache.crop(-1)
                    self.recorded = 0
        self.may_break = True

    @precondition(lambda self: self.may_break)
    @rule(data=st.data(), layer=st.integers(0, LAYERS - 1), moment=st.sampled_from(["before", "after", "writing"]))
    def exception_in_a_pass(self, data, layer, moment):
        with pytest.raises((Interrupted, CacheFullError)):
            run_pass(self.cache, self.draw_tokens(data), stop_at=(layer, moment))
        self.broken, self.may_break = True, False

    @rule(data=st.data())
    def crop(self, data):
        held = len(self.columns[0]) if self.columns else 0
        remove = data.draw(st.one_of(st.just(0), st.integers(0, held)), label="remove")
        try:
            self.cache.crop(-remove)
        except RuntimeError:
            assert remove > self.recorded
        else:
            self.columns = [row[: len(row) - remove] for row in self.columns] if remove < held else []
            self.recorded = 0
        self.broken = False

    @precondition(lambda self: self.columns)
    @rule(repeats=st.integers(1, 3))
    def repeat(self, repeats):
        if len(self.columns) * repeats <= MOST_ROWS:
            self.cache.batch_repeat_interleave(repeats)
            self.columns = [list(row) for row in self.columns for _ in range(repeats)]
            self.broken = False

    @precondition(lambda self: self.columns)
    @rule(data=st.data())
    def reorder(self, data):
        rows = st.integers(0, len(self.columns) - 1)
        order = data.draw(st.lists(rows, min_size=len(self.columns), max_size=len(self.columns)))
        self.cache.reorder_cache(torch.tensor(order))
        self.columns = [list(self.columns[index]) for index in order]
        self.broken = False

    @precondition(lambda self: self.columns)
    @rule(data=st.data())
    def select(self, data):
        chosen = data.draw(st.lists(st.booleans(), min_size=len(self.columns), max_size=len(self.columns)).filter(any))
        self.cache.batch_select_indices(torch.tensor(chosen))
        self.columns = [row for row, keep in zip(self.columns, chosen, strict=True) if keep]
        self.broken = False

    @rule()
    def deep_copy(self):
        self.cache = copy.deepcopy(self.cache)

    @rule()
    def reset(self):
        self.cache.reset()
        self.told = []
        assert all(table.pool.num_used == 0 for table in self.cache.sequences.tables.values())
        if not self.cache.sequences.record_past and self.record:
            self.cache.activate_past_recording()
        self.forget()

    @invariant()
    def holds_what_it_was_given(self):
        if not hasattr(self, "cache"):
            return
        check_counts(self.cache)
        assert self.cache.get_seq_length() == (len(self.columns[0]) if self.columns else 0)
        if self.broken:  # the next step drops what the broken pass left
            return
        check_contents(self.cache, self.rows, self.tolerance)
        sliding = self.cache.sequences.tables[WINDOW]
        if not self.cache.sequences.keeps_past:
            bound = math.ceil(WINDOW / self.block_size) + 1
            assert all(sum(block >= 0 for block in row) <= bound for row in sliding.rows)
        poison(self.cache)


class PrefixMachine(PagedCacheMachine):
    """The same with an index of prefixes, which texts are told to and found in again."""

    prefixes, bounds = True, (None, 7, 14)

    def check_that_it_is_full(self):
        """What only the index held was given up first, in the table that is full."""
        for table in self.cache.sequences.tables.values():
            rows = {block for row in table.rows for block in row}
            if rows.issuperset(remembered_blocks(self.cache, table.window)):
                return
        raise AssertionError("the index still holds blocks that no row needs")

    @precondition(lambda self: self.columns and not self.broken)
    @rule()
    def remember(self):
        """As at the end of generate."""
        self.cache.sequences.remember(self.rows)
        size, tail = self.block_size, self.cache.sequences.tail
        stored = [len(row) for row in self.rows] if tail is None else tail.sealed
        self.told += [row[: length // size * size] for row, length in zip(self.rows, stored, strict=True)]

    @rule(data=st.data(), told=st.booleans())
    def begin_again(self, data, told):
        """All rows forgotten but for what was told; other prompts come."""
        if told and self.columns and not self.broken:
            self.remember()
        self.cache.reset(keep_prefixes=True)
        for table in self.cache.sequences.tables.values():
            assert table.pool.num_used == len(self.cache.sequences.prefixes)
        if not self.cache.sequences.record_past and self.record:
            self.cache.activate_past_recording()
        self.forget()
        self.match(data)

    @precondition(lambda self: not self.columns)
    @rule(data=st.data())
    def match(self, data):
        """Prompts that begin like what was told, or like nothing."""
        prompts = []
        for _ in range(data.draw(st.integers(1, 3), label="batch")):
            text = data.draw(st.sampled_from([*self.told, []]), label="text")
            text = text[: data.draw(st.one_of(st.just(len(text)), st.integers(0, len(text))), label="kept")]
            more = data.draw(st.one_of(st.integers(1, 8), st.integers(9, 50)), label="more")
            prompts.append(text + list(range(self.next_token, self.next_token + more)))
            self.next_token += more
        width = max(map(len, prompts))
        columns = [[None] * (width - len(prompt)) + prompt for prompt in prompts]
        ids = torch.tensor([[token or 0 for token in row] for row in columns])
        mask = torch.tensor([[token is not None for token in row] for row in columns]).long()
        found = self.cache.match_prefix(ids, mask)
        assert 0 <= found < width
        if self.cache.sequences.tables[None].pool.max_blocks is None:  # nothing was given up
            known = [max(self.common_blocks(prompt, text) for text in [*self.told, []]) for prompt in prompts]
            known = min(width - len(prompt) + blocks for prompt, blocks in zip(prompts, known, strict=True))
            lengths = [max(0, min(known, width - 1) - (width - len(prompt))) for prompt in prompts]
            assert found == (min(known, width - 1) if any(lengths) else 0)
        self.columns = [row[:found] for row in columns] if found else []
        self.recorded, self.broken, self.may_break = 0, False, True
        self.holds_what_it_was_given()
        self.run([row[found:] for row in columns])

    def common_blocks(self, prompt, text) -> int:
        """Tokens in the full blocks that two texts begin alike with."""
        size, alike = self.block_size, 0
        while alike + size <= min(len(prompt), len(text)) and prompt[: alike + size] == text[: alike + size]:
            alike += size
        return alike

    @precondition(lambda self: len(self.columns) == 1 and not self.broken and None not in self.columns[0])
    @rule(data=st.data())
    def share_the_beginning(self, data):
        """As a prefill does whose prompts begin alike: other rows start with this row's blocks."""
        held, sequences = len(self.columns[0]), self.cache.sequences
        columns = data.draw(st.integers(1, held), label="columns")
        padding = data.draw(st.lists(st.integers(0, columns - 1), min_size=1, max_size=3), label="padding")
        lengths = [columns - pad for pad in padding]
        valid = torch.arange(columns) >= torch.tensor(padding).unsqueeze(1)
        self.cache.adopt([sequences.beginning(0, length) for length in lengths], lengths, valid)
        text = self.columns[0]
        self.columns = [[None] * pad + text[: columns - pad] for pad in padding]
        self.recorded = 0


class Int8PrefixMachine(PrefixMachine):
    kv_dtype, tolerance = "int8", 0.06


class Int4PrefixMachine(PrefixMachine):
    kv_dtype, tolerance, block_size = "int4", 0.7, 32


class Int8CacheMachine(PagedCacheMachine):
    kv_dtype, tolerance = "int8", 0.06


class Fp8CacheMachine(PagedCacheMachine):
    kv_dtype, tolerance = "fp8", 0.15


class Int4CacheMachine(PagedCacheMachine):
    # Codes are a fifteenth of a group's range apart; a block that a crop opens is encoded once more.
    kv_dtype, tolerance, block_size = "int4", 0.7, 32


class MixedCacheMachine(PagedCacheMachine):
    kv_dtype, tolerance = ("int8", "int4"), 0.3


SETTINGS = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],  # shrinking takes minutes; leave `phases` out to have it
)
TestPagedCache = PagedCacheMachine.TestCase
TestPagedCache.settings = SETTINGS
TestInt8Cache = Int8CacheMachine.TestCase
TestInt8Cache.settings = settings(SETTINGS, max_examples=15)
TestFp8Cache = Fp8CacheMachine.TestCase
TestFp8Cache.settings = settings(SETTINGS, max_examples=15)

TestInt4Cache = Int4CacheMachine.TestCase
TestInt4Cache.settings = settings(SETTINGS, max_examples=30)
TestMixedCache = MixedCacheMachine.TestCase
TestMixedCache.settings = settings(SETTINGS, max_examples=10)


TestPrefixes = PrefixMachine.TestCase
TestPrefixes.settings = settings(SETTINGS, max_examples=200)
TestInt8Prefixes = Int8PrefixMachine.TestCase
TestInt8Prefixes.settings = settings(SETTINGS, max_examples=15)
TestInt4Prefixes = Int4PrefixMachine.TestCase
TestInt4Prefixes.settings = settings(SETTINGS, max_examples=30)


MACHINES = [PagedCacheMachine, Int8CacheMachine, Fp8CacheMachine, Int4CacheMachine, MixedCacheMachine]
MACHINES += [PrefixMachine, Int8PrefixMachine, Int4PrefixMachine]


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_many_more_steps(machine):
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(machine, settings=settings(SETTINGS, max_examples=400, stateful_step_count=50))
