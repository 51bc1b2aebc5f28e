"""`benchmark.py step` compares tokens on a CPU, keeps its rows as it goes, and says where it left one out."""

import json

import pytest
import torch

from scripts import benchmark, step_benchmark

SMALL = ["step", "--case", "2x40", "--method", "eager", "sdpa"]


def test_methods_are_compared_with_the_first(tmp_path, capsys):
    path = tmp_path / "step.json"
    methods = ["static", "plain", "generate-auto", "graph", "graph-nocompile", "graph-int8"]
    assert benchmark.main([*SMALL, *methods, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["method"] for row in rows] == ["eager", "sdpa", *methods]
    assert all(row["same"] == 1 for row in rows[:-1])
    assert "qwen3-0.6b" in capsys.readouterr().out


def test_tokens_that_part_are_a_failure_and_rows_before_an_error_are_kept(tmp_path, monkeypatch):
    path = tmp_path / "step.json"
    call = step_benchmark.Calls.__call__

    def wrong(calls, new):
        seconds = call(calls, new)
        if calls.model.config._attn_implementation == "sdpa":
            calls.tokens[1, 3:] += 1
        return seconds

    monkeypatch.setattr(step_benchmark.Calls, "__call__", wrong)
    assert benchmark.main([*SMALL, "--json", str(path)]) == 1
    assert json.loads(path.read_text())["rows"][1]["same"] < 1

    def broken(calls, new):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(step_benchmark.Calls, "__call__", broken)
    assert benchmark.main([*SMALL, "--json", str(path)]) == 1
    assert "no such kernel" in json.loads(path.read_text())["rows"][0]["why_not"]


def test_times_on_the_cpu_are_the_least_of_calls_in_turn(tmp_path):
    path = tmp_path / "step.json"
    few = ["--few", "2", "--many", "4", "--repeats", "2", "--device", "cpu"]
    tiny = {"qwen3-0.6b": {**step_benchmark.COMMON, **step_benchmark.TINY}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_benchmark, "SHAPES", tiny)
        assert benchmark.main(["step", "--case", "1x40", "--method", "sdpa", "plain", *few, "--json", str(path)]) == 0
    for row in json.loads(path.read_text())["rows"]:
        assert row["first_token_s"] > 0
        assert row["spread"][0] <= row["spread"][1]
        assert row["same"] == 1


@pytest.mark.parametrize(
    "bad", [["--case", "4096"], ["--few", "8", "--many", "8"], ["--method", "none"], ["--model", "./no-such.gguf"]]
)
def test_bad_input_is_one_line(bad, capsys):
    assert benchmark.main(["step", *bad]) == 2
    assert bad[0] in capsys.readouterr().err


def test_a_steps_kernels_are_a_difference_of_calls():
    class Calls:
        ids = torch.zeros(1, 1)

        def __call__(self, new):
            torch.ones(64, 64).matmul(torch.ones(64, 64))  # as a prefill, once
            for _ in range(new):
                torch.ones(300).cumsum(0)

    found = step_benchmark.profile_step(Calls(), 1.0)
    launches = {kernel["name"]: kernel["launches"] for kernel in found["kernels"]}
    assert launches["aten::cumsum"] == 1
    assert "aten::mm" not in launches
