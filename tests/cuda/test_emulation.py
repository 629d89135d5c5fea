"""The emulation of CuPy finds the bugs that it exists to find."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from devices import emulated, on_device

RUN = """
import sys
sys.path.insert(0, sys.argv[1])
import cupy, numpy as np

code = '''
__global__ void kernel(int* x, int n) {
  __shared__ int last;
  const int i = threadIdx.x;
  %s
}
'''
x = cupy.zeros(64, np.int32)
program = cupy.cuda.nvrtc.createProgram(code % sys.argv[2], "test.cu", (), ())
cupy.cuda.nvrtc.addNameExpression(program, "kernel")
cupy.cuda.nvrtc.compileProgram(program, ("--fmad=false", "--ftz=false"))
module = cupy.cuda.Module()
module.load(cupy.cuda.nvrtc.getCUBIN(program))
module.get_function("kernel")((1,), (64,), (x, np.int32(64)))
print(x.tolist())
"""


def run(body: str) -> subprocess.CompletedProcess[str]:
    folder = str(Path(__file__).parent / "emulation")
    return subprocess.run([sys.executable, "-c", RUN, folder, body], capture_output=True, text=True, timeout=100)


def test_threads_meet() -> None:
    body = "if (i == 7) last = 5; __syncthreads();"
    body += "x[i] = last + __popc(__ballot_sync(~0u, i % 2)) + __shfl_sync(~0u, i, 3);"
    assert run(body).stdout == str([5 + 16 + 3] * 32 + [5 + 16 + 35] * 32) + "\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("if (i < 40) __syncthreads();", "some threads have returned while others wait at a barrier"),
        ("if (i < 40) {\n__syncthreads();\n} else {\n__syncthreads();\n}", "different barriers"),
        pytest.param(
            "if (i < 8) {\n__ballot_sync(~0u, 1);\n} else {\n__any_sync(~0u, 1);\n}",
            "different collectives",
            marks=pytest.mark.full,
        ),
        ("if (i < 8) __ballot_sync(~0u, 1);", "wait for each other for ever"),
        pytest.param("if (i < 8) __ballot_sync(1u, 1);", "not in the mask", marks=pytest.mark.full),
        ("x[i + 1] = 1;", "wrote beside an array"),
        pytest.param("x[i - 1] = 1;", "wrote beside an array", marks=pytest.mark.full),
    ],
)
def test_planted_bugs_are_found(body: str, message: str) -> None:
    result = run(body)
    assert result.returncode != 0
    assert message in result.stderr


@pytest.mark.skipif(not emulated(), reason="about the stand-in")
def test_host_and_device_arrays_cannot_be_mixed() -> None:
    x = on_device(np.arange(5))
    for mixed in (lambda: x + np.arange(5), lambda: np.add(np.arange(5), x), lambda: np.concatenate([x, np.arange(3)])):
        with pytest.raises(TypeError):
            mixed()
    with pytest.raises(TypeError, match="Implicit conversion"):
        np.asarray(x)
    with pytest.raises(TypeError):
        memoryview(x)  # type: ignore[arg-type]
    assert (2 * x + 1).tolist() == [1, 3, 5, 7, 9]
    x[1:3][0] = 9
    assert x.tolist() == [0, 9, 2, 3, 4]


def test_new_memory_holds_garbage() -> None:
    if emulated():
        import cupy

        assert (cupy.empty(3, np.uint8).get() == 0xA5).all()


def test_missing_cpu_kernels_are_reported_with_the_command_that_builds_them() -> None:
    code = "import sys; sys.modules['horovod_sparse.kernels._cpu'] = None; import devices"
    tests = Path(__file__).parent.parent
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tests)
    assert run.stderr.splitlines()[-1].endswith("HOROVOD_SPARSE_TEST_HOOKS=1 python setup.py build_ext --inplace")
