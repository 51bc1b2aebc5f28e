"""One process a device: which share of the work is this process's, and everything gathered at the end.

Under `accelerate launch --num_processes N` each process takes every N-th piece; alone, a process takes them all.
Results are put back in the order of the pieces, so sums do not depend on N.
"""

from collections.abc import Sequence
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object

from eval.program import BadInput


class Shards:
    """This process among its peers."""

    def __init__(self, device: str):
        self.state = PartialState(cpu=True) if device == "cpu" else PartialState()

    @property
    def count(self) -> int:
        return self.state.num_processes

    @property
    def is_main(self) -> bool:
        return self.state.is_main_process

    def device(self, name: str) -> str:
        """The device of this process, where `name` leaves the choice of the GPU open."""
        return str(self.state.device) if self.count > 1 and name in ("auto", "cuda") else name

    def mine(self, pieces: Sequence[Any]) -> Sequence[Any]:
        """This process's share of `pieces`."""
        return pieces[self.state.process_index :: self.count]

    def gather(self, results: list, failure: BadInput | None = None) -> list:
        """All processes' results, in every process; where one of them failed, its failure, raised in each."""
        everything = gather_object([(results, str(failure) if failure else None)])
        for _, message in everything:
            if message:
                raise BadInput(message)
        return [result for share, _ in everything for result in share]

    def close(self) -> None:
        """Wait for the others and take leave: a process that just ends can make one that still listens to it abort."""
        if self.count > 1:
            self.state.wait_for_everyone()
            self.state.destroy_process_group()
