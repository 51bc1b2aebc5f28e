"""How far one next-token distribution is from another, and what each says of the token that came."""

import math
from dataclasses import dataclass

import torch

ROWS = 32  # rows in float64 at a time: 32 × 262,144 logits are 64 MiB


@dataclass
class Scores:
    """One entry a token: negative log-likelihood (nats), KL divergence from the exact model (nats), top-1 agreement."""

    nll: list[float]
    kl: list[float]
    agree: list[bool]

    def extend(self, other: "Scores") -> None:
        self.nll += other.nll
        self.kl += other.kl
        self.agree += other.agree


def score(exact: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> Scores:
    """Compare `logits [T, V]` with the exact model's, and both with the tokens that follow, `targets [T]`.

    KL(exact ‖ logits) = Σ p·(a - b) - lse(a) + lse(b), with p = softmax(a). Everything after the logits is float64: in
    float32 the rounding of the sum over a large vocabulary (1e-7 nats and up) would drown what a good format loses.
    """
    scores = Scores([], [], [])
    for top in range(0, len(targets), ROWS):
        rows = slice(top, top + ROWS)
        a, b, target = exact[rows].double(), logits[rows].double(), targets[rows, None]
        lse_a, lse_b = a.logsumexp(-1), b.logsumexp(-1)
        scores.nll += (lse_b - b.gather(1, target)[:, 0]).tolist()
        scores.agree += (a.argmax(-1) == b.argmax(-1)).tolist()
        p = (a - lse_a[:, None]).exp_()
        # A logit of -inf in both (a banned token) has p = 0 and adds nothing.
        weighted = (p * (a - b)).nan_to_num_(0.0, math.inf, -math.inf)
        scores.kl += (weighted.sum(-1) - lse_a + lse_b).clamp_min_(0).tolist()
    return scores


def nll(logits: torch.Tensor, targets: torch.Tensor) -> list[float]:
    """Negative log-likelihood (nats) of each of `targets [T]` under `logits [T, V]`, in float64."""
    out: list[float] = []
    for top in range(0, len(targets), ROWS):
        rows = logits[top : top + ROWS].double()
        out += (rows.logsumexp(-1) - rows.gather(1, targets[top : top + ROWS, None])[:, 0]).tolist()
    return out
