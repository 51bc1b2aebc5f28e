"""Zeroed int32 counters for kernels whose last program does more, and leaves its counters at zero.

A launch may not share counters with one that can run beside it. Launches on one stream cannot, so each stream has its
own. A launch recorded into a CUDA graph may later run beside anything: it takes counters that nobody else gets.
"""

import torch

from .integers import next_power_of_2

_GRAPH_COUNTERS = 1 << 20

_of_stream: dict[tuple[torch.device, int], torch.Tensor] = {}
_for_graphs: dict[torch.device, list] = {}


def take_counters(count: int, device: torch.device) -> torch.Tensor:
    """At least `count` zeros, int32, for one launch on the current stream."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        return _take_for_graph(count, device)
    if device not in _for_graphs:
        # Allocated outside any capture, so that no graph's memory pool owns it.
        _for_graphs[device] = [torch.zeros(_GRAPH_COUNTERS, dtype=torch.int32, device=device), 0]
    key = device, torch.cuda.current_stream(device).cuda_stream
    counters = _of_stream.get(key)
    if counters is None or len(counters) < count:
        counters = torch.zeros(max(1024, next_power_of_2(count)), dtype=torch.int32, device=device)
        _of_stream[key] = counters
    return counters


def _take_for_graph(count: int, device: torch.device) -> torch.Tensor:
    count = -(-count // 4) * 4  # 16 bytes, so that every launch's pointer is aligned as the first one's
    zeros, used = _for_graphs.get(device, (None, 0))
    if zeros is None or used + count > len(zeros):
        # Zeroed by the graph at every replay: a little slower, never wrong.
        return torch.zeros(count, dtype=torch.int32, device=device)
    _for_graphs[device][1] = used + count
    return zeros[used : used + count]


def forget_graphs() -> None:
    """Give the counters of captured graphs out again: for a program that has dropped every graph it captured."""
    for counters in _for_graphs.values():
        counters[1] = 0
