"""The harness gives what a ten-line loop gives, and sees what is wrong with a wrong format."""

import json
import math
from pathlib import Path

import pytest
import torch

import hf_paged_attention
from eval import perplexity
from eval.program import BadInput
from eval.windows import windows_of
from tests.eval.stand_ins import Exact, Int8, ScalesDropped, tokens


def by_hand(model, ids, window):
    """Perplexity of disjoint windows, as every tutorial writes it."""
    losses = []
    for start in range(0, len(ids), window):
        part = ids[None, start : start + window]
        with torch.no_grad():
            logits = model(part).logits[0, :-1].double()
        losses.append(torch.nn.functional.cross_entropy(logits, part[0, 1:], reduction="none"))
    return torch.cat(losses).mean().exp().item()


def rows_of(model, ids, formats, window=50, stride=50, chunk=0):
    records = [perplexity.measure(model, piece, formats, chunk) for piece in windows_of(ids, window, stride)]
    return {row["kv_dtype"]: row for row in perplexity.summarise(records)}


@pytest.mark.parametrize("chunk", [0, 1, 7, 50])
def test_perplexity_is_that_of_a_ten_line_loop(tiny, chunk):
    ids = tokens()
    rows = rows_of(tiny, ids, [Exact()], chunk=chunk)
    assert rows["exact"]["perplexity"] == pytest.approx(by_hand(tiny, ids, 50), rel=1e-6)
    assert rows["exact-cache"]["perplexity"] == pytest.approx(by_hand(tiny, ids, 50), rel=1e-5)


def test_a_model_does_not_diverge_from_itself(tiny):
    row = rows_of(tiny, tokens(), [Exact()])["exact-cache"]
    assert row["kl_max"] == 0
    assert row["agreement"] == 1
    assert row["nll_more"] == 0


@pytest.mark.parametrize(("stride", "chunk"), [(50, 0), (20, 0), (20, 13)])
def test_dropped_scales_are_caught(tiny, stride, chunk):
    rows = rows_of(tiny, tokens(), [Int8(), ScalesDropped()], stride=stride, chunk=chunk)
    assert 0 < rows["int8"]["kl_mean"] < 2e-3
    assert rows["scales dropped"]["kl_mean"] > 30 * rows["int8"]["kl_mean"]
    assert rows["scales dropped"]["agreement"] < rows["int8"]["agreement"]


def test_the_plugins_formats_rank_as_their_bits_do(tiny):
    from eval.formats import formats_named

    rows = rows_of(tiny, tokens(), formats_named(["auto", "int8", "fp8"]))
    assert rows["auto"]["kl_mean"] < 1e-8
    assert rows["auto"]["kl_mean"] < rows["int8"]["kl_mean"] < rows["fp8"]["kl_mean"] < 0.2
    assert rows["int8"]["bytes_per_token"] < rows["auto"]["bytes_per_token"]


def test_a_wrong_int4_is_seen(tiny, monkeypatch):
    """Codes that are read back with one scale for all channels, or without their zero points."""
    from eval.formats import formats_named
    from hf_paged_attention.kernels import reference

    def kl():
        return rows_of(tiny, tokens(200), formats_named(["int4"], 32), window=200, stride=200, chunk=40)["int4"][
            "kl_mean"
        ]

    right, decode = kl(), reference.dequantize_keys
    assert 0 < right < 0.15
    for part in (0, 1):

        def wrong(packed, scales, dtype=torch.float32, part=part):
            scales = scales.clone()
            scales[..., part, :] = scales[..., part, :].mean() if part == 0 else 0.0
            return decode(packed, scales, dtype)

        monkeypatch.setattr(reference, "dequantize_keys", wrong)
        assert kl() > 2 * right


def test_exact_layers_and_pairs_of_formats(tiny):
    from eval.formats import formats_named

    layers = tiny.config.num_hidden_layers
    plain, excepted = (formats_named(["int8:fp8"], 32, exact) for exact in ((), (0,)))
    rows = [rows_of(tiny, tokens(), formats, chunk=10)["int8:fp8"] for formats in (plain, excepted)]
    assert rows[1]["kl_mean"] < rows[0]["kl_mean"]
    assert rows[1]["bytes_per_token"] > rows[0]["bytes_per_token"]
    everywhere = formats_named(["int4"], 32, range(layers))
    assert rows_of(tiny, tokens(200), everywhere, window=200, stride=200, chunk=40)["int4"]["kl_mean"] < 1e-8
    assert formats_named(["auto:bf16"])[0].is_exact(torch.bfloat16)
    assert not formats_named(["auto:bf16"])[0].is_exact(torch.float32)
    assert not formats_named(["auto:int4"])[0].is_exact(torch.float32)


def test_nan_logits_are_named_with_their_position(tiny):
    class Broken(Exact):
        name = "broken"

        def new_cache(self, model):
            cache = super().new_cache(model)
            update = cache.update

            def poisoned(keys, values, *args, **kwargs):
                keys, values = update(keys, values, *args, **kwargs)
                values = values.clone()
                values[:, :, 20:21] = torch.nan
                return keys, values

            cache.update = poisoned
            return cache

    with pytest.raises(BadInput, match=r"broken: NaN logits at position 20 of the context"):
        rows_of(tiny, tokens(), [Broken()], chunk=10)


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog, again and again.\n" * 8)
    return str(file)


def run(tiny_folder, tmp_path, *more):
    out = tmp_path / "out" / "run.json"
    status = perplexity.main(["--model", tiny_folder, "--device", "cpu", "--json", str(out), *more])
    return status, json.loads(out.read_text()) if out.exists() else None


def test_a_run_leaves_json_and_markdown(tiny_folder, tmp_path, text, tiny):
    status, document = run(tiny_folder, tmp_path, "--text-file", text, "--window", "64", "--kv-dtype", "auto", "int8")
    assert status == 0
    assert [row["kv_dtype"] for row in document["results"]] == ["exact", "auto", "int8"]
    ids = torch.tensor(list(Path(text).read_bytes()))
    assert document["scored_tokens"] == len(ids) - math.ceil(len(ids) / 64)
    assert document["environment"]["versions"]["torch"] == hf_paged_attention.info()["versions"]["torch"]
    assert "| int8 |" in (tmp_path / "out" / "run.md").read_text()
    assert not list((tmp_path / "out").glob("*.partial*"))


def test_a_stopped_run_goes_on_from_what_it_has(tiny_folder, tmp_path, text, monkeypatch):
    asked = ["--text-file", text, "--window", "64", "--kv-dtype", "int8"]
    _, whole = run(tiny_folder, tmp_path / "whole", *asked)
    measure, windows = perplexity.measure, []

    def stops_after_three(model, window, *rest):
        windows.append(window.index)
        if len(windows) == 4:
            raise KeyboardInterrupt
        return measure(model, window, *rest)

    monkeypatch.setattr(perplexity, "measure", stops_after_three)
    assert run(tiny_folder, tmp_path, *asked) == (130, None)
    status, resumed = run(tiny_folder, tmp_path, *asked)
    assert status == 0
    assert windows == [0, 1, 2, 3, 3, 4, 5, 6, 7]
    for row in (*whole["results"], *resumed["results"]):
        del row["seconds"]
    assert resumed["results"] == whole["results"]


def test_max_kl_is_an_exit_status(tiny_folder, tmp_path, text):
    asked = ["--text-file", text, "--max-tokens", "64", "--kv-dtype", "int8"]
    assert run(tiny_folder, tmp_path, *asked, "--max-kl", "1")[0] == 0
    assert run(tiny_folder, tmp_path, *asked, "--max-kl", "1e-12")[0] == 1


def test_a_dataset_is_its_rows_joined(tiny_folder, tmp_path):
    pytest.importorskip("datasets")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"story": f"row {i} says something. "}) + "\n" for i in range(20)))
    asked = ["--dataset", str(rows), "--column", "story", "--kv-dtype", "int8", "--max-tokens", "200"]
    status, document = run(tiny_folder, tmp_path, *asked)
    assert status == 0
    assert document["config"]["tokens"] == 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-dtype", "int3"], "int3"),
        (["--kv-dtype", "int8:int4:int4"], "int8:int4:int4"),
        (["--exact-layers", "0", "9", "--max-tokens", "64"], "--exact-layers 0 9: exact_layers="),
        (["--block-size", "24"], "24"),
        (["--block-size", "0"], "--block-size"),
        (["--text-file", "absent.txt"], "absent.txt"),
        (["--model", "absent/model/folder"], "absent/model/folder"),
        (["--model", "absent.gguf"], "absent.gguf"),
        (["--stride", "100", "--window", "50"], "--stride 100"),
        (["--window", "1"], "--window"),
        (["--window", "100000"], "--window 100000"),
        (["--device", "cuda:99"], "cuda:99"),
        (["--device", "abacus"], "abacus"),
        (["--split", "test"], "--split"),
        (["--dataset", "absent.jsonl"], "absent.jsonl"),
        (["--json", "result.txt"], "result.txt"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_bad_input_is_one_line_and_status_two(tiny_folder, arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert perplexity.main(["--model", tiny_folder, *arguments]) == 2
    error = capsys.readouterr().err
    line = error.strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert message in line
    assert "Traceback" not in error


@pytest.mark.parametrize(("content", "message"), [(b"", "empty"), (b"x", "two tokens"), (b"\xff\xfe", "UTF-8")])
def test_bad_texts(tiny_folder, content, message, capsys, tmp_path):
    file = tmp_path / "bad.txt"
    file.write_bytes(content)
    assert perplexity.main(["--model", tiny_folder, "--text-file", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_a_text_shorter_than_the_window_asked_for(tiny_folder, text, capsys):
    assert perplexity.main(["--model", tiny_folder, "--text-file", text, "--max-tokens", "40", "--window", "128"]) == 2
    assert "--window 128" in capsys.readouterr().err


def test_a_column_that_is_not_there(tiny_folder, tmp_path, capsys):
    pytest.importorskip("datasets")
    rows = tmp_path / "rows.csv"
    rows.write_text("title,body\na,b\n")
    assert perplexity.main(["--model", tiny_folder, "--dataset", str(rows)]) == 2
    assert "title, body" in capsys.readouterr().err


def test_a_dataset_that_cannot_be_reached(tiny_folder, capsys, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def unreachable(*arguments, **keywords):
        raise ConnectionError("Couldn't reach the hub (no route to host)")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    assert perplexity.main(["--model", tiny_folder, "--dataset", "wikitext-2"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: --dataset wikitext-2 (config wikitext-2-raw-v1, split test): cannot be loaded")
    assert "--text-file" in line


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        (NotImplementedError("fp8 needs a device that has it"), "fp8 needs a device that has it"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has"), "CUDA out of memory"),
        (
            RuntimeError("[enforce fail]\nDefaultCPUAllocator: can't allocate memory: you tried"),
            "can't allocate memory",
        ),
        (hf_paged_attention.CacheFullError("2 blocks are needed and 1 is free."), "1 is free"),
    ],
)
def test_a_format_that_the_device_cannot_hold(tiny, refusal, message):
    class Refused(Exact):
        name = "refused"

        def new_cache(self, model):
            cache = super().new_cache(model)

            def update(*arguments, **keywords):
                raise refusal

            cache.update = update
            return cache

    with pytest.raises(BadInput, match="--kv-dtype refused: ") as caught:
        rows_of(tiny, tokens(), [Refused()])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_fault_is_not_taken_for_bad_input(tiny):
    class Faulty(Exact):
        def new_cache(self, model):
            raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        rows_of(tiny, tokens(), [Faulty()])


def test_key_outliers_leave_the_function_as_it_was(tiny_folder):
    from eval import models

    plain, _ = models.load(tiny_folder, torch.device("cpu"), torch.float32)
    spiked, _ = models.load(tiny_folder, torch.device("cpu"), torch.float32, 30.0)
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        torch.testing.assert_close(spiked(tokens()[None]).logits, plain(tokens()[None]).logits, atol=1e-3, rtol=1e-3)
    keys = [model.model.layers[0].self_attn.k_proj.weight.view(2, 16, -1).norm(dim=-1) for model in (spiked, plain)]
    ratio = (keys[0] / keys[1]).round(decimals=3)
    assert ratio[:, [7, 15]].unique().tolist() == [30.0]
    assert ratio[:, [0, 6, 8, 14]].unique().tolist() == [1.0]


def test_key_outliers_are_refused_where_keys_are_normed(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    from eval.outliers import add_key_outliers

    config = AutoConfig.for_model(
        "qwen3", vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(BadInput, match="--key-outliers 30"):
        add_key_outliers(AutoModelForCausalLM.from_config(config), 30.0)


def test_max_windows_is_a_number_of_whole_windows(tiny_folder, tmp_path, text):
    asked = ["--text-file", text, "--window", "64", "--kv-dtype", "int8", "--max-windows", "3"]
    _, document = run(tiny_folder, tmp_path, *asked)
    assert document["windows"] == 3
    assert document["scored_tokens"] == 3 * 63


def test_an_encoder_decoder_is_refused(tmp_path, capsys):
    from transformers import T5Config

    T5Config(num_layers=1, d_model=8, d_kv=4, num_heads=2, d_ff=8).save_pretrained(tmp_path)
    assert perplexity.main(["--model", str(tmp_path)]) == 2
    assert "encoder-decoder" in capsys.readouterr().err
