"""Several processes share the work and give the numbers of one.

`accelerate launch --cpu` starts one process whatever --num_processes says (more need MPI); --multi_gpu starts them
through torchrun, and --device cpu keeps them on the CPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eval import perplexity

ROOT = Path(__file__).resolve().parents[2]


def launch(arguments):
    command = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"]
    command += ["--mixed_precision=no", "--dynamo_backend=no", "--num_cpu_threads_per_process=1"]
    return subprocess.run(
        [sys.executable, *command, "eval/perplexity.py", *arguments],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("".join(f"line {i} of a text that is long enough to be shared by two.\n" for i in range(12)))
    return str(file)


@pytest.mark.usefixtures("one_thread")
def test_two_processes_give_the_numbers_of_one(tiny_folder, tmp_path, text):
    asked = ["--model", tiny_folder, "--text-file", text, "--window", "64", "--chunk", "16", "--device", "cpu"]
    asked += ["--kv-dtype", "auto", "int8", "--json"]
    assert perplexity.main([*asked, str(tmp_path / "1.json")]) == 0
    done = launch([*asked, str(tmp_path / "2.json")])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written:") == 1
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("1.json", "2.json"))
    assert (one["processes"], two["processes"]) == (1, 2)
    assert one["windows"] == two["windows"] > 4
    for row in (*one["results"], *two["results"]):
        del row["seconds"]
    assert one["results"] == two["results"], "the same windows on the same number of threads: to the last digit"
    assert not list(tmp_path.glob("*.partial*"))


def test_without_accelerate_one_line_says_so():
    program = "import sys; sys.modules['accelerate'] = None; from eval import perplexity; sys.exit(perplexity.main([]))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr == "error: needs a package: pip install accelerate\n"
