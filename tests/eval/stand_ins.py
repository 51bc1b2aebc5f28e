"""A tiny random model with a tokenizer, and cache formats that need no plugin: what they test is the harness."""

import functools
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedTokenizerFast


class Exact:
    """Transformers' own cache under eager attention: nothing is lost."""

    name = "exact-cache"
    attn_implementation = "eager"

    def new_cache(self, model):
        cache = DynamicCache(config=model.config)
        cache.bytes_per_token = 1
        return cache

    def is_exact(self, dtype):
        return True


class Int8(Exact):
    """Keys and values through int8 codes with one scale a token and head, in the plainest way."""

    name = "int8"
    keep_scales = True

    def new_cache(self, model):
        cache = _Int8Cache(config=model.config)
        cache.keep_scales = self.keep_scales
        return cache

    def is_exact(self, dtype):
        return False


class ScalesDropped(Int8):
    """A known fault: every token is read back with the same scale."""

    name = "scales dropped"
    keep_scales = False


class _Int8Cache(DynamicCache):
    keep_scales = True
    bytes_per_token = 1

    def update(self, keys, values, *args, **kwargs):
        return super().update(self._through(keys), self._through(values), *args, **kwargs)

    def _through(self, tensor):
        scale = tensor.abs().amax(-1, keepdim=True) / 127
        return (tensor / scale).round() * (scale if self.keep_scales else scale.mean())


@functools.cache
def tiny_model():
    config = AutoConfig.for_model(
        "llama",
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.4,
        bos_token_id=256,
        eos_token_id=None,
        pad_token_id=257,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 257
    return model


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>")


def saved(folder: Path) -> str:
    """The tiny model and its tokenizer as a model folder."""
    tiny_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def tokens(count: int = 150) -> torch.Tensor:
    return torch.randint(3, 250, (count,), generator=torch.Generator().manual_seed(1))
