"""A long text as overlapping windows, each token scored once."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Window:
    """`ids [T]` go through the model; the tokens from `first` on are scored, each from all that stand before it."""

    index: int
    start: int  # where in the text the window's first token stands
    ids: torch.Tensor
    first: int

    @property
    def targets(self) -> torch.Tensor:
        """The scored tokens; logits row `first - 1 + i` predicts entry i."""
        return self.ids[self.first :]


def windows_of(ids: torch.Tensor, window: int, stride: int, bos: int | None = None) -> list[Window]:
    """Windows of `window` tokens, `stride` apart, over the text `ids [N]`.

    A token is scored in the first window that holds it, so with a stride below the window it sees at least window -
    stride tokens before it. The first token of all has nothing before it and is not scored. Every window opens with the
    BOS token where the tokenizer opens texts with one (models trained so are lost without it); it counts as one of the
    window's.
    """
    room = window - (bos is not None)
    if bos is not None and len(ids) and ids[0] == bos:
        ids = ids[1:]
    lead = ids.new_tensor([bos] if bos is not None else [])
    windows, scored = [], 0
    for start in range(0, len(ids), min(stride, room)):
        end = min(start + room, len(ids))
        first = max(scored - start + len(lead), 1)
        if end - start + len(lead) > first:
            windows.append(Window(len(windows), start, torch.cat([lead, ids[start:end]]), first))
        scored = end
        if end == len(ids):
            break
    return windows
