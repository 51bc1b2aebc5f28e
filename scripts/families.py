"""Runs the family tests and writes docs/families.md from what they saw.

python -m scripts.families                 the families that are named, in every mode (minutes)
python -m scripts.families --sweep         also every other causal language model that can be built small
python -m scripts.families --check         exit 1 if the named families' part of the file is not what the tests see
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "families.md"
FORMATS = ("fp16", "bf16", "int8", "fp8", "int4", "int8:int4")
# What a reader should know about layers that a PagedCache does not page.
LAYERS = {
    "Qwen3-Next": "full-attention layers paged; linear-attention layers as Transformers keeps them",
    "Qwen3.5": "full-attention layers paged; linear-attention layers as Transformers keeps them",
    "Falcon-H1": "attention and mamba in each layer: keys paged, mamba states as Transformers keeps them",
    "LFM2": "full-attention layers paged; convolutions as Transformers keeps them",
    "DeepSeek-V3": "the cache holds latents (MLA), as Transformers keeps them, in no format",
    "Gemma 3n": "layers that share keys and values read the pages of the layer that wrote them",
    "Gemma 4": "layers that share keys and values read the pages of the layer that wrote them",
    "Gemma 3": "an image prompt's bidirectional mask is refused by name; the vision-language model's text prompts work",
}
HEAD = """# Families

What `tests/families` saw on Transformers {version}: every mode of `generate` on a tiny random float32 model of the
family against eager attention, with prompts past the window of 16 and a batch of unequal left-padded prompts. Written
by `python -m scripts.families`; do not edit.

Modes: {modes}.
Formats: {formats}, and "auto" in every mode.

| Family | Paged layers | Modes | Formats | Layers, and what does not work |
|---|---|---|---|---|
"""
OTHERS = """
## Others

Every other causal language model that can be built small from its default config, with the attention name alone and
with a PagedCache. The rest raise an error that says so; a family that is not here was too large to try.

**Work both ways:** {work}.

| Model types | What is refused: both ways where none is named |
|---|---|
"""


class Record:
    """Collects each test's outcome and what it noted with `record_property`."""

    def __init__(self):
        self.seen: list[tuple[dict, str]] = []

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            self.seen.append((dict(report.user_properties), report.outcome))


def run(*arguments: str) -> list[tuple[dict, str]]:
    record = Record()
    pytest.main(["-q", "-p", "no:cacheprovider", "--no-header", *arguments], plugins=[record])
    return record.seen


def named_families(seen) -> str:
    table: dict[str, dict[str, str]] = {}
    paged: dict[str, str] = {}
    for noted, outcome in seen:
        if "mode" in noted:
            paged[noted["family"]] = noted.get("paged", "?")
            table.setdefault(noted["family"], {})[noted["mode"]] = noted.get("seen", outcome)
    modes = list(dict.fromkeys(mode for row in table.values() for mode in row if mode not in FORMATS))
    page = HEAD.format(version=transformers.__version__, modes=", ".join(modes), formats=", ".join(FORMATS))
    reasons = list(
        dict.fromkeys(seen_there for row in table.values() for seen_there in row.values() if seen_there != "yes")
    )
    for family, row in table.items():
        counts = [sum(row.get(mode) == "yes" for mode in group) for group in (modes, FORMATS)]
        whole = ["all" if n == len(g) else f"{n} of {len(g)}" for n, g in zip(counts, (modes, FORMATS), strict=True)]
        if paged[family].startswith("0 "):
            whole[1] = "none"
        notes = [LAYERS[family]] if family in LAYERS else []
        for number, reason in enumerate(reasons, 1):
            where = [mode for mode, seen_there in row.items() if seen_there == reason]
            notes += [f"not {', '.join(where)} ({number})"] if where else []
        page += f"| {family} | {paged[family]} | {whole[0]} | {whole[1]} | {'; '.join(notes)} |\n"
    return page + "".join(f"\n({number}) {reason}.\n" for number, reason in enumerate(reasons, 1))


def other_families(seen) -> str:
    """Those that work, and for each refusal the families that meet it."""
    work: list[str] = []
    refused: dict[str, list[str]] = {}
    for noted, outcome in seen:
        if outcome == "skipped" or "family" not in noted:
            continue
        family = noted["family"]
        ways = {way: noted.get(way, outcome) for way in ("name alone", "PagedCache")}
        if set(ways.values()) == {"yes"}:
            work.append(family)
            continue
        said: dict[str, list[str]] = {}
        for way, text in ways.items():
            if text != "yes":
                said.setdefault(text.split(". ")[0].replace("|", "/").replace(f"'{family}'", "..."), []).append(way)
        both = "; ".join(text if len(where) == 2 else f"{where[0]}: {text}" for text, where in said.items())
        refused.setdefault(both, []).append(family)
    rows = "".join(f"| {', '.join(families)} | {text} |\n" for text, families in refused.items())
    return OTHERS.format(work=", ".join(work)) + rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="also try every other causal language model")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file is out of date")
    options = parser.parse_args(arguments)
    page = named_families(run(str(ROOT / "tests/families/test_families.py")))
    old = PAGE.read_text() if PAGE.exists() else ""
    if options.check:
        return 0 if old.startswith(page) else 1
    if options.sweep:
        page += other_families(run("-m", "slow", str(ROOT / "tests/families/test_sweep.py")))
    elif "\n## Others" in old:
        page += old[old.index("\n## Others") :]
    PAGE.write_text(page)
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
