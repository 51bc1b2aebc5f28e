"""Kernels of many cases compiled at once, each in a process of its own, into Triton's cache on disk.

A case is compiled by running it on an empty batch: the same tensors but for their contents, so the same kernel.
"""

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool

import torch

from scripts.attention_cases import Spec, make_case


def _start() -> None:
    torch.set_num_threads(1)


def _compile(job: tuple[Spec, object]) -> str | None:
    spec, plan = job
    try:
        make_case(spec, torch.device("cuda"), empty=True).run(0, plan)
        torch.cuda.synchronize()
        return None
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]


def compile_ahead(jobs: list[tuple[Spec, object]], *, processes: int | None = None, seconds: float = 120.0) -> list:
    """Compile each (spec, plan); plan None is the kernels' own choice. Returns a job's error message, or None.

    Jobs that are not done after `seconds`, or whose process died, are left to whoever runs them.
    """
    if not jobs:
        return []
    deadline = time.monotonic() + seconds
    processes = processes or min(len(jobs), len(os.sched_getaffinity(0)))
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_start)
    pending = [pool.submit(_compile, job) for job in jobs]
    results: list = []
    for future in pending:
        try:
            results.append(future.result(max(0.1, deadline - time.monotonic())))
        except (TimeoutError, BrokenProcessPool):
            future.cancel()
            results.append(None)
    pool.shutdown(wait=False, cancel_futures=True)
    return results
