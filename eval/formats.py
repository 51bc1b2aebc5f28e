"""A cache format as an evaluation sees it: a name, and how to make an empty cache of it for a model."""

import contextlib
from collections.abc import Sequence

import torch

import hf_paged_attention
from eval.program import BadInput
from hf_paged_attention.cache.formats import get_format


class Format:
    """`--kv-dtype` text: one format, or keys:values, read through the plugin's attention.

    exact_layers: layers of every cache that are excepted, as `PagedCache` takes them.
    """

    attn_implementation = "paged_triton"

    def __init__(self, name: str, block_size: int | None = None, exact_layers: Sequence[int] = ()):
        self.name = name
        self.kv_dtype = tuple(name.split(":")) if ":" in name else name
        self.block_size = block_size
        self.exact_layers = tuple(exact_layers)

    def new_cache(self, model):
        """An empty PagedCache of this format for `model`."""
        return self._cache(model.config, model.dtype, self.exact_layers)

    def is_exact(self, dtype: torch.dtype) -> bool:
        """Whether keys and values of `dtype` come back from the cache as they went in."""
        stored = get_format(self.kv_dtype)
        return all(side.dtype in (None, dtype) for side in (stored.key, stored.value))

    def check(self) -> None:
        """Let PagedCache judge the arguments on a config of one layer, before a model is loaded.

        exact_layers wait for the model, whose layers they name.
        """
        from transformers import LlamaConfig

        self._cache(LlamaConfig(num_hidden_layers=1, hidden_size=128, num_attention_heads=2), torch.float32, ())

    def _cache(self, config, dtype: torch.dtype, exact_layers: tuple[int, ...]):
        try:
            return hf_paged_attention.PagedCache(
                config, kv_dtype=self.kv_dtype, block_size=self.block_size, exact_layers=exact_layers, dtype=dtype
            )
        except (ValueError, NotImplementedError) as error:
            blamed = f"--kv-dtype {self.name}"
            if str(error).startswith("block_size="):
                blamed = f"--block-size {self.block_size}"
            elif str(error).startswith("exact_layers="):
                blamed = f"--exact-layers {' '.join(map(str, exact_layers))}"
            raise BadInput(f"{blamed}: {error}") from error


def formats_named(names: list[str], block_size: int | None = None, exact_layers: Sequence[int] = ()) -> list[Format]:
    """The formats asked for, each once, in order; a wrong one is refused here."""
    formats = [Format(name, block_size, exact_layers) for name in dict.fromkeys(names)]
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
