"""The command `hf-paged-attention` finds its programs, and what `make demo` runs is what they take."""

import importlib

import pytest

from hf_paged_attention import cli


@pytest.mark.parametrize("name", [name for name in cli.PROGRAMS if name not in ("bench", "lm-eval")])
def test_every_program_has_help(name, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert "usage: " + name in capsys.readouterr().out


def test_usage_names_every_program(capsys):
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in ("info", "demo", *cli.PROGRAMS))


@pytest.mark.parametrize("command", cli.DEMO)
def test_the_demos_commands_are_understood(command):
    name, *arguments = command.split()
    assert importlib.import_module(cli.PROGRAMS[name][0]).arguments(arguments).model == "demo"


def test_the_demo_stops_at_the_first_failure(monkeypatch, capsys):
    monkeypatch.setattr(cli, "DEMO", ("diff --max-new-tokens 0", "perplexity --window 0"))
    assert cli.main(["demo"]) == 2
    output = capsys.readouterr()
    assert "perplexity" not in output.out
    assert "--max-new-tokens" in output.err


def test_an_unknown_command_names_the_known_ones(capsys):
    assert cli.main(["perplexty"]) == 2
    assert "perplexity" in capsys.readouterr().err


def test_a_package_that_is_missing_is_named(monkeypatch, capsys):
    def missing(name):
        raise ModuleNotFoundError("needs a package", name="lm_eval")

    monkeypatch.setattr(cli.importlib, "import_module", missing)
    assert cli.main(["lm-eval"]) == 2
    assert "pip install lm_eval" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["info", "demo"])
def test_commands_without_arguments_explain_themselves_and_do_not_run(name, monkeypatch, capsys):
    monkeypatch.setattr(cli, "DEMO", ("diff --max-new-tokens 0",))
    assert cli.main([name, "--help"]) == 0
    assert "usage: hf-paged-attention" in capsys.readouterr().out
    assert cli.main([name, "--model"]) == 2
    assert "--model" in capsys.readouterr().err
