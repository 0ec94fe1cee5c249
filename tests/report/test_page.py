"""The page of a run: complete, small, of any subset of the files and metrics that a run may have
left."""

import json
import math
import re

import pytest
from made_run import checked, write_run

from zaya_jax.report import write_report


def drawn(workdir):
    """The page's source and its text."""
    source = write_report(workdir).read_text(encoding="utf-8")
    return source, checked(source)


def with_other_figures(path, figures):
    """Puts other figures into lines of a run's metrics, by the lines' numbers from 0."""
    lines = (path / "metrics.jsonl").read_text().splitlines()
    for number, more in figures.items():
        lines[number] = json.dumps({**json.loads(lines[number]), **more})
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return path


def test_report_of_a_run_has_all_its_parts(tmp_path):
    source, text = drawn(write_run(tmp_path / "run", 300))
    assert re.findall("<figcaption>(.*?)</figcaption>", source) == [
        "Loss",
        "Loss, second half",
        "Balance of each layer",
        "Experts of layer 0",
        "Experts of layer 2",
        "Experts of layer 3",
        "Experts of layer 5",
        "Learning rate",
        "Gradient norm",
        "Skipped updates",
        "Gradient norm by group",
        "Seconds per step",
        "Tokens per second",
        "Time waiting for data",
        "Model FLOPs utilisation",
        "Norm of the weights",
        "Change of the balancing biases",
    ]
    headings = "Loss, Expert load, Optimisation, Speed, Other metrics, Sample, Numbers, Config"
    assert re.findall("<h2>(.*?)</h2>", source) == headings.split(", ")
    assert source.count('role="img"') == source.count("aria-label=") == source.count("<figure")
    assert (
        "<title>tiny training report</title>" in source
        and "2 CPU cores" in text
        and "complete" in text
    )
    assert "prefers-color-scheme:dark" in source.replace(" ", "") and len(source) < 250_000
    assert "Interruptions" not in text and "Lineage" not in text and "Checkpoints" not in text
    # the same run gives the same page
    assert write_report(write_run(tmp_path / "run", 300)).read_text() == source


def test_of_phases_nothing_is_said_that_only_some_have(tmp_path):
    path = write_run(tmp_path / "run", 300)
    config = json.loads((path / "config.json").read_text())
    assert "complete" in drawn(path)[1] and "tokens per step" in drawn(path)[1]
    # phases end the run before, and each has a batch of its own
    config["run"]["num_steps"] = 1000
    config["schedule"]["phases"] = [{"tokens": 300 * 16 * 256, "global_batch": 16}]
    (path / "config.json").write_text(json.dumps(config))
    _, text = drawn(path)
    assert "complete" not in text and "planned" not in text and "tokens per step" not in text


def test_a_sample_is_escaped_and_the_recorded_prompt_marked(tmp_path):
    path, marked = (
        write_run(tmp_path / "run", 5),
        "<mark>def </mark>&lt;x&gt;(&#x27;y&#x27;) &amp; ␇</pre>",
    )
    for sample, html in (("def <x>('y') & \x07", marked), ("class A:", "<pre>class A:</pre>")):
        (path / "sample.txt").write_text(sample)
        source, text = drawn(path)
        assert html in source and ("after the marked prompt" in text) == ("<mark>" in html)


def test_what_differs_from_the_defaults_stands_first(tmp_path):
    path = write_run(tmp_path / "run", 5)
    config = json.loads((path / "config.json").read_text())
    config["optim"]["lr"] = 0.25
    config["optim"]["b1"] = config["optim"]["b1"] * 1.0
    config["extra"] = {"<key>": "\ud800"}
    (path / "config.json").write_text(json.dumps(config))
    source, text = drawn(path)
    differing = source[source.index("Differences from the defaults") : source.index("All keys")]
    assert '<th scope="row">optim.lr</th><td>0.25</td><td>0.001</td></tr>' in differing
    assert "extra.&lt;key&gt;" in differing and "optim.b1" not in differing and "optim.b1" in text


def test_a_fork_names_its_parent_and_what_changed(tmp_path):
    path = write_run(tmp_path / "run", 5)
    parent = {"folder": "/runs/<a>", "run": "1", "step": 20, "tokens": 5000}
    parent["changed"] = {"optim.lr": [0.1, 0.2]}
    (path / "lineage.json").write_text(json.dumps({"forked": [parent]}))
    source, text = drawn(path)
    assert "Forked from /runs/<a> (run 1) at step 20, 5,000 tokens." in text
    assert '<th scope="row">optim.lr</th><td>0.1</td><td>0.2</td>' in source


def test_losses_that_are_not_finite_are_marked(tmp_path):
    path = write_run(tmp_path / "run", 60)
    bad = {19: {"loss": math.nan}, 20: {"loss": math.inf}, 40: {"loss": None}}
    source, text = drawn(with_other_figures(path, bad))
    loss = source[
        source.index("<figcaption>Loss<") : source.index("<figcaption>Loss, second half<")
    ]
    assert loss.count('<g class="bad">') == 3 and "not finite at step 20" in loss
    assert "loss was not finite at 3 steps, first at step 20." in text
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "tokens": 1, "loss": NaN, "grad_norm": NaN}\n')
    assert "NaNnot finite at step 61" in drawn(path)[1]


def test_a_spike_is_left_out_of_the_picture_and_said(tmp_path):
    path = with_other_figures(write_run(tmp_path / "run", 200, extras=False), {99: {"loss": 5e8}})
    assert "Beyond the picture: train, each step (500M at step 100)." in drawn(path)[1]


def test_a_figure_that_is_always_zero_has_no_picture_and_is_named(tmp_path):
    zero = {
        "skipped": 0,
        "data/retries": 0,
        "data/efficiency": 0.9,
        "dead_experts": [0, 0],
        "skip_share": [0, 0],
    }
    path = with_other_figures(
        write_run(tmp_path / "run", 40, extras=False), dict.fromkeys(range(40), zero)
    )
    source, text = drawn(path)
    for title in ("Skipped updates", "Skipped tokens", "Experts without a token"):
        assert f"<figcaption>{title}<" not in source
    assert (
        "Zero at every step: Skipped updates; Data: retries; Experts without a token; Skipped"
        " tokens." in text
    )
    data = source[source.index("<figcaption>Data<") :].split("</figure>")[0]
    assert "efficiency" in data and "retries" not in data
    once = drawn(with_other_figures(path, {7: {"skipped": 1, "data/retries": math.nan}}))[1]
    assert "Zero at every step: Experts without a token; Skipped tokens." in once


def test_updates_that_were_clipped_are_drawn_as_a_share(tmp_path):
    clipped = {n: {"clipped": float(n % 2 or n >= 60)} for n in range(120)}
    source, _ = drawn(with_other_figures(write_run(tmp_path / "run", 120), clipped))
    picture = source[source.index("<figcaption>Clipped gradients<") :].split("</figure>")[0]
    values = [
        float(pair.split(",")[1])
        for pair in re.search(r'<polyline[^>]*points="([^"]*)"', picture)[1].split()
    ]
    assert (
        len(values) <= 24
        and values[1] == values[5] > values[-2]
        and "of the steps <b>100 %</b>" in picture
    )


def test_the_loss_before_training_is_in_the_picture(tmp_path):
    path = write_run(tmp_path / "run", 100)
    (path / "metrics.jsonl").write_text(
        '{"step": 0, "eval/loss": 40.0}\n' + (path / "metrics.jsonl").read_text()
    )
    loss = drawn(path)[0].split("<figcaption>Loss<")[1].split("</figure>")[0]
    assert "held-out at step 0: 40" in loss and ">40</text>" in loss


def test_a_run_without_a_complete_step(tmp_path):
    for content in (None, "", "\n\n", '{"step": 1, "lo'):
        if content is not None:
            (tmp_path / "metrics.jsonl").write_text(content)
        source, text = drawn(tmp_path)
        assert "<figure" not in source and "metrics.jsonl" in text


@pytest.mark.parametrize(
    "record",
    [
        {"step": 5},
        {"step": 5, "eval/loss": 2.0},
        {"step": 5, "load_entropy": [0.9, 0.8]},
        {"step": 5, "load": [[0.0, 0.0, 1.0], [float("nan")] * 3]},
        {
            "step": 5,
            "loss": 0.0,
            "lr": 0.0,
            "grad_norm": 0.0,
            "step_seconds": 0.0,
            "tokens_per_second": 0.0,
        },
        {
            "step": 5,
            "loss": 1e299,
            "grad_norm": -1e299,
            "step_seconds": -1.0,
            "data/wait_fraction": 1.0,
        },
        {"step": 2**53 - 1, "loss": 5e-324, "tokens": 0, "data/wait_fraction": 0.5},
        {"step": 5, "eval/accuracy": 0.5, "a/b": 1.0, "a/": 2.0, "/b": 3.0, "": 4.0, "<x>": [1, 2]},
    ],
)
def test_any_subset_of_metrics_makes_a_page(tmp_path, record):
    lines = json.dumps(record) + "\n" + json.dumps({**record, "step": record["step"] + 1}) + "\n"
    (tmp_path / "metrics.jsonl").write_text(lines)
    drawn(tmp_path)


def test_a_long_run_with_many_metrics_stays_small(tmp_path):
    path = write_run(tmp_path / "run", 3000, layers=40, experts=16, load_every=20)
    more = {n: {f"update_norm/{i}": math.sin(n * i) for i in range(60)} for n in range(3000)}
    source, _ = drawn(with_other_figures(path, more))
    assert "<figcaption>Norm of the update by group (10)<" in source and "mean and range" in source
    learning_rate = source[source.index("<figcaption>Learning rate<") :].split("</figure>")[0]
    assert learning_rate.count('<polygon class="band c0"') == 1  # each point is of several steps


def test_dead_experts_and_uneven_layers_are_named(tmp_path):
    load = [[0.5, 0.5, 0.0, 0.0], [0.3, 0.3, 0.3, 0.1]]
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "load": load}) + "\n")
    text = drawn(tmp_path)[1]
    assert (
        "between 0.631 (layer 0) and 1.000 (layer 1)" in text and "Shares at the last step" in text
    )
    assert (
        "5 % of the tokens are skipped, averaged over the layers. 1 expert received no token."
        in text
    )
