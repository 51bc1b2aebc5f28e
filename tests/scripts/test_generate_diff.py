"""Where two texts part, and when that is a fault."""

import json

import pytest
import torch

from scripts import generate_diff
from tests.eval.stand_ins import Exact, ScalesDropped, tokens


class Wrong(ScalesDropped):
    """The fault in a format that calls itself exact."""

    name = "wrong"

    def is_exact(self, dtype):
        return True


def difference(model, fmt, new_tokens=24):
    ids = tokens(40)
    eager = generate_diff.continuation(model, ids, new_tokens)
    return eager, generate_diff.compare(model, ids, eager, fmt, new_tokens)


def test_an_exact_cache_says_the_same(tiny):
    eager, found = difference(tiny, Exact())
    assert found.verdict == "identical"
    assert found.tokens == eager.tokens
    assert found.in_common == 1


def test_a_wrong_format_that_claims_to_be_exact_is_a_fault(tiny):
    eager, found = difference(tiny, Wrong())
    assert found.verdict == "fault"
    assert eager.tokens[: found.first] == found.tokens[: found.first]
    assert found.eager_token == eager.tokens[found.first] != found.tokens[found.first] == found.format_token
    assert found.gap > generate_diff.ALLOWED * found.rounding


def test_a_lossy_format_parts_without_fault(tiny):
    assert difference(tiny, ScalesDropped())[1].verdict == "parts"


def test_the_gap_is_eagers_own(tiny):
    ids = tokens(40)
    eager, found = difference(tiny, Wrong())
    tiny.set_attn_implementation("eager")
    with torch.no_grad():
        logits = tiny(torch.cat([ids, torch.tensor(eager.tokens[: found.first])])[None].long()).logits[0, -1]
    assert found.gap == pytest.approx((logits[found.eager_token] - logits[found.format_token]).item(), abs=1e-4)


def test_a_near_tie_is_reported_as_one(tiny):
    """Two output rows that differ by less than rounding: a format that picks the other is no fault."""

    class PicksTheTwin(Exact):
        def new_cache(self, model):
            model.lm_head.weight.data[twin] = model.lm_head.weight.data[first] * (1 + 2e-7)
            return super().new_cache(model)

    ids = tokens(40)
    original = tiny.lm_head.weight.data.clone()
    try:
        eager = generate_diff.continuation(tiny, ids, 8)
        first = eager.tokens[0]
        twin = (first + 1) % 250
        tiny.lm_head.weight.data[twin] = tiny.lm_head.weight.data[first] * (1 - 2e-7)
        eager = generate_diff.continuation(tiny, ids, 8)
        found = generate_diff.compare(tiny, ids, eager, PicksTheTwin(), 8)
    finally:
        tiny.lm_head.weight.data.copy_(original)
    assert (found.verdict, found.first) == ("near tie", 0)


def test_the_summary_counts(tiny):
    ids = tokens(40)
    eager = generate_diff.continuation(tiny, ids, 24)
    found = [generate_diff.compare(tiny, ids, eager, fmt, 24) for fmt in (Exact(), Wrong())]
    row = generate_diff.summarise(found, [24, 24])
    assert (row["identical"], row["faults"], row["near_ties"]) == ("1 of 2", 1, 0)
    assert row["mean_common_prefix"] == (24 + found[1].first) / 2


def run(tiny_folder, *arguments):
    return generate_diff.main(["--model", tiny_folder, "--device", "cpu", "--max-new-tokens", "16", *arguments])


def test_the_plugin_on_a_tiny_model(tiny_folder, tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("once upon a time\n\nthe other prompt, a little longer than the first\n")
    out = tmp_path / "diff.json"
    status = run(tiny_folder, "--prompts-file", str(prompts), "--kv-dtype", "auto", "int8", "--json", str(out))
    document = json.loads(out.read_text())
    assert status == 0
    assert [row["kv_dtype"] for row in document["results"]] == ["auto", "int8"]
    assert [len(entry["eager"]) for entry in document["prompts"]] == [16, 16]
    assert document["results"][0]["faults"] == 0
    assert "identical: 16 tokens" in capsys.readouterr().out


def test_a_fault_is_exit_status_one(tiny_folder, monkeypatch, capsys):
    from eval import formats

    monkeypatch.setattr(formats, "formats_named", lambda *asked: [Wrong()])
    assert run(tiny_folder, "--prompt", "once upon a time") == 1
    assert "fault" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-dtype", "int3"], "int3"),
        (["--prompt", "x", "--kv-dtype", "int8:int3"], "int8:int3"),
        (["--prompt", "x", "--kv-dtype", "int4", "--block-size", "16"], "--block-size 16"),
        (["--prompt", "x", "--kv-dtype", "int4", "--exact-layers", "0", "-7"], "--exact-layers 0 -7: exact_layers="),
        (["--prompt", "  "], "--prompt"),
        (["--prompts-file", "absent.txt"], "absent.txt"),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--prompt", "x", "--max-new-tokens", "5000"], "--max-new-tokens 5000"),
        (["--prompt", "x", "--prompts-file", "y"], "--prompts-file"),
        (["--dtype", "float8"], "--dtype"),
    ],
)
def test_bad_input_is_one_line_and_status_two(tiny_folder, arguments, message, capsys):
    assert run(tiny_folder, *arguments) == 2
    error = capsys.readouterr().err
    assert error.strip().splitlines()[-1].startswith("error: ")
    assert message in error
    assert "Traceback" not in error


def test_an_empty_prompts_file(tiny_folder, tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("\n\n")
    assert run(tiny_folder, "--prompts-file", str(file)) == 2
    assert "holds no prompt" in capsys.readouterr().err
