"""The texts that models are measured on: a file, a dataset, or what every CPython carries."""

import hashlib
import importlib.util
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from eval.program import BadInput

BETWEEN = "\n\n"  # joins the rows of a dataset, as is the custom for WikiText

# name: (dataset, config, split, column, streamed)
KNOWN = {
    "wikitext-2": ("Salesforce/wikitext", "wikitext-2-raw-v1", "test", "text", False),
    "c4": ("allenai/c4", "en", "validation", "text", True),
}
FILE_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


@dataclass(frozen=True)
class Text:
    """A name for tables, and the text in pieces that are read only as far as they are needed."""

    name: str
    pieces: Iterator[str]


def default_text() -> Text:
    """The help topics of this Python, sorted by name: about 100,000 tokens of technical English on every machine."""
    from pydoc_data.topics import topics

    return Text("pydoc_data.topics", iter([BETWEEN.join(topics[name] for name in sorted(topics))]))


def text_file(path: str) -> Text:
    """A UTF-8 text file."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise BadInput(f"--text-file {path}: no such file; give a UTF-8 text file")
    try:
        content = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"--text-file {path}: not UTF-8 (byte {error.start}); convert it first") from error
    if not content.strip():
        raise BadInput(f"--text-file {path}: the file is empty; give a text of two tokens or more")
    return Text(file.name, iter([content]))


def dataset_text(
    name: str, config: str | None = None, split: str | None = None, column: str | None = None, streaming: bool = False
) -> Text:
    """The rows of a dataset's column, joined by an empty line.

    `name` is one of KNOWN, an id on the hub, a folder, or a .json, .jsonl, .csv, .parquet or .txt file. A streamed
    dataset is fetched only as far as it is read.
    """
    if importlib.util.find_spec("datasets") is None:
        raise BadInput(f"--dataset {name}: needs a package: pip install 'hf-paged-attention[eval]'")
    import datasets

    asked = f"--dataset {name}"
    path, known_config, known_split, known_column, streamed = KNOWN.get(name, (name, None, None, None, False))
    config, split, column = config or known_config, split or known_split or "test", column or known_column or "text"
    file = Path(path).expanduser()
    where = {"path": path, "name": config}
    if file.is_file():
        if file.suffix not in FILE_BUILDERS:
            raise BadInput(f"{asked}: a file of no known kind; give {', '.join(FILE_BUILDERS)}")
        where = {"path": FILE_BUILDERS[file.suffix], "data_files": {split: str(file)}}
    elif file.suffix in FILE_BUILDERS:  # not asked for on the hub, whose client tries again and again
        raise BadInput(f"{asked}: no such file; give one that is there, a folder or an id on the hub")
    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(**where, split=split, streaming=streaming or streamed)
    except Exception as error:  # the library raises its own, the hub client's, requests' and plain ones alike
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        raise BadInput(
            f"{asked} (config {config}, split {split}): cannot be loaded: {reason}; "
            "check its name, --dataset-config and --split, or use --text-file"
        ) from error
    rows = iter(rows)
    head = next(rows, None)
    if head is None:
        raise BadInput(f"{asked}: split {split} has no rows; give another --split")
    if column not in head:
        raise BadInput(f"{asked}: --column {column} is not there; it has {', '.join(head)}")
    texts = (str(row[column]) for row in itertools.chain([head], rows))
    return Text(f"{name}:{split}", (BETWEEN + text if i else text for i, text in enumerate(texts)))


def chosen(args) -> Text:
    """The text that the arguments name; refused before a model is loaded where it is not there."""
    if not args.dataset and (args.dataset_config or args.split or args.column):
        raise BadInput("--dataset-config, --split and --column say something of a --dataset; none is given")
    if args.dataset:
        return dataset_text(args.dataset, args.dataset_config, args.split, args.column, args.streaming)
    return text_file(args.text_file) if args.text_file else default_text()


def tokens_of(text: Text, tokenizer, max_tokens: int | None = None) -> tuple[torch.Tensor, str]:
    """(token ids `[N]`, SHA-256 of the characters they were made from), at most `max_tokens` of them.

    Raises:
        BadInput: there are fewer than two tokens.
    """
    pieces, characters = text.pieces, ""
    wanted = 16 * max_tokens if max_tokens else None  # more characters than tokens ever need; grown where that is wrong
    while True:
        for piece in pieces:
            characters += piece
            if wanted and len(characters) >= wanted:
                break
        else:
            wanted = None
        part = characters[:wanted] if wanted else characters
        ids = tokenizer(part, return_tensors="pt", verbose=False).input_ids[0]
        if wanted is None or len(ids) > max_tokens + 16:  # the last tokens before a cut may not be the text's
            break
        wanted *= 2
    ids = ids[:max_tokens].long()
    if len(ids) < 2:
        raise BadInput(f"{text.name}: {len(ids)} tokens; a perplexity needs a text of two tokens or more")
    return ids, hashlib.sha256(part.encode()).hexdigest()
