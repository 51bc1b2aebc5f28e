"""The paged cache: pools, block tables, storage formats, and the class that Transformers sees."""

from .cache import PagedCache

__all__ = ["PagedCache"]
