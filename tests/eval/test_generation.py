"""How far continuations are from the exact ones, and what a run leaves."""

import json

import pytest

from eval import generation
from eval.continuations import common_prefix, edit_distance, in_common
from tests.eval.stand_ins import Exact, ScalesDropped, tokens


@pytest.mark.parametrize(
    ("a", "b", "edits", "prefix", "common"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 0, 4, 1),
        ([1, 2, 3, 4], [1, 3, 4], 1, 1, 0.75),
        ([1, 2, 3, 4], [9, 1, 2, 3, 4], 1, 0, 0.8),
        ([1, 2, 3], [4, 5, 6], 3, 0, 0),
        ([1, 2, 3, 4, 5, 6], [1, 9, 3, 4, 8, 8, 6], 3, 1, 4 / 7),
        ([], [1, 2], 2, 0, 0),
    ],
)
def test_measures_by_hand(a, b, edits, prefix, common):
    assert edit_distance(a, b) == edit_distance(b, a) == edits
    assert common_prefix(a, b) == prefix
    assert in_common(a, b) == pytest.approx(common)


def test_an_exact_cache_says_the_same_and_a_wrong_one_does_not(tiny):
    record = generation.continue_prompt(tiny, tokens(40), [Exact(), ScalesDropped()], 24)
    same, wrong = record["exact-cache"], record["scales dropped"]
    assert same["tokens"] == record["exact"]["tokens"]
    assert (same["identical"], same["common_prefix"], same["in_common"], same["edit_distance"]) == (True, 24, 1, 0)
    assert not wrong["identical"]
    assert wrong["common_prefix"] < 24
    assert wrong["edit_distance"] > 0


def test_prompts_are_spread_over_the_text():
    ids = tokens(100)
    prompts = generation.prompts_from(ids, 4, 10, "text")
    assert [prompt.tolist() for prompt in prompts] == [ids[at : at + 10].tolist() for at in (0, 25, 50, 75)]


def run(tiny_folder, tmp_path, *more):
    out = tmp_path / "run.json"
    status = generation.main(["--model", tiny_folder, "--device", "cpu", "--json", str(out), *more])
    return status, json.loads(out.read_text()) if out.exists() else None


def test_a_run_leaves_json_and_markdown(tiny_folder, tmp_path):
    asked = ["--prompts", "2", "--prompt-tokens", "20", "--max-new-tokens", "8", "--questions", "2", "--words", "4"]
    status, document = run(tiny_folder, tmp_path, *asked, "--kv-dtype", "auto", "int8")
    assert status == 0
    exact, auto, _ = document["results"]
    assert auto["identical"] == 1
    assert auto["lookup_nll"] == pytest.approx(exact["lookup_nll"], abs=1e-4)
    assert len(document["continuations"]) == 2
    assert "| int8 |" in (tmp_path / "run.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "0", "--questions", "0"], "--prompts 0"),
        (["--words", "1000"], "--words 1000"),
        (["--words", "2"], "--words"),
        (["--prompt-tokens", "250", "--max-new-tokens", "20"], "--prompt-tokens 250"),
        (["--text-file", "absent.txt"], "absent.txt"),
    ],
)
def test_bad_input_is_one_line_and_status_two(tiny_folder, tmp_path, arguments, message, capsys):
    assert run(tiny_folder, tmp_path, *arguments) == (2, None)
    error = capsys.readouterr().err
    assert error.strip().splitlines()[-1].startswith("error: ")
    assert message in error


def test_a_text_too_short_for_the_prompts(tiny_folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("a short text")
    assert run(tiny_folder, tmp_path, "--text-file", str(text), "--prompts", "3", "--prompt-tokens", "10") == (2, None)
    assert "--prompts 3" in capsys.readouterr().err
