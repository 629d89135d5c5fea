"""`horovod-sparse advise` predicts, recommends and refuses."""

from __future__ import annotations

import json

import pytest

import horovod_sparse as hvs
from horovod_sparse.cli import main
from horovod_sparse.cli.advise import recommendation
from horovod_sparse.costs.formulas import Cost

MODEL = ("--parameters", "25.6M", "--ranks", "64")
ETHERNET = ("--bandwidth", "10Gbit", "--latency", "5us", "--density", "0.01")
# Yoon and Oh: 8 A100 with NVLink (300 GB/s each way). torch's sort-based top-k passes 13 ns an element there, 12 bytes.
VGG16 = ("--parameters", "14.7M", "--ranks", "8", "--density", "0.001", "--bandwidth", "100Gbit")
NVLINK = ("--gpus-per-node", "8", "--inner-bandwidth", "300GB", "--select-bandwidth", "0.92GB")


def advise(*arguments, capsys, folder):
    """Status, text and JSON."""
    path = folder / "advice.json"
    status = main(["advise", *arguments, "--json", str(path)])
    return status, capsys.readouterr().out, json.loads(path.read_text())


def test_a_slow_network_is_advised_to_send_sparse_but_never_random_blocks(capsys, tmp_path):
    path = tmp_path / "advice.png"
    status, text, content = advise(*MODEL, *ETHERNET, "--plot", str(path), capsys=capsys, folder=tmp_path)
    assert status == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "Recommended: compression=hvs.Compression.recommended(density=0.01)" in text
    assert "25,600,000 parameters, k = 256,000; 64 ranks" in text
    assert content["recommended"] == "hvs.Compression.recommended(density=0.01)"
    assert content["costs"][0]["algorithm"] == "oktopk"
    assert content["break_even_bandwidth"] > 1.25e9  # the break-even point lies above this link
    *totals, random = [cost["total"] for cost in content["costs"]]
    assert [random, *totals] == sorted([random, *totals])
    assert content["costs"][-1]["algorithm"] == "shared"
    assert "randomblock *" in text


@pytest.mark.parametrize(("algorithm", "collective"), [("gtopk", "auto"), ("hierarchical", "hierarchical")])
def test_the_recommended_line_is_a_configuration(algorithm, collective):
    """Auto finds every algorithm by itself but the hierarchical one."""
    line = recommendation(Cost(algorithm, 1, 1, 1, 1, 1), 0.02)
    assert eval(line, {"hvs": hvs}) == hvs.Compression.recommended(0.02, collective=collective)  # noqa: S307 - our own


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*VGG16, *NVLINK), "2400 Gbit/s"),
        ((*MODEL, "--bandwidth", "1Gbit", "--density", "1"), "No link is slow enough"),
        (("--parameters", "1M", "--ranks", "1", *ETHERNET), "1 ranks"),
    ],
    ids=["a sort-based selection on NVLink", "the whole gradient", "one rank"],
)
def test_dense_is_recommended_where_sparse_does_not_win(arguments, said, capsys, tmp_path):
    _, text, content = advise(*arguments, capsys=capsys, folder=tmp_path)
    assert content["costs"][0]["algorithm"] == "dense"
    assert content["recommended"] == "hvd.Compression.none"
    assert "Recommended: compression=hvd.Compression.none" in text
    assert said in text


def test_nodes_with_several_gpus_may_reduce_among_themselves_first(capsys, tmp_path):
    _, text, content = advise(*MODEL, *ETHERNET, "--gpus-per-node", "8", capsys=capsys, folder=tmp_path)
    names = {cost["algorithm"] for cost in content["costs"]}
    assert "hierarchical" in names
    assert "64 ranks on 8 nodes" in text
    assert content["plan"]["node"]["ranks"] == 8


@pytest.mark.parametrize(("ranks", "collective"), [("4", ""), ("8", ", collective='hierarchical'")])
def test_what_applies_less_is_advised_where_it_is_twice_as_fast(ranks, collective, capsys, tmp_path):
    """Both times the hierarchical exchange is the fastest; with 4 ranks TopkA, which applies all, takes little more."""
    model = ("--parameters", "1M", "--bandwidth", "100Mbit", "--gpus-per-node", "2")
    _, _, content = advise(*model, "--ranks", ranks, capsys=capsys, folder=tmp_path)
    assert content["costs"][0]["algorithm"] == "hierarchical"
    assert content["recommended"] == f"hvs.Compression.recommended(density=0.01{collective})"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--parameters", "-1"), "--parameters"),
        (("--ranks", "0"), "at least 1, not '0'"),
        (("--bandwidth", "10"), "10Gbit or 300GB"),
        (("--density", "2"), "(0, 1]"),
        (("--gpus-per-node", "0"), "at least 1"),
        (("--gpus-per-node", "65"), "--gpus-per-node 65 exceeds --ranks 64"),
        (("--plot", "/proc/x.png"), "cannot write /proc/x.png"),
        (("--json", "/proc/x"), "cannot write /proc/x: "),
        (("--json", "/nowhere/a.json"), "/nowhere"),
    ],
)
def test_bad_input_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["advise", *MODEL, *ETHERNET, *arguments])
    assert message in capsys.readouterr().err


def test_a_bandwidth_is_needed(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["advise", *MODEL])
    assert "--bandwidth" in capsys.readouterr().err
