"""Kernels run compiled where there is a GPU, and in Triton's interpreter elsewhere: the same tests both ways."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel is defined, so it must be set before the package is imported.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"
