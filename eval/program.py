"""What makes a file here a program: its arguments, and the one line that bad input is answered with."""

import argparse
import functools
import os
import sys

# What a program imports when it is asked to measure, not before: its --help needs none of them.
NEEDED = ("accelerate", "rich")


class BadInput(ValueError):
    """What was asked cannot be done. The message is one line: the argument, its value, and the way out."""


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Names the defaults that say something: no None, no False, and a list as it would be typed."""

    def _get_help_string(self, action):
        if action.default is None or action.default is False:
            return action.help
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose own complaints are one line as well (argparse prints the whole usage first)."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=_Help, **kwargs)

    def error(self, message: str):
        raise BadInput(f"{message} (see --help)")


def answers_bad_input(main):
    """Decorate `main(argv) -> exit status`: a `BadInput` becomes one line on standard error and exit status 2.

    So does a package of `NEEDED` that is not installed: a checkout runs where nobody has installed what it depends on.
    """

    @functools.wraps(main)
    def wrapped(argv: list[str] | None = None) -> int:
        try:
            return main(argv)
        except (BadInput, ModuleNotFoundError) as error:
            message = str(error)
            if isinstance(error, ModuleNotFoundError):
                if error.name not in NEEDED:
                    raise
                message = f"needs a package: pip install {error.name}"
            if os.environ.get("RANK", "0") == "0":  # under `accelerate launch` every process meets the same complaint
                print(f"error: {' '.join(message.split())}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            return 130

    return wrapped


def paragraph(docstring: str, index: int) -> str:
    """One paragraph of a docstring, as --help shows it."""
    return " ".join(docstring.split("\n\n")[index].split())


def count(minimum: int):
    """An argparse type: an integer of at least `minimum`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")
        return value

    return parse


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """--model, --device, --dtype."""
    parser.add_argument(
        "--model",
        default="demo",
        help="a model id on the hub, a folder, a .gguf file, or one of the models that PyPI packages carry: "
        "demo (Gemma 3 270M), smollm2 (SmolLM2 135M)",
    )
    parser.add_argument("--device", default="auto", help="auto (CUDA if there is one), cpu, cuda, cuda:1, ...")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="of weights and activations; auto is float32 on the CPU and bfloat16 on a GPU",
    )
    parser.add_argument(
        "--key-outliers",
        type=float,
        metavar="FACTOR",
        help="multiply two channels of every key head by this and divide the query's: the same function, hard to store",
    )


def add_format_arguments(parser: argparse.ArgumentParser, default: list[str]) -> None:
    """--kv-dtype (several), --block-size, --exact-layers."""
    parser.add_argument(
        "--kv-dtype",
        nargs="+",
        default=default,
        metavar="FORMAT",
        help="cache formats to compare: auto, bf16, fp16, int8, fp8, int4; other values than keys as int8:int4",
    )
    parser.add_argument("--block-size", type=count(1), default=None, help="tokens a block (the device's best)")
    parser.add_argument(
        "--exact-layers",
        nargs="+",
        type=int,
        default=[],
        metavar="LAYER",
        help="layers that keep keys and values as they arrive under every format; negative ones count from the last",
    )


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """--text-file or --dataset with what belongs to it; `texts.chosen` finds the text."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--text-file", help="a UTF-8 text file (with neither this nor --dataset: pydoc_data.topics)")
    source.add_argument(
        "--dataset", help="wikitext-2, c4, an id on the hub, a folder, or a .json, .jsonl, .csv, .parquet or .txt file"
    )
    parser.add_argument("--dataset-config", help="the dataset's configuration")
    parser.add_argument("--split", help="the dataset's split (test, or what a dataset known by name has)")
    parser.add_argument("--column", help="the dataset's text column (text)")
    parser.add_argument(
        "--streaming", action="store_true", help="fetch no more of the dataset than is read (always so for c4)"
    )


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """--json, --fresh."""
    parser.add_argument("--json", metavar="FILE", help="where the results go, a Markdown table beside")
    parser.add_argument("--fresh", action="store_true", help="do not go on from what a stopped run left")
