"""At density 1 our optimizer is Horovod's, whatever a training script does with it."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
from laws import everywhere, same_bits
from torch import nn
from training import Branches, assert_parity, batch, loss_of, mlp, own_gradients, snapshot

import horovod_sparse as hvs

pytestmark = pytest.mark.mpi

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def sgd(model: nn.Module, **settings: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **settings})


def wrapped(wrap, model, **settings):
    """The model's SGD optimizer, wrapped."""
    return wrap(sgd(model), named_parameters=model.named_parameters(), **settings)


def train(optimizer, model, rank, steps=5):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    return snapshot(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(hvd, comm, name):
    def scenario(wrap, rank):
        model = mlp()
        optimizer = wrap(OPTIMIZERS[name](model.parameters()), named_parameters=model.named_parameters())
        return train(optimizer, model, rank, steps=10)

    assert_parity(hvd, comm, scenario)


def every_torch_optimizer():
    """All that Horovod's own tests step through; LBFGS and SparseAdam are not supported there either."""
    values = (value for _, value in inspect.getmembers(torch.optim, inspect.isclass))
    left_out = (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)
    return [kind for kind in values if issubclass(kind, torch.optim.Optimizer) and kind not in left_out]


@pytest.mark.parametrize("kind", every_torch_optimizer(), ids=lambda kind: kind.__name__)
def test_every_optimizer_of_torch(hvd, comm, kind):
    """Some layers without gradient on some ranks, a restart from rank 0's state, and on with training."""
    rank = comm.Get_rank()

    def build():
        torch.manual_seed(9)
        model = nn.Sequential(nn.Linear(12, 16, bias=False), nn.Linear(16, 4, bias=False))  # Muon takes matrices only
        plain = kind(model.parameters(), lr=0.01)
        return model, wrapped_plain(plain, model)

    def wrapped_plain(plain, model):
        compression = hvs.Compression.topka(0.2, dense_below=0)
        return hvs.DistributedOptimizer(plain, model.named_parameters(), compression)

    model, optimizer = build()
    for step in range(3):
        optimizer.zero_grad()
        x, y = batch(rank, step)
        hidden = model[0](x)
        (model[1](hidden) - y if rank == 0 else hidden).square().mean().backward()
        optimizer.step()
    assert all(same_bits(comm, p.numpy()) for p in snapshot(model))
    state = optimizer.state_dict()
    restarted, fresh = build()
    if rank == 0:
        restarted.load_state_dict(model.state_dict())
        fresh.load_state_dict(state)
    hvd.broadcast_optimizer_state(fresh, root_rank=0)  # steps fresh optimizers, which moves ASGD's parameters
    hvd.broadcast_parameters(restarted.state_dict(), root_rank=0)
    assert everywhere(comm, all(map(torch.equal, snapshot(model), snapshot(restarted))))
    train(fresh, restarted, rank, steps=2)
    assert all(same_bits(comm, p.numpy()) for p in snapshot(restarted))


def test_without_named_parameters(hvd, comm):
    def scenario(wrap, rank):
        model = mlp()
        return train(wrap(sgd(model)), model, rank)

    assert_parity(hvd, comm, scenario)


def test_param_groups_with_learning_rates_of_their_own(hvd, comm):
    def scenario(wrap, rank):
        model = mlp()
        groups = [{"params": model[0].parameters(), "lr": 0.3}, {"params": [*model[2].parameters()]}]
        groups += [{"params": model[4].parameters(), "lr": 0.01}]
        optimizer = wrap(torch.optim.SGD(groups, lr=0.1), named_parameters=model.named_parameters())
        return train(optimizer, model, rank)

    assert_parity(hvd, comm, scenario)


def test_backward_passes_per_step(hvd, comm):
    def scenario(wrap, rank):
        model = mlp()
        optimizer = wrapped(wrap, model, backward_passes_per_step=2)
        for step in range(6):
            if step % 2 == 0:
                optimizer.zero_grad()
            (loss_of(model, rank, step) / 2).backward()
            if step % 2:
                optimizer.step()
        return snapshot(model)

    assert_parity(hvd, comm, scenario)


def test_a_step_before_all_backward_passes_are_done(hvd, comm):
    def scenario(wrap, rank):
        model = mlp()
        optimizer = wrapped(wrap, model, backward_passes_per_step=3)
        return train(optimizer, model, rank, steps=3)

    assert_parity(hvd, comm, scenario)


def test_clipping_between_synchronize_and_step(hvd, comm):
    def scenario(wrap, rank):
        model = mlp()
        optimizer = wrapped(wrap, model)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            with optimizer.skip_synchronize():
                optimizer.step()
        return snapshot(model)

    assert_parity(hvd, comm, scenario)


def test_step_after_synchronize_warns_and_exchanges_once(hvd, comm):
    model = mlp()
    optimizer = wrapped(hvs.DistributedOptimizer, model, compression=hvs.Compression.topka(0.1, dense_below=0))
    loss_of(model, comm.Get_rank(), 0).backward()
    optimizer.synchronize()
    reduced = [p.grad.clone() for p in model.parameters()]
    sent = optimizer.traffic.bytes_sent
    if comm.Get_size() > 1:
        with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
            optimizer.step()
        assert everywhere(comm, sent > 0)
    assert everywhere(comm, optimizer.traffic.bytes_sent == sent)
    assert everywhere(comm, all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), reduced, strict=True)))


def test_a_rank_without_backward_after_a_skipped_step_still_meets_the_others(hvd, comm):
    """A GradScaler skips step() after synchronize(); the next step must not be taken for synchronized already."""
    model, rank, ranks = mlp(), comm.Get_rank(), comm.Get_size()
    optimizer = wrapped(hvs.DistributedOptimizer, model, compression=hvs.Compression.topka(1.0, dense_below=0))
    loss_of(model, rank, 0).backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    if rank == 0:
        loss_of(model, rank, 1).backward()
    expected = comm.bcast([p.grad / ranks for p in model.parameters()] if rank == 0 else None)
    optimizer.step()
    if ranks > 1:
        pairs = zip(model.parameters(), expected, strict=True)
        assert everywhere(comm, all(torch.allclose(p.grad, gradient) for p, gradient in pairs))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(hvd, comm, set_to_none):
    def scenario(wrap, rank):
        model = mlp()
        optimizer = wrapped(wrap, model)
        for step in range(4):
            if wrap is hvd.DistributedOptimizer:
                model.zero_grad(set_to_none=set_to_none)  # Horovod's own takes no argument
            else:
                optimizer.zero_grad(set_to_none=set_to_none)
                assert all((p.grad is None) == set_to_none for p in model.parameters()) or step == 0
            loss_of(model, rank, step).backward()
            optimizer.step()
        return snapshot(model)

    assert_parity(hvd, comm, scenario)


def test_zero_grad_during_an_exchange_is_refused(hvd, comm):
    model = mlp()
    optimizer = wrapped(hvs.DistributedOptimizer, model, compression=hvs.Compression.topka(0.1))
    loss_of(model, comm.Get_rank(), 0).backward()
    if comm.Get_size() > 1:
        with pytest.raises(AssertionError, match="zero_grad"):
            optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=10),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3)),
    ],
    ids=["step", "one cycle", "warm-up from zero"],
)
def test_learning_rate_schedulers(hvd, comm, schedule):
    def scenario(wrap, rank):
        model = mlp()
        optimizer = wrapped(wrap, model)
        scheduler = schedule(optimizer)
        for step in range(8):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            scheduler.step()
        return snapshot(model)

    assert_parity(hvd, comm, scenario)


def branches(hvd, comm, order_of):
    """Trains Branches; ``order_of(rank, step)`` says which branches run, and in which order."""

    def scenario(wrap, rank):
        model = Branches()
        optimizer = wrapped(wrap, model)
        for step in range(5):
            optimizer.zero_grad()
            model(batch(rank, step)[0], order_of(rank, step)).backward()
            optimizer.step()
        return snapshot(model)

    assert_parity(hvd, comm, scenario)


def test_parameters_without_gradient_on_some_ranks(hvd, comm):
    branches(hvd, comm, lambda rank, step: ("left", "right", "left right")[(rank + step) % 3])


def test_parameters_without_gradient_on_any_rank(hvd, comm):
    branches(hvd, comm, lambda rank, step: "left")


def test_hooks_that_fire_in_another_order_on_every_rank(hvd, comm):
    branches(hvd, comm, lambda rank, step: "left right" if (rank + step) % 2 else "right left")


def test_ranks_without_any_backward_pass(hvd, comm):
    def scenario(wrap, rank):
        model = mlp()
        optimizer = wrapped(wrap, model)
        for step in range(3):
            optimizer.zero_grad()
            if rank == 0 or step == 0:
                loss_of(model, rank, step).backward()
            optimizer.step()
        return snapshot(model)

    if comm.Get_size() > 1:  # a single process has nobody to take a gradient from
        assert_parity(hvd, comm, scenario)


def test_freezing_and_unfreezing(hvd, comm):
    def scenario(wrap, rank):
        model = mlp()
        optimizer = wrapped(wrap, model)
        for step in range(6):
            for p in model[step % 3 * 2].parameters():
                p.requires_grad_(False)
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            for p in model.parameters():
                p.requires_grad_(True)
        return snapshot(model)

    assert_parity(hvd, comm, scenario)


def test_two_optimizers_in_one_program(hvd, comm):
    """A GAN: each optimizer's parameters get gradients in the other's step, too."""

    def scenario(wrap, rank):
        generator, critic = mlp(), nn.Linear(4, 1)
        nn.init.constant_(critic.weight, 0.3)
        nn.init.zeros_(critic.bias)
        optimizers = [wrapped(wrap, model) for model in (generator, critic)]
        for step, (number, optimizer) in itertools.product(range(3), enumerate(optimizers)):
            for model, learns in ((generator, number == 0), (critic, number == 1)):
                model.zero_grad()
                model.requires_grad_(learns)
            score = critic(generator(batch(rank, step)[0])).square().mean()
            score.backward()
            optimizer.step()
        return snapshot(generator, critic)

    assert_parity(hvd, comm, scenario)


def test_two_optimizers_that_exchange_at_the_same_time(hvd, comm):
    def scenario(wrap, rank):
        first, second = mlp(), mlp()
        optimizers = [
            wrap(sgd(model), named_parameters=[(f"{name}.{key}", p) for key, p in model.named_parameters()])
            for name, model in (("first", first), ("second", second))
        ]
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            x, y = batch(rank, step)
            order = (first, second) if rank % 2 else (second, first)
            sum((model(x) - y).square().mean() for model in order).backward()
            for optimizer in optimizers:
                optimizer.step()
        return snapshot(first, second)

    assert_parity(hvd, comm, scenario)


def test_a_parameter_shared_by_two_modules(hvd, comm):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.encoder, self.decoder = nn.Linear(12, 4, bias=False), nn.Linear(12, 4)
            self.decoder.weight = self.encoder.weight

        def forward(self, x):
            return self.decoder(self.encoder(x) @ self.encoder.weight)

    def scenario(wrap, rank):
        model = Tied()
        return train(wrapped(wrap, model), model, rank)

    assert_parity(hvd, comm, scenario)


class Embedded(nn.Module):
    """An embedding with sparse gradients below a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.words = nn.Embedding(50, 6, sparse=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, embed: bool = True) -> torch.Tensor:
        if not embed:
            return self.head(x[:, :6])
        return self.head(self.words((x[:, 0].abs() * 10).long().clamp(max=49)))


@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_embeddings_with_sparse_gradients(hvd, comm, sparse_as_dense):
    def scenario(wrap, rank):
        model = Embedded()
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = wrap(plain, named_parameters=model.named_parameters(), sparse_as_dense=sparse_as_dense)
        return train(optimizer, model, rank)

    assert_parity(hvd, comm, scenario)


def test_an_embedding_unused_on_some_ranks_after_the_first_step(hvd, comm):
    """Horovod itself would hang here: the ranks without it would submit a dense gradient."""
    model = Embedded()
    optimizer = hvs.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=hvs.Compression.topka(1.0, dense_below=0),
    )
    rank = comm.Get_rank()
    for step in range(3):
        optimizer.zero_grad()
        x, y = batch(rank, step)
        (model(x, embed=step == 0 or rank == 0) - y).square().mean().backward()
        expected = comm.bcast(None if model.words.weight.grad is None else model.words.weight.grad.to_dense())
        optimizer.step()
        if step:
            got = model.words.weight.grad.to_dense()
            assert everywhere(comm, torch.allclose(got, expected / comm.Get_size()))


@pytest.mark.parametrize("settings", ["sum", "predivide"])
def test_reduction(hvd, comm, settings):
    arguments = {"sum": {"op": hvd.Sum}, "predivide": {"gradient_predivide_factor": 2.0}}[settings]

    def scenario(wrap, rank):
        model = mlp()
        return train(wrapped(wrap, model, **arguments), model, rank)

    assert_parity(hvd, comm, scenario)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_groups_by_number(hvd, comm, count):
    def scenario(wrap, rank):
        model = mlp()
        return train(wrapped(wrap, model, groups=count), model, rank)

    assert_parity(hvd, comm, scenario)


def test_groups_by_list(hvd, comm):
    def scenario(wrap, rank):
        model = mlp()
        groups = [[model[0].weight, model[4].weight], [model[2].weight, model[2].bias]]
        return train(wrapped(wrap, model, groups=groups), model, rank)

    assert_parity(hvd, comm, scenario)


def test_num_groups_warns(hvd, comm):
    model = mlp()
    with pytest.warns(DeprecationWarning, match="groups"):
        optimizer = wrapped(hvs.DistributedOptimizer, model, compression=hvs.Compression.topka(1.0), num_groups=2)
    train(optimizer, model, comm.Get_rank(), steps=1)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float16, 2e-2), (torch.float64, 1e-12)], ids=str)
def test_precisions(hvd, comm, dtype, rtol):
    def scenario(wrap, rank):
        model = mlp(dtype)
        return train(wrapped(wrap, model), model, rank)

    assert_parity(hvd, comm, scenario, rtol=rtol, atol=rtol)


def test_bfloat16_gradients_are_averaged_in_float32(hvd, comm):
    """Horovod 0.28 knows no bfloat16 on the CPU, so the reference is the sum in float32."""
    model = mlp(torch.bfloat16)
    optimizer = wrapped(hvs.DistributedOptimizer, model, compression=hvs.Compression.topka(1.0, dense_below=0))
    for step in range(3):
        optimizer.zero_grad()
        local = [gradient.float().numpy() for gradient in own_gradients(model, comm.Get_rank(), step)]
        expected = [torch.from_numpy(comm.allreduce(one) / comm.Get_size()) for one in local]
        loss_of(model, comm.Get_rank(), step).backward()
        optimizer.synchronize()
        for p, one in zip(model.parameters(), expected, strict=True):
            assert everywhere(comm, p.grad.dtype == torch.bfloat16)
            assert everywhere(comm, torch.allclose(p.grad.float(), one, rtol=2**-7, atol=1e-30))
        with optimizer.skip_synchronize():
            optimizer.step()


def test_gradients_that_are_not_contiguous_keep_their_layout(hvd, comm):
    """Horovod itself refuses them; its reference is the same model in the default layout."""

    def scenario(wrap, rank):
        layout = torch.contiguous_format if wrap is hvd.DistributedOptimizer else torch.channels_last
        torch.manual_seed(5)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 2, 4))
        model = model.to(memory_format=layout)
        optimizer = wrapped(wrap, model)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(8, 3, 4, 3, generator=torch.Generator().manual_seed(10 * rank + step))
            model(x.to(memory_format=layout)).square().mean().backward()
            optimizer.step()
            assert model[0].weight.grad.is_contiguous(memory_format=layout)
        return snapshot(model)

    assert_parity(hvd, comm, scenario)


def test_process_sets(hvd, comm):
    """Even and odd ranks train on their own; a rank outside a set takes its own steps, as with Horovod."""
    ranks = comm.Get_size()
    chosen = [list(range(first, ranks, 2)) for first in range(min(2, ranks))]
    sets = [hvd.global_process_set if ranks == 1 else hvd.add_process_set(one) for one in chosen]
    mine = comm.Get_rank() % len(sets)
    inner = comm.Split(mine)
    try:

        def scenario(wrap, rank):
            results = []
            for process_set in sets:
                model = mlp()
                results += train(wrapped(wrap, model, process_set=process_set), model, comm.Get_rank())
                if process_set is not sets[mine]:
                    del results[-len(list(model.parameters())) :]
            return results

        assert_parity(hvd, inner, scenario)
    finally:
        comm.Barrier()
        for process_set in sets:
            if process_set is not hvd.global_process_set:
                hvd.remove_process_set(process_set)


def test_load_state_dict(hvd, comm):
    def scenario(wrap, rank):
        model = mlp()
        optimizer = wrapped(wrap, model)
        train(optimizer, model, rank, steps=3)
        state = optimizer.state_dict()
        saved = snapshot(model)
        train(optimizer, model, rank, steps=2)
        with torch.no_grad():
            for p, old in zip(model.parameters(), saved, strict=True):
                p.copy_(old)
        optimizer.load_state_dict(state)
        return train(optimizer, model, rank, steps=2)

    assert_parity(hvd, comm, scenario)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_broadcast_optimizer_state(hvd, comm, name):
    """Horovod steps a fresh optimizer on rank 0 alone: it must not take that for a step of ours."""
    model = mlp()
    optimizer = hvs.DistributedOptimizer(
        OPTIMIZERS[name](model.parameters()),
        named_parameters=model.named_parameters(),
        compression=hvs.Compression.topka(0.1),
    )
    optimizer.param_groups[0]["lr"] = 0.25 if comm.Get_rank() == 0 else 0.5
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert everywhere(comm, optimizer.param_groups[0]["lr"] == 0.25)
    train(optimizer, model, comm.Get_rank(), steps=2)


def test_horovods_own_compressors_give_horovods_own_optimizer(hvd, comm):
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvs.parse("none"), hvs.Compression.fp16):
        optimizer = wrapped(hvs.DistributedOptimizer, mlp(), compression=compression)
        assert optimizer._compression in (hvd.Compression.none, hvd.Compression.fp16)
        assert not hasattr(optimizer, "compression_state_dict")


def test_the_class_is_the_wrapped_one(hvd, comm):
    model = mlp()
    optimizer = wrapped(hvs.DistributedOptimizer, model, compression=hvs.Compression.topka(0.1))
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    assert optimizer.param_groups[0]["momentum"] == 0.9
