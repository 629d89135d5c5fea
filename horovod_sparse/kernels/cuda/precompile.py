"""Compilation of all kernels into the cache ahead of the first step; needs CuPy and its NVRTC, but no GPU or driver.

    CUPY_CACHE_DIR=kernels python -m horovod_sparse.kernels.cuda.precompile 80 90

The cache serves machines with the same version of NVRTC. The arguments are compute capabilities without the dot.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from horovod_sparse.kernels import cuda  # noqa: F401 - defines the modules
from horovod_sparse.kernels.cuda.compilation import cached
from horovod_sparse.kernels.cuda.launch import MODULES


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile what the cache lacks, and print the seconds that it took."""
    parser = argparse.ArgumentParser(description="Compile all CUDA kernels into the cache; needs no GPU.")
    parser.add_argument("archs", nargs="+", metavar="ARCH", help="compute capability without the dot, such as 90")
    for arch in parser.parse_args(arguments).archs:
        for module in MODULES:
            begin = time.perf_counter()
            size = len(cached(module.name, module.kernels, arch).code)
            print(f"{module.name} for sm_{arch}: {size / 1e3:.0f} kB, {time.perf_counter() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
