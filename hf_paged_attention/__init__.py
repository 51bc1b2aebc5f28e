"""A paged, optionally quantised KV cache for Transformers, with attention computed from the pages."""

__version__ = "0.1.0"
