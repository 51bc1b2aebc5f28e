"""One decode step of a model at fixed addresses: run, captured as a CUDA graph, replayed, by whichever loop decodes.

The host allocates the step's blocks and uploads a block table when it changed; everything else happens on the device.
A captured step reads and writes the addresses of its capture, so it is replayed only while nothing that it has kept
has moved: `CapturedStep.prepare` compares, and drops the graph where something has.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from typing import Any

import torch

from .cache import PagedCache
from .cache.device_state import DeviceState
from .kernels.integers import next_power_of_2
from .log import warn_once

# Steps for which memory is reserved, at most, at a time. When it is used up the pools move, and the step is captured
# anew.
RESERVATION = 512


def capture(work: Callable[[], None]) -> Any:
    """A graph of what `work` launches, nothing of which is executed. `replay()` executes it."""
    graph = torch.cuda.CUDAGraph()
    # Garbage may hold an earlier graph, and destroying one would end the capture of another, so none is collected
    # meanwhile. (Collecting it before takes longer than the capture.) Another thread's calls would end it too, if the
    # capture were not this thread's alone.
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
    finally:
        if collects:
            gc.enable()
    return graph


def must_run_eagerly(cache: PagedCache) -> bool:
    """Whether the next step has work for the host: an eager step copies shared blocks, and goes on fitting the keys'
    factors; a captured or compiled one could do neither."""
    return cache.sequences.shares_next_block or any(not layer.storage.is_fitted for layer in cache.layers)


class CapturedStep:
    """The addresses of one model's decode step for one number of rows, and the graph that was captured over them.

    captures: whether steps are captured at all; else each runs as it is.
    """

    def __init__(self, captures: bool):
        self.captures = captures
        self.state: DeviceState | None = None
        self.captured = 0  # graphs captured so far
        self._graph: Any = None
        self.longest = 0
        self._kept: tuple[Hashable, ...] = ()
        self._places: tuple[Hashable, ...] = ()
        self._room: dict[int | None, int] = {}  # blocks that the pools of a table's layers have memory for

    def prepare(self, cache: PagedCache, longest: int, kept: tuple[Hashable, ...]) -> None:
        """Tensors for rows of at most `longest` tokens, and memory for the next steps. Before the first `run`.

        kept: what else a capture would keep, by value.
        """
        sequences = cache.sequences
        self.longest = longest
        if self.state is None or not self.state.fits(sequences, longest):
            self.state = self._graph = None  # before their successors are allocated
            # The next power of two, which serves calls of like lengths.
            self.state = DeviceState(sequences, next_power_of_2(longest), cache.layers[0].storage.device)
        elif self.state.is_behind(sequences):
            self.state.restart(sequences)
        if kept != self._kept:
            self._kept, self._graph = kept, None
        self._reserve(cache)

    def is_ready_for(self, cache: PagedCache) -> bool:
        """Whether `run` may be called: nothing happened to the cache since the last step or `prepare`."""
        return (
            self.state is not None
            and not self.state.is_behind(cache.sequences)
            and max(cache.sequences.lengths) < self.longest
        )

    def _reserve(self, cache: PagedCache) -> None:
        """Memory some steps ahead, not for the request's whole limit. A graph over other memory is dropped."""
        lengths = cache.sequences.lengths
        wanted = max(1, min(RESERVATION, self.longest - max(lengths)))
        cache.reserve(wanted)
        if self._places and self._places != tuple(map(_place_of, cache.layers)):
            # Memory that moves costs a capture: move seldom.
            try:
                cache.reserve(max(wanted, max(lengths) // 4, RESERVATION))
            except torch.OutOfMemoryError:
                warn_once("no memory to reserve ahead for captured steps; they are captured anew more often")
        self._room = {}
        for layer in cache.layers:
            blocks = layer.storage.num_blocks
            self._room[layer.window] = min(blocks, self._room.get(layer.window, blocks))
        places = tuple(map(_place_of, cache.layers))
        if places != self._places:
            self._places, self._graph = places, None

    def run(self, cache: PagedCache, work: Callable[[], None]) -> None:
        """One step of `work`, replayed where it has been captured.

        work reads and writes fixed addresses only, and calls `state.advance()` first. Raises what it raises, and
        `CacheFullError`, with the step taken back.
        """
        sequences, state = cache.sequences, self.state
        sequences.enter_together()
        try:
            if any(table.pool.capacity > self._room[window] for window, table in sequences.tables.items()):
                self._reserve(cache)
            state.follow(sequences)
            sequences.device_state = state
            if self._graph is not None:
                self._graph.replay()
            else:
                work()  # compiles, and warms up what the capture needs
                if self.captures:
                    self._graph = capture(work)
                    self.captured += 1
        except BaseException:
            sequences.device_state = None
            sequences.take_back_together()
            raise
        finally:
            sequences.device_state = None


def _place_of(layer: Any) -> Hashable:
    """Where a layer's pools lie, and what its attention computes."""
    memory = tuple(None if t is None else (t.data_ptr(), tuple(t.shape)) for t in layer.storage.memory())
    spec = layer.call[1]
    return (*memory, spec.scale, spec.window, spec.softcap, None if spec.sinks is None else spec.sinks.data_ptr())


def model_state(model: torch.nn.Module) -> Hashable:
    """What a captured step has kept of the model: addresses of weights, and the settings and hooks of its modules.

    A module's numbers, strings and flags are compared because code reads them while it is captured: adapters, for
    example, are switched on and off by such a flag.
    """
    parts: list[Hashable] = [tuple(t.data_ptr() for t in (*model.parameters(), *model.buffers()))]
    for module in model.modules():
        settings = tuple(value for value in vars(module).values() if type(value) in (bool, int, float, str))
        parts.append((id(type(module)), len(module._forward_hooks), len(module._forward_pre_hooks), *settings))
    return tuple(parts)
