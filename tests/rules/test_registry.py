"""Custom rules: requirements, and use by name."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import numpy as np
import pytest

import horovod_sparse as hvs
from horovod_sparse.collectives import COLLECTIVES
from horovod_sparse.memories import MEMORIES
from horovod_sparse.rules import RuleOptions, Stateless, integer
from horovod_sparse.schedules import SCHEDULES, Constant
from horovod_sparse.sparsifiers import SPARSIFIERS, Base

REGISTRIES = (SPARSIFIERS, MEMORIES, COLLECTIVES, SCHEDULES)
pytestmark = pytest.mark.usefixtures("own_rules")


class First(Base):
    """Takes the first positions from ``start`` on."""

    shares_indices = True

    @dataclass(frozen=True, kw_only=True)
    class Options(RuleOptions):
        start: int = integer(0)

    def take(self, accumulator, k, step):
        start = self._options.start
        positions = np.arange(start, min(start + k, accumulator.size), dtype=np.int32)
        return accumulator.take_at(positions, shared=True)


def first(**changes):
    """Another class like First, with some of its attributes changed; None: taken away."""
    kept = {**vars(Stateless), **vars(Base), **vars(First), **changes}
    return type("Changed", (), {name: value for name, value in kept.items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class NoDefault(RuleOptions):
    start: int


@dataclass(frozen=True, kw_only=True)
class Taken(RuleOptions):
    density: int = integer(0)


class Derived(First.Options):
    pass


def options(base=RuleOptions):
    """Another class of options, with the fields of ``base``."""
    return dataclass(frozen=True, kw_only=True)(type("Options", (base,), {}))


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.kind)
def test_the_built_in_rules_meet_the_requirements_of_custom_ones(registry):
    for rule in registry.values():
        registry.check(rule)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (first, "a sparsifier must be a class, not <function first"),
        (first(Options=None), "sparsifier Changed must define a nested class Options derived from RuleOptions"),
        (type("Inherited", (First,), {}), "sparsifier Inherited must define a nested class Options"),
        (first(Options=int), "sparsifier Changed must define a nested class Options"),
        (
            first(Options=Derived),
            r"Options of .* Changed must be a dataclass: put @dataclass\(frozen=True, kw_only=True",
        ),
        (first(Options=NoDefault), "option 'start' of .* Changed has no default: declare it with integer or number"),
        (first(Options=Taken), "option 'density' of .* Changed is reserved for the configuration: rename it"),
        (first(shares_indices=None), "lacks the attribute shares_indices: see Sparsifier"),
        (first(take=None), r"sparsifier Changed must have a method take\(self, accumulator, k, step\)"),
        (first(take=lambda self, accumulator, k: None), r"must have a method take\(self, accumulator, k, step\)"),
        (first(__init__=lambda self, context: None), r"must have a method __init__\(self, context, options\)"),
        (first(state_dict=None), r"must have a method state_dict\(self\)"),
    ],
)
def test_an_incomplete_class_is_refused_with_the_missing_attribute(rule, message):
    with pytest.raises(ValueError, match=message):
        hvs.register("sparsifier", "changed")(rule)
    assert "changed" not in SPARSIFIERS


def test_a_collective_must_count_its_traffic():
    members = {name: value for one in reversed(COLLECTIVES["topka"].__mro__) for name, value in vars(one).items()}
    del members["traffic"], members["__dict__"]
    with pytest.raises(ValueError, match="the collective Silent lacks the property traffic: see Collective"):
        COLLECTIVES.check(type("Silent", (), members))


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("sparsifiers", "first", "unknown kind of rule 'sparsifiers'; known are: sparsifier, memory, collective, sch"),
        ("sparsifier", "my first", "the name of a sparsifier must be an identifier, such as my_spars.*not 'my first'"),
        ("memory", "None", "the name of a memory must be an identifier, such as my_memory, not 'None'"),
        ("sparsifier", 1, "must be an identifier, .*not 1"),
        ("sparsifier", "topk", "sparsifier 'topk' already exists, as horovod_sparse.sparsifiers.topk.TopK: choose an"),
    ],
)
def test_an_invalid_name_is_refused(kind, name, message):
    with pytest.raises(ValueError, match=message):
        hvs.register(kind, name)(First)


def test_a_registered_rule_can_be_used_by_name():
    with pytest.raises(
        ValueError, match=r"unknown sparsifier 'first'; known are: topk, .*custom sparsifier must be registered"
    ):
        hvs.parse("topka:sparsifier=first")
    assert hvs.register("sparsifier", "first")(First) is First
    sparse = hvs.parse("randomblock:density=0.1,sparsifier=first,start=5")
    assert sparse == hvs.Sparse.of(0.1, sparsifier="first", collective="shared", start=5)
    assert sparse == hvs.Sparse(0.1, sparsifier=First.Options(start=5), collective=COLLECTIVES["shared"].Options())
    assert sparse.facts()["sparsifier"]["of"] == "first"
    assert pickle.loads(pickle.dumps(sparse)) == sparse  # noqa: S301 - our own
    with pytest.raises(ValueError, match="start must be an integer of at least 0, not -1"):
        hvs.parse("topka:sparsifier=first,start=-1")
    average = hvs.SparseAllreduce(100, sparse)
    assert average(np.ones(100, np.float32)).nonzero()[0].tolist() == list(range(5, 15))


def test_a_reloaded_module_replaces_its_rule():
    for _ in range(2):
        hvs.register("sparsifier", "first")(First)
    again = type("First", (First,), {"Options": options(), "__module__": __name__})
    hvs.register("sparsifier", "first")(again)
    assert SPARSIFIERS["first"] is again
    with pytest.raises(ValueError, match=r"sparsifier 'first' already exists, as .*test_registry.First: choose anothe"):
        hvs.register("sparsifier", "first")(first())


def test_a_configuration_with_an_unregistered_rule_is_refused(monkeypatch):
    """As when a pickle comes from another rank."""
    hvs.register("sparsifier", "first")(First)
    sparse = hvs.parse("topka:sparsifier=first")
    monkeypatch.delitem(SPARSIFIERS._rules, "first")
    for use in (sparse.facts, lambda: hvs.SparseAllreduce(10, sparse)):
        with pytest.raises(ValueError, match=r"not .*First.Options.* must be registered on every rank \(import its"):
            use()


def test_schedules_and_memories_can_be_registered_too():
    @hvs.register("schedule", "half")
    class Half(Constant):
        Options = options(Constant.Options)

        def densities(self, step):
            return [0.5 * one for one in super().densities(step)]

    hvs.register("memory", "kept")(type("Kept", (MEMORIES["residual"],), {"Options": options()}))
    average = hvs.SparseAllreduce(100, "topka:density=0.1,schedule=half,memory=kept")
    assert np.count_nonzero(average(np.arange(1, 101, dtype=np.float32))) == 5


@pytest.mark.mpi
def test_a_rule_not_registered_on_one_rank_is_an_error_on_all(comm):
    missing = comm.Get_size() > 1 and comm.Get_rank() == comm.Get_size() - 1
    if not missing:
        hvs.register("sparsifier", "first")(First)
    if comm.Get_size() == 1:
        assert hvs.SparseAllreduce(10, "topka:sparsifier=first", comm)
        return
    expected = "unknown sparsifier 'first'; known are: .*must be registered first, on every rank"
    with pytest.raises(ValueError, match=expected if missing else rf"rank {comm.Get_size() - 1} could not begin: "):
        hvs.SparseAllreduce(10, "topka:sparsifier=first", comm)


@pytest.mark.mpi
def test_ranks_with_rules_of_different_names_are_refused(comm):
    for name in ("one", "two"):
        hvs.register("sparsifier", name)(type(name, (First,), {"Options": options(First.Options)}))
    name = "two" if comm.Get_rank() else "one"
    if comm.Get_size() == 1:
        return
    with pytest.raises(ValueError, match=r"compression.sparsifier.of differs between ranks: rank . has two, rank 0 ha"):
        hvs.SparseAllreduce(10, f"topka:sparsifier={name}", comm)
