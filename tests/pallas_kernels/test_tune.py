"""The search for tiles, interpreted, with planted faults: each costs its kernels' place and no
more."""

import dataclasses
import math
import types

import jax
import jax.numpy as jnp
import pytest
import tiny_runs

from pallas_kernels import cases, chip, messages, table, trying, tune
from pallas_kernels.cases import Size
from pallas_kernels.trying import BEST, SHIPPED, XLA
from zaya_jax.config import read_config
from zaya_jax.training import kernels

MODEL = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "num_experts": 2,
    "router_hidden_size": 32,
    "cca_time0": 2,
    "cca_time1": 2,
}
HERE = chip.Chip("cpu", "gfx942")


def asked(*operators, **more):
    given = {"model": MODEL, "batch": 1, "length": 64, "dtype": "bfloat16", "windows": []}
    return given | {"operators": list(operators), **more}


def tuned(request, *faults, **more):
    program = ("tests.pallas_kernels.planted", *faults)
    more = {"seconds": 300, "patience": 90, "pretend": HERE} | more
    return tune.measure(lambda devices: request, program=program, **more)


def searched(rows, request=None, card=HERE, name="MI300X"):
    return tune.Search(card, name, request or REQUEST, rows)


def faults(rows):
    return {
        (row["operator"], row["case"], row["name"]): row["fault"] for row in rows if "fault" in row
    }


def row(name, seconds, case="causal, documents", **more):
    known = {"operator": "attention", "case": case, "name": name, "tiles": {}, "seconds": seconds}
    return known | more


def in_all_cases(name, seconds, **more):
    return [row(name, seconds, **more), row(name, 0, case=FURTHER)]


FURTHER = "log-sum-exps, padded tail"
REQUEST = asked("attention")
TILE = {"rows": 64, "keys": 64, "warps": 4, "stages": 1}


def taken(*rows):
    return tune.verdict(searched([*in_all_cases(XLA, 1.0), *rows]), "attention")[1]


def test_ours_must_be_right_in_every_case_and_faster_by_three_percent():
    assert taken(*in_all_cases(SHIPPED, 0.96)) == SHIPPED
    assert taken(*in_all_cases(SHIPPED, 0.98)) == XLA
    wrong = row(SHIPPED, 0, case=FURTHER, fault="wrong: not finite")
    assert taken(row(SHIPPED, 0.1), wrong) == XLA
    assert taken(row(SHIPPED, 0.1, fault="failed: x"), *in_all_cases(BEST, 0.5)) == BEST
    assert taken(*in_all_cases(SHIPPED, 0.5), row(BEST, 0.1), wrong | {"name": BEST}) == SHIPPED
    failed = [row(XLA, 0, fault="failed: x"), row(XLA, 0, case=FURTHER)]
    both = [*failed, *in_all_cases(SHIPPED, 9.0)]
    assert tune.verdict(searched(both), "attention")[1] == SHIPPED


def test_a_case_that_was_never_begun_decides_nothing():
    rows = [*in_all_cases(XLA, 1.0), row(SHIPPED, 0.1)]  # and the padded tail was not reached
    search = searched(rows)
    assert tune.verdict(search, "attention") == ({}, XLA)
    record = tune.make_record(search)
    assert record["tiles"] == {} and "attention" in record["kernels"]  # as it ships
    earlier = {"kernels": ["cca_mix"], "tiles": {"mix": {"tile": 1}, "attention_keys": {"tile": 2}}}
    kept = tune.make_record(search, earlier)
    assert kept["kernels"] == ["cca_mix"] and kept["tiles"] == earlier["tiles"]
    unknown = searched(rows, card=chip.Chip("gpu", "NVIDIA B200"), name="B200")
    assert tune.make_record(unknown)["kernels"] == []
    assert tune.describe(search, "attention")[0] == "attention: not tried to its end: as it ships"


def test_the_best_tile_of_each_kernel_is_one_that_is_faster_than_what_ships():
    cases = trying.request_cases(REQUEST, "attention")
    keys = {"attention_keys": TILE}
    rows = [
        *in_all_cases(SHIPPED, 1.0),
        row("a", 0.8, tiles={"attention_forward": TILE}),
        row("b", 0.7, tiles={"attention_forward": {}}),
        row("c", 0.995, tiles=keys),
        row("d", 0.1, tiles=keys, fault="x"),
    ]
    assert trying.best_of_each(rows, cases) == {"attention_forward": {}}


def test_errors_are_held_against_xlas_and_without_it_against_the_formats_own():
    """A gradient that is wrong by 9% of its norm is refused where XLA's implementation fails."""
    case = trying.request_cases(asked("residual_norm"), "residual_norm")[2]
    reference = trying.Reference(case, asked("residual_norm"), HERE)
    ((_, program),) = reference.compiled({XLA: {}}, HERE)

    def scaled(by):
        def call(arguments, sums):
            (out, gradients), sums = program(arguments, sums)
            return (out, jax.tree.map(lambda x: (by * x).astype(x.dtype), gradients)), sums

        return call

    assert "fault" not in reference.judge(SHIPPED, scaled(1.0))
    assert "fault" not in reference.judge(SHIPPED, scaled(1.01))
    assert reference.judge(SHIPPED, scaled(1.09))["fault"].startswith("wrong: by 0.09 of the norm")
    assert "seconds" in reference.judge(XLA, program)
    assert reference.judge(SHIPPED, scaled(1.01))["fault"].startswith("wrong: by 0.01")
    assert reference.judge(SHIPPED, scaled(float("nan")))["fault"] == "wrong: not finite"
    assert reference.judge(SHIPPED, ValueError("x"))["fault"] == "failed: ValueError: x"


def test_what_is_compared_has_the_runs_options():
    config = tiny_runs.settings()

    def requested(devices=1, **groups):
        of = {name: dataclasses.replace(getattr(config, name), **of) for name, of in groups.items()}
        return kernels.tuning_request(dataclasses.replace(config, **of), devices)

    request = requested()
    labels = {
        operator: [
            case.label for case in trying.request_cases(request | {"windows": [7]}, operator)
        ]
        for operator in chip.OPERATORS
    }
    assert labels["attention"] == ["causal, documents", "window of 7", FURTHER]
    assert labels["grouped_mlp"][0] == "in stacks of 2 layers" and len(labels["grouped_mlp"]) == 3
    assert labels["cca_mix"][1] == "all channels turn, padded tail"
    assert request["model"]["expert_weights"] == config.precision.compute
    wide = requested(precision={"weights": "float32", "compute": "bfloat16"})["model"]
    weights = cases.stacked(Size("", 1, 16, types.SimpleNamespace(**wide)))[2]
    assert weights.dtype == jnp.float32
    cut = requested(4, mesh={"data": 2, "expert": 2, "tensor": 1})
    assert cut["batch"] == 2 and cut["model"]["num_experts"] == config.model.num_experts // 2
    assert cut["operators"] == ["attention", "cca_mix", "grouped_mlp", "residual_norm"]
    cut = requested(2, mesh={"data": 1, "context": 2})
    assert (cut["length"], cut["whole"]) == (8, 16) and "cca_mix" not in cut["operators"]


def test_an_operator_that_a_step_does_not_have_is_named(monkeypatch, capsys):
    def ask(make_request, **options):
        raise RuntimeError(f"asked for {make_request(1)['operators']}")

    monkeypatch.setattr(tune, "measure", ask)
    given = ["--config=experiments/configs/tiny.py", "--operators", "attention", "linear_attention"]
    assert tune.main(given) == 2
    out, err = capsys.readouterr()
    assert out.startswith("note: linear_attention is not tried: ") and out.count("note: ") == 1
    assert "asked for ['attention']" in err


def test_without_a_gpu_it_says_so_and_a_process_that_cannot_start_is_named(capsys):
    assert tune.main(["--config=experiments/configs/tiny.py"]) == 2
    assert "error: no GPU is here; python -m benchmarks.kernels" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="ended the process \\(exit code 1\\)"):
        tune.measure(lambda devices: REQUEST, program=("no.such.module",))


def test_stacks_have_the_fewest_layers_whose_offsets_are_as_wide_as_the_steps():
    """ZAYA1's matrices down are 134 MB of bfloat16 a layer: those of all 40 layers, and of 33, take
    more than 2 ** 32 bytes."""
    base = kernels.tuning_request(read_config("experiments/configs/zaya1_base.py"), 1)
    cards = {0: 33, 64 << 30: 33, 40 << 30: 2}
    for memory, layers in cards.items():
        case = trying.request_cases(base | {"memory": memory}, "grouped_mlp")[0]
        assert case.label == f"in stacks of {layers} layers"
        weights = [a.like for a in case.arguments(case.size)[2:]]
        assert [w.shape[0] for w in weights] == [layers, layers]
        wide = [math.prod(w.shape) * w.dtype.itemsize > 2**32 for w in weights]
        assert wide == [layers == 33] * 2


def test_what_is_found_is_given_as_it_is_found(tmp_path, monkeypatch):
    """Before the child ends, which here it does not do by itself."""
    said = [
        messages.Device("cuda", "sm_90", "H100", 1, None),
        messages.Tried(row(SHIPPED, 1.0)),
        messages.Done("attention"),
    ]
    lines = "\n".join(map(messages.encode, said))
    sleep = "import sys, time\nif 'attention' in sys.stdin.read(): time.sleep(99)\n"
    (tmp_path / "a_child.py").write_text(f"print({lines!r}, flush=True)\n{sleep}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    told = []

    def after_operator(search, operator):
        told.append((search.name, search.request["memory"], len(search.outcomes), operator))
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        tune.measure(lambda devices: REQUEST, program=("a_child",), after_operator=after_operator)
    assert told == [("H100", None, 1, "attention")]


def test_what_was_written_stays_where_the_search_ends_early(tmp_path, monkeypatch, capsys):
    def ends(make_request, seconds, after_operator):
        rows = [*in_all_cases(XLA, 1.0), *in_all_cases(SHIPPED, 0.5)]
        after_operator(searched(rows, asked("attention", "residual_norm")), "attention")
        raise RuntimeError("the process that tries ended")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tune, "measure", ends)
    assert tune.main(["--config=experiments/configs/tiny.py"]) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith("attention: a run takes shipped: XLA 1000.000 ms")
    assert printed.err == "error: the process that tries ended\n"
    record, _ = table.read_measured(HERE.kind)
    assert {name.split("_")[0] for name in record["tiles"]} == {"attention"}
    assert "residual_norm" in record["kernels"]  # as it ships


@pytest.mark.parametrize("late", [False, True])
def test_after_the_deadline_nothing_more_is_compiled_but_xlas_and_what_ships(monkeypatch, late):
    compiled = []

    class Reference:
        def __init__(self, *given):
            self.judge = lambda name, program: {"seconds": 1.0}
            self.limit_by = lambda row: None

        def compiled(self, todo, card):
            compiled.append(len(todo))
            return [(name, None) for name in todo]

    monkeypatch.setattr(trying, "Reference", Reference)
    task = messages.TileTask(REQUEST, seconds=0 if late else 99)
    received = [*trying.try_all(task, HERE)]
    rows = [message.outcome for message in received if isinstance(message, messages.Tried)]
    tried = [row["name"] for row in rows if row["case"] == "causal, documents"]
    assert tried[:2] == [XLA, SHIPPED] and received[-1] == messages.Done("attention")
    if late:
        assert compiled == [2, 2] and len(tried) == 2
    else:
        assert max(compiled) == trying.THREADS and len(tried) > trying.THREADS


@pytest.mark.slow
def test_experts_in_stacks_and_another_tile_are_tried_as_the_step_runs_them():
    search = tuned(asked("grouped_mlp"), "tiles=1")
    rows = search.outcomes
    assert not faults(rows)
    names = {row["name"] for row in rows if row["case"] == "in stacks of 2 layers"}
    assert len(names) >= 8 and {XLA, SHIPPED} < names
    for row in rows:  # ours are interpreted here, and slow
        row["seconds"] = 9.0 if row["name"] == XLA else 1.0
    record = tune.make_record(search)
    assert set(record["tiles"]) == {
        f"experts_{kernel}"
        for kernel in ("gate_up", "down", "d_hidden", "d_x", "d_gate_up", "d_down")
    }


def test_a_crash_and_a_kernel_that_never_ends_cost_one_place():
    """The first child compiles in threads, so a second one finds which implementation it was."""
    planted = "residual_norm=kills@experts' join"
    search = tuned(asked("residual_norm"), planted)
    assert faults(search.outcomes) == {
        ("residual_norm", "experts' join", SHIPPED): "ended the process (SIGKILL)"
    }
    assert tune.verdict(search, "residual_norm")[1] == XLA
    assert tune.make_record(search)["kernels"] == [
        operator for operator in chip.OPERATORS if operator != "residual_norm"
    ]


@pytest.mark.slow
def test_one_that_never_ends_is_ended():
    search = tuned(asked("residual_norm"), "residual_norm=hangs@attention's norm", patience=15)
    assert faults(search.outcomes) == {
        ("residual_norm", "attention's norm", SHIPPED): "did not end within 15 s"
    }
