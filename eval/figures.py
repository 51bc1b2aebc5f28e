"""The pictures: heat maps of retrieval, and quality against bytes a token."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TITLES = {"demo": "Gemma 3 270M", "smollm2": "SmolLM2 135M"}
FLOOR = 1e-7  # nats: below this a divergence is the rounding of float32, and the logarithmic axis ends


@dataclass(frozen=True)
class Panel:
    """One measure of an evaluation, drawn against bytes a token."""

    evaluation: str
    key: str
    label: str
    error: str | None = None
    logarithmic: bool = False


PANELS = [
    Panel("perplexity", "kl_mean", "KL to the exact model (nats a token)", "kl_mean_error", logarithmic=True),
    Panel("retrieval", "found", "passkeys found (share)"),
    Panel("generation", "edit_distance", "edits to the exact text (share of its tokens)"),
    Panel("generation", "lookup", "looked up rightly (share)"),
]


def heat_maps(rows: list[dict], path: Path, model: str) -> Path:
    """Retrieval's rows as a panel each: depth downwards, length to the right, the share found as colour and number."""
    lengths = sorted({cell["length"] for cell in rows[0]["cells"]})
    depths = sorted({cell["depth"] for cell in rows[0]["cells"]})
    figure, panels = plt.subplots(
        1,
        len(rows),
        figsize=(1.2 + len(rows) * (0.9 + 0.55 * len(lengths)), 1.4 + 0.4 * len(depths)),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for panel, row in zip(panels[0], rows, strict=True):
        found = {(cell["depth"], cell["length"]): cell["found"] for cell in row["cells"]}
        image = panel.imshow(
            [[found[depth, length] for length in lengths] for depth in depths],
            vmin=0,
            vmax=1,
            cmap="RdYlGn",
            aspect="auto",
        )
        for (depth, length), share in found.items():
            panel.text(lengths.index(length), depths.index(depth), f"{share:.0%}", ha="center", va="center", fontsize=7)
        panel.set_title(row["kv_dtype"], fontsize=10)
        panel.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45, fontsize=8)
        panel.set_yticks(range(len(depths)), [f"{depth:.0f} %" for depth in depths], fontsize=8)
    panels[0][0].set_ylabel("depth of the passkey")
    figure.supxlabel("tokens of text", fontsize=10)
    figure.suptitle(f"Passkeys found: {_title(model)}", fontsize=11)
    figure.colorbar(image, ax=panels[0].tolist(), shrink=0.9)
    return _saved(figure, path)


def quality(runs: Sequence[dict], path: Path) -> Path:
    """Each run's formats by their bytes a token, a colour a run, a panel a measure that any of the runs has."""
    drawn = [panel for panel in PANELS if any(_points(run, panel) for run in runs)]
    figure, axes = plt.subplots(1, len(drawn), figsize=(6.2 * len(drawn), 4.6), squeeze=False, layout="constrained")
    for axis, panel in zip(axes[0], drawn, strict=True):
        sizes = set()
        for number, run in enumerate(run for run in runs if _points(run, panel)):
            points = sorted(_points(run, panel))
            heights = [max(y, FLOOR) if panel.logarithmic else y for _, y, *_ in points]
            line = axis.errorbar(
                [x for x, *_ in points],
                heights,
                yerr=[error or 0 for _, _, error, _ in points] if panel.error else None,
                marker="osD^v<>P"[number % 8],
                markerfacecolor="none",
                linestyle="none",
                capsize=3,
                label=_name(run),
            )
            # Runs of one model differ by little: each writes its labels in its own place and colour.
            offset = ((-8, 6), (8, 6), (8, -12), (-8, -12))[number % 4]
            for (x, _, _, name), y in zip(points, heights, strict=True):
                axis.annotate(
                    name,
                    (x, y),
                    xytext=offset,
                    textcoords="offset points",
                    ha="left" if offset[0] > 0 else "right",
                    fontsize=8,
                    color=line[0].get_color(),
                )
                sizes.add(x)
        if panel.logarithmic:
            axis.set_yscale("log")
            axis.set_ylim(bottom=FLOOR / 2)
        axis.set_xscale("log", base=2)
        axis.margins(x=0.15, y=0.1)
        axis.set_xticks(sorted(sizes), [f"{size:,}" for size in sorted(sizes)], rotation=45, ha="right", fontsize=8)
        axis.minorticks_off()
        axis.set_xlabel("bytes a token, all layers")
        axis.set_ylabel(panel.label)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    return _saved(figure, path)


def _points(run: dict, panel: Panel) -> list[tuple[float, float, float | None, str]]:
    if run["evaluation"] != panel.evaluation:
        return []
    return [
        (row["bytes_per_token"], row[panel.key], row.get(panel.error), row["kv_dtype"])
        for row in run["results"]
        if row.get("bytes_per_token") and row.get(panel.key) is not None
    ]


def _name(run: dict) -> str:
    config = run["config"]
    outliers = f", key outliers ×{config['key_outliers']:g}" if config.get("key_outliers") else ""
    return f"{_title(config['model'])}{outliers}"


def _title(model: str) -> str:
    return TITLES.get(model) or model.rstrip("/").split("/")[-1]


def _saved(figure, path: Path) -> Path:
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
