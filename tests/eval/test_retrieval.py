"""Where the passkey stands, and what a run leaves."""

import json

import pytest

from eval import retrieval
from tests.eval.stand_ins import byte_tokenizer


def tokens_of(question):
    return len((question.prompt + question.answer).encode())


@pytest.mark.parametrize("length", [600, 1000, 5000])
@pytest.mark.parametrize("depth", [0, 50, 100])
def test_a_text_fills_its_length(length, depth):
    question = retrieval.text_with_key(byte_tokenizer(), retrieval.Cell(length, depth, 0), "12345")
    assert length - len(retrieval.FILLER) < tokens_of(question) <= length


def test_depth_is_where_the_passkey_stands():
    places = []
    for depth in (0, 25, 50, 75, 100):
        question = retrieval.text_with_key(byte_tokenizer(), retrieval.Cell(5000, depth, 0), "12345")
        filler = question.prompt[len(retrieval.OPENING) : -len(retrieval.QUESTION)]
        key = retrieval.KEY.format(key="12345")
        places.append(filler.index(key) / (len(filler) - len(key)))
    assert places == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=0.02)


def run(tiny_folder, tmp_path, *more):
    out = tmp_path / "run.json"
    status = retrieval.main(["--model", tiny_folder, "--device", "cpu", "--json", str(out), *more])
    return status, json.loads(out.read_text()) if out.exists() else None


@pytest.fixture
def short(monkeypatch):
    """A question that fits the tiny model's 256 tokens."""
    monkeypatch.setattr(retrieval, "OPENING", "")
    monkeypatch.setattr(retrieval, "FILLER", "Grass is green. ")
    monkeypatch.setattr(retrieval, "KEY", "The key is {key}. ")
    monkeypatch.setattr(retrieval, "QUESTION", "The key is")


@pytest.mark.usefixtures("short")
def test_a_run_leaves_json_markdown_and_a_heat_map(tiny_folder, tmp_path):
    pytest.importorskip("matplotlib")
    asked = ["--lengths", "128", "64", "--depths", "3", "--trials", "2", "--kv-dtype", "auto", "int8"]
    status, document = run(tiny_folder, tmp_path, *asked)
    assert status == 0
    exact, auto, int8 = document["results"]
    assert [row["kv_dtype"] for row in document["results"]] == ["exact", "auto", "int8"]
    assert [(cell["length"], cell["depth"]) for cell in exact["cells"]] == [
        (length, depth) for length in (64, 128) for depth in (0, 50, 100)
    ]
    assert auto["nll_more"] == pytest.approx(0, abs=1e-4)
    assert int8["bytes_per_token"] < auto["bytes_per_token"]
    assert "| int8 |" in (tmp_path / "run.md").read_text()
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "20"], "--lengths 20"),
        (["--lengths", "100000"], "--lengths 100000"),
        (["--lengths", "0"], "--lengths"),
        (["--depths", "0"], "--depths"),
        (["--kv-dtype", "int3"], "int3"),
        (["--key-outliers", "x"], "--key-outliers"),
    ],
)
def test_bad_input_is_one_line_and_status_two(tiny_folder, tmp_path, arguments, message, capsys):
    assert run(tiny_folder, tmp_path, *arguments) == (2, None)
    error = capsys.readouterr().err
    assert error.strip().splitlines()[-1].startswith("error: ")
    assert message in error
