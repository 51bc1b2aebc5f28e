"""One picture of all runs in a folder."""

import json

import pytest

from eval import plot


def document(evaluation, **results):
    rows = [{"kv_dtype": "exact"}] + [
        {"kv_dtype": name, "bytes_per_token": size, **values} for name, (size, values) in results.items()
    ]
    return {"evaluation": evaluation, "config": {"model": "org/some-model"}, "results": rows}


def test_all_runs_are_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    perplexity = document(
        "perplexity",
        auto=(1000, {"kl_mean": 0.0, "kl_mean_error": 0.0}),
        int8=(260, {"kl_mean": 3e-4, "kl_mean_error": None}),
    )
    generation = document("generation", auto=(1000, {"edit_distance": 0.0}), int8=(260, {"edit_distance": 0.1}))
    (tmp_path / "a.json").write_text(json.dumps(perplexity))
    (tmp_path / "b.json").write_text(json.dumps(generation))
    (tmp_path / "c.json").write_text('{"evaluation": "generate_diff"}')
    (tmp_path / "d.json").write_text("no JSON")
    assert plot.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("2 runs drawn")
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["absent"], "absent"), (["."], "holds no JSON"), ([".", "--out", "x.gif"], "holds no JSON")],
)
def test_bad_input_is_one_line_and_status_two(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert plot.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


@pytest.mark.parametrize("out", ["quality.gif", "absent/quality.png"])
def test_a_picture_that_cannot_be_written(out, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text(json.dumps(document("perplexity")))
    assert plot.main([".", "--out", out]) == 2
    assert f"--out {out}" in capsys.readouterr().err
