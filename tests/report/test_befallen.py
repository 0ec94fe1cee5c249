"""The report's part on a supervised run: what is drawn of which second, the tables, and nothing for other runs."""

import dataclasses
import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_page import checked

from zaya_jax.aegis import accounts
from zaya_jax.aegis.events import FILES, FOLDER, Event
from zaya_jax.config import UserError
from zaya_jax.report import aegis, write_report
from zaya_jax.report.supervised import report
from zaya_jax.report.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH


def spent(time, seconds, first, last, **sections):
    return Event("spent", time, step=last, seconds=seconds, facts={"from": first, "sections": sections})


def befallen(faults=3, left_out=1, days=0.0):
    """Events of a run with so many deaths, each 100 s after a start, and so many spikes."""
    time, step, found = 1e9, 0, []
    for turn in range(faults + 1):
        found.append(Event("started", time, step=step if turn else -1, facts={"start": turn + 1}))
        if turn:
            found.append(Event("restarted", time + 8, step=step, seconds=12.0, facts={"stop": 1.0}))
        stretch = 86400 * days / (faults + 1) if days else 0.0
        found.append(spent(time + 20, 20.0, step, step, start=8.0, compile=12.0))
        found.append(
            spent(
                time + 90 + stretch,
                70.0 + stretch,
                step,
                step + 70,
                step=60.0 + stretch,
                save=6.0,
                evaluate=4.0,
            )
        )
        time, step = time + 100 + stretch, step + 40
        if turn < faults:
            label = ("gpu uncorrectable memory error", "", "disk full")[turn % 3]
            found.append(
                Event(
                    "died",
                    time,
                    "critical",
                    "node1",
                    turn,
                    step,
                    "SIGKILL",
                    label,
                    "restart",
                    3.0,
                    {"start": turn + 1},
                )
            )
            time += 3
    for turn in range(left_out):
        facts = {"step": step - 10 - turn, "at": step, "batches": 6}
        found.append(Event("spike", time, "numbers", step=step, seen="loss <9.1>", facts=facts))
    found.append(Event("ended", time + 1, step=step, facts={"code": 0}))
    return found


def write(folder, found):
    path = folder / FOLDER / FILES["agent"]
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(dataclasses.asdict(event)) + "\n" for event in found))
    return folder


def section(text):
    return text[text.index("What befell the run") :].split("</section>")[0]


def test_a_supervised_run_has_its_part(make_run):
    source, text = checked(write_report(write(make_run(60), befallen())))
    for title in ("Timeline", "Goodput", "Interruptions by cause", "Where the time went", "Batches left out"):
        assert title in text, title
    part = section(source)
    assert part.count("gpu uncorrectable memory error") >= 1 and "died: SIGKILL" in part
    assert "loss &lt;9.1&gt;" in part and "<9.1>" not in part


def test_a_run_without_an_agent_has_none(make_run):
    source, _ = checked(write_report(make_run(60)))
    assert "What befell the run" not in source


@pytest.mark.parametrize("faults", [0, 1, 7, 200])
def test_the_columns_sum_to_the_time(faults):
    account = accounts.of(befallen(faults))
    shares = aegis.binned(account, aegis.BINS)
    assert shares.sum(1) == pytest.approx([1.0] * aegis.BINS)
    whole, totals = account.end - account.begin, account.totals
    for i, (_, uses, _) in enumerate(aegis.GROUPS):
        assert shares[:, i].mean() == pytest.approx(sum(totals[use] for use in uses) / whole, abs=1e-9)


def test_every_use_but_idle_is_drawn_in_one_group():
    drawn = [use for _, uses, _ in aegis.GROUPS for use in uses]
    assert sorted([*drawn, "idle"]) == sorted(accounts.USES)
    assert len({color for _, _, color in aegis.GROUPS}) == len(aegis.GROUPS)


@pytest.mark.parametrize("days", [0.0, 0.2, 30.0])
def test_the_picture_stays_within_itself(days):
    svg = aegis.timeline(accounts.of(befallen(9, days=days)))
    assert "nan" not in svg.lower() and svg.count("<g data-name=") == aegis.BINS
    bars = [
        tuple(map(float, b))
        for b in re.findall(r'class="bar c\d" x="(\S+)" y="(\S+)" width="(\S+)" height="(\S+)"', svg)
    ]
    for left, top, wide, tall in bars:
        assert left >= LEFT - 0.1 and left + wide <= WIDTH - RIGHT + 0.1
        assert top >= TOP - 0.1 and top + tall <= HEIGHT - BOTTOM + 0.2 and tall >= 0
    labels = re.findall(r'<text x="(\S+)" y="(\S+)" text-anchor="(\w+)">([^<]*)<', svg)
    below = [(float(x), anchor, words) for x, y, anchor, words in labels if float(y) > HEIGHT - BOTTOM + 10]
    places = []
    for x, anchor, words in below:
        wide = 8.0 * len(words)
        left = {"end": x - wide, "middle": x - wide / 2, "start": x}[anchor]
        places.append((left, left + wide))
        assert left >= 0 and left + wide <= WIDTH
    for (_, end), (begin, _) in itertools.pairwise(sorted(places)):
        assert begin >= end - 4, below
    assert {words for *_, words in below} & {"s", "min", "h", "d"}  # the unit


@pytest.mark.parametrize("faults", [0, 3, 50])
def test_the_curve_of_goodput_ends_at_the_goodput(faults):
    account = accounts.of(befallen(faults))
    drawn = aegis.goodput_curve(account)
    assert "nan" not in drawn.lower()
    last = re.findall(r"so far <b[^>]*>([\d.]+) %</b>", drawn)
    assert float(last[0]) == pytest.approx(100 * account.goodput, rel=1e-3)


def test_colours_follow_the_scheme():
    part = aegis.timeline(accounts.of(befallen()))
    assert not re.search(
        r"#[0-9a-f]{3,6}\b|fill=|stroke=", part
    )  # classes alone: light and dark are the page's


def test_tables_are_what_the_account_says(make_run):
    folder = write(make_run(20), befallen(6))
    account = accounts.of(befallen(6))
    part = section(checked(write_report(folder))[0])
    rows = accounts.by_cause(account)
    assert math.isclose(sum(row.lost for row in rows), sum(cause.lost for cause in account.causes))
    for row in rows:
        assert f'<th scope="row">{row.label}</th><td>{row.group}</td><td>{len(row.causes)}</td>' in part
        assert aegis.duration(row.lost) in part
    assert f"<td>{aegis.duration(account.end - account.begin)}</td><td>100 %</td>" in part


def test_the_report_in_words(make_run):
    folder = write(make_run(20), befallen())
    told = report(folder)
    assert "goodput" in told and "disk full" in told and told.endswith(f"{folder / 'report.html'}\n")
    with pytest.raises(UserError, match="not a directory"):
        report(folder / "nowhere")


def test_half_written_and_foreign_events_are_no_harm(make_run):
    folder = write(make_run(20), befallen())
    with (folder / FOLDER / FILES["agent"]).open("ab") as file:
        file.write(
            b'{"kind": "died", "time": 1e9\n\xff\xfe\n[]\n{"kind": "new", "time": 2e9, "later": 1}\n{"kind'
        )
    checked(write_report(folder))


def test_durations():
    assert [aegis.duration(s) for s in (0, 0.0123, 4.25, 125, 3600, 90061, float("nan"))] == [
        "0 s", "12.3 ms", "4.25 s", "2 min 5 s", "1 h", "1 d 1 h", "–",
    ]  # fmt: skip


def test_the_report_needs_no_jax():
    code = "import sys; import zaya_jax.report.supervised; sys.exit('jax' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=Path(aegis.__file__).parents[2], check=False
        ).returncode
        == 0
    )
