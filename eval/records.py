"""Finished pieces of a run, on disk as they are finished, so that a run that is stopped goes on from what it has."""

import json
from pathlib import Path


class Records:
    """`NAME.partial-RANK.jsonl` beside the run's JSON: one line a finished piece, the run's settings on every line.

    Only pieces of a run with the same settings are taken up again. A line that a stop cut short is passed over.
    """

    def __init__(self, json_path: Path, settings: str, rank: int = 0):
        self._pattern = f"{json_path.stem}.partial-*.jsonl"
        self._folder = json_path.parent
        self._settings = settings
        self._path = self._folder / f"{json_path.stem}.partial-{rank}.jsonl"
        self.done: dict[int, dict] = {}
        for file in sorted(self._folder.glob(self._pattern)):
            for line in file.read_text().splitlines():
                self._take(line)

    def _take(self, line: str) -> None:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            return
        if entry["settings"] == self._settings:
            self.done[entry["piece"]] = entry["record"]

    def add(self, piece: int, record: dict) -> None:
        """Keep the record of a finished piece."""
        line = json.dumps({"settings": self._settings, "piece": piece, "record": record})
        with self._path.open("a") as file:
            file.write(line + "\n")
        self.done[piece] = record

    def remove(self) -> None:
        """Delete what was kept, of every process: the run is complete."""
        for file in self._folder.glob(self._pattern):
            file.unlink(missing_ok=True)
