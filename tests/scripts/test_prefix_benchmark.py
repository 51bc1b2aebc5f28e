"""The benchmark of prefix reuse on a CPU, where it shrinks: what it computes and that tokens agree."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from scripts import prefix_benchmark


@pytest.mark.skipif(torch.cuda.is_available(), reason="takes a model of full size there")
def test_a_known_beginning_is_not_computed(tmp_path, monkeypatch, capsys):
    path = tmp_path / "results" / "prefix.json"
    monkeypatch.setattr(sys, "argv", ["prefix_benchmark.py", "--repeats", "2", "--own", "8", "--json", str(path)])
    assert prefix_benchmark.main() == 0
    rows = json.loads(path.read_text())
    assert {row["method"]: row["computed"] for row in rows} == {
        "sdpa, DynamicCache": 264,
        "paged": 264,
        "paged, prefix reuse": 8,
    }
    assert all(row["same"] == 1 and row["ms"] > 0 for row in rows)
    assert "| tiny | 256 + 8 | paged, prefix reuse |" in capsys.readouterr().out
