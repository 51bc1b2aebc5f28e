"""Quality against bytes a token: every run in a folder in one picture, a panel a measure and a colour a run.

    python eval/plot.py results --out results/quality.png

Reads the JSON that perplexity, retrieval and generation write, and passes over other files. Formats that store keys and
values as they are diverge by rounding alone; they are drawn at the bottom of the logarithmic axis (1e-7 nats).
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from eval.program import BadInput, Parser, answers_bad_input, paragraph


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="plot", description=paragraph(__doc__, 0), epilog=paragraph(__doc__, 2))
    parser.add_argument("folder", nargs="?", default="results", help="where the runs' JSON files lie")
    parser.add_argument("--out", metavar="FILE", help="the picture, .png, .svg or .pdf (FOLDER/quality.png)")
    return parser.parse_args(argv)


def runs_in(folder: Path) -> list[dict]:
    """The documents of all evaluations in `folder`, by file name.

    Raises:
        BadInput: there is no such folder, or no run in it.
    """
    if not folder.is_dir():
        raise BadInput(f"folder {folder}: no such folder; give one that holds the JSON files of evaluations")
    runs = []
    for file in sorted(folder.glob("*.json")):
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError):
            continue
        if isinstance(document, dict) and document.get("evaluation") in ("perplexity", "retrieval", "generation"):
            runs.append(document)
    if not runs:
        raise BadInput(f"folder {folder}: holds no JSON of perplexity, retrieval or generation; run one of them first")
    return runs


@answers_bad_input
def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    folder = Path(args.folder).expanduser()
    runs = runs_in(folder)
    out = Path(args.out).expanduser() if args.out else folder / "quality.png"
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise BadInput(f"--out {out}: the name must end in .png, .svg or .pdf")
    if not out.parent.is_dir():
        raise BadInput(f"--out {out}: {out.parent} is no folder; make it, or give another")
    if importlib.util.find_spec("matplotlib") is None:
        raise BadInput("plots need a package: pip install 'hf-paged-attention[eval]'")
    from eval import figures

    print(f"{len(runs)} runs drawn: {figures.quality(runs, out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
