"""What a run leaves behind: one JSON, a Markdown table beside it, and a table on the terminal."""

import datetime
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import hf_paged_attention
from eval.program import BadInput


@dataclass(frozen=True)
class Column:
    """A column: the key of its value in a result, its heading, how it is written, the key of its standard error."""

    key: str
    heading: str
    form: str = ""
    error: str | None = None
    terminal: bool = True  # whether a terminal of 80 columns has room for it; Markdown and JSON have

    def cell(self, result: dict, with_error: bool = True) -> str:
        """The value as text, its standard error behind it; empty where the result has none."""
        value, error = result.get(self.key), result.get(self.error) if with_error else None
        if value is None:
            return ""
        text = format(value, self.form)
        return text if error is None or math.isnan(error) else f"{text} ± {error:{self.form}}"


def fingerprint(settings: dict) -> str:
    """Eight characters that differ where any setting does."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:8]


def path_for(evaluation: str, model: str, settings: dict, asked: str | None) -> Path:
    """Where the run's JSON goes: where it was asked for, else in results/ under a name that says what it is."""
    if asked:
        return writable(asked)
    stem = Path(model).stem if model.endswith(".gguf") else model.rstrip("/").split("/")[-1]
    return writable(f"results/{evaluation}-{stem}-{fingerprint(settings)}.json")


def writable(name: str) -> Path:
    """`name` as a path to write a JSON to; its folder is made. Refused where that cannot be."""
    path = Path(name).expanduser()
    if path.suffix != ".json":
        raise BadInput(f"--json {name}: the name must end in .json (a Markdown table goes beside it)")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--json {path}: its folder cannot be made: {error.strerror}; give another path") from error
    if path.is_dir():
        raise BadInput(f"--json {path}: is a folder; give a file")
    return path


def write(
    path: Path, evaluation: str, settings: dict, device: str, results: list[dict], columns: Sequence[Column], **more
) -> None:
    """The JSON at `path`, and the same table as Markdown beside it."""
    document = {
        "evaluation": evaluation,
        "written": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "config": settings,
        "environment": hf_paged_attention.info(),
        "device": device,
        **more,
        "results": results,
    }
    path.write_text(json.dumps(_finite(document), indent=1, default=str) + "\n")
    path.with_suffix(".md").write_text(markdown(results, columns))


def markdown(results: Iterable[dict], columns: Sequence[Column]) -> str:
    """A Markdown table."""
    lines = [" | ".join(column.heading for column in columns)]
    lines += [" | ".join([":--"] + ["--:"] * (len(columns) - 1))]
    lines += [" | ".join(column.cell(result) for column in columns) for result in results]
    return "".join(f"| {line} |\n" for line in lines)


def terminal_table(title: str, results: Iterable[dict], columns: Sequence[Column]):
    """What of it fits a terminal, as a rich table."""
    from rich import box
    from rich.table import Table

    shown = [column for column in columns if column.terminal]
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, column in enumerate(shown):
        table.add_column(column.heading, justify="right" if i else "left", no_wrap=True)
    for result in results:
        table.add_row(*(column.cell(result, with_error=column.form.endswith("f")) for column in shown))
    return table


def _finite(value):
    """JSON has no NaN: null instead."""
    if isinstance(value, dict):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
