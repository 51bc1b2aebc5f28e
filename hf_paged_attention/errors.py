"""The errors that a caller can catch by name."""


class CacheFullError(RuntimeError):
    """The pool has no block left for the tokens of a forward pass. Nothing was stored: the cache holds what it held."""
