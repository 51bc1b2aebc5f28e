"""One state for the whole process, set before the package is imported.

Without a GPU the reference backend answers, and a test that wants the Triton kernels asks for them by name
(`backend="triton"`): they then run in Triton's interpreter, which must be chosen before the kernels are defined.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["HF_PAGED_ATTENTION_BACKEND"] = "reference"
