"""Calls like an earlier one: checked and planned already, and their kernel found.

Each layer of a pass asks for the same with other tensors. What is checked, what is planned and what Triton compiles for
follow from shapes, strides, dtypes, alignment and numbers, so these are the key of a table. `kernel[grid](...)` would
classify every argument, write the options out as text and compare the globals that the kernel reads.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_ALIGNMENT = 16  # bytes, to which Triton looks at pointers
# Kinds of calls that are remembered; past it all are forgotten.
_MOST = 4096

Grid = tuple[int, int, int]
# Grid, arguments behind the tensors, and constexprs with launch options by name.
Launch = tuple[Grid, tuple[Any, ...], dict[str, Any]]

_calls: dict[tuple, "KnownCall"] = {}


class KnownCall:
    """One kind of call: the sizes that its check found, its plan, and the kernels that were compiled for it."""

    def __init__(self, shape: Any, plan: Any):
        self.shape, self.plan = shape, plan
        self._compiled: dict[tuple, tuple[CompiledKernel, Grid, tuple]] = {}

    def launch(self, kernel: Any, tensors: tuple[Any, ...], rest: Callable[[], Launch]) -> None:
        """Start the kernel over `tensors`, its first arguments: tensors, descriptors or None.

        rest gives all else, which follows from the kind of call; asked where it is not known.
        """
        # Not in the interpreter, and not on AMD, where Triton also looks at the memory that a tensor is part of.
        if not isinstance(kernel, JITFunction) or torch.version.hip is not None:
            grid, numbers, constants = rest()
            kernel[grid](*tensors, *numbers, **constants)
            return
        knobs = triton.knobs
        key = kernel, driver.active.get_current_device(), knobs.runtime.debug, knobs.compilation.instrumentation_mode
        if key in self._compiled:
            compiled, grid, arguments = self._compiled[key]
            compiled[grid](*tensors, *arguments)
            return
        grid, numbers, constants = rest()
        compiled = kernel[grid](*tensors, *numbers, **constants)
        if isinstance(compiled, CompiledKernel) and compiled.module is not None:  # else compiled, but not started
            names = kernel.arg_names[len(tensors) + len(numbers) :]
            self._compiled[key] = compiled, grid, (*numbers, *(constants[name] for name in names))


def known_call(
    prepare: Callable[[], tuple[Any, Any]], tensors: tuple[torch.Tensor | None, ...], *numbers: Any
) -> KnownCall:
    """The call with these arguments; `prepare` checks them and gives (sizes, plan), where none like it is known."""
    # A number's type too: 1 and 1.0 are equal, and other kernels.
    kind = (numbers, tuple(map(type, numbers)), *map(_kind, tensors))
    call = _calls.get(kind)
    if call is None:
        call = KnownCall(*prepare())
        if len(_calls) >= _MOST:
            _calls.clear()
        _calls[kind] = call
    return call


def _kind(tensor: torch.Tensor | None) -> tuple | None:
    if tensor is None:
        return None
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % _ALIGNMENT
