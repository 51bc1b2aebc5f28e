"""Times of GPU calls: CUDA graphs over calls that read cold memory, medians and their spread, the card's ceilings."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

# A call must not find its data in the L2 cache: between two calls on the same memory this many bytes are read.
COLD_BYTES = 512 << 20


@dataclass(frozen=True)
class Time:
    """Microseconds a call: the median over replays, and the tenth and ninetieth percentile."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.1f}"

    @property
    def spread(self) -> float:
        """The percentiles' distance, over the median."""
        return (self.high - self.low) / self.median


def layers_for(bytes_a_call: int, *, at_most: int = 256) -> int:
    """Calls on separate memory that together read enough to make each cold."""
    return max(2, min(at_most, -(-COLD_BYTES // max(bytes_a_call, 1))))


def time_graph(call: Callable[[int], object], calls: int, *, replays: int = 15, seconds: float = 0.25) -> Time:
    """Time of call(0) .. call(calls - 1), captured in one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)  # compiles, and lets libraries set themselves up
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            call(index)
    graph.replay()
    torch.cuda.synchronize()
    first = _replay(graph)
    replays = max(5, min(replays, int(seconds * 1e6 / max(first, 1))))
    times = sorted(_replay(graph) / calls for _ in range(replays))
    del graph
    return Time(statistics.median(times), times[len(times) // 10], times[-1 - len(times) // 10])


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def copy_bandwidth() -> float:
    """Bytes a second of a large copy on the device, read and written."""
    source = torch.randn(2 << 28, device="cuda")
    target = torch.empty_like(source)
    # A kernel, not `copy_`: captured in a graph that becomes a copy node, which reached two thirds of the bandwidth.
    time = time_graph(lambda _: torch.neg(source, out=target), 2)
    return 2 * source.nbytes / (time.median * 1e-6)


def matmul_rate() -> float:
    """bfloat16 operations a second of a large matrix product on random data."""
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    time = time_graph(lambda _: a @ b, 3)
    return 2 * n**3 / (time.median * 1e-6)
