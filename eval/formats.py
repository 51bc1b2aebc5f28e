"""A cache format as an evaluation sees it: a name, and how to make an empty cache of it for a model."""

import contextlib

import torch

import hf_paged_attention
from eval.program import BadInput
from hf_paged_attention.cache.formats import FORMATS


class Format:
    """`--kv-dtype` text: one format, or keys:values, read through the plugin's attention."""

    attn_implementation = "paged_triton"

    def __init__(self, name: str, block_size: int | None = None):
        self.name = name
        self.kv_dtype = tuple(name.split(":")) if ":" in name else name
        self.block_size = block_size

    def new_cache(self, model):
        """An empty PagedCache of this format for `model`."""
        return self._cache(model.config, model.dtype)

    def is_exact(self, dtype: torch.dtype) -> bool:
        """Whether keys and values of `dtype` come back from the cache as they went in."""
        stored = FORMATS.get(self.kv_dtype)
        return stored is not None and not stored.scaled and stored.dtype in (None, dtype)

    def check(self) -> None:
        """Let PagedCache judge the arguments on a config of one layer, before a model is loaded."""
        from transformers import LlamaConfig

        self._cache(LlamaConfig(num_hidden_layers=1, hidden_size=128, num_attention_heads=2), torch.float32)

    def _cache(self, config, dtype: torch.dtype):
        try:
            return hf_paged_attention.PagedCache(
                config, kv_dtype=self.kv_dtype, block_size=self.block_size, dtype=dtype
            )
        except (ValueError, NotImplementedError) as error:
            blamed = f"--block-size {self.block_size}" if "block_size=" in str(error) else f"--kv-dtype {self.name}"
            raise BadInput(f"{blamed}: {error}") from error


def formats_named(names: list[str], block_size: int | None = None) -> list[Format]:
    """The formats asked for, each once, in order; a wrong one is refused here."""
    formats = [Format(name, block_size) for name in dict.fromkeys(names)]
    for fmt in formats:
        fmt.check()
    return formats


@contextlib.contextmanager
def refusals_as_bad_input(who: str):
    """What the plugin or the device refuses while a model runs, as one line that opens with `who`.

    Anything else that goes wrong is a fault, and goes on as the exception that it is.
    """
    try:
        yield
    except NotImplementedError as error:
        raise BadInput(f"{who}: {error}") from error
    except hf_paged_attention.CacheFullError as error:
        raise BadInput(f"{who}: {error} Give a shorter context.") from error
    except RuntimeError as error:
        reason = next((line for line in str(error).splitlines() if _says_memory_is_full(line)), None)
        if reason is None:
            raise
        raise BadInput(
            f"{who}: {reason.split('. ')[0]}; give a shorter context, a smaller --dtype or a larger --device"
        ) from error


def _says_memory_is_full(line: str) -> bool:
    return "out of memory" in line or "can't allocate memory" in line or "not enough memory" in line
