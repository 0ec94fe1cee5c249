"""The whole page: complete, self-contained, small, and written whole or not at all."""

import html.parser
import json
import math
import re

import numpy as np
import pytest

from zaya_jax.config import UserError
from zaya_jax.report import experts, heat, page, write_report


class Checker(html.parser.HTMLParser):
    """Fails where tags do not nest; collects text, ids and anything that would load something."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.loads, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        names = dict(attrs)
        self.ids += [names["id"]] if "id" in names else []
        self.loads += [(tag, n) for n in names if n in ("src", "href", "xlink:href", "action", "data")]
        self.loads += [tag] if tag in ("link", "iframe", "object", "embed", "img", "image", "base") else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data):
        self.text.append(data)


def checked(path):
    """The page's source and its text, after the checks that every page must pass."""
    text = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids))
    assert checker.loads == []
    assert not re.search(r"https?:|@import|url\((?!#)", text)
    assert "NaN" not in "".join(re.findall(r' (?:points|d|x|y|cx|cy|transform)="[^"]*"', text))
    assert path.stat().st_size < 1_000_000
    return text, "".join(checker.text)


def test_report_of_a_run_has_all_its_parts(make_run):
    path = write_report(make_run(300))
    assert path.name == "report.html"
    source, text = checked(path)
    for title in ("Loss", "Loss, second half", "Balance of each layer", "Skipped tokens", "Learning rate",
                  "Gradient norm", "Seconds per step", "Tokens per second", "Time waiting for data",
                  "Model FLOPs utilisation", "Skipped updates", "grad_norm/…", "param_norm", "bias_change",
                  "Experts of layer 0", "Experts of layer 2", "Experts of layer 5"):  # fmt: skip
        assert f"<figcaption>{title}<" in source, title
    for heading in (
        "Loss",
        "Expert load",
        "Optimisation",
        "Speed",
        "Other metrics",
        "Sample",
        "Numbers",
        "Config",
    ):
        assert f"<h2>{heading}</h2>" in source
    assert source.count('role="img"') == source.count("<desc ") == source.count("<figure")
    assert re.search(
        r"<title>tiny: held-out 1\.\d+, train 1\.\d+ nats per byte after 300 steps</title>", source
    )
    assert "2 CPU cores" in text
    assert "complete" in text
    assert "prefers-color-scheme:dark" in source.replace(" ", "")


def test_the_same_run_gives_the_same_page(make_run):
    path = make_run(20)
    assert write_report(path).read_bytes() == write_report(path).read_bytes()


def test_sample_is_escaped_and_its_prompt_marked(make_run):
    path = make_run(5)
    (path / "sample.txt").write_text("def <script>alert('x')</script> & \x07")
    source, text = checked(write_report(path))
    assert "<mark>def </mark>&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; ␇" in source
    assert "def <script>alert('x')</script>" in text


def test_sample_without_the_recorded_prompt_is_shown_unmarked(make_run):
    path = make_run(5)
    (path / "sample.txt").write_text("class A:")
    source, _ = checked(write_report(path))
    assert "<pre>class A:</pre>" in source
    assert "after the marked prompt" not in source


def test_the_samples_of_earlier_ends_are_below(make_run):
    path = make_run(5)
    kept = [{"step": s, "prompt": "def ", "text": f"def <{s}>"} for s in (2, 4, 4, 5)]
    kept[2]["text"] = "def <four>"
    (path / "sample.txt").write_text("def <5>")
    lines = [*map(json.dumps, kept), '{"step": 9, "text": 1, "prompt": ""}', "half"]
    (path / "samples.jsonl").write_text("\n".join(lines) + "\n")
    source, text = checked(write_report(path))
    part = source[source.index("<h2>Sample</h2>") : source.index("<h2>Numbers</h2>")]
    assert re.findall("<summary>(.*?)</summary>", part) == ["At step 4", "At step 2"]
    assert (
        "<mark>def </mark>&lt;four&gt;" in part and "&lt;4&gt;" not in part and part.count("&lt;5&gt;") == 1
    )
    assert "2 lines of samples.jsonl could not be read and are left out." in text


def test_the_page_of_a_small_run_is_under_400_kb(make_run):
    assert write_report(make_run(400, layers=4)).stat().st_size < 400_000


def test_config_marks_what_differs_from_the_defaults(make_run):
    path = make_run(5)
    config = json.loads((path / "config.json").read_text())
    config["optim"]["lr"] = 0.25
    config["optim"]["weight_decay"] = 1  # an integer where the default is 0.1
    config["optim"]["b1"] = config["optim"]["b1"] * 1.0
    config["extra"] = {"<key>": "\ud800"}
    (path / "config.json").write_text(json.dumps(config))
    source, _ = checked(write_report(path))
    row = '<th scope="row"><code>lr</code></th><td><code>0.25</code></td><td><code>0.001</code></td></tr>'
    assert f'<tr class="changed">{row}' in source
    assert '<tr><th scope="row"><code>b1</code></th>' in source
    assert "&lt;key&gt;" in source
    marked = int(re.search(r"\((\d+) differ from the defaults", source)[1])
    assert marked == source.count('<tr class="changed">')


def test_losses_that_are_not_finite_are_marked(make_run):
    path = make_run(60)
    lines = (path / "metrics.jsonl").read_text().splitlines()
    for index, value in ((19, math.nan), (20, math.inf), (40, None)):
        lines[index] = json.dumps({**json.loads(lines[index]), "loss": value})
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    source, text = checked(write_report(path))
    loss = source[source.index("<figcaption>Loss<") : source.index("<figcaption>Loss, second half<")]
    assert loss.count('<g class="bad">') == 3
    assert "not finite at step 20" in loss
    assert "loss was not finite at 3 steps, first at step 20." in text


def test_a_run_that_ends_in_nan_says_so(make_run):
    path = make_run(30, extras=False)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "tokens": 1, "loss": NaN, "grad_norm": NaN}\n')
    _, text = checked(write_report(path))
    assert "NaNnot finite at step 31" in text


def test_all_losses_nan(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {s}, "loss": NaN}}\n' for s in range(1, 2000))
    )
    source, text = checked(write_report(tmp_path))
    assert "loss was not finite at 1,999 steps, first at step 1." in text
    assert source.count('<g class="bad">') <= 2 * 40


def test_a_spike_is_left_out_of_the_picture_and_said(make_run):
    path = make_run(200, extras=False)
    lines = (path / "metrics.jsonl").read_text().splitlines()
    lines[99] = json.dumps({**json.loads(lines[99]), "loss": 5e8})
    (path / "metrics.jsonl").write_text("\n".join(lines))
    _, text = checked(write_report(path))
    assert "The highest, 500M at step 100, is above the picture." in text


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_run_of_few_steps(make_run, steps):
    source, _ = checked(write_report(make_run(steps)))
    assert "Shares at the " in source


@pytest.mark.parametrize("content", ["", "\n\n", '{"step": 1, "lo', None])
def test_a_run_without_a_complete_step(tmp_path, content):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    source, text = checked(write_report(tmp_path))
    assert "<figure" not in source
    assert "metrics.jsonl" in text


def test_a_truncated_last_line_is_left_out(make_run):
    path = make_run(10)
    whole = (path / "metrics.jsonl").read_bytes()
    (path / "metrics.jsonl").write_bytes(whole[:-40])
    _, text = checked(write_report(path))
    assert "1 line of metrics.jsonl could not be read and is left out." in text
    assert "of 10 planned" in text


@pytest.mark.parametrize("record", [
    {"step": 5},
    {"step": 5, "eval/loss": 2.0},
    {"step": 5, "load_entropy": [0.9, 0.8]},
    {"step": 5, "load": [[0.5, 0.5]]},
    {"step": 5, "load": [[0.0, 0.0, 1.0], [float("nan")] * 3]},
    {"step": 5, "loss": 0.0, "lr": 0.0, "grad_norm": 0.0, "step_seconds": 0.0, "tokens_per_second": 0.0},
    {"step": 5, "loss": 1e299, "grad_norm": -1e299, "step_seconds": -1.0, "data/wait_fraction": 1.0},
    {"step": 0, "loss": 5e-324, "tokens": 0},
    {"step": 2**53 - 1, "loss": 1.0, "data/wait_fraction": 0.5},
    {"step": 5, "eval/accuracy": 0.5, "a/b": 1.0, "a/": 2.0, "/b": 3.0, "": 4.0, "<x>": [1, 2]},
])  # fmt: skip
def test_any_subset_of_metrics_makes_a_page(tmp_path, record):
    lines = json.dumps(record) + "\n" + json.dumps({**record, "step": record["step"] + 1}) + "\n"
    (tmp_path / "metrics.jsonl").write_text(lines)
    checked(write_report(tmp_path))


def test_a_long_run_with_many_metrics_stays_small(make_run):
    path = make_run(3000, layers=40, experts=16, load_every=20)
    lines = (path / "metrics.jsonl").read_text().splitlines()
    with (path / "metrics.jsonl").open("w") as file:
        for index, line in enumerate(lines):
            more = {f"update_norm/{i}": math.sin(index * i) for i in range(60)}
            file.write(json.dumps({**json.loads(line), **more}) + "\n")
    source, _ = checked(write_report(path))
    assert "<figcaption>update_norm/… (10)<" in source
    assert "mean and range" in source


def test_a_curve_of_merged_steps_has_the_range_of_each(tmp_path):
    lines = [json.dumps({"step": s, "loss": 2 + math.sin(s), "lr": s}) + "\n" for s in range(1, 2001)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    source, _ = checked(write_report(tmp_path))
    for title in ("Loss", "Learning rate"):
        drawn = source[source.index(f"<figcaption>{title}<") :].split("</figure>")[0]
        assert drawn.count('<polygon class="band c0"') == 1, title
    assert not re.search(r'class="[^"]*[\[(]', source)


def test_many_experts_are_a_picture_at_the_end(make_run):
    source, _ = checked(write_report(make_run(20, layers=3, experts=300, extras=False)))
    assert "<figcaption>Shares at the last step<" in source
    assert 'class="shares"' not in source


def test_dead_experts_and_uneven_layers_are_named(tmp_path):
    load = [[0.5, 0.5, 0.0, 0.0], [0.3, 0.3, 0.3, 0.1]]
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "load": load}) + "\n")
    _, text = checked(write_report(tmp_path))
    assert "between 0.631 (layer 0) and 1.000 (layer 1)" in text
    assert "5 % of the tokens are skipped, averaged over the layers. 1 expert received no token." in text


def heat_maps(source):
    """{title: ({colour: rectangles}, the figure's text)} of a page's heat maps."""
    found = {}
    for figure in re.findall(r"<figure.*?</figure>", source, re.S):
        if "data-heat" in figure:
            title = re.search(r"<figcaption>(.*?)<", figure)[1]
            paths = dict(re.findall(r'<path class="([sdr]\d+)" d="([^"]*)"', figure))
            found[title] = {name: d.count("M") for name, d in paths.items()}, figure
    return found


@pytest.mark.parametrize("steps", [1, 3])
def test_maps_of_zeros_are_drawn_as_zero_and_maps_of_one_value_say_it(tmp_path, steps):
    record = {
        "zeros": [0.0, 0.0],
        "threes": [3.0, 3.0],
        "load": [[0.0, 0.0, 1.0]] * 2,
        "load_entropy": [0.0, 0.0],
    }
    lines = [json.dumps({"step": i + 1, **record}) + "\n" for i in range(steps)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    source, _ = checked(write_report(tmp_path))
    maps = heat_maps(source)
    assert maps["zeros"][0] == {"s0": 2} and "0 throughout." in maps["zeros"][1]
    assert maps["threes"][0] == {f"s{heat.LEVELS - 1}": 2} and "3 throughout." in maps["threes"][1]
    for title, low in (("zeros", ">0<span"), ("threes", ">0<span")):
        assert low in maps[title][1]
    assert maps["Balance of each layer"][0] == {"r0": 2}
    assert maps["Experts of layer 0"][0] == {"d0": 2, f"s{heat.LEVELS - 1}": 1}  # no token went to an expert


def test_a_share_of_which_an_expert_s_is_not_known_stays_open():
    fair = experts._fair(np.array([[0.0, np.nan, 1.0], [0.0, 0.0, 1.0], [0.2, 0.6, 0.2]]))
    np.testing.assert_allclose(fair, [[np.nan, np.nan], [0, 0], [0.5, 1.5]])


def test_entropy_is_that_of_the_experts_alone():
    load = np.array([[0.25, 0.25, 0.5], [0.1, 0.3, 0.6], [0.0, 0.4, 0.6], [0.0, 0.0, 1.0]])
    quarter = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) / math.log(2)
    np.testing.assert_allclose(experts.entropies(load), [1.0, quarter, 0.0, np.nan])


def test_a_workdir_that_is_none_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match="is not a directory; give the one a run wrote to"):
        write_report(tmp_path / "nowhere")


def test_a_failure_leaves_the_old_report_and_no_debris(make_run, monkeypatch):
    path = make_run(5)
    write_report(path).write_text("old")

    def broken(run):
        raise RuntimeError("while drawing")

    monkeypatch.setattr(page, "render", broken)
    with pytest.raises(RuntimeError, match="while drawing"):
        write_report(path)
    assert (path / "report.html").read_text() == "old"
    assert not list(path.glob(".report*"))


def test_a_report_that_cannot_be_replaced_is_one_clear_line(make_run):
    path = make_run(5)
    (path / "report.html").mkdir()
    with pytest.raises(UserError, match=r"no report: .*the workdir must be readable"):
        write_report(path)
    assert not list(path.glob(".report*"))
