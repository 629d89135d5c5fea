"""`horovod-sparse advise` predicts, recommends and refuses."""

from __future__ import annotations

import json
import re

import pytest
from pages import ROOT

import horovod_sparse as hvs
from horovod_sparse.cli import main

MODEL = ("--parameters", "25.6M", "--ranks", "64")
ETHERNET = ("--bandwidth", "10Gbit", "--latency", "5us")
SMALL = ("--parameters", "1.2M", "--ranks", "4", "--latency", "300us", "--compute", "35ms")
# Yoon and Oh: 8 A100 with NVLink (300 GB/s each way). torch's sort-based top-k passes 13 ns an element there, 24 bytes.
VGG16 = ("--parameters", "14.7M", "--ranks", "8", "--density", "0.001", "--bandwidth", "100Gbit")
NVLINK = ("--gpus-per-node", "8", "--inner-bandwidth", "300GB", "--memory-bandwidth", "1.84GB")
LOSS = r"[+-]\d+\.\d%"
GPUS = (*MODEL, "--bandwidth", "100Gbit", "--gpus-per-node", "8", "--device", "gpu", "--compute", "100ms")


def advise(*arguments, capsys, folder):
    """Text and JSON."""
    path = folder / "advice.json"
    assert main(["advise", *arguments, "--json", str(path)]) == 0
    return capsys.readouterr().out, json.loads(path.read_text())


def rows_of(content):
    return {row["compression"]: row for row in content["rows"]}


def test_dense_exchanges_and_the_densities_of_the_preset_are_compared(capsys, tmp_path):
    path = tmp_path / "advice.png"
    text, content = advise(*MODEL, *ETHERNET, "--plot", str(path), capsys=capsys, folder=tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
    schedule = hvs.Compression.recommended().schedule
    densities = sorted({*schedule.densities, schedule.least}, reverse=True)  # bytes decide at all but the least
    sparse = [f"recommended:density={density:g}" for density in densities]
    assert list(rows_of(content)) == ["none", "fp16", "dense:wire=float16", "dense:wire=log8", *sparse]
    assert "25,600,000 parameters; 64 ranks" in text
    assert "Recommended: compression=hvs.Compression.recommended()" in text
    assert content["recommended"] == "hvs.Compression.recommended()"
    assert content["chosen"] is None  # which density it is depends on the computing time
    assert "--compute TIME" in text
    assert content["bandwidths"]["break-even"] > content["bandwidths"]["this link"]
    assert content["bandwidths"]["this link"] == pytest.approx(1.25e9)


def test_the_documentation_shows_what_is_printed(capsys, tmp_path):
    """docs/choosing.md, without the columns that it leaves out: the parts of the exchange."""
    page = (ROOT / "docs/choosing.md").read_text()
    command = re.search(r"^    horovod-sparse advise (.*)$", page, re.MULTILINE)[1]
    text, _ = advise(*command.split(), capsys=capsys, folder=tmp_path)
    shown = [line.split() for line in re.search(r"```text\n(.*?)```", page, re.DOTALL)[1].splitlines()]
    table = slice(3, 12)
    printed = [line.split() for line in text.splitlines()]
    printed[table] = [[*cells[:5], *cells[9:]] for cells in printed[table]]
    shown[2].remove("...")
    printed[2] = [*printed[2][:5], *printed[2][9:]]
    assert shown == printed


@pytest.mark.parametrize(
    ("rate", "chosen"), [("100Gbit", "1"), ("1Gbit", "0.01"), ("100Mbit", "0.002"), ("10Mbit", "0.001")]
)
def test_the_choice_of_the_preset_is_marked(rate, chosen, capsys, tmp_path):
    """As measured for this model on emulated links: docs/performance.md, "A training step on slow links"."""
    text, content = advise(*SMALL, "--bandwidth", rate, capsys=capsys, folder=tmp_path)
    assert content["chosen"] == f"recommended:density={chosen}"
    [marked] = [line for line in text.splitlines() if "<- chosen" in line]
    assert marked.startswith(f"recommended:density={chosen} ")


@pytest.mark.parametrize(
    ("rate", "best", "of_torch"),
    [
        ("100Mbit", "hvs.Compression.recommended()", ""),
        ("2Gbit", "hvs.Compression.recommended()", ""),
        ("3Gbit", "hvd.Compression.fp16", " (with DDP: torch's fp16_compress_hook)"),
        ("40Gbit", "hvd.Compression.none", " (with DDP and FSDP2: stay dense, without a hook)"),
    ],
)
def test_the_most_precise_of_what_costs_no_time_is_recommended(rate, best, of_torch, capsys, tmp_path):
    """Nothing is gained from a more compressed exchange if the backward pass hides a larger one."""
    model = ("--parameters", "25.6M", "--ranks", "4", "--compute", "500ms")
    text, content = advise(*model, "--bandwidth", rate, capsys=capsys, folder=tmp_path)
    assert content["recommended"] == best
    assert f"Recommended: compression={best}{of_torch}\n" in text


def test_gradients_in_bfloat16_take_half_as_long_without_compression_and_the_others_as_long_as_before(capsys, tmp_path):
    wide, narrow = (
        advise(*MODEL, *ETHERNET, "--dtype", dtype, capsys=capsys, folder=tmp_path)[1]
        for dtype in ("float32", "bfloat16")
    )
    before, after = rows_of(wide), rows_of(narrow)
    assert after["none"]["cost"] == before["fp16"]["cost"]
    assert set(before) - set(after) == {"fp16"}
    assert all(after[name] == before[name] for name in set(after) - {"none"})
    assert narrow["bandwidths"]["break-even"] < wide["bandwidths"]["break-even"]


def test_ranks_of_an_fsdp_replica_exchange_their_shards_over_a_shared_link(capsys, tmp_path):
    text, sharded = advise(*MODEL, *ETHERNET, "--gpus-per-node", "8", "--shards", "8", capsys=capsys, folder=tmp_path)
    shared = ("--parameters", "3.2M", "--ranks", "8", "--bandwidth", "1.25Gbit", "--latency", "5us")
    _, alone = advise(*shared, capsys=capsys, folder=tmp_path)
    assert sharded["rows"] == alone["rows"]
    assert "The 8 ranks of a replica exchange 3,200,000 gradients each" in text
    assert "8 ranks use at a time" in text


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert hvs.__version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*VGG16, *NVLINK), "2400 Gbit/s"),
        (("--parameters", "1M", "--ranks", "1", *ETHERNET), "1 ranks"),
    ],
    ids=["a sort-based selection on NVLink", "one rank"],
)
def test_horovods_own_exchange_is_recommended_where_sparse_does_not_win(arguments, said, capsys, tmp_path):
    text, content = advise(*arguments, capsys=capsys, folder=tmp_path)
    assert content["recommended"].startswith("hvd.Compression.")
    assert said in text


def test_everything_is_never_sent_sparse(capsys, tmp_path):
    text, content = advise(*MODEL, *ETHERNET, "--density", "1", capsys=capsys, folder=tmp_path)
    assert not any("recommended" in name for name in rows_of(content))
    assert "No link is slow enough for a density of 1" in text


@pytest.mark.parametrize(("ranks", "collective"), [("4", "topka"), ("32", "hierarchical")])
def test_at_one_density_the_collectives_are_compared(ranks, collective, capsys, tmp_path):
    """The preset finds the marked one by itself."""
    model = ("--parameters", "1M", "--bandwidth", "100Mbit", "--gpus-per-node", "2", "--density", "0.01")
    text, content = advise(*model, "--ranks", ranks, capsys=capsys, folder=tmp_path)
    best = content["recommended"]
    assert best == "hvs.Compression.recommended(density=0.01)"
    assert next(line for line in text.splitlines() if line.endswith("<- chosen")).split()[1] == collective
    assert eval(best, {"hvs": hvs}).density == 0.01  # noqa: S307 - our own
    names = {name.partition("collective=")[2] for name in rows_of(content)} - {""}
    assert names == {"topka", "topkdsa", "oktopk", "hierarchical"}
    assert f"on {int(ranks) // 2} nodes" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--ranks", "64", "--density", "0.01"), f"Measured at a density of 0.01, .*: {LOSS} .SGD, .*, 64 ranks"),
        (("--ranks", "20", "--density", "0.01", "--optimizer", "adamw"), f"{LOSS} .AdamW, .*, 16 ranks, "),
        (("--ranks", "20", "--density", "0.1"), f"Measured at a density of 0.01, .*: {LOSS} .SGD"),
        (("--ranks", "64", "--density", "0.0005"), "The accuracy at a density of 0.0005 was not measured"),
        (("--ranks", "64", "--compute", "200ms"), "Measured at a density of"),
    ],
)
def test_measured_accuracy_of_the_choice_is_quoted(arguments, said, capsys, tmp_path):
    given = ("--parameters", "25.6M", "--bandwidth", "1Gbit", *arguments)
    text, _ = advise(*given, capsys=capsys, folder=tmp_path)
    [line] = [line for line in text.splitlines() if "ccuracy at" in line or "Measured at" in line]
    assert re.search(said, line)


@pytest.mark.parametrize("arguments", [(), ("--compute", "10s"), ("--density", "0.9", "--bandwidth", "100Gbit")])
def test_no_accuracy_is_quoted_where_nothing_or_everything_is_chosen(arguments, capsys, tmp_path):
    text, _ = advise(*MODEL, *ETHERNET, *arguments, capsys=capsys, folder=tmp_path)
    assert "perplexity" not in text
    assert "accuracy" not in text


def test_local_steps_are_proposed_where_no_density_is_low_enough(capsys, tmp_path):
    slow, content = advise(*SMALL, "--bandwidth", "1Mbit", capsys=capsys, folder=tmp_path)
    least = rows_of(content)["recommended:density=0.001"]
    assert least["exposed"] > least["step"] / 2
    assert "hvs.LocalOptimizer(..., local_steps=2, compression=hvs.Compression.auto(density=0.001" in slow
    assert least["exchange"] / 2 <= 0.035 < least["exchange"]
    fast, _ = advise(*SMALL, "--bandwidth", "100Mbit", capsys=capsys, folder=tmp_path)
    assert "LocalOptimizer" not in fast


def test_a_gpu_selects_faster_and_waits_for_the_host(capsys, tmp_path):
    given = (*GPUS, "--density", "0.01")
    _, cpu = advise(*given, "--device", "cpu", capsys=capsys, folder=tmp_path)
    text, gpu = advise(*given, capsys=capsys, folder=tmp_path)
    name = "recommended:density=0.01,collective=topka"
    here, there = (rows_of(content)[name]["cost"] for content in (cpu, gpu))
    assert there["selection"] < here["selection"] / 50
    before, after = (rows_of(content)["dense:wire=log8"]["cost"] for content in (cpu, gpu))
    assert after["latency"] == pytest.approx(before["latency"] + 50e-6 * after["rounds"])
    each = 2 * 25.6e6 * 7 / 8 + after["nbytes"] / 8  # bytes of a rank, within its node and between nodes
    assert after["bandwidth"] == pytest.approx(before["bandwidth"] + 2 * each / 25e9)  # copies
    assert "MPI through host memory" in text
    assert "--dense-bandwidth" in text
    _, fast = advise(*given, "--memory-bandwidth", "3TB", capsys=capsys, folder=tmp_path)
    assert rows_of(fast)[name]["cost"]["selection"] == pytest.approx(there["selection"] / 2)


def test_nccl_is_priced_by_its_bus_bandwidth_and_the_rest_is_not(capsys, tmp_path):
    _, mpi = advise(*GPUS, capsys=capsys, folder=tmp_path)
    text, nccl = advise(*GPUS, "--dense-bandwidth", "80GB", capsys=capsys, folder=tmp_path)
    dense = rows_of(nccl)["none"]
    assert dense["exchange"] == pytest.approx(2 * 63 / 64 * 4 * 25.6e6 / 80e9)
    assert rows_of(nccl)["fp16"]["exchange"] == pytest.approx(dense["exchange"] / 2)
    assert all(rows_of(nccl)[name] == row for name, row in rows_of(mpi).items() if "=" in name)
    assert nccl["recommended"] == "hvd.Compression.none"
    assert "none and fp16 are priced at --dense-bandwidth" in text
    assert "break-even" not in nccl["bandwidths"]  # NCCL's time does not depend on the link of MPI


def test_ranks_of_a_node_that_hold_a_replica_together_share_the_bandwidth_of_nccl(capsys, tmp_path):
    given = ("--parameters", "1.3B", "--ranks", "32", "--shards", "8", "--gpus-per-node", "8", "--bandwidth", "25Gbit")
    _, content = advise(*given, "--dense-bandwidth", "2.8GB", capsys=capsys, folder=tmp_path)
    shard = 1.3e9 / 8
    assert rows_of(content)["none"]["exchange"] == pytest.approx(2 * 3 / 4 * 4 * shard / (2.8e9 / 8))


def test_warns_nccl_users_if_the_preset_would_send_dense_by_mpi(capsys, tmp_path):
    computing = ("--compute", "5s", "--dense-bandwidth", "80GB")
    text, content = advise(*GPUS, *computing, capsys=capsys, folder=tmp_path)
    assert content["chosen"] == "recommended:density=1"
    assert "`recommended` would do so here" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--parameters", "-1"), "--parameters"),
        (("--ranks", "0"), "at least 1, not '0'"),
        (("--bandwidth", "10"), "10Gbit or 300GB"),
        (("--density", "2"), "(0, 1]"),
        (("--compute", "120"), "5us or 0.1ms"),
        (("--compute", "0ms"), "5us or 0.1ms"),
        (("--device", "tpu"), "invalid choice: 'tpu'"),
        (("--dense-bandwidth", "fast"), "10Gbit or 300GB"),
        (("--gpus-per-node", "0"), "at least 1"),
        (("--gpus-per-node", "65"), "--gpus-per-node 65 exceeds --ranks 64"),
        (("--shards", "3"), "--shards 3 must divide --ranks 64"),
        (("--gpus-per-node", "8", "--shards", "4"), "--shards 4 must divide --ranks 64"),
        (("--shards", "64"), "--shards 64 leaves one replica: what fully sharded models exchange is not predicted"),
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
