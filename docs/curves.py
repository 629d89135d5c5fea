"""Predictions of the cost model, as curves."""

from __future__ import annotations

from drawing import save
from matplotlib.figure import Figure

from horovod_sparse.costs.model import CANDIDATES, Compute, predict, table
from horovod_sparse.costs.network import Link

ELEMENTS = 25_000_000
# Round figures of one core of a server.
COMPUTE = Compute(select=0.6e-9, accumulate=0.4e-9, reduce=0.4e-9, merge=5e-9, cut=5e-9)


def volume() -> None:
    """Bytes over ranks."""
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axes = figure.subplots()
    ranks = [2**level for level in range(1, 11)]
    for name in ("dense", "topka", "topkdsa", "gtopk", "oktopk", "shared"):
        costs = [predict(name, ELEMENTS, ELEMENTS // 100, one, Link(0, 0), COMPUTE) for one in ranks]
        axes.loglog(ranks, [cost.nbytes / 1e6 for cost in costs], marker=".", label=name)
    axes.set(xlabel="ranks", ylabel="MB that a rank sends", title="25 million float32 elements, density 1 %")
    axes.set_xticks(ranks, [str(one) for one in ranks])
    axes.grid(which="major", alpha=0.3)
    axes.legend(ncols=2)
    save(figure, "volume")


def auto() -> None:
    """Time over bandwidth."""
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axes = figure.subplots()
    gbits = [10 ** (step / 20) for step in range(-20, 61)]
    links = [Link(alpha=20e-6, beta=8e-9 / gbit) for gbit in gbits]
    costs = [table(ELEMENTS, ELEMENTS // 100, 8, link, COMPUTE) for link in links]
    for name in ("dense", *CANDIDATES):
        axes.loglog(gbits, [1e3 * cost.total for row in costs for cost in row if cost.algorithm == name], label=name)
    best = [1e3 * row[0].total for row in costs]
    axes.loglog(gbits, best, color="black", lw=7, alpha=0.15, solid_capstyle="butt", label="the choice")
    axes.set(
        xlabel="bandwidth in Gbit/s",
        ylabel="predicted milliseconds of an exchange",
        title="8 ranks, 20 µs a message, density 1 %",
    )
    axes.set_xticks([0.1, 1, 10, 100, 1000], ["0.1", "1", "10", "100", "1000"])
    axes.grid(which="major", alpha=0.3)
    axes.legend(ncols=2)
    save(figure, "auto")
