"""The command `hf-paged-attention`: `info`, and the programs of scripts/ and eval/ under short names."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

PROGRAMS = {
    "diff": ("scripts.generate_diff", "the same prompts under eager and under the plugin, side by side"),
    "perplexity": ("eval.perplexity", "perplexity and divergence of each cache format on a text"),
    "retrieval": ("eval.retrieval", "a passkey hidden in filler: which format still finds it"),
    "generation": ("eval.generation", "continuations and answers under each cache format"),
    "lm-eval": ("eval.lm_harness", "lm-evaluation-harness with its model on a paged cache"),
    "plot": ("eval.plot", "quality against bytes a token, of all runs in a folder"),
    "bench": ("scripts.benchmark", "speed of the kernels beside PyTorch's own attention"),
}

# What `demo` runs, in one process: the model is read once. Both texts are longer than the model's window of 512 tokens.
DEMO = (
    "diff --model demo --kv-dtype auto int8 fp8 --max-new-tokens 16",
    "perplexity --model demo --kv-dtype bf16 int8 fp8 --window 640 --max-windows 1",
)


def programs_folder() -> Path:
    """The folder of scripts/ and eval/: the checkout, or in an installed wheel the copy within the package."""
    package = Path(__file__).resolve().parent
    return package / "_programs" if (package / "_programs").is_dir() else package.parent


def usage() -> str:
    lines = [f"  {name:<11} {what}" for name, (_, what) in PROGRAMS.items()]
    return "\n".join(
        [
            "usage: hf-paged-attention COMMAND [arguments]",
            "",
            "  info        versions, device, and which backend is usable or why not",
            "  demo        diff and perplexity on a real model, Gemma 3 270M: minutes on two cores",
            *lines,
            "",
            "hf-paged-attention COMMAND --help says what a command takes.",
        ]
    )


def show_info() -> int:
    """Print `hf_paged_attention.info()`, one fact a line."""
    import hf_paged_attention

    for heading, facts in hf_paged_attention.info().items():
        if isinstance(facts, dict):
            print(f"{heading}:")
            for name, fact in facts.items():
                print(f"  {name:<20} {fact}")
        else:
            print(f"{heading}: {', '.join(facts) if isinstance(facts, list) else facts}")
    return 0


def run_demo() -> int:
    """Run the commands of `DEMO`, each shown before; the exit status is that of the first that fails."""
    for command in DEMO:
        print(f"\n$ hf-paged-attention {command}", flush=True)
        if status := main(command.split()):
            return status
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit status (2: no such command or bad arguments)."""
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help", "help"):
        print(usage())
        return 0
    if command in ("info", "demo") and rest:
        if {"-h", "--help"} & set(rest):
            print(usage())
            return 0
        print(f"error: {command}: takes no arguments, not {' '.join(rest)}", file=sys.stderr)
        return 2
    if command == "info":
        return show_info()
    if command == "demo":
        return run_demo()
    if command not in PROGRAMS:
        print(f"error: {command!r} is no command; use info, demo, {', '.join(PROGRAMS)}", file=sys.stderr)
        return 2
    module, _ = PROGRAMS[command]
    sys.path.insert(0, str(programs_folder()))
    try:
        program = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name in ("rich", "datasets", "matplotlib"):
            print(f"error: {command}: needs {error.name}: pip install 'hf-paged-attention[eval]'", file=sys.stderr)
            return 2
        if error.name == "lm_eval":
            print(f"error: {command}: needs a package: pip install lm_eval", file=sys.stderr)
            return 2
        if error.name == module:
            print(f"error: {command}: {module} is not part of this installation", file=sys.stderr)
            return 2
        raise
    return program.main(rest)


if __name__ == "__main__":
    sys.exit(main())
