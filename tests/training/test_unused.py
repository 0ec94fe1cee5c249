"""A key that a config sets and that nothing reads is named at the start, with the reason."""

import jax
import pytest
import tiny_runs

import zaya_jax as zj
from zaya_jax import cli, config
from zaya_jax.config import Mesh, Phase
from zaya_jax.training import start, unused

TWO_PHASES = (Phase(tokens=256, seq_len=8), Phase(tokens=256, seq_len=16))
OWN_RATES = (Phase(tokens=256, lr=1e-3), Phase(tokens=256, lr=1e-4))
HIGHER_RATES = (Phase(tokens=256, lr=1e-2),)
OWN_SOURCES = (Phase(tokens=256, mixture=("web=1",)), Phase(tokens=256, mixture=("code=1",)))
DENSE = {
    "model.model_type": "dense",
    "model.num_experts": 1,
    "model.intermediate_size": 32,
    "model.moe_intermediate_size": 2048,  # the default
    "model.router_hidden_size": 256,
}
SLIDING = {"model.layer_types": ("hybrid", "hybrid_sliding")}
OWN_LAYER = {"model.layer": "somewhere:Layer"}
PAIRS = {"run.preference": "dpo", "run.init_from": "runs/a", "balance.enabled": False}
PAIRS |= {"data.chats": True, "data.packing": "best_fit"}
FLOAT32 = {"precision.compute": "float32"}
OF_PHASES = "each of schedule.phases has its own"

# (a key and its value, what makes it idle, words of the reason, what makes it count)
CASES = [
    ("run.beta", 0.3, {}, "run.preference is none", PAIRS),
    ("run.spike_deviations", 4.0, {}, "run.skip_update is not spike", {"run.skip_update": "spike"}),
    ("run.changed_source", True, {}, "names no model.layer", OWN_LAYER),
    *(
        (key, value, {"optim.name": "adamw"}, "optim.name is adamw", {"optim.name": "muon"})
        for key, value in (
            ("optim.momentum", 0.9),
            ("optim.nesterov", False),
            ("optim.muon_scale", "spectral"),
            ("optim.newton_schulz", "polar_express"),
            ("optim.newton_schulz_steps", 6),
            ("precision.newton_schulz", "float32"),
            ("precision.momentum", "bfloat16"),
        )
    ),
    *(
        (key, value, DENSE, "model.model_type is dense", {})
        for key, value in (
            ("model.moe_intermediate_size", 64),
            ("model.router_hidden_size", 16),
            ("model.cca_time0", 3),
            ("model.cca_time1", 3),
            ("precision.router", "bfloat16"),
            ("balance.lr", 0.1),
            ("balance.b1", 0.8),
            ("balance.b2", 0.8),
            ("balance.dead_after", 50),
        )
    ),
    ("model.intermediate_size", 64, {}, "model.model_type is not dense", DENSE),
    ("model.sliding_window", 4, {}, "is hybrid_sliding", SLIDING),
    ("model.sliding_window", 4, {}, "is hybrid_sliding", OWN_LAYER),
    ("precision.matmul", "highest", {"precision.compute": "bfloat16"}, "bfloat16", FLOAT32),
    ("guard.spike_deviations", 9.0, {"guard.spike_steps": 0}, "guard.spike_steps is 0", {}),
    ("guard.rollbacks", 2, {"guard.spike_steps": 0}, "guard.spike_steps is 0", {}),
    ("eval.tasks_every", 50, {}, "eval.tasks names none", {"eval.tasks": ("arc_easy",)}),
    ("eval.tasks_limit", 50, {}, "eval.tasks names none", {"eval.tasks": ("arc_easy",)}),
    ("eval.tasks_path", "mine", {}, "eval.tasks names none", {"eval.tasks": ("arc_easy",)}),
    ("eval.every", 50, {"eval.windows": 0}, "eval.windows is 0", {}),
    ("checkpoint.keep_best", 2, {"eval.windows": 0}, "eval.windows is 0", {"eval.every": 8}),
    (
        "checkpoint.keep_best",
        2,
        {"eval.every": 100, "checkpoint.every_steps": 7},
        "a multiple of both",
        {"eval.every": 100, "checkpoint.every_steps": 50},
    ),
    (
        "schedule.final_lr_fraction",
        0.1,
        {"schedule.decay_fraction": 0.0},
        "schedule.decay_fraction is 0",
        {"schedule.decay_fraction": 0.0, "schedule.decay_steps": 5},
    ),
    ("schedule.decay_fraction", 0.5, {"schedule.phases": OWN_RATES}, "has its own lr", {}),
    (
        "schedule.decay_fraction",
        0.5,
        {"schedule.decay_steps": 5},
        "decay_steps takes its place",
        {},
    ),
    (
        "data.path",
        "text",
        {"data.mixture": ("web=1",)},
        "mixtures",
        {"data.mixture": ("text/a=1",)},
    ),
    ("data.path", "text", {"schedule.phases": OWN_SOURCES}, "mixtures take its place", {}),
    ("data.mixture", ("web=1",), {"schedule.phases": OWN_SOURCES}, "has its own", {}),
    ("data.seq_len", 8, {"schedule.phases": TWO_PHASES}, OF_PHASES, {}),
    *(
        ("optim.lr", value, {"schedule.phases": idle}, OF_PHASES, {"schedule.phases": used})
        for value, idle, used in ((0.1, OWN_RATES, TWO_PHASES), (1e-4, HIGHER_RATES, OWN_RATES))
    ),
    ("mesh.expert", 2, {"schedule.phases": (Phase(tokens=256, mesh=Mesh()),)}, "has its own", {}),
]


def said_of(key, value, changes):
    """The sentences that name a key, of a small config with these changes."""
    keys = {"precision.compute": "bfloat16", "optim.name": "muon"} | changes | {key: value}
    said = unused.notes(tiny_runs.settings(**keys))
    return [line for line in said if f"config.{key}={value!r}" in line]


@pytest.mark.parametrize(("key", "value", "idle", "because", "used"), CASES)
def test_a_key_that_nothing_reads_is_named_with_the_reason(key, value, idle, because, used):
    reasons = [line.partition(" no effect: ")[2] for line in said_of(key, value, idle)]
    assert len(reasons) == 1 and because in reasons[0]
    assert not said_of(key, value, used)


@pytest.mark.parametrize("name", sorted(path.stem for path in config.SHIPPED.glob("[a-z]*.py")))
def test_shipped_configs_set_nothing_in_vain(name):
    if name != "finetune":  # it needs a model
        said = unused.notes(config.read_config(f"experiments/configs/{name}.py"))
        # those of `tiny`, which it starts from
        assert [line for line in said if "config.data.seq_len=256" not in line] == []


def test_weights_that_are_there_are_said_to_come_before_init_from(tmp_path, capsys):
    saved = zj.create(tiny_runs.settings()).save(tmp_path / "run")
    assert tiny_runs.train(saved, run__num_steps=1, run__init_from="elsewhere") == cli.DONE
    note = "note: config.run.init_from=elsewhere has no effect: the run begins with the weights in"
    assert f"{note} {saved}/checkpoints/0" in capsys.readouterr().out


def test_a_start_says_it_with_what_its_devices_and_steps_do_not_have(tmp_path):
    settings = tiny_runs.settings(
        run__num_steps=4,
        run__beta=0.3,
        mesh__fsdp=True,
        mesh__ring=True,
        log__profile="9:2",
        optim__rows=("layers/share=adamw",),
    )
    recipe, tokenizer = start.load_recipe(settings, tmp_path / "run")
    said = [x for x in start.plan_start(0, recipe, tokenizer).notes if "no effect" in x]
    assert len(jax.devices()) > 1  # so that fsdp has one
    assert said == [
        "note: config.run.beta=0.3 has no effect: run.preference is none",
        "note: config.mesh.ring=True has no effect: the axis that it is about has one device here",
        "note: config.optim.rows=('layers/share=adamw',) has no effect: no weight has such a path",
        "note: config.log.profile=9:2 has no effect: this start has steps 1 to 4",
    ]
