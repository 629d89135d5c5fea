"""Registers, spills, shared memory, occupancy and load width of every CUDA kernel; needs no GPU.

    python -m benchmarks.kernels.machine_code --arch 80 90 100

CUDA's run-time compiler compiles every kernel with the options used in training, and its report becomes a table.
Occupancy is the share of a multiprocessor's warps that registers and shared memory allow, with the kernels' block size.
The last column is the widest load from global memory in the PTX, in bytes per thread. Kernels for double are shown only
with ``--all``. Exits with 1 if registers are spilled.
"""

from __future__ import annotations

import re
import sys
from typing import NamedTuple

from cupy.cuda import nvrtc

from benchmarks import command_line, markdown
from horovod_sparse.kernels import cuda  # noqa: F401 - defines the modules
from horovod_sparse.kernels.cuda.compilation import OPTIONS, source
from horovod_sparse.kernels.cuda.launch import MODULES, THREADS

_WARPS = 64  # per multiprocessor
_REGISTERS = 65536
_SHARED = {"80": 164 << 10}  # bytes per multiprocessor
_SHARED_LATER = 228 << 10
_RESERVED = 1 << 10  # bytes per block
_USED = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores.*?"
    r"Used (\d+) registers(?:[^\n]*?(\d+) bytes smem)?",
    re.DOTALL,
)
_LOAD = re.compile(r"ld\.(?:\w+\.)*?global(?:\.\w+)*?(?:\.v([248]))?\.[a-z](\d+)")


class Kernel(NamedTuple):
    """Machine code of one kernel; all but the registers in bytes."""

    name: str  # with template arguments
    registers: int  # per thread
    spilled: int  # by spill stores
    shared: int  # memory per block
    load: int  # the widest from global memory

    def occupancy(self, arch: str) -> float:
        """Return the share of a multiprocessor's warps that can be resident."""
        warps = THREADS // 32
        by_registers = _REGISTERS // (warps * -(-self.registers * 32 // 256) * 256)
        by_shared = _SHARED.get(arch, _SHARED_LATER) // (self.shared + _RESERVED)
        return min(by_registers, by_shared, _WARPS // warps) * warps / _WARPS


def kernels_of(arch: str, name: str, kernels: list[str]) -> list[Kernel]:
    """Return the kernels of a module as reported by the compiler."""
    program = nvrtc.createProgram(source(name), f"{name}.cu", (), ())
    for kernel in kernels:
        nvrtc.addNameExpression(program, kernel)
    nvrtc.compileProgram(program, (*OPTIONS, f"--gpu-architecture=sm_{arch}", "--ptxas-options=-v"))
    plain = {nvrtc.getLoweredName(program, kernel): kernel.replace("hvs::", "") for kernel in kernels}
    bodies = dict(re.findall(r"\.entry (\w+)\((.*?)\n}\n", nvrtc.getPTX(program).decode(), re.DOTALL))
    found = []
    for entry, _, spilled, registers, shared in _USED.findall(nvrtc.getProgramLog(program)):
        loads = [int(count or 1) * int(bits) // 8 for count, bits in _LOAD.findall(bodies[entry])]
        found.append(Kernel(plain[entry], int(registers), int(spilled), int(shared or 0), max(loads, default=0)))
    return sorted(found)


def main() -> None:
    """Print the table."""
    parser = command_line("kernels.machine_code", __doc__)
    parser.add_argument("--arch", nargs="+", default=["80", "90", "100"], help="compute capabilities (80 90 100)")
    parser.add_argument("--all", action="store_true", help="also show kernels for double")
    options = parser.parse_args()
    archs = "/".join(options.arch)
    heads = ("kernel", f"registers {archs}", "spilled", "shared memory", f"occupancy {archs}", "widest load")
    cells, spilled = [], 0
    for module in MODULES:
        rows = zip(*(kernels_of(arch, module.name, module.kernels) for arch in options.arch), strict=True)
        for row in rows:
            first = row[0]
            spilled += sum(kernel.spilled for kernel in row)
            if "double" in first.name and not options.all:
                continue
            registers = "/".join(str(kernel.registers) for kernel in row)
            occupancy = "/".join(
                f"{kernel.occupancy(arch):.0%}" for kernel, arch in zip(row, options.arch, strict=True)
            )
            most = max(kernel.spilled for kernel in row)
            name = f"{module.name}: `{first.name}`"
            cells.append((name, registers, str(most), str(first.shared), occupancy, str(first.load)))
    print(markdown(heads, cells, left=len(heads)))
    sys.exit(1 if spilled else 0)


if __name__ == "__main__":
    main()
