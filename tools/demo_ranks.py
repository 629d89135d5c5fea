"""A rank of the demo: makes all runs in one process, because starting torch takes longer than some of them.

mpirun -np 4 python -m tools.demo_ranks '[["--compression", "none"], ["--compression", "fp16"]]'
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

_EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def main() -> None:
    """Run ``examples/train.py`` with each of the lists of arguments."""
    runs: list[list[str]] = json.loads(sys.argv[1])
    sys.path.insert(0, str(_EXAMPLES))  # as for a script
    for arguments in runs:
        sys.argv = ["train.py", *arguments]
        runpy.run_path(str(_EXAMPLES / "train.py"), run_name="__main__")


if __name__ == "__main__":
    main()
