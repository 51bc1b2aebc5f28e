"""`info()`: versions, device and backends, for a bug report or a first look."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import torch

from .backends import availability
from .cache.formats import FORMATS


def info() -> dict[str, Any]:
    """Versions of what matters here, the device, and for each backend "usable" or the reason why it is not."""

    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("hf-paged-attention", "torch", "triton", "transformers", "accelerate")},
        },
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"cpu ({platform.machine()})",
        "backends": availability(device),
        "kv_dtypes": list(FORMATS),
    }
