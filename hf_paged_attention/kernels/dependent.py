"""Programmatic dependent launch (CUDA programming guide, section of that name; Hopper on).

A kernel's programs are put in place while the kernel before it in the stream still runs, and wait there for its end.
That saves the time between two launches, a good part of a decode step's attention at short contexts.

A kernel launched so must call `follow` before it reads or writes anything in memory.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .launch import gpu_of


@triton.jit
def follow(DEPENDENT: tl.constexpr):
    """Wait for the end of the kernel before; let the programs of the next be put in place as soon as there is room."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Arguments of a launch: whether the kernel is to `follow`, and the launch attribute that makes it necessary."""
    if gpu_of(device).kind != "hopper":
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}
