"""The configuration: typed options, presets, text form, and every wrong value named."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rules import LIKE

import horovod_sparse as hvs
from horovod_sparse.collectives import COLLECTIVES
from horovod_sparse.memories import MEMORIES
from horovod_sparse.rules import BucketContext, Mode
from horovod_sparse.schedules import SCHEDULES
from horovod_sparse.sparsifiers import SPARSIFIERS

PRESETS = [name for name in vars(hvs.Compression) if name[0] != "_" and name not in ("none", "fp16")]
RULES = [rule for rules in (SPARSIFIERS, MEMORIES, COLLECTIVES, SCHEDULES) for rule in rules.values()]
FIELDS = [
    (options, one) for options in (hvs.Sparse, *(rule.Options for rule in RULES)) for one in dataclasses.fields(options)
]


def documented():
    """Every configuration in the documentation, as text; calls of presets are brought into the text form."""
    root = Path(__file__).parents[2]
    text = "\n".join(path.read_text() for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))))
    specs = re.findall(r"(?<![\w.])[a-z]\w*:\w+=[^\s`\"'|]+", text)
    calls = re.findall(r"hvs\.Compression\.(\w+)\(([^()]*(?:\([^()]*\)[^()]*)*)\)", text)
    specs += [f"{name}:" + re.sub(r"[\s\"]", "", keywords) for name, keywords in calls]
    return sorted({spec for spec in specs if not spec.startswith("powersgd:")})  # an exchange of the benchmarks


@pytest.fixture(autouse=True)
def decisions(monkeypatch, tmp_path):
    """The file of decisions that the documentation names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "decisions.jsonl").write_text('{"step": 0, "density": 0.01, "wire": null}\n')


# --- options ---


@pytest.mark.parametrize(("options", "field"), FIELDS, ids=lambda one: getattr(one, "__qualname__", None) or one.name)
def test_a_value_of_a_wrong_type_or_out_of_range_is_refused_with_name_and_value(options, field):
    required = {"density": 0.1} if options is hvs.Sparse else {}
    wrong = [-1, True, "nonsense", float("nan"), float("inf"), (2,), {}, None]
    if field.default is None and field.name != "threshold":
        wrong.remove(None)
    if isinstance(field.default, bool):
        wrong.remove(True)
    if field.name in ("record", "decisions"):  # names of files
        wrong.remove("nonsense")
    for value in wrong:
        with pytest.raises(ValueError, match=rf"^{field.name} must be .*{re.escape(repr(value))}"):
            options(**{**required, field.name: value})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "topk",
            r"unknown compression 'topk'; known are: none, fp16, recommended, topka, union,.*auto, dense",
        ),
        ("", "unknown compression ''"),
        ("topka:density=2", r"density must be in \(0, 1\], not 2: 0.01 sends 1 % of the gradients"),
        ("topka:densty=0.1", "unknown option 'densty'; known are: bucket_bytes, .*threads"),
        ("topka:memory=residul", "unknown memory 'residul'; known are: residual, none"),
        (
            "recommended:eps=0.7",
            "unknown option 'eps'; .*; 'eps' is an option of schedule='gravac', which is not chosen",
        ),
        ("gravac:schedule=measured,cf_max=99", "'cf_max' is an option of schedule='gravac', which is not chosen here"),
        (
            "topka:inner=dense",
            "unknown option 'inner'; .*; 'inner' is an option of collective='hierarchical'",
        ),
        (
            "topka:schedule=later",
            "unknown schedule 'later'; known are: constant, warmup, annealed, measured, gravac, accordion",
        ),
        ("topka:density", "'density' in 'topka:density' is not of the form key=value"),
        ("oktopk:global_up=''", "global_up must be at least 1, not ''"),
        ("topka:threads=1025", "threads must be an integer of at most 1024, not 1025"),
        ("topka:density=1e400", r"density must be in \(0, 1\], not inf"),
        (f"oktopk:global_up={10**400}", "global_up must be at least 1, not 1000"),
        (f"topka:density={'(' * 1000}", r"density must be in \(0, 1\], not '\(\(\("),
        ("topka:density=0.1\0", r"density must be in \(0, 1\], not"),
        ("randomk:seed=99999999999999999999", "seed must be an integer of at most"),
        ("topka:bucket_bytes=1e6", "bucket_bytes must be an integer of at least 1, not 1000000.0"),
        ("none:density=0.1", "takes no settings"),
        ("threshold", "compression 'threshold' needs threshold, as in threshold:threshold=0.1"),
        (
            "topka:sparsifier=threshold",
            "threshold must be above 0, not None: give the option threshold",
        ),
        ("topka:wire=float8", "wire must be one of float32, float16, .*, log4, fitted3, fitted2, not 'float8'"),
        ("conef:rows=2", "rows must be one of 1, 3, 5, not 2: a value is the median"),
        ("conef:memory=partial,beta=0", r"beta must be in \(0, 1\), not 0: .*share of the error that is not fed back"),
        ("conef:memory=partial,beta=1", r"beta must be in \(0, 1\), not 1: .*the error would grow without bound"),
        (
            "conef:memory=improved,version=1",
            "version 1 does not work with compressor 'sketch': .*compressor='quantize', or",
        ),
        (
            "topka:memory=conef",
            "memory 'conef' does not work with sparsifier 'topk' and .*: a sketch needs .* use compressor='quantize'",
        ),
        ("stable:memory=partial", "sparsifier 'stable' and collective 'shared': a sketch needs random .*='quantize'"),
        (
            "conef:memory=improved,collective=gtopk",
            "sparsifier 'randomblock' and collective 'gtopk': .* all ranks, .* 'shared'",
        ),
        ("dgc:momentum=1", r"momentum must be in \[0, 1\), not 1"),
        ("recommended:nesterov=True", "nesterov must be False, not True, where .*: set nesterov=True in the optimizer"),
        ("oktopk:tau_partition=0", "tau_partition must be an integer of at least 1, not 0"),
        ("oktopk:throttle=0", "throttle must be an integer of at least 1, not 0"),
        ("oktopk:global_low=3", r"global_low must be in \(0, 1\], not 3"),
        ("oktopk:published=gpt", "unknown published schedule 'gpt'; known are: vgg, lstm, bert"),
        ("hierarchical:inner=[1]", r"inner must be one of topka, topkdsa, gtopk, oktopk, dense, not \[1\]"),
        (
            "topka:density=0.1,density=0.2",
            "'topka:density=0.1,density=0.2' gives a setting twice: write each of density once",
        ),
        ("hierarchical:outer=topka,tau_threshold=3", "unknown option 'tau_threshold'; known are: .*node_ranks"),
        ("auto:throtle=2", "unknown option 'throtle'"),
        ("gravac:cf_min=100,cf_max=10", r"cf_min must not be above cf_max, but is 100 \(1 / density\)"),
        ("gravac:cf_min=0.5", "cf_min must be at least 1, not 0.5"),
        ("gravac:sparsifier=stable", "schedule 'gravac' sends a part .* 'stable' selects the same .* or randomk"),
        ("accordion:high_density=0.001", r"high_density must be at least density \(0.01\), not 0.001"),
        ("randomk:shared=False", "collective 'shared' sends values without indices"),
        ("topka:collective=shared", r"collective 'shared' .*'topk' chooses different indices.*use randomblock"),
    ],
)
def test_a_wrong_spec_is_refused_with_name_value_and_remedy(spec, message):
    with pytest.raises(ValueError, match=message):
        hvs.parse(spec)


def test_options_cannot_be_names():
    with pytest.raises(ValueError, match=r"sparsifier must be the options of one of topk, .*not 'topk': Sparse.of\(\)"):
        hvs.Sparse(0.1, sparsifier="topk")


def test_a_configuration_is_a_value():
    """Equal if and only if the facts are, in any order; frozen, hashable, and equal after pickling."""
    sparses = [
        hvs.parse(spec)
        for spec in (*documented(), *(f"{one}:threshold=0.5" if one == "threshold" else one for one in PRESETS))
    ]
    facts = [one.facts() for one in sparses]
    for (one, its), (other, others) in itertools.product(zip(sparses, facts, strict=True), repeat=2):
        assert (one == other) == (its == others)
        assert one != other or hash(one) == hash(other)
    for one in sparses:
        assert pickle.loads(pickle.dumps(one)) == one  # noqa: S301 - our own
        for part in (one, one.sparsifier, one.memory, one.collective, one.schedule):
            with pytest.raises(dataclasses.FrozenInstanceError):
                part.density = 0.5


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("oktopk:throttle=2,tau_threshold=8,density=0.1", "oktopk:density=0.1,tau_threshold=8,throttle=2", True),
        ("topka", "topka:density=0.01,memory=residual,wire=None", True),
        ("topka:threads=4", "topka", True),
        ("oktopk:published=vgg", "oktopk:published=vgg,tau_partition=64", True),
        ("topka:dense_below=0", "topka", False),
        ("topka:wire=float16", "topka", False),
        ("hierarchical:inner=gtopk", "hierarchical", False),
        ("auto:tau_threshold=8", "auto", False),
        ("randomk:seed=1", "randomk", False),
    ],
)
def test_configurations_differ_by_what_can_change_a_result(one, other, equal):
    assert (hvs.parse(one) == hvs.parse(other)) == equal
    assert (hvs.parse(one).facts() == hvs.parse(other).facts()) == equal


# --- names and texts ---


@pytest.mark.parametrize("spec", documented())
def test_every_configuration_of_the_documentation_can_be_read(spec):
    assert isinstance(hvs.parse(spec), hvs.Sparse)


def test_the_documentation_has_configurations_of_both_forms():
    assert {"topka:density=0.01", "hierarchical:density=0.01,inner=gtopk,outer=topkdsa,node_ranks=8"} <= set(
        documented()
    )


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in ("threshold", "dense", "gravac")])
def test_a_spec_means_what_the_preset_and_the_names_mean(name):
    sparse = hvs.parse(f"{name}:density=0.02,bucket_bytes=4096")
    assert sparse == getattr(hvs.Compression, name)(density=0.02, bucket_bytes=4096)
    assert sparse != getattr(hvs.Compression, name)(bucket_bytes=4096, density=0.03)
    if name in SPARSIFIERS:
        assert isinstance(sparse.sparsifier, SPARSIFIERS[name].Options)
    if name in COLLECTIVES:
        assert isinstance(sparse.collective, COLLECTIVES[name].Options)
    if name in SCHEDULES:
        assert isinstance(sparse.schedule, SCHEDULES[name].Options)


def test_the_recommended_preset_takes_another_schedule_without_a_density():
    assert hvs.parse("recommended:schedule=annealed").density == 0.01


def test_a_check_does_not_depend_on_configurations_before_it(tmp_path):
    hvs.Compression.recommended()
    with pytest.raises(ValueError, match="cannot be repeated: pass a file"):
        hvs.Compression.recommended(decisions=str(tmp_path / "missing"))


@pytest.mark.parametrize(
    ("spec", "part", "expected"),
    [
        ("oktopk:published=vgg", "collective", {"tau_threshold": 32, "tau_partition": 64, "global_up": 1.008}),
        ("oktopk:published=vgg", "schedule", {"dense_steps": 512}),
        ("oktopk:published=vgg,dense_steps=0,throttle=2", "schedule", {"dense_steps": 0}),
        ("oktopk:published=lstm", "sparsifier", {"tau_threshold": 32, "local_low": 3 / 4, "local_high": 5 / 4}),
        ("oktopk:published=bert", "sparsifier", {"tau_threshold": 128, "local_scale": 1.025}),
        ("oktopk:published=bert", "collective", {"global_up": 1.036, "global_down": 1.025}),
        ("topka:schedule=warmup,warmup_densities=(0.5,0.1)", "schedule", {"warmup_densities": (0.5, 0.1)}),
        ("gravac:cf_min=20,cf_max=200", "schedule", {"cf_max": 200}),
        ("dgc", "memory", {"momentum": 0.9, "masking": True}),
        ("dgc:momentum=0.5,masking=False", "memory", {"momentum": 0.5, "masking": False}),
        ("dgc:memory=conef,compressor=quantize", "memory", {"compressor": "quantize"}),
        ("recommended", "memory", {"momentum": None, "masking": False, "fresh": 0.4}),
        ("recommended:fresh=None", "memory", {"fresh": None}),
        ("recommended:memory=residual", "memory", {}),
        ("recommended", "collective", {"wire": "log4"}),
        ("conef:saving=0.9", "memory", {"saving": 0.9, "compressor": "sketch"}),
        ("auto:wire=float16,throttle=2", "collective", {"wire": "float16"}),
    ],
)
def test_settings_reach_the_rules_that_know_them(spec, part, expected):
    options = dataclasses.asdict(getattr(hvs.parse(spec), part))
    assert expected.items() <= options.items()


@pytest.mark.parametrize(
    ("spec", "keep"),
    [
        ("auto", "auto"),
        ("auto:keep=6", 6),
        ("recommended", "auto"),
        ("recommended:collective=oktopk", "auto"),
        ("oktopk:keep=auto", "auto"),
        ("recommended:collective=oktopk,keep=None", None),
        ("oktopk", None),
    ],
)
def test_owners_keep_sums_where_collectives_are_compared_by_time_and_in_recommended(spec, keep):
    assert hvs.parse(spec).collective.keep == keep


def test_recommended_takes_any_collective_between_nodes():
    of = "recommended:collective=hierarchical"
    assert hvs.parse(of).collective.outer.keep == "auto"
    assert hvs.parse(f"{of},outer=topkdsa").collective.outer.wire == "log4"


def test_both_parts_of_hierarchical_get_their_settings():
    both = hvs.parse("hierarchical:inner=gtopk,outer=topkdsa,throttle=2,wire=float16").collective
    assert (both.inner.wire, both.outer.wire, both.outer.throttle) == ("float16", "float16", 2)
    assert hvs.parse("gravac:cf_min=20").density == 1 / 20


PARSING = """
import gc, time
from concurrent.futures import ThreadPoolExecutor
from horovod_sparse import parse

def parsed(depth):
    return parsed(depth - 1) if depth else [parse("topka:density=0.01,threads=2") for _ in range(200)]

# The collector runs inside Python's parser, and lets in another thread, whose stack has another depth.
gc.callbacks.append(lambda *_: time.sleep(1e-4))
gc.set_threshold(10)
with ThreadPoolExecutor(4) as pool:
    print(len({one for every in pool.map(parsed, (0, 10, 20, 30)) for one in every}))
"""


def test_threads_may_parse_at_the_same_time():
    # A new process: only one that has not parsed anything yet fails each time.
    ended = subprocess.run([sys.executable, "-c", PARSING], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("1\n", "")


def test_horovods_own_compressors_have_their_names():
    from horovod.torch.compression import Compression

    assert hvs.parse("none") is hvs.Compression.none is Compression.none
    assert hvs.parse("fp16") is hvs.Compression.fp16 is Compression.fp16


# --- what is built ---


@given(density=st.floats(1e-6, 1.0), size=st.integers(0, 10**9))
def test_k_is_the_density_rounded_and_at_least_one(density, size):
    k = hvs.Sparse(density).k(size)
    assert k == (0 if size == 0 else max(1, round(density * size)))
    assert k <= size


@pytest.mark.parametrize("kind", ["sparsifier", "memory", "collective", "schedule"])
def test_build_makes_the_named_rules(kind):
    from mpi4py import MPI

    from horovod_sparse.transport.mpi import MPITransport

    registry = {"sparsifier": SPARSIFIERS, "memory": MEMORIES, "collective": COLLECTIVES, "schedule": SCHEDULES}[kind]
    others = {"shared": {"sparsifier": "randomk"}, "threshold": {"threshold": 1.0}, "arctopk": {"block": 10}}
    others |= {one: {"sparsifier": "randomk", "collective": "shared"} for one in MEMORIES}
    for name, rule in registry.items():
        sparse = hvs.Sparse.of(0.1, **{kind: name}, **others.get(name, {}))
        parts = sparse.build(BucketContext(100, LIKE.astype(np.float64)), MPITransport(MPI.COMM_SELF))
        assert [type(part) for part in parts].count(rule) == 1
        assert type(getattr(sparse, kind)) is rule.Options
        assert sparse.replaces_momentum == (name == "momentum")
        assert (sparse.mode is Mode.SELECT) == (name != "dense")
    assert hvs.Compression.dense().mode is Mode.ALL
