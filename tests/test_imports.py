"""Which package may import which. Root modules count as packages; imports for type checkers count, too."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import launch
import pytest

PACKAGE = Path(__file__).parent.parent / "horovod_sparse"
FILES = {path.relative_to(PACKAGE): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
RULES = ("memories", "sparsifiers", "collectives", "schedules")
MAY_IMPORT = {
    "metrics": "",
    "kernels": "",
    "transport": "kernels",
    "control": "transport",
    "wire": "kernels",
    "vector": "kernels",
    "accumulator": "kernels vector",
    "rules": "kernels vector accumulator transport",  # transport: its law tests for users only
    "costs": "kernels transport",
    "schedules": "rules kernels",
    "memories": "rules kernels vector accumulator",
    "sparsifiers": "rules kernels vector accumulator",
    "collectives": "rules kernels wire transport costs",
    "config": "rules memories sparsifiers collectives schedules",
    "engine": "config rules costs kernels transport metrics control",
    "frontends": "engine config rules kernels transport metrics control",
    "checkpoint": "frontends engine control transport",
}


def imports(node, checking=False, local=False):
    """Yield name, whether only type checkers import it, and whether inside a function, of each imported module."""
    for child in ast.iter_child_nodes(node):
        for_checkers = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and child in node.body
        inside = local or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        if isinstance(child, ast.ImportFrom):
            whole = child.module == "horovod_sparse"
            names = [f"{child.module}.{one.name}" for one in child.names] if whole else [child.module]
        else:
            names = [one.name for one in child.names] if isinstance(child, ast.Import) else []
        yield from ((name, checking or for_checkers, local) for name in names)
        yield from imports(child, checking or for_checkers, inside)


def package(path):
    return path.parts[0].removesuffix(".py")


PACKAGES = set(map(package, FILES))
IMPORTS = [(path, *one) for path, tree in FILES.items() for one in imports(tree)]
# The root package, which holds the version, is loaded before all others.
PAIRS = {(package(path), name.split(".")[1]) for path, name, *_ in IMPORTS if name.startswith("horovod_sparse.")}
DEPENDENCIES = sorted((one, other) for one, other in PAIRS if other in PACKAGES - {one})


def test_packages_import_from_those_below_them_only():
    wrong = [
        f"{one} -> {other}" for one, other in DEPENDENCIES if one in MAY_IMPORT and other not in MAY_IMPORT[one].split()
    ]
    assert not wrong
    assert {*MAY_IMPORT, "__init__", "cli"} == PACKAGES  # these two may import everything


def test_only_certain_packages_import_torch_horovod_and_mpi():
    loaded = {(package(path), name.partition(".")[0]) for path, name, checking, _ in IMPORTS if not checking}
    users = {framework: {one for one, name in loaded if name == framework} for framework in ("torch", "mpi4py")}
    assert users == {
        "torch": {"transport", "engine", "frontends", "checkpoint"},
        "mpi4py": {"transport", "frontends", "cli"},
    }
    of_torch = {path.stem for path, name, *_ in IMPORTS if package(path) == "transport" and name == "torch"}
    assert of_torch == {"torch_distributed", "torch_job"}
    # DDP under torchrun needs no MPI: mpi4py is imported late, or in modules that are.
    early = {str(path) for path, name, checking, local in IMPORTS if name == "mpi4py" and not checking and not local}
    assert {path for path in early if not path.startswith("cli")} == {"transport/mpi.py", "frontends/mpi_members.py"}
    # One front end is Horovod's. Elsewhere Horovod is imported late, for process sets and its own compressors.
    of_horovod = {(str(path), local) for path, name, _, local in IMPORTS if name.partition(".")[0] == "horovod"}
    front_end = {(f"frontends/horovod/{name}.py", False) for name in ("optimizer", "gradients", "arguments")}
    late = {(f"{name}.py", True) for name in ("frontends/horovod/join", "frontends/mpi_members", "config/presets")}
    assert of_horovod == front_end | late
    by_rules = {name for path, name, checking, _ in IMPORTS if package(path) in (*RULES, "costs") and not checking}
    assert {name for name in by_rules if name.startswith("horovod_sparse.transport")} <= {
        "horovod_sparse.transport.slots",
        "horovod_sparse.transport.traffic",
    }


def test_no_package_imports_itself_inside_a_function():
    own = [(str(path), name) for path, name, _, local in IMPORTS if local and name.split(".")[1:2] == [package(path)]]
    assert not own


def test_there_are_few_root_modules_and_few_dependencies():
    roots = sorted(path.name for path in FILES if len(path.parts) == 1)
    assert len(roots) <= 8, roots
    assert len(DEPENDENCIES) <= 62, f"{len(DEPENDENCIES)} dependencies:\n" + "\n".join(
        f"{one} -> {other}" for one, other in DEPENDENCIES
    )


CODE = """
import importlib, sys
for name in sys.argv[2].split():
    importlib.import_module(name)
import horovod_sparse
exec(sys.argv[3])
loaded = {name.partition(".")[0] for name in sys.modules}
sys.exit(f"loaded {sorted(loaded & set(sys.argv[1].split()))}" if loaded & set(sys.argv[1].split()) else 0)
"""
STAGES = " ".join(f"horovod_sparse.{one}" for one in ("accumulator", "kernels", *RULES, "config", "engine.pipeline"))
AVERAGE = "import numpy; horovod_sparse.SparseAllreduce(9, 'topka:density=0.5')(numpy.ones((3, 3)))"
ADVISE = ["advise", "--parameters", "25.6M", "--ranks", "64", "--bandwidth", "10Gbit"]


@pytest.mark.parametrize(
    ("names", "statement", "forbidden"),
    [
        ("horovod_sparse horovod_sparse.cli", "", "torch horovod mpi4py numpy"),
        ("horovod_sparse.config", "horovod_sparse.parse('hierarchical:inner=gtopk')", "torch horovod mpi4py"),
        ("horovod_sparse.cli", f"horovod_sparse.cli.main({ADVISE})", "torch horovod mpi4py"),
        (STAGES, "", "torch horovod"),
        (
            "horovod_sparse",
            "horovod_sparse.ddp.SparseState, horovod_sparse.checkpoint.Checkpoints, horovod_sparse.LocalOptimizer",
            "horovod mpi4py",
        ),
        ("horovod_sparse", "horovod_sparse.fsdp.sparse_all_reduce", "horovod mpi4py"),
        ("horovod_sparse.engine.pipeline", AVERAGE, "torch horovod"),
    ],
    ids=["package", "parse", "advise", "stages", "front ends", "FSDP", "arrays"],
)
def test_unneeded_packages_are_not_loaded(names, statement, forbidden):
    result = launch.python("-c", CODE, forbidden, names, statement)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("statement", "remedy"),
    [
        ("horovod_sparse.DistributedOptimizer", "hvs.DistributedOptimizer needs Horovod.*: use hvs.ddp or hvs.fsdp"),
        ("horovod_sparse.parse('none')", "Compression.none is Horovod's own.*: choose 'dense'"),
    ],
)
def test_without_horovod_what_needs_it_names_a_remedy(statement, remedy):
    code = f"import sys; sys.modules['horovod'] = None; import horovod_sparse; {statement}"
    ended = launch.python("-c", code)
    assert ended.returncode == 1
    assert re.search(f"ModuleNotFoundError: {remedy}", ended.stderr)
