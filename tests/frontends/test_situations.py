"""What scripts do around a step, and which front end supports it: the table below is the list.

Each test is a situation, which ``front_ends.FrontEnd.check`` runs with stock (Horovod, DDP, FSDP2 over replicas and
fully sharded, a dense sum of arrays) and with the front end: at density 1, training has stock's bits; below, every rank
ends with the same bits, and what a parameter lacks is in the residuals.
"""

from __future__ import annotations

import functools
import gc
import threading
import time
import types
import weakref
from contextlib import nullcontext, suppress

import pytest
import torch
import torch_ranks
from front_ends import EVERYTHING, RECOMMENDED, SHAPES, SPARSE, Layer, Model, sgd, train
from states import same
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts
from training import MEAN, agree, loss_of, mlp, near, settings

import horovod_sparse as hvs

pytestmark = pytest.mark.mpi

# yes: as stock. refused: an error on every rank, with a remedy. -: does not apply, for the reason in the comment.
TABLE = """
situation                                                    Horovod  DDP      FSDP2    sharded  local    arrays
training                                                     yes      yes      yes      yes      yes      yes
training_with_adamw                                          yes      yes      yes      yes      -        -       # arrays, local: no exchange of gradients knows AdamW
several_backward_passes_in_a_step                            yes      yes      yes      yes      yes      yes
several_exchanged_passes_in_a_step                           yes      yes      yes      refused  -        -       # arrays, local: no exchange of gradients before the step
a_layer_frozen_from_the_start                                yes      yes      yes      yes      yes      -       # arrays: a script leaves out what it likes
a_layer_frozen_for_some_steps                                yes      yes      yes      yes      yes      -
a_layer_frozen_after_the_first_pass_of_a_step                yes      yes      yes      yes      -        -       # local: freeze between two steps
a_layer_frozen_after_the_first_exchanged_pass_of_a_step      yes      yes      yes      refused  -        -       # local: no exchange of gradients before the step
a_layer_thawed_later                                         yes      -        refused  refused  yes      -       # DDP: stock does not average such gradients
layers_without_a_gradient_on_some_ranks                      yes      yes      yes      yes      yes      -
a_layer_without_a_gradient_on_all_ranks                      yes      yes      yes      yes      yes      -
gradients_zeroed_in_place                                    yes      yes      yes      yes      yes      -
layers_run_in_a_different_order_on_each_rank                 yes      yes      yes      yes      yes      -
parameters_listed_in_a_different_order_on_each_rank          yes      yes      yes      yes      yes      -       # arrays: know no parameters
a_parameter_shared_by_two_layers                             yes      yes      yes      yes      yes      yes
an_empty_parameter                                           yes      yes      -        -        yes      yes     # FSDP: torch cannot reduce it
parameters_of_several_dtypes                                 yes      yes      yes      -        yes      -       # sharded: float32 and bfloat16. arrays: one dtype each (test_arrays.py)
complex_parameters                                           yes      yes      yes      -        yes      -
other_defaults_of_torch                                      yes      yes      yes      yes      yes      -       # arrays: NumPy's
param_groups_with_different_rates                            yes      yes      yes      yes      yes      -       # arrays: one rate each
embeddings_with_sparse_gradients                             yes      yes      -        -        yes      -       # FSDP: torch does not support them
activations_computed_again                                   yes      yes      yes      yes      yes      yes
a_layer_that_runs_twice                                      yes      yes      yes      yes      yes      yes
a_backward_pass_that_fails_before_the_first_gradient         yes      yes      yes      yes      yes      yes     # after it: test_optimizer.py, test_ddp.py, test_fsdp_passes.py
gradients_in_one_flat_buffer                                 yes      yes      -        -        yes      -       # FSDP: has its own buffers
gradients_clipped_by_the_compression                         yes      yes      yes      refused  refused  -       # arrays: test_arrays.py
gradients_clipped_by_the_script_at_density_1                 yes      yes      yes      yes      -        -       # local: before its own step. arrays: explicit
gradients_divided_by_a_number_that_changes_at_density_1      yes      yes      yes      yes      -        -       # below, rank 0 warns
a_step_that_a_scaler_skips                                   yes      yes      yes      yes      -        -       # local: each rank skips its own (test_local_sgd.py)
a_dropped_step                                               refused  refused  refused  refused  -        -
a_dropped_step_where_exchanges_are_undoable                  yes      yes      yes      yes      -        -
exchanged_passes_with_momentum_of_the_compression            refused  refused  refused  refused  -        -
an_exchanged_pass_after_gradients_were_changed               refused  refused  refused  refused  -        -
two_steps_with_the_same_gradients_at_density_1               yes      yes      yes      yes      -        -       # local: a second round. arrays: a second exchange
two_steps_with_the_same_gradients                            refused  refused  refused  refused  -        -       # those of memory='residual' count twice, as in stock
momentum_cleared_by_the_script                               yes      yes      yes      yes      -        -       # local: own momentum of each rank. arrays: know no optimizer
momentum_moved_by_the_script                                 yes      yes      yes      yes      -        -
momentum_scaled_by_the_script_at_density_1                   yes      yes      yes      yes      -        -       # below, rank 0 warns
a_closure                                                    yes      yes      yes      yes      yes      -       # arrays: the call stands in the closure
two_optimizers_of_one_model                                  yes      yes      yes      yes      yes      -       # arrays: know no optimizer
an_optimizer_with_its_own_step                               yes      yes      yes      yes      -        -       # local: its momentum stays on the rank
attributes_and_hooks_of_the_optimizer                        yes      -        -        -        yes      -       # DDP, FSDP: wrap no optimizer
a_learning_rate_of_0_for_some_steps                          yes      yes      yes      yes      yes      -
learning_rates_that_fall_near_0_and_rise_again               yes      yes      yes      yes      -        -
two_models_in_turn_and_together                              yes      yes      yes      yes      yes      yes
ranks_with_fewer_steps                                       yes      yes      -        -        yes      -       # FSDP: torch has no join. arrays: as any collective
going_back_with_reset                                        yes      yes      yes      yes      yes      -       # arrays: make a new one
a_training_that_ends                                         yes      yes      yes      yes      yes      yes
resuming_on_the_same_ranks                                   yes      yes      yes      yes      yes      yes
resuming_on_another_number_of_ranks                          yes      yes      yes      -        yes      -       # arrays: same ranks only
an_unknown_compression                                       refused  refused  refused  refused  refused  refused
configurations_that_differ_between_ranks                     refused  refused  refused  refused  refused  refused
models_that_differ_between_ranks                             refused  -        refused  refused  refused  refused # DDP: torch itself refuses them
parameters_with_the_same_name                                refused  refused  -        -        refused  -       # FSDP: names are the model's. arrays: have none
momentum_of_both_optimizer_and_compression                   refused  refused  refused  refused  refused  -       # arrays: know no optimizer
an_optimizer_that_is_wrapped_already                         refused  refused  refused  refused  refused  -
a_parameter_that_gets_another_group                          -        refused  refused  refused  -        -       # Horovod: test_late_changes.py, local: test_local_sgd.py
an_optimizer_of_another_model                                -        refused  refused  refused  -        -       # Horovod, local: the optimizer is the model
"""  # noqa: E501

_, *NAMES = TABLE.split("\n")[1].split()
ROWS = {row.split()[0]: row.split("#")[0].split()[1:] for row in TABLE.strip().split("\n")[1:]}
WRITTEN = []
# Front ends that exchange in the backward pass, through hooks of torch, under torchrun, too.
HOOKED = ("DDP", "FSDP2", "sharded")


def situation(message=None, **messages):
    """Run a test with the front ends in its row; where it is refused, expect an error on every rank.

    Without any of them, which happens under torchrun, there is no test: a skipped one would fail the run.
    """

    def decorate(test):
        name = test.__name__.removeprefix("test_")
        WRITTEN.append(name)
        cells = {one: cell for one, cell in zip(NAMES, ROWS[name], strict=True) if cell != "-"}
        if torch_ranks.launched():  # torchrun starts no MPI
            cells = {one: cell for one, cell in cells.items() if one in HOOKED}
        if not cells:
            return None

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

        # FSDP's collectives take long where ranks share cores: `make test-ci` runs these at 2 ranks, not at 3.
        made = [pytest.param(one, marks=pytest.mark.nightly if one in ("FSDP2", "sharded") else ()) for one in cells]
        return pytest.mark.parametrize("front_end", made, indirect=True)(run)

    return decorate


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
        assert front_end.everywhere(exchanges(training) in (None, 3))

    front_end.check(train, passes=3)


def exchanges(training):
    """Return the number of steps that hooks of torch have exchanged; None for others, and for one rank alone."""
    if training.exchanges and training.front_end.ranks > 1 and training.front_end.name in HOOKED:
        return training.exchange.statistics()["total/steps"]
    return None


def accumulate(training):
    for step in range(3):
        training.zero_grad()
        for batch in range(3):
            training.backward(3 * step + batch, last=batch == 2)
        training.step()


@situation(sharded="RANK: .*momentum would decay twice.*set_requires_gradient_sync")
def test_several_exchanged_passes_in_a_step(front_end):
    """Without ``no_sync`` and its like, each pass exchanges what it adds; they count as one step."""

    def exchange_each(training):
        for step in range(3):
            training.zero_grad()
            for batch in range(3):
                training.backward(3 * step + batch)
                reduced = front_end.reduced(training)
            with reduced:
                training.step()

    front_end.check(exchange_each, like=accumulate, stock={"passes": 3}, dgc=False)


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
            frozen = 3 <= step < 6
            freeze(training, "second", frozen=frozen)
            before = training.parameters()["second.weight"]
            training.take(step)
            stands = same(training.parameters()["second.weight"], before)
            assert front_end.everywhere(stands or not frozen or training.momentum is not None)

    front_end.check(train, unused=True, dgc=False)


def train_frozen_between(training, exchanges):
    for step in range(0, 12, 2):
        training.zero_grad()
        training.backward(step, last=exchanges)
        reduced = training.front_end.reduced(training) if exchanges else nullcontext()
        freeze(training, "third")
        training.backward(step + 1)
        if exchanges:
            reduced = training.front_end.reduced(training)
        with reduced:
            training.step()
        freeze(training, "third", frozen=False)


@situation()
def test_a_layer_frozen_after_the_first_pass_of_a_step(front_end):
    """Its gradient of that pass counts."""
    front_end.check(functools.partial(train_frozen_between, exchanges=False), passes=2, unused=True, dgc=False)


@situation(sharded="RANK: .*momentum would decay twice.*set_requires_gradient_sync")
def test_a_layer_frozen_after_the_first_exchanged_pass_of_a_step(front_end):
    accumulating = functools.partial(train_frozen_between, exchanges=False)
    exchanging = functools.partial(train_frozen_between, exchanges=True)
    front_end.check(exchanging, like=accumulating, stock={"passes": 2}, unused=True, dgc=False)


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
            names += ["second"] * (step % 3 == 1 and front_end.name in HOOKED)
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
def test_complex_parameters(front_end):
    """They travel dense."""
    layers = {"narrow": (6, torch.complex64), "wide": (9, torch.complex128)}
    front_end.check(model=lambda: Model(**{name: Layer(n, dtype=dtype) for name, (n, dtype) in layers.items()}))


@situation()
@pytest.mark.parametrize(
    "default", [torch.float16, "meta", pytest.param(torch.float64, marks=pytest.mark.nightly)], ids=str
)
def test_other_defaults_of_torch(front_end, set_default, default):
    """``set_default_dtype`` and ``set_default_device`` change no bit, also of momentum that a loaded state clears."""

    def ends():
        for compression, momentum in front_end.sparse:
            training = front_end.training(compression, momentum, unused=True)
            initial = training.optimizer.state_dict()
            for step in range(4):
                if step == 2:
                    training.optimizer.load_state_dict(initial)
                training.take(step, *list(SHAPES)[front_end.replica > 0 :])
            yield training.parameters()

    expected = list(ends())
    set_default(default)
    assert front_end.everywhere(same(list(ends()), expected))


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


def train_exchanging_once(training):
    train(training)
    assert training.front_end.everywhere(exchanges(training) in (None, 6))


@situation()
def test_activations_computed_again(front_end):
    """By a backward pass for each layer, which leave one exchange in a step."""
    front_end.check(train_exchanging_once, model=lambda: Model(reentrant=True))


@situation()
def test_a_layer_that_runs_twice(front_end):
    """Under activation checkpoints, which are not reentrant."""

    def model():
        made = Model(False)
        made.again = made.second
        return made

    front_end.check(train_exchanging_once, model=model)


@situation()
def test_a_backward_pass_that_fails_before_the_first_gradient(front_end):
    """An error of the script that it catches: training goes on as if the pass had not been."""

    def fail(_):
        raise KeyError("of the script")

    def train_with_failures(training):
        for step in range(6):
            training.zero_grad()
            if step % 2:
                loss = training.model(training.gradients(100 + step))
                loss.register_hook(fail)
                with pytest.raises(KeyError, match="of the script"):
                    loss.backward()
                getattr(training.module, "reset_iter_state", lambda: None)()  # of FSDP
            training.take(step)

    front_end.check(train_with_failures, like=train)


# --- the optimizer's step ---


@situation()
def test_gradients_in_one_flat_buffer(front_end):
    """As with Megatron, apex and fairseq. What is special to Horovod is in ``test_flat_gradients.py``."""

    def train_with_views(training):
        parameters = list(training.module.parameters())
        buffer = torch.zeros(sum(p.numel() for p in parameters))
        for p, part in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p)
        for step in range(6):
            buffer.zero_()
            training.backward(step)
            training.step()
        assert front_end.everywhere(all(p.grad._base is buffer for p in parameters))

    front_end.check(train_with_views, like=train)
    front_end.check_bits(train_with_views, train)


@situation(local="RANK: .*outer step .*residual", sharded="RANK: max_norm=50.0 does not work")
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
def test_gradients_divided_by_a_number_that_changes_at_density_1(front_end, caplog):
    """Such as that of the tokens in a batch. Below, what is delivered is a sum over steps: rank 0 warns once."""

    def train(training):
        for step in range(8):
            training.zero_grad()
            training.backward(step)
            with front_end.reduced(training):
                for p in training.module.parameters():
                    p.grad.div_(10 + step)
                training.step()

    def reports():
        return [message for message in caplog.messages if "gradients are scaled after the exchange" in message]

    front_end.check(train, below=False, dgc=False)
    assert front_end.everywhere(not reports())
    train(front_end.training(SPARSE[0]))
    assert front_end.everywhere(len(reports()) == (front_end.rank == 0 and front_end.ranks > 1))


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


# How each front end computes gradients without an exchange.
PASSES = {
    "Horovod": r"\(with torch\.autograd\.grad\(\)[^)]*backward_passes_per_step",
    "DDP": r"\(inside model\.no_sync\(\)\)",
    **dict.fromkeys(("FSDP2", "sharded"), r"\(after model\.set_requires_gradient_sync\(False\)\)"),
}


@situation(**{name: f"RANK: .*{passes}.*undoable=True" for name, passes in PASSES.items()})
def test_a_dropped_step(front_end):
    """Exchanged and cleared without a step; it would arrive later, from the residuals."""
    training = front_end.training(RECOMMENDED, 0.5)
    training.backward(0)
    front_end.reduced(training)
    training.zero_grad()
    if front_end.ranks > 1:
        with pytest.raises(RuntimeError, match=rf"rank {front_end.rank}: .*{PASSES[front_end.name]}.*undoable"):
            training.exchange.discard()
    training.backward(1)


@situation()
@pytest.mark.parametrize("how", ["cleared", "zeroed", "discarded"])
def test_a_dropped_step_where_exchanges_are_undoable(front_end, how):
    """As in the training of a GAN, or a trial step: every bit is as if it had not been."""

    def train_with_trials(training):
        for step in range(9):
            if step % 3 == 1:
                training.backward(100 + step)
                front_end.reduced(training)
                if how == "discarded":
                    training.exchange.discard()
                training.zero_grad(set_to_none=how != "zeroed")
            training.backward(step)
            training.step()
            training.zero_grad(set_to_none=how != "zeroed")

    def train(training):
        for step in range(9):
            training.take(step)

    if how == "cleared":  # of the others, the same training says as much
        front_end.check(train_with_trials, like=train, undoable=True, dgc=False)
    front_end.check_bits(train_with_trials, train, undoable=True)


@situation(
    **{name: f"RANK: .*momentum of its own.*{passes}" for name, passes in PASSES.items()}
    | {"sharded": "RANK: .*momentum would decay twice.*set_requires_gradient_sync"}
)
def test_exchanged_passes_with_momentum_of_the_compression(front_end):
    training = front_end.training(hvs.Compression.topka(memory="momentum", momentum=0.9, **settings()))
    for _ in range(2):
        training.backward(0)
        front_end.reduced(training)


@situation("RANK: .* cleared")
@pytest.mark.parametrize("change", ["scaled", "cleared"])
def test_an_exchanged_pass_after_gradients_were_changed(front_end, change):
    """A script that clips between two passes of one step, or clears some gradients."""
    # Fully sharded, any such pass is refused with momentum.
    training = front_end.training(SPARSE[0] if front_end.name == "sharded" else RECOMMENDED)
    training.backward(0)
    front_end.reduced(training)
    first = next(training.module.parameters())
    first.grad = None if change == "cleared" else first.grad / 2
    training.backward(1)


def step_twice(training):
    for step in range(3):
        training.zero_grad()
        training.backward(step)
        training.step()
        training.step()


@situation()
def test_two_steps_with_the_same_gradients_at_density_1(front_end):
    front_end.check(step_twice, below=False, dgc=False)


@situation(r"RANK: .*momentum .*would count again: call .*step\(\) once")
@pytest.mark.parametrize("own", [False, True], ids=["", "own"])
def test_two_steps_with_the_same_gradients(front_end, own):
    """What is sent stands for a velocity, in which the gradient of one step is not to be seen."""
    dgc = hvs.Compression.dgc(momentum=0.5, **settings())
    step_twice(front_end.training(*(dgc, 0.0) if own else (RECOMMENDED, 0.5)))


@situation()
@pytest.mark.parametrize("how", ["deleted", "deleted after state_dict()", "zeroed", "replaced"])
def test_momentum_cleared_by_the_script(front_end, how):
    """It begins again, as after loading the state in which the optimizer has begun."""
    ends = []
    for clears in (True, False):
        training = front_end.training(RECOMMENDED, 0.5)
        initial = training.optimizer.state_dict()
        train(training)
        if clears:
            clear(training.optimizer, how)
        else:
            training.optimizer.load_state_dict(initial)
        train(training)
        ends.append(training.parameters())
    assert front_end.everywhere(same(*ends))


def clear(optimizer, how):
    for state in optimizer.state.values():
        buffer = state["momentum_buffer"]
        if how == "zeroed":
            buffer.zero_()
        elif how == "replaced":
            state["momentum_buffer"] = torch.zeros_like(buffer)
    if how == "deleted after state_dict()":
        optimizer.state_dict()
    if how.startswith("deleted"):
        optimizer.state.clear()


@situation()
def test_momentum_moved_by_the_script(front_end):
    """To the host between two steps, and back."""

    def moving(training):
        for step in range(6):
            training.take(step)
            for state in training.optimizer.state.values():
                if state.get("momentum_buffer") is not None:
                    state["momentum_buffer"] = state["momentum_buffer"].clone()

    # Of a small layer, nothing is delivered in most steps: its buffer then holds zeros.
    front_end.check_bits(moving, model=lambda: Model(small=Layer(3)), make=functools.partial(sgd, decay=0))


@situation()
def test_momentum_scaled_by_the_script_at_density_1(front_end, caplog):
    """Below, what is not delivered yet keeps its size: rank 0 warns once."""

    def scaling(training):
        for step in range(6):
            training.take(step)
            for state in training.optimizer.state.values():
                if state.get("momentum_buffer") is not None:
                    state["momentum_buffer"].mul_(0.5)

    def reports():
        return [message for message in caplog.messages if "the script changes the momentum of SGD" in message]

    front_end.check(scaling, below=False, dgc=False)
    assert front_end.everywhere(not reports())
    scaling(front_end.training(RECOMMENDED, 0.5))
    assert front_end.everywhere(len(reports()) == (front_end.rank == 0 and front_end.ranks > 1))


@situation()
def test_a_closure(front_end):
    """Horovod's own ``step(closure)`` applies gradients that are not reduced: it is compared with its plain loop."""

    def with_closure(training):
        for step in range(6):

            def closure(step=step):
                training.zero_grad()
                return training.backward(step)

            assert training.optimizer.step(closure).ndim == 0

    front_end.check(with_closure, like=train)
    front_end.check_bits(with_closure, train)


@situation()
def test_two_optimizers_of_one_model(front_end):
    def make(model, momentum):
        rest = [*model.second.parameters(), *model.third.parameters()]
        return sgd(model, momentum, model.first.parameters()) + sgd(model, momentum, rest, lr=0.5)

    front_end.check(make=make)


class Centralized(torch.optim.SGD):
    """Changes gradients, and leaves the rest to its base class."""

    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            p.grad.sub_(p.grad.mean())
        return super().step(closure)


@situation()
def test_an_optimizer_with_its_own_step(front_end, caplog):
    """A compression that replaces momentum of SGD leaves it to a step that may do more: rank 0 reports it."""

    def make(model, momentum):
        return [Centralized(model.parameters(), 0.25, momentum=momentum)]

    front_end.check(make=make, below=False, dgc=False)
    reports = [message for message in caplog.messages if "of subclasses without their own step()" in message]
    assert front_end.everywhere(len(reports) == (front_end.rank == 0))
    ends = []
    for memory in ("momentum", "residual"):
        training = front_end.training(hvs.Compression.topka(memory=memory, **settings()), 0.5, make)
        train(training)
        ends.append(training.parameters())
    assert agree(front_end.comm, ends[0].values())
    assert front_end.everywhere(near(ends[0].values(), ends[1].values()))


class Chosen(torch.optim.SGD):
    """Has an option that is no key of the param groups, and an argument without a default."""

    def __init__(self, params, lr, rank, centralize=True):
        super().__init__(params, lr)
        self.rank, self.centralize = rank, centralize

    def tell(self):
        return self.rank


HOOKS = ["step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"]


@situation()
def test_attributes_and_hooks_of_the_optimizer(front_end):
    """A wrapped optimizer keeps them; more of this is in ``test_wrapping.py``."""
    plain, called = [], []

    def make(model, momentum):
        optimizer = Chosen(model.parameters(), 0.1, rank=8, centralize=False)
        optimizer.note = ["set by hand"]
        optimizer.defaults["other"] = 3
        optimizer.param_groups[0]["layer"] = "all"
        optimizer.told = types.MethodType(lambda self: self.rank, optimizer)
        for name in HOOKS:
            getattr(optimizer, f"register_{name}_hook")(lambda *_, name=name: called.append(name))
        plain.append(optimizer)
        return [optimizer]

    training = front_end.training(SPARSE[0], make=make)
    optimizer = training.optimizer
    optimizer.rank = 9
    assert (optimizer.centralize, optimizer.tell(), optimizer.told(), plain[0].told()) == (False, 9, 9, 8)
    assert optimizer.note is plain[0].note
    assert optimizer.defaults["other"] == 3
    assert optimizer.param_groups[0] is plain[0].param_groups[0]
    assert optimizer.param_groups[0]["layer"] == "all"
    training.take(0)
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == HOOKS
    assert not plain[0]._optimizer_state_dict_pre_hooks.keys() - optimizer._optimizer_state_dict_pre_hooks.keys()
    assert len(plain[0]._optimizer_step_post_hooks) == 1  # not those of the front end


@situation()
def test_a_learning_rate_of_0_for_some_steps(front_end):
    def train(training):
        for step, rate in enumerate([0.25, 0.25, 0.0, 0.0, 0.5, 0.25]):
            training.set_rate(rate)
            training.take(step)

    front_end.check(train, dgc=False)


@situation()
def test_learning_rates_that_fall_near_0_and_rise_again(front_end):
    """Warm restarts, with momentum: the parameters grow no further than in dense training."""
    norms = []
    for density in (0.05, 1.0):
        compression = hvs.Compression.topka(density=density, dense_below=0)
        training = front_end.training(compression, 0.9, functools.partial(sgd, lr=0.1, decay=0), mlp)
        scheduler = CosineAnnealingWarmRestarts(training.optimizer, 30)
        for step in range(90):
            training.zero_grad()
            loss_of(training.model, front_end.rank, step).backward()
            training.step()
            scheduler.step()
        norms.append(flat(training.parameters()).norm().item())
    assert front_end.everywhere(0 < norms[0] <= 1.2 * norms[1]), norms


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
def test_going_back_with_reset(front_end):
    """Model and optimizer are restored; the exchange forgets the abandoned run."""
    for compression, momentum in front_end.sparse:
        straight, again = (front_end.training(compression, momentum) for _ in range(2))
        model, optimizer, *_ = again.save()
        for step in range(100, 107):
            again.take(step)
        again.module.load_state_dict(model)
        again.optimizer.load_state_dict(optimizer)
        again.exchange.reset()
        for training in (straight, again):
            train(training)
        assert front_end.everywhere(same(again.parameters(), straight.parameters()))


@pytest.fixture
def no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@situation()
def test_a_training_that_ends(front_end, no_collection):
    """Threads and connections end with the last reference to it, even after a step that was not finished."""

    def threads():
        return sum(thread.name == "horovod_sparse" for thread in threading.enumerate())

    def begin():
        training = front_end.training(RECOMMENDED if front_end.replaces_momentum else SPARSE[0])
        training.take(0)
        training.backward(1)
        return training

    begin()  # errors of torch's first imports keep the frames
    before = threads()
    training = begin()
    left = [weakref.ref(connection) for connection in connections(training.exchange)]
    del training
    if front_end.name in ("FSDP2", "sharded"):  # whose modules refer to themselves
        gc.collect()
    deadline = time.monotonic() + 10  # of the watch, too
    while time.monotonic() < deadline and (threads() > before or any(one() for one in left)):
        time.sleep(0.05)
    assert front_end.everywhere(threads() <= before and not any(one() for one in left))


def connections(exchange):
    """Return what torch's connections of an exchange belong to; MPI's are only freed by all ranks together."""
    transport = getattr(getattr(exchange, "_exchange", exchange), "transport", None)
    return [transport._connection] if torch_ranks.launched() else []


@situation()
def test_resuming_on_the_same_ranks(front_end):
    """A resumed run has the bits of an uninterrupted one."""
    own = [(hvs.parse("dgc:density=0.05,dense_below=100,nesterov=True"), 0.0)]
    for case in front_end.sparse + own * front_end.replaces_momentum:
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
    sharded="unknown compression 'topk'.*fully_shard alone",
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


@situation(r"RANK: .* was added .*add_param_group\(\) before it")
@pytest.mark.parametrize("change", ["added", "moved"])
def test_a_parameter_that_gets_another_group(front_end, change):
    """Its residual is kept with the rate of its first group, or without one."""

    def make(model, momentum):
        parameters = list(model.parameters())
        return sgd(model, momentum, parameters[:-1] if change == "added" else parameters)

    training = front_end.training(SPARSE[0], make=make)
    training.take(0)
    last, group = list(training.module.parameters())[-1], training.optimizer.param_groups[0]
    group["params"] = [p for p in group["params"] if p is not last]
    training.take(1)  # nothing is wrong with a parameter that is trained no longer
    training.optimizer.add_param_group({"params": [last], "lr": 1.0})
    training.take(2)


@situation("RANK: .*the optimizer SGD is not the one of this model.*: pass the optimizers")
def test_an_optimizer_of_another_model(front_end):
    front_end.training(SPARSE[0], make=lambda model, momentum: sgd(Model(), momentum)).take(0)
