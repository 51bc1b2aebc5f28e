"""A call is known by all that its checks, its plan and its compiled kernel follow from."""

import pytest
import torch

from hf_paged_attention.kernels import known_calls
from hf_paged_attention.kernels.known_calls import known_call


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(known_calls, "_calls", {})


def prepared():
    return "sizes", "plan"


def refused():
    raise ValueError("refused")


def test_the_same_with_other_tensors_is_not_checked_again():
    first = known_call(prepared, (torch.zeros(4, 8), None), 1.0)
    assert known_call(refused, (torch.ones(4, 8), None), 1.0) is first
    assert (first.shape, first.plan) == ("sizes", "plan")


ALIGNED = torch.zeros(64)


@pytest.mark.parametrize(
    ("tensors", "numbers"),
    [
        ((torch.zeros(4, 9), None), (1, False)),
        ((torch.zeros(8, 4).t(), None), (1, False)),
        ((torch.zeros(4, 8, dtype=torch.float16), None), (1, False)),
        ((ALIGNED[1:33].view(4, 8), None), (1, False)),
        ((torch.zeros(4, 8), torch.zeros(1)), (1, False)),
        ((torch.zeros(4, 8), None), (1.0, False)),
        ((torch.zeros(4, 8), None), (1, 0)),
        ((torch.zeros(4, 8), None), (2, False)),
        ((torch.zeros(4, 8), None), (None, False)),
    ],
)
def test_another_kind_of_call_is_checked(tensors, numbers):
    known_call(prepared, (torch.zeros(4, 8), None), 1, False)
    with pytest.raises(ValueError, match="refused"):
        known_call(refused, tensors, *numbers)


def test_a_refused_call_is_refused_again():
    for _ in range(2):
        with pytest.raises(ValueError, match="refused"):
            known_call(refused, (torch.zeros(4, 8),), 1)


def test_no_more_calls_are_remembered_than_allowed(monkeypatch):
    monkeypatch.setattr(known_calls, "_MOST", 3)
    for number in range(10):
        known_call(prepared, (torch.zeros(4, 8),), number)
        assert len(known_calls._calls) <= 3


class Compiled:
    """What Triton compiled, and the launches that went straight to it."""

    def __init__(self, started: bool):
        self.module = object() if started else None
        self.launches = []

    def __getitem__(self, grid):
        return lambda *arguments: self.launches.append((grid, arguments))


class Kernel:
    """A kernel whose launches through Triton are noted."""

    arg_names = ("x_ptr", "y_ptr", "stride", "BLOCK", "WINDOW")

    def __init__(self, started: bool = True):
        self.compiled, self.launches = Compiled(started), []

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.launches.append((grid, arguments, constants))
            return self.compiled

        return run


class Driver:
    device = 0

    @property
    def active(self):
        return self

    def get_current_device(self):
        return self.device


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(known_calls, "JITFunction", Kernel)
    monkeypatch.setattr(known_calls, "CompiledKernel", Compiled)
    monkeypatch.setattr(known_calls, "driver", Driver())
    return known_calls.driver


def rest():
    return (2, 3, 1), (8,), {"WINDOW": 0, "BLOCK": 16, "num_warps": 4}


def unasked():
    raise AssertionError("asked again")


def test_a_known_launch_goes_to_the_compiled_kernel_with_the_tensors_at_hand(driver):
    kernel, call = Kernel(), known_call(prepared, ())
    call.launch(kernel, ("x", "y"), rest)
    call.launch(kernel, ("other x", None), unasked)
    assert kernel.launches == [((2, 3, 1), ("x", "y", 8), {"WINDOW": 0, "BLOCK": 16, "num_warps": 4})]
    assert kernel.compiled.launches == [((2, 3, 1), ("other x", None, 8, 16, 0))]


def test_each_device_has_a_kernel_of_its_own(driver, monkeypatch):
    kernel, call = Kernel(), known_call(prepared, ())
    call.launch(kernel, ("x", "y"), rest)
    monkeypatch.setattr(Driver, "device", 1)
    call.launch(kernel, ("x", "y"), rest)
    assert len(kernel.launches) == 2


def test_what_was_compiled_and_not_started_is_not_remembered(driver):
    kernel, call = Kernel(started=False), known_call(prepared, ())
    for _ in range(2):
        call.launch(kernel, ("x", "y"), rest)
    assert len(kernel.launches) == 2
