"""What every evaluation does alike: open a model, share the pieces of work among processes, keep each when it is done,
and leave a JSON, a Markdown table and a table on the terminal."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from eval import models, progress, report
from eval.formats import formats_named
from eval.program import BadInput
from eval.records import Records
from eval.shards import Shards

# Arguments that do not change what is measured: a stopped run goes on whatever they are.
NOT_SETTINGS = ("json", "fresh", "max_kl", "device", "streaming")


class Run:
    """One evaluation of one model under several formats, as `args` (add_model_arguments, add_format_arguments,
    add_output_arguments) ask for it.

    Raises:
        BadInput: there is no such format, device or model; from `load`, a layer that the model does not have. The
            weights are read there, after all other checks.
    """

    def __init__(self, evaluation: str, args):
        self.evaluation, self.args = evaluation, args
        self.console = Console()
        self.formats = formats_named(args.kv_dtype, args.block_size, args.exact_layers)
        self.shards = Shards(args.device)
        self.device = models.device_named(self.shards.device(args.device))
        self.dtype = models.dtype_named(args.dtype, self.device)
        models.locate(args.model)

    def say(self, line: str) -> None:
        """Print a line, once for all processes."""
        if self.shards.is_main:
            self.console.print(line, highlight=False)

    def load(self, on: str):
        """(model, tokenizer); `on` says what it is measured on."""
        processes = f" in {self.shards.count} processes" if self.shards.count > 1 else ""
        self.say(f"{self.args.model}, {self.dtype} on {self.device}{processes}, {on}")
        model, tokenizer = models.load(self.args.model, self.device, self.dtype, self.args.key_outliers)
        for fmt in self.formats:
            fmt.new_cache(model)  # what a format refuses of this model is said before anything is measured
        return model, tokenizer

    def records(
        self,
        pieces: Sequence[Any],
        measure: Callable[[Any, Callable[[str], None]], dict],
        describe: Callable[[Any], str],
        **found: Any,
    ) -> list[dict]:
        """`measure(piece, advance)` of every piece, in their order, in every process.

        `advance(name)` moves the progress bar after the exact model and after each format. `describe(piece)` opens the
        message where a piece fails. `found` are settings that were not arguments (a text's checksum): with the
        arguments they are the run's identity, by which a stopped one is taken up again.
        """
        settings = {key: value for key, value in vars(self.args).items() if key not in NOT_SETTINGS}
        settings |= {"dtype": str(self.dtype).removeprefix("torch."), "device": self.device.type, **found}
        self.settings = settings
        self.path = report.path_for(self.evaluation, self.args.model, settings, self.args.json)
        self._kept = Records(self.path, report.fingerprint(settings), self.shards.state.process_index)
        if self.args.fresh:
            self._kept.done.clear()
        mine = [index for index in self.shards.mine(range(len(pieces))) if index not in self._kept.done]
        if self._kept.done:
            self.say(f"going on from {len(self._kept.done)} of {len(pieces)} pieces of a run that was stopped")

        failure = None
        with progress.bar(self.console, self.shards.is_main) as bar:
            task = bar.add_task(self.evaluation, total=len(mine) * (1 + len(self.formats)))

            def advance(name: str) -> None:
                bar.update(task, advance=1, description=f"{name:>8}")

            for index in mine:
                try:
                    self._kept.add(index, measure(pieces[index], advance))
                except BadInput as error:
                    failure = BadInput(f"{describe(pieces[index])}: {error}")
                    break
        gathered = dict(self.shards.gather(list(self._kept.done.items()), failure))
        return [gathered[index] for index in range(len(pieces))]

    def finish(self, title: str, rows: list[dict], columns: Sequence[report.Column], **more: Any) -> None:
        """Write and show the results, forget what was kept against a stop, and take leave of the other processes."""
        if self.shards.is_main:
            device = models.device_name(self.device)
            more["processes"] = self.shards.count
            report.write(self.path, self.evaluation, self.settings, device, rows, columns, **more)
            self._kept.remove()
            self.console.print(report.terminal_table(title, rows, columns))
            self.say(f"written: {self.path} and {self.path.with_suffix('.md').name}")
        self.shards.close()
