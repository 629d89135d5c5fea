"""benchmarks.kernels.traffic compares profiles of Nsight Compute with the accesses counted in the kernels."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks.kernels import traffic

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]
# The format is that of published logs; the values are invented.
PROFILE = """\
==PROF== Connected to process 42 (/usr/bin/python3.12)
==PROF== Profiling "sweep" - 1: 0%....50%....100% - 1 pass
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum"
"","","","","","","","","","","","byte","byte","ns"
"0","42","python3.12","127.0.0.1","void draw<float>(const Segment *, int)","1","13","(256, 1, 1)","(256, 1, 1)","0",\
"9.0","4,194,304","0","5,000"
"1","42","python3.12","127.0.0.1","void sweep<float, (int)0>(const Segment *, int)","1","13","(256, 1, 1)",\
"(6250, 1, 1)","0","9.0","204,800,000","104,652,800","100,000"
"2","42","python3.12","127.0.0.1","find_largest(const Segment *, int)","1","13","(256, 1, 1)","(6250, 1, 1)","0",\
"9.0","102,400,000","0","40,000"
"3","42","python3.12","127.0.0.1","void sweep<float, (int)0>(const Segment *, int)","1","13","(256, 1, 1)",\
"(6250, 1, 1)","0","9.0","204,800,000","104,652,800","120,000"
==PROF== Disconnected from process 42
"""


def run(profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    path = tmp_path / "traffic.csv"
    path.write_text(profile)
    monkeypatch.setattr(sys, "argv", ["traffic", str(path), *arguments])
    return traffic.main()


def test_the_table_has_bytes_per_element_beside_those_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(PROFILE, tmp_path, monkeypatch, "--size", "25.6M", "--kept") == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[2:]}
    assert rows["sweep"] == ["2", "8.00", "4.09", "12.09", "12.09", "110.00", "2813.21"]
    assert rows["draw"] == ["1", "0.16", "0.00", "0.16", "0.16", "5.00", "838.86"]
    assert rows["find_largest"][4] == "4.00"


def test_a_sweep_with_momentum_has_a_separate_row() -> None:
    kernels = [launch.kernel for launch in traffic.launches(PROFILE.replace("(int)0", "(int)1").splitlines())]
    assert kernels == ["draw", "sweep, velocity", "find_largest", "sweep, velocity"]
    counted = traffic.counted(25_000_000, 0.01, clears=True)
    assert counted["sweep, velocity"] == counted["sweep"] + 8


def test_units_that_ncu_chooses_are_converted() -> None:
    scaled = PROFILE.replace('"byte","byte","ns"', '"Mbyte","Kbyte","us"')
    first = next(traffic.launches(scaled.splitlines()))
    assert first == ("draw", 4_194_304e6, 0.0, pytest.approx(5e-3))


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n", "ncu failed: ==ERROR== ERR_NVGPUCTRPERM"),
        ("no kernels\n", "the profile lacks Kernel Name, dram__bytes_read.sum"),
        (PROFILE.replace("dram__bytes_write.sum", "other"), "the profile lacks dram__bytes_write.sum"),
        (PROFILE.replace('"byte","byte","ns"', '"byte","byte","weeks"'), "the units {'weeks'}"),
        (PROFILE.replace("102,400,000", "n/a"), "could not convert string to float: 'n/a'"),
    ],
)
def test_a_file_without_the_metrics_is_refused(
    profile: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(profile, tmp_path, monkeypatch)
    assert message in capsys.readouterr().err


def test_the_page_has_the_counts_of_the_whole_step() -> None:
    """At 25 million elements and a density of 1 %."""
    table = re.findall(r"^\| `(\w+)`.*\| ([\d.]+) \|$", (ROOT / "docs" / "gpu.md").read_text(), re.MULTILINE)
    counted = traffic.counted(25_000_000, 0.01, clears=True)
    counted["digit"] *= 3
    del counted["sweep, velocity"]
    assert {kernel: float(number) for kernel, number in table} == pytest.approx(counted, abs=0.05)


def test_every_kernel_that_is_counted_exists() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "csrc" / "cuda").glob("*.cu"))
    kernels = [name.partition(",")[0] for name in traffic.counted(1000, 0.01, clears=True)]
    assert not [kernel for kernel in kernels if not re.search(rf"\b{kernel}\(", sources)]
