"""The page's script: its arithmetic wherever there is node, and all of it in a browser where there is one."""

import json
import pathlib
import re
import shutil
import subprocess
import threading

import pytest
from browser import CHROMIUM, DRIVER, Browser
from test_befallen import befallen, write

from experiments import report
from zaya_jax.report import compare, evaluation, live, page, script, serve, style, svg, write_report
from zaya_jax.report.read import read_workdir

NODE = shutil.which("node")
WITHOUT_PAGE = """
const nothing = {className: '', setAttribute() {}, append() {}, addEventListener() {}};
globalThis.document = {createElement: () => nothing, body: nothing, querySelectorAll: () => [],
  getElementById: () => ({dataset: {version: '', every: '2'}, textContent: ''}), addEventListener() {}};
globalThis.setInterval = () => 0;
"""


def told(expression):
    """What an expression of the page's script gives, as JSON."""
    source = f"{WITHOUT_PAGE}{script.SCRIPT}{live.SCRIPT}console.log(JSON.stringify({expression}));"
    source = source.replace("'use strict';", "")
    done = subprocess.run([NODE, "-e", source], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(not NODE, reason="no node")
def test_the_arithmetic_of_zoom_and_cursor():
    spans = [(0, 1), (1.5, 6.1), (-3, 7), (1, 400), (0, 3e-9), (12, 12.5)]
    values = [0, 1.63499, -2.5, 4096, 12_345, 1_638_400, 1e-5, 1e200]
    plain, log = svg.Axis(1, 400, 54, 448), svg.Axis(0.01, 100, 204, 14, log=True)
    found = told(
        f"""{{
        ticks: {json.dumps(spans)}.map(([a, b]) => ticks(a, b)),
        shown: {json.dumps(values)}.map(v => show(v)),
        nearest: [nearest([[1, 5], [4, 6], [9, 7]], 5), nearest([], 5)],
        inside: [inside(10, 20, 0, 100), inside(-10, 20, 0, 100), inside(90, 130, 0, 100), inside(5, 5, 0, 100),
          inside(-500, 500, 0, 100)],
        places: [axis("{plain.data()}").place(100), axis("{log.data()}").place(1)],
        values: [axis("{plain.data()}").value(448), axis("{log.data()}").value(109)],
        fitted: [fitted([{{points: [[1, 50], [2, 80], [3, 9000], [9, 20]]}}], 1, 3, 204, 14), fitted([], 1, 3, 204, 14)]
        }}"""
    )
    for (low, high), ticks in zip(spans, found["ticks"], strict=True):
        assert ticks == pytest.approx(svg.ticks(low, high))
    assert found["shown"] == ["0", "1.635", "-2.5", "4096", "12.35k", "1.638M", "1.00e-5", "1e+188T"]
    assert found["nearest"] == [[4, 6], None]
    assert found["inside"] == [[10, 20], [0, 30], [60, 100], pytest.approx([4.95, 5.05]), [0, 100]]
    assert found["places"] == pytest.approx([plain(100), log(1)])
    assert found["values"] == pytest.approx([400, 1])
    assert found["fitted"] == [pytest.approx([81.8, 48.2]), [204, 14]]


def luminance(color):
    return style._luminance(color if len(color) == 7 else "#" + "".join(2 * c for c in color[1:]))


def contrast(a, b):
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def palettes():
    """The variables of the light scheme and of the dark one."""
    sheet = style.style_sheet()
    light, dark = (
        re.findall(r"--(\w+): (#\w+);", block) for block in re.findall(r":root \{(.*?)\}", sheet, re.S)[:2]
    )
    return {"light": dict(light), "dark": dict(light) | dict(dark)}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_curves_stand_out(scheme):
    colors = palettes()[scheme]
    for text in ("ink", "soft", "bad"):
        for ground in ("page", "card"):
            assert contrast(colors[text], colors[ground]) >= 4.5, (text, ground)
    for text in ("ink", "soft"):
        assert contrast(colors[text], colors["mark"]) >= 4.5, text
    for color in (*style.LINES[scheme], colors["focus"]):
        assert contrast(color, colors["card"]) >= 3, color
    assert palettes()["light"] != palettes()["dark"]


def test_nothing_moves_by_itself():
    """Who asked for less motion gets none, and so does everybody else."""
    assert not re.search(r"transition|animation|@keyframes|scroll-behavior", style.style_sheet())
    assert not re.search(r"<animate|requestAnimationFrame|smooth'", script.SCRIPT + live.SCRIPT)


def test_every_picture_has_a_table_a_title_and_a_description(make_run):
    pictures = re.findall(
        "<figure.*?</figure>", write_report(write(make_run(60), befallen())).read_text(), re.S
    )
    assert len(pictures) > 15
    for picture in pictures:
        assert "<title " in picture and "<desc " in picture
        title = re.search("<figcaption>(.*?)<", picture)[1]
        assert '<details class="values">' in picture or title in ("Timeline", "Shares at the last step"), (
            title
        )


def test_a_curve_s_table_has_its_ends_and_dashes_where_another_has_none():
    lines = [svg.Line("a", [(s, s / 10) for s in range(1, 101)]), svg.Line("b", [(1, 5.0), (2, 4.0)])]
    drawn = svg.line_chart("t", lines, x_range=(1, 100), y_range=(0, 10))
    rows = re.findall(r'<tr><th scope="row">(\d+)</th><td>(.*?)</td><td>(.*?)</td></tr>', drawn)
    assert len(rows) == svg.TABLE_ROWS and rows[0] == ("1", "0.1", "5") and rows[-1] == ("100", "10", "–")
    assert "(12 of 100)" in drawn
    hours = svg.line_chart(
        "t", [svg.Line("a", [(0.25, 1.0), (1.5, 2.0)])], x_range=(0, 2), y_range=(0, 3), over="h"
    )
    assert re.findall(r'<th scope="row">(.*?)</th>', hours) == ["0.25", "1.5"]


########################################################################################################################
# In a browser
########################################################################################################################

browser = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium with its chromedriver")
LEGEND = "return [...document.querySelectorAll('#' + arguments[0] + ' b')].map(b => b.textContent)"
AT = "return document.querySelector('#' + arguments[0] + ' .at').textContent"
BOX = (
    "const f = document.getElementById(arguments[0]); f.scrollIntoView({block: 'center'});"
    "const b = f.querySelector('svg').getBoundingClientRect(); return [b.left, b.top, b.width, b.height]"
)


def place(window, name, x):
    """Where on the screen a picture's pixel is, in the middle of its height."""
    left, top, wide, tall = window.run(BOX, name)
    return left + x * wide / svg.WIDTH, top + tall / 2


@browser
@pytest.mark.slow
def test_hover_zoom_and_keys_in_a_browser(make_run):
    path = write_report(make_run(300))
    records = [json.loads(line) for line in (path.parent / "metrics.jsonl").read_text().splitlines()]
    name = svg.picture_id("Learning rate")
    x = svg.Axis(1, 300, svg.LEFT, svg.WIDTH - svg.RIGHT)
    with Browser() as window:
        window.open(path)
        before = window.run(LEGEND, name)
        window.mouse(("move", *place(window, name, x(100))))
        assert window.run(AT, name) == "step 100"
        assert float(window.run(LEGEND, name)[0]) == pytest.approx(records[99]["lr"], rel=0.01)
        start, end = place(window, name, x(50)), place(window, name, x(80))
        window.mouse(("move", *start), ("down",), ("move", *end), ("up",), ("move", 2, 2))
        low, high = map(float, re.match(r"step (\d+) – (\d+)$", window.run(AT, name)).groups())
        assert (low, high) == pytest.approx((50, 80), abs=2)
        window.mouse(("move", *place(window, name, (svg.LEFT + svg.WIDTH - svg.RIGHT) / 2)))
        assert int(window.run(AT, name).split()[1]) == pytest.approx(
            65, abs=2
        )  # the middle is another step now
        labels = window.run(
            "return [...document.querySelectorAll('#' + arguments[0] + ' .xs text')].map(t => t.textContent)",
            name,
        )
        assert all(50 <= int(label) <= 80 for label in labels) and len(labels) >= 3
        window.run(
            "document.querySelector('#' + arguments[0] + ' svg').dispatchEvent(new MouseEvent('dblclick'))",
            name,
        )
        window.mouse(("move", 2, 2))
        assert window.run(AT, name) == "" and window.run(LEGEND, name) == before
        # The keyboard.
        told = "return document.querySelector('.told').textContent"
        window.run("document.querySelector('#' + arguments[0] + ' svg').focus()", name)
        window.keys("home", "right", "right")
        assert window.run(told).startswith("step 3: each step ")
        window.keys("end", "left", "+", "+")
        assert window.run(told).startswith("zoomed to step ")
        low, high = map(int, re.search(r"step (\d+) – (\d+)$", window.run(told)).groups())
        assert high == 300 and high - low == pytest.approx(75, abs=2)
        window.keys("0")
        assert window.run(told) == "whole picture"
        window.keys("escape")
        heat = svg.picture_id("Balance of each layer")
        window.run("document.querySelector('#' + arguments[0] + ' svg').focus()", heat)
        window.keys("right", "down")
        assert re.match(r"layer 1, step \d+: 0\.\d+$", window.run(told))
        assert window.run("return [...document.querySelectorAll('figure svg:not([tabindex])')].length") == 0


@browser
@pytest.mark.slow
def test_a_held_out_value_of_a_long_run_has_its_step(tmp_path):
    """Of 200,000 steps 507 are a pixel: within one the value stood as if it were of the step under the cursor."""
    train = svg.Line("train", [(512 * i + 256.5, 3 - i / 400) for i in range(391)])
    held_out = svg.Line("held-out", [(25_000 * i, 3.1 - i / 8) for i in range(1, 9)], 1, "dots")
    picture = svg.line_chart("Loss", [train, held_out], x_range=(1, 200_000), y_range=(2, 3.2))
    (tmp_path / "page.html").write_text(page.shell("Loss", {"loss": picture}))
    name, x = svg.picture_id("Loss"), svg.Axis(1, 200_000, svg.LEFT, svg.WIDTH - svg.RIGHT)
    with Browser() as window:
        window.open(tmp_path / "page.html")
        window.run("document.querySelector('#' + arguments[0] + ' svg').focus()", name)
        for step in (24_832, 25_000, 100_000):
            window.mouse(("move", *place(window, name, x(step))))
            at, (_, value) = window.run(AT, name), window.run(LEGEND, name)
            near = 25_000 if step < 60_000 else 100_000
            assert value == f"{3.1 - near / 200_000:.4g}" + (
                "" if at == f"step {near // 1000}k" else f" (step {near // 1000}k)"
            ), (at, value)


@browser
@pytest.mark.slow
def test_a_finger_reads_and_zooms(make_run):
    path = write_report(make_run(300))
    name = svg.picture_id("Learning rate")
    x = svg.Axis(1, 300, svg.LEFT, svg.WIDTH - svg.RIGHT)
    with Browser(360, 800) as window:
        window.open(path)
        window.mouse(("move", *place(window, name, x(100))), ("down",), ("up",), kind="touch")
        assert window.run(AT, name).startswith("step ")
        assert int(window.run(AT, name).split()[1]) == pytest.approx(100, abs=2)
        start, end = place(window, name, x(100)), place(window, name, x(200))
        window.mouse(("move", *start), ("down",), ("move", *end), ("up",), kind="touch")
        assert window.run(
            "return document.querySelector('#' + arguments[0] + ' svg').classList.contains('zoomed')", name
        )


@browser
@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_no_sideways_scrolling_on_a_phone_in_either_scheme(make_run, tmp_path, dark):
    path = write_report(write(make_run(60), befallen()))
    runs = [read_workdir(path.parent)] * 12
    several = tmp_path / "several.html"
    page.write_page(several, lambda: page.shell(compare.title(runs), compare.parts(runs)))
    with Browser(360, 800, dark) as window:
        for one in (path, several):
            window.open(one)
            window.run("for (const fold of document.querySelectorAll('details')) fold.open = true")
            assert window.run("return document.documentElement.scrollWidth") == 360, one
            assert window.run("return matchMedia('(prefers-color-scheme: dark)').matches") == dark
            ground = window.run("return getComputedStyle(document.body).backgroundColor")
            wanted = palettes()["dark" if dark else "light"]["page"]
            assert ground == "rgb({}, {}, {})".format(*style._rgb(wanted))


@browser
@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (360, True)])
def test_an_evaluation_s_page_is_read_at_any_width(tmp_path, width, dark):
    row = {"documents": 12, "tokens": 172_799, "bytes": 9, "loss": 3.7, "perplexity": 41.3, "bits_per_byte": 5.4,
           "accuracy": 0.1}  # fmt: skip
    places = [{"from": 1 << k, "to": (2 << k) - 1, "tokens": 9, "loss": 6 / (k + 1)} for k in range(15)]
    data = {
        name: {**row, "by_position": places} for name in ("all", "a/folder of a long name/**/*.jsonl.zst")
    }
    result = {
        "model": "runs/one", "date": "today", "device": "cpu", "jax": "0", "seconds": 1.0, "notes": ["A note."],
        "data": data, "tasks": {"one": {"acc": (0.5, None)}},
    }  # fmt: skip
    (tmp_path / "evaluation.html").write_text(evaluation.render(result))
    name = svg.picture_id("Loss by place in the document over place")
    x = svg.Axis(1, 1 << 14, svg.LEFT, svg.WIDTH - svg.RIGHT, log=True)
    with Browser(width, 1500, dark) as window:
        window.open(tmp_path / "evaluation.html")
        assert window.run("return document.documentElement.scrollWidth") == width
        inside = """
            const card = document.querySelector('figure').getBoundingClientRect();
            return [...document.querySelectorAll('figure svg text')].map(one => one.getBoundingClientRect())
              .every(one => one.left >= card.left && one.right <= card.right && one.height < 25)"""
        assert window.run(inside)
        whole = "return [...document.querySelectorAll('td')].map(one => getComputedStyle(one).whiteSpace)"
        assert set(window.run(whole)) == {"nowrap"}
        window.mouse(("move", *place(window, name, x(64))))
        assert window.run(AT, name) == "place 64"
        assert float(window.run(LEGEND, name)[0].removesuffix(" nats")) == pytest.approx(6 / 7, rel=1e-3)
        window.mouse(("move", *place(window, name, x(8192))))
        assert window.run(AT, name) == "place 8192"


@browser
@pytest.mark.slow
def test_a_page_that_is_watched_keeps_zoom_folds_place_and_focus(make_run, monkeypatch):
    monkeypatch.setattr(live, "EVERY", 0.2)
    monkeypatch.setattr(serve, "AT_MOST_EVERY", 0.0)
    monkeypatch.setattr(serve, "SHARE", 1.0)
    run: pathlib.Path = make_run(200)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:150]))
    server = serve.Server(0, serve.Pages(report.Watched([run])))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    name = svg.picture_id("Learning rate")
    soon = (
        "for (let i = 0; i < 100; i++) { if (TEST) return true; await new Promise(r => setTimeout(r, 50)); }"
        "return false;"
    )
    try:
        with Browser() as window:
            window.open(f"http://127.0.0.1:{server.server_port}/")
            assert "after 150 steps" in window.run("return document.title")
            window.run(
                f"document.querySelector('#{name} svg').focus(); document.querySelector('#{name}').scrollIntoView()"
            )
            window.run(
                f"document.querySelector('#{name} details').open = true; window.old = document.querySelector('#{name}')"
            )
            window.keys("home", "+", "+", "right")
            at, top = window.run(AT, name), window.run("return scrollY")
            assert at == "step 2"
            with (run / "metrics.jsonl").open("a") as file:
                file.write("".join(lines[150:]))
            seen = soon.replace("TEST", "document.title.includes('after 200 steps')")
            assert window.run(f"return (async () => {{{seen}}})()")
            assert window.run(f"return document.querySelector('#{name}') !== window.old")
            assert window.run(AT, name) == at and window.run("return scrollY") == top
            assert window.run("return document.activeElement.closest('figure').id") == name
            assert window.run(f"return document.querySelector('#{name} details').open")
            assert window.run(f"return document.querySelector('#{name} svg').classList.contains('zoomed')")
            labels = window.run(
                f"return [...document.querySelectorAll('#{name} .xs text')].map(t => +t.textContent)"
            )
            assert labels and max(labels) <= 40  # a quarter of the 150 steps
            monkeypatch.setattr(serve.Handler, "do_GET", lambda self: setattr(self, "close_connection", True))
            gone = soon.replace("TEST", "document.getElementById('live').textContent.startsWith('No answer')")
            assert window.run(f"return (async () => {{{gone}}})()")
    finally:
        server.shutdown()
        server.server_close()
