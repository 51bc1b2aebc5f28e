"""The measures, against their definitions."""

import pytest
import torch

from eval import divergence


@pytest.fixture
def logits():
    return torch.randn(70, 50, generator=torch.Generator().manual_seed(0)) * 4


def test_divergence_of_a_model_from_itself_is_zero(logits):
    scores = divergence.score(logits, logits.clone(), logits.argmax(-1))
    assert scores.kl == [0.0] * 70
    assert all(scores.agree)


def test_scores_are_torchs(logits):
    other, targets = logits + torch.randn_like(logits), torch.arange(70) % 50
    scores = divergence.score(logits, other, targets)
    p, q = logits.double().log_softmax(-1), other.double().log_softmax(-1)
    torch.testing.assert_close(
        torch.tensor(scores.kl).double(),
        torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1),
        atol=1e-7,
        rtol=1e-6,
    )
    torch.testing.assert_close(
        torch.tensor(scores.nll).double(), -q.gather(1, targets[:, None])[:, 0], atol=1e-6, rtol=1e-6
    )
    assert scores.nll == divergence.nll(other, targets)
    assert scores.agree == (p.argmax(-1) == q.argmax(-1)).tolist()


def test_a_constant_added_to_all_logits_changes_nothing(logits):
    scores = divergence.score(logits, logits + 1000.0, logits.argmax(-1))
    assert max(scores.kl) < 1e-6


def test_banned_tokens_in_both_add_nothing(logits):
    logits[:, 3] = -torch.inf
    assert max(divergence.score(logits, logits.clone(), torch.zeros(70, dtype=torch.long)).kl) == 0


def test_a_token_banned_by_the_format_alone_is_infinitely_far(logits):
    other = logits.clone()
    other[0, 3] = -torch.inf
    assert divergence.score(logits, other, torch.zeros(70, dtype=torch.long)).kl[0] == float("inf")
