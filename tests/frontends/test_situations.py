"""What scripts do around a step, and which front end supports it: the table below is the list.

Each test is a situation, which ``front_ends.FrontEnd.check`` runs with stock (Horovod, DDP, FSDP2 over replicas, a
dense sum of arrays) and with the front end: at density 1, training has stock's bits; below, every rank ends with the
same bits, and what a parameter lacks is in the residuals.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext, suppress

import front_ends
import pytest
import torch
import torch_ranks
from front_ends import EVERYTHING, RECOMMENDED, SHAPES, SPARSE, Layer, Model, sgd, train
from states import same
from torch import nn
from training import MEAN, agree, near, settings

import horovod_sparse as hvs

pytestmark = pytest.mark.mpi

# yes: as stock. refused: an error on every rank, with a remedy. -: does not apply, for the reason in the comment.
TABLE = """
situation                                                    Horovod  DDP      FSDP2    local    arrays
training                                                     yes      yes      yes      yes      yes
training_with_adamw                                          yes      yes      yes      -        -       # arrays, local: no exchange of gradients knows AdamW
several_backward_passes_in_a_step                            yes      yes      yes      yes      yes
a_layer_frozen_from_the_start                                yes      yes      yes      yes      -       # arrays: a script leaves out what it likes
a_layer_frozen_for_some_steps                                yes      yes      yes      yes      -
a_layer_thawed_later                                         yes      -        refused  yes      -       # DDP: stock does not average such gradients
layers_without_a_gradient_on_some_ranks                      yes      yes      yes      yes      -
a_layer_without_a_gradient_on_all_ranks                      yes      yes      yes      yes      -
gradients_zeroed_in_place                                    yes      yes      yes      yes      -
layers_run_in_a_different_order_on_each_rank                 yes      yes      yes      yes      -
parameters_listed_in_a_different_order_on_each_rank          yes      yes      yes      yes      -       # arrays: know no parameters
a_parameter_shared_by_two_layers                             yes      yes      yes      yes      yes
an_empty_parameter                                           yes      yes      -        yes      yes     # FSDP2: torch cannot reduce it
parameters_of_several_dtypes                                 yes      yes      yes      yes      -       # arrays: one dtype each (test_arrays.py)
param_groups_with_different_rates                            yes      yes      yes      yes      -       # arrays: one rate each
embeddings_with_sparse_gradients                             yes      yes      -        yes      -       # FSDP2: torch does not support them
activations_computed_again                                   yes      yes      yes      yes      yes
a_layer_that_runs_twice                                      yes      yes      yes      yes      yes
gradients_clipped_by_the_compression                         yes      yes      yes      refused  -       # arrays: test_arrays.py
gradients_clipped_by_the_script_at_density_1                 yes      yes      yes      -        -       # local: before its own step. arrays: explicit
a_step_that_a_scaler_skips                                   yes      yes      yes      -        -       # local: each rank skips its own (test_local_sgd.py)
a_closure                                                    yes      yes      yes      yes      -       # arrays: the call stands in the closure
two_optimizers_of_one_model                                  yes      yes      yes      yes      -       # arrays: know no optimizer
two_models_in_turn_and_together                              yes      yes      yes      yes      yes
ranks_with_fewer_steps                                       yes      yes      -        yes      -       # FSDP2: torch has no join. arrays: as any collective
resuming_on_the_same_ranks                                   yes      yes      yes      yes      yes
resuming_on_another_number_of_ranks                          yes      yes      yes      yes      -       # arrays: same ranks only
an_unknown_compression                                       refused  refused  refused  refused  refused
configurations_that_differ_between_ranks                     refused  refused  refused  refused  refused
models_that_differ_between_ranks                             refused  -        refused  refused  refused # DDP: torch itself refuses them
parameters_with_the_same_name                                refused  refused  -        refused  -       # FSDP2: names are the model's. arrays: have none
momentum_of_both_optimizer_and_compression                   refused  refused  refused  refused  -       # arrays: know no optimizer
an_optimizer_that_is_wrapped_already                         refused  refused  refused  refused  -
an_optimizer_of_another_model                                -        refused  refused  -        -       # Horovod, local: the optimizer is the model
"""  # noqa: E501
# A step whose result was dropped, repeated or applied late, and gradients of other kinds: further rows.

_, *NAMES = TABLE.split("\n")[1].split()
ROWS = {row.split()[0]: row.split("#")[0].split()[1:] for row in TABLE.strip().split("\n")[1:]}
WRITTEN = []


def situation(message=None, **messages):
    """Run a test with the front ends in its row; where it is refused, expect an error on every rank."""

    def decorate(test):
        name = test.__name__.removeprefix("test_")
        WRITTEN.append(name)
        cells = {one: cell for one, cell in zip(NAMES, ROWS[name], strict=True) if cell != "-"}
        if torch_ranks.launched():  # torchrun starts no MPI
            cells = {one: cell for one, cell in cells.items() if one in ("DDP", "FSDP2")}

        @functools.wraps(test)
        def run(front_end, **fixtures):
            expected = nullcontext()
            if cells[front_end.name] == "refused":
                text = messages.get(front_end.name, message).replace("RANK", f"rank {front_end.rank}")
                errors = (ValueError, RuntimeError)
                # A single rank has nobody to differ from.
                expected = pytest.raises(errors, match=f"(?s){text}") if front_end.ranks > 1 else suppress(*errors)
            with expected:
                test(front_end, **fixtures)
            front_end.comm.Barrier()

        return pytest.mark.parametrize("front_end", list(cells), indirect=True)(run)

    return decorate


@pytest.fixture
def front_end(request, comm):
    kind = front_ends.FRONT_ENDS[request.param]
    return kind(comm, request.getfixturevalue(kind.needs) if kind.needs else None)


def test_the_table_has_a_row_for_each_situation():
    assert list(ROWS) == WRITTEN


# --- gradients ---


@situation()
def test_training(front_end):
    """With a learning rate that changes."""

    def train(training):
        for step in range(6):
            training.set_rate((0.25, 0.5, 0.125)[step // 2])
            training.take(step)
        sent = [one.traffic.bytes_sent > 0 for one in training.exchanges]
        assert front_end.everywhere(all(sent) or front_end.ranks == 1)

    front_end.check(train)


@situation()
def test_training_with_adamw(front_end):
    front_end.check(make=adamw, below=False, dgc=False)


def adamw(model, momentum, **more):
    return [torch.optim.AdamW(model.parameters(), 0.25, (momentum, 0.99), weight_decay=0.1, **more)]


@situation()
def test_several_backward_passes_in_a_step(front_end):
    """``backward_passes_per_step``, ``no_sync``, ``set_requires_gradient_sync(False)``; the last step has fewer."""

    def train(training):
        for batches in (range(3), range(3, 6), range(6, 8)):
            training.zero_grad()
            for batch in batches:
                training.backward(batch, last=batch == batches[-1])
            training.step()
        if front_end.ranks > 1 and front_end.name in ("DDP", "FSDP2"):
            steps = [exchange.statistics()["total/steps"] for exchange in training.exchanges]
            assert front_end.everywhere(steps in ([], [3]))

    front_end.check(train, passes=3)


def freeze(training, name, frozen=True):
    getattr(training.module, name).requires_grad_(not frozen)


def frozen_model():
    model = Model()
    model.third.requires_grad_(False)
    return model


@situation()
def test_a_layer_frozen_from_the_start(front_end):
    def stands(training):
        train(training)
        assert front_end.everywhere(same(training.parameters()["third.weight"], training.start["third.weight"]))

    front_end.check(stands, model=frozen_model)


@situation()
def test_a_layer_frozen_for_some_steps(front_end):
    """It stands still: its residual waits. With Horovod, its momentum goes on, as in stock."""

    def train(training):
        for step in range(9):
            freeze(training, "second", frozen=3 <= step < 6)
            before = training.parameters()["second.weight"]
            training.take(step)
            stands = same(training.parameters()["second.weight"], before)
            assert front_end.everywhere(stands == (3 <= step < 6) or training.momentum is not None)

    front_end.check(train, unused=True, dgc=False)


@situation("RANK: the gradient of third.weight is not exchanged.*freeze some of them afterwards")
def test_a_layer_thawed_later(front_end):
    """Stock Horovod would not average its gradients: it is wrapped before the layer is frozen."""

    def train(training):
        for step in range(6):
            freeze(training, "third", frozen=step < 3)
            training.take(step)

    front_end.check(train, model=frozen_model, stock={"model": Model}, make=functools.partial(sgd, decay=0), dgc=False)


@situation()
def test_layers_without_a_gradient_on_some_ranks(front_end):
    uses = (("first", "second", "third"), ("first", "third"), ("second", "third"))
    front_end.check(
        lambda training: taking(training, lambda step: uses[(front_end.replica + step) % 3]), unused=True, dgc=False
    )


@situation()
def test_a_layer_without_a_gradient_on_all_ranks(front_end):
    uses = (("first", "second", "third"), ("second", "third"))
    front_end.check(lambda training: taking(training, lambda step: uses[step % 2]), unused=True, dgc=False)


def taking(training, layers):
    for step in range(8):
        training.take(step, *layers(step))


@situation()
def test_gradients_zeroed_in_place(front_end):
    """Zeros of a layer that is frozen or, in DDP and FSDP2, used by no rank mean that it stands still."""

    def train(training):
        uses = (["first", "second", "third"], ["first", "third"], ["first", "second"][front_end.replica % 2 :])
        for step in range(9):
            freeze(training, "third", frozen=step >= 6)
            before = training.parameters()
            training.module.zero_grad(set_to_none=False)
            training.backward(step, *uses[step % 3])
            training.step()
            names = ["third"] * (step >= 6)
            names += ["second"] * (step % 3 == 1 and front_end.name in ("DDP", "FSDP2"))
            stand = [same(training.parameters()[f"{name}.weight"], before[f"{name}.weight"]) for name in names]
            assert front_end.everywhere(all(stand) or training.momentum is not None)

    front_end.check(train, unused=True, dgc=False)


@situation()
def test_layers_run_in_a_different_order_on_each_rank(front_end):
    order = list(SHAPES), list(SHAPES)[::-1]
    front_end.check(
        lambda training: taking(training, lambda step: order[(front_end.replica + step) % 2]), unused=True, dgc=False
    )


# --- parameters ---


@situation()
def test_parameters_listed_in_a_different_order_on_each_rank(front_end):
    def make(model, momentum):
        return sgd(model, momentum, list(model.parameters())[:: -1 if front_end.rank % 2 else 1])

    front_end.check(make=make)


def tied():
    model = Model()
    model.tied = Layer(*SHAPES["third"])
    model.tied.weight = model.third.weight
    return model


@situation()
def test_a_parameter_shared_by_two_layers(front_end):
    front_end.check(model=tied)


@situation()
def test_an_empty_parameter(front_end):
    def train(training):
        for step in range(4):
            training.take(step)
        assert front_end.everywhere(training.module.empty.weight.grad.shape == (0, 3))

    front_end.check(train, model=lambda: Model(empty=Layer(0, 3)))


@situation()
def test_parameters_of_several_dtypes(front_end):
    def model():
        return Model(narrow=Layer(30, dtype=torch.float16), wide=Layer(50, dtype=torch.float64))

    front_end.check(model=model, tolerance=0.02)


@situation()
def test_param_groups_with_different_rates(front_end):
    def make(model, momentum):
        rates = zip(model.parameters(), (0.5, 0.25, 0.125), strict=True)
        return sgd(model, momentum, [{"params": [p], "lr": rate} for p, rate in rates])

    front_end.check(make=make)


class Words(nn.Embedding):
    """Embedding with a sparse gradient, which is the second input."""

    def __init__(self):
        super().__init__(20, 6, sparse=True)
        nn.init.zeros_(self.weight)

    def forward(self, total, gradient):
        rows = gradient[:, 0].nonzero().flatten()[:5]
        return total + (super().forward(rows) * gradient[rows]).sum()


@situation()
def test_embeddings_with_sparse_gradients(front_end):
    """They travel dense, as in stock."""
    front_end.check(model=lambda: Model(words=Words()), make=functools.partial(sgd, decay=0))


# --- passes ---


@situation()
def test_activations_computed_again(front_end):
    front_end.check(model=lambda: Model(reentrant=True))


@situation()
def test_a_layer_that_runs_twice(front_end):
    """Under activation checkpoints, which are not reentrant."""

    def model():
        made = Model(False)
        made.again = made.second
        return made

    front_end.check(model=model)


# --- the optimizer's step ---


@situation("RANK: .*outer step .*residual")
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
def test_gradients_clipped_by_the_compression(front_end, scaled):
    """Each replica's complete gradient, to the threshold by the square root of their number; before the loss scale."""
    shards, most = front_end.ranks_that_share_data, 50.0
    compression = hvs.Compression.dgc(**settings(density=1.0), momentum=0.0, max_norm=most)
    training = front_end.training(compression, scaled=scaled)
    training.take(0)
    everyone = front_end.comm.allgather(flat(training.gradients(0)))
    replicas = [sum(everyone[at : at + shards]) / shards for at in range(0, front_end.ranks, shards)]
    factors = [most / len(replicas) ** 0.5 / one.norm() for one in replicas]
    mean = sum(one * factor for one, factor in zip(replicas, factors, strict=True)) / len(replicas)
    moved = flat(training.start) - flat(training.parameters())
    assert front_end.everywhere(max(factors) < 1)
    assert front_end.everywhere(near([moved], [0.25 * mean], 1e-5))


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


@situation()
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
def test_gradients_clipped_by_the_script_at_density_1(front_end, scaled):
    """After ``synchronize()``, or ``unscale_``, which then does it."""

    def train(training):
        optimizer = training.optimizer
        for step in range(6):
            training.zero_grad()
            training.backward(step)
            with front_end.reduced(training):
                training.scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(training.module.parameters(), 40.0)
                training.scaler.step(optimizer)
            training.scaler.update()

    front_end.check(train, scaled=scaled, below=False, dgc=False)


@situation()
@pytest.mark.parametrize("make", [sgd, functools.partial(adamw, fused=True)], ids=["", "fused"])
def test_a_step_that_a_scaler_skips(front_end, make):
    """The gradient of one rank overflows, and nothing stays of the step. The scale changes, too.

    With ``fused``, the scaler calls ``step()`` all the same, and torch's kernel leaves the parameters as they are.
    """

    def train(training):
        for step in range(6):
            if step == 3:
                before = training.states()
                training.take(9, overflow="second" if front_end.rank == front_end.ranks - 1 else None)
                assert front_end.everywhere(same(training.states(), before))
            training.take(step)
            training.scaler.update(2.0 ** (step % 4))

    front_end.check(train, scaled=True, make=make, below=make is sgd, dgc=make is sgd)


@situation()
def test_a_closure(front_end):
    """Horovod's own ``step(closure)`` applies gradients that are not reduced: it is compared with its plain loop."""

    def with_closure(training):
        for step in range(6):

            def closure(step=step):
                training.zero_grad()
                return training.backward(step)

            assert training.optimizer.step(closure).ndim == 0

    front_end.check(with_closure, train)


@situation()
def test_two_optimizers_of_one_model(front_end):
    def make(model, momentum):
        rest = [*model.second.parameters(), *model.third.parameters()]
        return sgd(model, momentum, model.first.parameters()) + sgd(model, momentum, rest, lr=0.5)

    front_end.check(make=make)


@situation()
def test_two_models_in_turn_and_together(front_end):
    def train(first, second):
        for step in range(6):
            first.zero_grad()
            second.zero_grad()
            first.backward(step)
            if step % 2:
                second.backward(step)
                second.step()
            first.step()

    front_end.check(train, count=2)


@situation()
def test_ranks_with_fewer_steps(front_end):
    """``join``: they take part with zeros, and end the epoch with the parameters of the last one."""

    def train(training):
        for epoch in range(2):
            with front_end.uneven(training):
                for step in range(2 + front_end.rank):
                    training.take(10 * epoch + step)

    front_end.check(train, dgc=False)


# --- state ---


@situation()
def test_resuming_on_the_same_ranks(front_end):
    """A resumed run has the bits of an uninterrupted one."""
    of_momentum = [(hvs.parse("dgc:density=0.05,dense_below=100,nesterov=True"), 0.0), (RECOMMENDED, 0.5)]
    for case in [(one, None) for one in SPARSE] + of_momentum * front_end.replaces_momentum:
        straight, resumed = (front_end.training(*case) for _ in range(2))
        train(straight)
        resumed.load(straight.save())
        for training in (straight, resumed):
            train(training)
        ends = [[one.parameters(), one.states()] for one in (straight, resumed)]
        assert front_end.everywhere(same(*ends))


@situation()
def test_resuming_on_another_number_of_ranks(front_end):
    """As if twice as many had saved: their residuals are added. Nothing of them is lost later."""
    old, new, dense = front_end.training(SPARSE[0]), front_end.training(SPARSE[0]), front_end.training()
    train(old)
    owed, states = old.owed(), front_end.comm.allgather(old.states()[0])
    front_end.load(new.exchange, front_end.merge(new.exchange, states))
    assert front_end.everywhere(new.owed() == pytest.approx({name: 2 * one for name, one in owed.items()}))
    train(new)
    train(dense)
    lost = [new.moved()[name] + new.owed()[name] - dense.moved()[name] - 2 * owed[name] for name in owed]
    assert front_end.everywhere(max(map(abs, lost)) < 1e-3)
    assert agree(front_end.comm, new.parameters().values())


# --- errors: on every rank, with the remedy ---


@situation(
    "RANK: .*'topk'",
    DDP="unknown compression 'topk'.*register no hook",
    FSDP2="unknown compression 'topk'.*mesh of both dimensions",
    local=r"RANK: unknown compression 'topk'.*Compression\.dense",
)
def test_an_unknown_compression(front_end):
    front_end.training("topk").take(0)


@situation(r"compression\.density differs between ranks: rank \d has .*give every rank the same")
def test_configurations_that_differ_between_ranks(front_end):
    front_end.training(hvs.Compression.topka(**settings(density=0.1 * (1 + front_end.rank)))).take(0)


@situation(r"parameter differs between ranks: rank \d has .*first", arrays=r"size differs between ranks: rank \d has")
def test_models_that_differ_between_ranks(front_end):
    front_end.training(SPARSE[0], model=lambda: Model(first=Layer(20 + front_end.rank))).take(0)


@situation(Horovod="unique", DDP="holds the name 'one' more than once: give each", local="RANK: .*a name twice")
def test_parameters_with_the_same_name(front_end):
    model = Model()
    (optimizer,), named = sgd(model, None), [("one", p) for p in model.parameters()]
    if front_end.name == "Horovod":
        hvs.DistributedOptimizer(optimizer, named, SPARSE[0])
    elif front_end.name == "local":
        hvs.LocalOptimizer(optimizer, named, 1, SPARSE[0], MEAN)
    else:
        hvs.ddp.SparseState(SPARSE[0], optimizer, named)


@situation("RANK: .*SGD has momentum, too: set momentum=0", local="RANK: .*outer step .*residual")
def test_momentum_of_both_optimizer_and_compression(front_end):
    front_end.training(hvs.Compression.dgc(), momentum=0.9).take(0)


@situation("RANK: .*wrapped by a DistributedOptimizer already.*: pass the plain one")
def test_an_optimizer_that_is_wrapped_already(front_end, hvd):
    def make(model, momentum):
        return [hvs.DistributedOptimizer(one, None, EVERYTHING) for one in sgd(model, momentum)]

    front_end.training(EVERYTHING, make=make).take(0)


@situation("RANK: .*the optimizer SGD is not the one of this model.*: pass the optimizers")
def test_an_optimizer_of_another_model(front_end):
    front_end.training(SPARSE[0], make=lambda model, momentum: sgd(Model(), momentum)).take(0)
