"""lm-evaluation-harness on a paged cache: its Hugging Face model with a cache format, and its own command line.

    pip install lm_eval
    python eval/lm_harness.py run --model hf-paged --model_args pretrained=Qwen/Qwen3-0.6B,kv_dtype=int8 --tasks gsm8k
    python eval/lm_harness.py run --model hf-paged --model_args pretrained=NAME,kv_dtype=int8:int4,chunk=64 --tasks piqa

The harness's own model `hf` has no argument for a cache, and `attn_implementation=paged_triton` in its `--model_args`
measures the exact model: a log-likelihood request is one forward pass for which Transformers builds its own cache, and
attention reads the keys and values just computed. `enable(model, kv_dtype=...)` changes that for `generate` alone.
`hf-paged` hands a `PagedCache` to every forward pass and every `generate`: both kinds of request read the cache.
Run with lm_eval 0.4.13.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "lm_eval":
        raise
    raise ModuleNotFoundError("needs a package: pip install lm_eval", name="lm_eval") from error

import hf_paged_attention
from hf_paged_attention.compat import CACHE_ARGUMENT


@register_model("hf-paged")
class PagedHFLM(HFLM):
    """`HFLM` that reads every key and value out of a `PagedCache`.

    Args:
        pretrained: as HFLM's: a name, or a model.
        kv_dtype: the cache's format; another for values than for keys as int8:int4.
        block_size: tokens a block.
        chunk: log-likelihood requests go through the cache this many tokens at a time (0: all at once, as HFLM does).
        kwargs: HFLM's.

    Raises:
        ValueError: for a format or block size that `PagedCache` refuses.
    """

    def __init__(self, pretrained, kv_dtype: str = "auto", block_size: int | None = None, chunk: int = 0, **kwargs):
        super().__init__(pretrained, **kwargs)
        pair = tuple(kv_dtype.split(":")) if ":" in kv_dtype else kv_dtype
        self.cache_arguments = {"kv_dtype": pair, "block_size": block_size}
        self.chunk = chunk
        hf_paged_attention.enable(self.model, **self.cache_arguments)

    def _model_call(self, inps: torch.Tensor, attn_mask=None, labels=None) -> torch.Tensor:
        """Logits `[B, T, V]` of `inps [B, T]`, which HFLM has padded on the right: what follows does no harm."""
        cache = hf_paged_attention.PagedCache(self.model.config, dtype=self.model.dtype, **self.cache_arguments)
        chunk = self.chunk or inps.shape[1]
        with torch.no_grad():
            parts = [
                self.model(inps[:, at : at + chunk], use_cache=True, **{CACHE_ARGUMENT: cache}).logits
                for at in range(0, inps.shape[1], chunk)
            ]
        return torch.cat(parts, 1)


def main(argv: list[str] | None = None) -> int:
    """The command `lm_eval` with the model `hf-paged` known to it."""
    from lm_eval.__main__ import cli_evaluate

    if argv is not None:
        sys.argv[1:] = argv
    return cli_evaluate() or 0


if __name__ == "__main__":
    sys.exit(main())
