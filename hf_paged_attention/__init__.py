"""A paged, optionally quantised KV cache for Transformers, with attention computed from the pages.

Importing the package registers `attn_implementation="paged_triton"`.
"""

from .cache import PagedCache
from .errors import CacheFullError
from .generation import disable, enable
from .information import info
from .registration import register

__version__ = "0.1.0"
__all__ = ["CacheFullError", "PagedCache", "disable", "enable", "info"]

register()
