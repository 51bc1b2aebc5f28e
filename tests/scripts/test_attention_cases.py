"""The cases that the benchmark measures: an answer is checked before it is timed, and a wrong one is seen."""

import pytest
import torch

from scripts import benchmark
from scripts.attention_cases import ATTENTION_FORMATS, error_of, even, make_case

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def case_of(fmt, new=1, **options):
    spec = even("gemma3-4b", 2, 300, new, format=fmt, **options).small()
    case = make_case(spec, DEVICE)
    case.poison()
    return case


@pytest.mark.parametrize("new", [1, 20], ids=["decode", "prefill"])
@pytest.mark.parametrize("fmt", ATTENTION_FORMATS)
def test_every_format_is_within_the_error(fmt, new):
    case = case_of(fmt, new)
    case.run(0)
    error_of(case, 0)


@pytest.mark.parametrize("window", [None, 100])
def test_int4_keeps_the_newest_tokens_in_a_tail(window):
    spec = even("qwen3-8b", 1, 200, format="int4", window=window)
    assert spec.sealed(200) == 128  # blocks of 64, and 64 tokens of 200 that are exact
    encoded = 128 if window is None else 28
    a_head = 2 * 128 // 2 + 2 * 128 * 2 // 32 + 128 // 32 * 2 * 2  # codes, key scales, value scales
    assert spec.bytes_read == 8 * (encoded * a_head + 72 * 2 * 128 * 2)


@pytest.mark.parametrize(
    ("fmt", "broken"),
    [("int4", "k_scale"), ("int4", "v_scale"), ("int4", "tail"), ("int8:int4", "k_scale"), ("int8:int4", "v_scale")],
)
def test_a_kernel_that_reads_something_else_is_seen(fmt, broken):
    case = case_of(fmt)
    held = case.tail[0]["v_tail"] if broken == "tail" else getattr(case, broken)[0]
    held.mul_(2)
    case.run(0)
    held.div_(2)
    with pytest.raises(AssertionError, match="error"):
        error_of(case, 0)


def test_decode_takes_int4_and_pairs_by_name(capsys):
    asked = ["decode", "--format", "int4", "int8:int4", "--shape", "mha", "--batch", "2", "--context", "200"]
    assert benchmark.main(asked) == 0
    shown = capsys.readouterr().out
    assert "int4  block 64  error" in shown
    assert "int8:int4  block 64  error" in shown


def test_writes_of_int4_are_not_measured(capsys):
    assert benchmark.main(["write", "--format", "int4"]) == 2
    assert "--format: invalid choice: 'int4'" in capsys.readouterr().err
