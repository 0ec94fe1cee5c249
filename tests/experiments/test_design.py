"""experiments.design: the search against a brute force, its picture, its configs, its refusals."""

import itertools
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from refusals import check_refused

from experiments.design import page, picture, search
from experiments.design.__main__ import parser
from zaya_jax import config as config_lib
from zaya_jax import schedule
from zaya_jax.hardware import clusters
from zaya_jax.model import zaya
from zaya_jax.plan import phases, rates, serving
from zaya_jax.training import recipe

NAME, CLUSTER = "h100_ib", clusters.CLUSTERS["h100_ib"]
RATES = rates.for_cluster(CLUSTER)
ACTIVE, TOTAL = 60e6, 420e6
SMALL = {"WIDTHS": (512, 768, 1024), "PARTS": (1, 2), "EXPERTS": (8, 12, 16, 24)}


def ask_for(**changes) -> search.Ask:
    given = dict(
        cluster=CLUSTER, devices=64, active=ACTIVE, total=TOTAL, context=4096, vocab=32_768
    )
    return search.Ask(**(given | changes))


@pytest.fixture(scope="module")
def result():
    """Of three widths, two parts and four numbers of experts, which further searches have too."""
    with pytest.MonkeyPatch.context() as patch:
        for name, values in SMALL.items():
            patch.setattr(search, name, values)
        yield page.compare(ask_for(), RATES)


def sizes(row):
    return row["width"], row["heads"][0], row["experts"], row["layers"], row["expert_width"]


def weights(width, heads, groups, experts, layers, inner, router=256, c=128):
    """Active and all weights of matrices, by SPEC.md."""
    attention = width * c * (2 * heads + 2 * groups) + (heads + groups) * c * (2 * c + 2)
    routing = width * router + 2 * router**2 + router * (experts + 1)
    expert = 3 * width * inner
    return [layers * (attention + routing + n * expert) for n in (1, experts)]


def brute_force():
    """The nearest shape to both budgets for each width, heads and number of experts, of all depths
    and widths of experts."""
    for width, part, experts in itertools.product(*SMALL.values()):
        heads = width // part // 128
        groups = {4: 1, 8: 2, 6: 2, 3: 1, 2: None}[heads]
        if groups is None:
            continue
        tried = []
        for layers, inner in itertools.product(range(1, 40), range(64, 8193, 64)):
            if 32 <= width / layers <= 128:
                active, total = weights(width, heads, groups, experts, layers, inner)
                away = max(abs(active / ACTIVE - 1), abs(total / TOTAL - 1))
                tried.append((away, (width, heads, experts, layers, inner)))
        away, nearest = min(tried)
        if away <= 0.02:
            yield nearest


def test_the_shapes_are_those_of_a_brute_force(result):
    found = {sizes(row) for row in result["shapes"]}
    assert found == set(brute_force())
    assert len(found) > 5


def test_the_front_has_what_no_other_beats():
    gains = {1: (3, 1, 1), 2: (1, 3, 1), 3: (1, 1, 1), 4: (3, 1, 1), 5: (3, 1, 0), 6: (2, 2, 2)}
    assert search.front(gains) == [1, 2, 4, 6]


def test_the_front_is_of_depth_training_and_answering_without_strains(result):
    gains = {
        row["number"]: (row["layers"], row["tokens_per_second"][0], -row["token_ms"][0][0])
        for row in result["shapes"]
        if not row["strains"]
    }
    front = [row["number"] for row in result["shapes"] if row["front"]]
    assert front == search.front(gains)
    assert 1 < len(front) < len(result["shapes"])


def test_shapes_are_near_the_budgets_and_fit_the_tiles(result):
    for row in result["shapes"]:
        counts = zaya.param_counts(config_lib.check(search.configured(row["settings"])).model)
        # Vectors, which the search does not count, are a hundredth at this size.
        assert counts["active_without_embedding"] == pytest.approx(ACTIVE, rel=0.03)
        assert counts["without_embedding"] == pytest.approx(TOTAL, rel=0.03)
        assert not {"multiple of 64", "tile", "head_dim"} & set(row["strains"])
        assert ("experts over 8" in row["strains"]) == (row["experts"] % 8 > 0)


def test_a_written_config_is_planned_as_the_shape_was(result, tmp_path):
    row = result["shapes"][1]
    path = tmp_path / "shape_2.py"
    path.write_text(page.config_file(result, 2, path, NAME))
    config = config_lib.read_config(str(path))
    (planned,), notes = phases.plan_run(config, 64, CLUSTER, RATES)
    token_ms = 1e3 * serving.seconds(planned.case, RATES, 8, 1, 4096)
    found = [planned.tokens_per_second / 64, planned.memory.peak, token_ms]
    expected = [row["tokens_per_second"][0], row["memory"], row["token_ms"][1][0]]
    assert found == pytest.approx(expected) and not notes


@pytest.mark.parametrize("vocab", [262_272, 131_072])
def test_zaya1_base_is_among_the_shapes_and_on_the_front_at_its_own_budgets(vocab, monkeypatch):
    monkeypatch.setattr(search, "WIDTHS", (2048,))
    monkeypatch.setattr(search, "EXPERTS", (16, 24))
    cluster = clusters.CLUSTERS["mi300x_pollara"]
    own = ask_for(cluster=cluster, devices=1024, active=760e6, total=8.3e9, vocab=vocab)
    found = page.compare(own, rates.for_cluster(cluster))
    (row,) = [row for row in found["shapes"] if row["zaya1_base"]]
    assert sizes(row) == (2048, 8, 16, 40, 2048) and row["front"]
    by_assumption = {what: (trains, more) for what, trains, more, *_ in found["zaya1_base"]}
    assert by_assumption["as planned, batch 1"] == (row["number"], 0.0)
    # 22 layers of wider experts train faster.
    assert by_assumption["fewer layers are as good"][1] > 0.05
    assert ">ZAYA1-base<" in picture.draw(found)


def test_what_does_not_fit_is_trained_in_another_way_or_counted():
    near = ask_for(devices=8, active=760e6, total=8.3e9, vocab=262_272)
    found = search.planned(near, search.BASE)
    assert found.settings["data.micro_batch"] < found.settings["data.global_batch"]
    assert search.planned(ask_for(devices=1), search.BASE) is None


@pytest.mark.parametrize(
    ("devices", "context", "parts"),
    [
        (1024, 4096, 1),
        (1024, 32_768, 2),
        (1024, 131_072, 8),
        (1000, 131_072, 4),
        (1024, 100_000, 4),
        (12, 2**24, 4),
        (7, 100_001, 1),
    ],
)
def test_any_number_of_devices_trains_at_any_context(devices, context, parts):
    given = ask_for(devices=devices, context=context)
    way = next(search.ways(given, 16))
    assert way["mesh.context"] == parts
    settings = search.settings_of(search.base_shape(given), way)
    config = config_lib.check(search.configured(settings))
    (segment,) = schedule.make_plan(config).segments
    *_, sequences, _ = recipe.place_segment(config, segment, devices)
    assert sequences == way["data.global_batch"]


def test_the_picture_is_whole_and_no_two_labels_overlap(result):
    svg = ET.fromstring(re.search(r"<svg.*</svg>", picture.draw(result), re.DOTALL)[0])
    assert len(svg.findall(".//circle")) == len(result["shapes"])
    boxes = []
    for text in svg.findall(".//text[@class='value']"):
        x, y, half = float(text.get("x")), float(text.get("y")), 3.6 * len(text.text)
        boxes.append((x - half, y - 10, x + half, y + 2))
    assert boxes and all(left > 0 and right < picture.WIDTH for left, _, right, _ in boxes)
    for (l1, t1, r1, b1), (l2, t2, r2, b2) in itertools.combinations(boxes, 2):
        assert r1 <= l2 or r2 <= l1 or b1 <= t2 or b2 <= t1


def test_nothing_near_the_budgets_is_one_line(result):
    check_refused("0 shapes are near that", page.compare, ask_for(total=61e6), RATES)


@pytest.mark.parametrize(("text", "budget"), [("60M", 60e6), ("0.4B", 400e6), ("8300", 8300)])
def test_budgets_are_read_with_their_suffix(text, budget):
    assert parser().parse_args([f"--active={text}"]).active == budget


@pytest.mark.parametrize("text", ["many", "M", "-1M"])
def test_what_is_no_budget_is_refused(text):
    check_refused("--active", parser().parse_args, [f"--active={text}"])


def test_the_program_writes_its_files_and_a_config_that_pretrain_takes(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(search, "WIDTHS", (512,))
    monkeypatch.setattr(search, "EXPERTS", (8,))
    given = ["--active=60M", "--total=0.42B", "--vocab=32768", "--chip=h100", "--devices=64"]
    nowhere = parser().parse_args([*given, f"--out={tmp_path / 'new'}", "--write=999"])
    check_refused("--write=999 is none of the shapes", page.run, nowhere)
    assert not (tmp_path / "new").exists()
    assert page.run(parser().parse_args([*given, f"--out={tmp_path}", "--write=1"])) == 0
    text = capsys.readouterr().out
    assert "ZAYA1-base is not near these budgets" in text and f"{tmp_path}/shape_1.py" in text
    assert (tmp_path / "design.md").read_text() in text
    assert "<svg" in (tmp_path / "design.html").read_text()
    assert ET.parse(tmp_path / "design.svg").getroot().tag.endswith("}svg")
    own = json.loads((tmp_path / "design.json").read_text())["shapes"][0]["settings"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "experiments.pretrain",
            f"--config={tmp_path / 'shape_1.py'}",
            "--describe",
        ],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert f"{own['data.global_batch']:,}" in done.stdout
