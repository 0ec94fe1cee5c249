"""The section of a supervised run: the timeline and the tables."""

import dataclasses
import json
import math
import re

from made_run import checked, write_run

from zaya_jax.aegis import accounts
from zaya_jax.cluster.events import FILES, FOLDER, RunEvent
from zaya_jax.report import supervised, write_report


def spent(time, seconds, first, last, **sections):
    return RunEvent(
        "spent", time, step=last, seconds=seconds, facts={"from": first, "sections": sections}
    )


def befallen(faults=3):
    """Events of a run with so many deaths, each 100 s after a start, and a spike."""
    time, step, found = 1e9, 0, []
    for turn in range(faults + 1):
        found.append(
            RunEvent("started", time, step=step if turn else -1, facts={"start": turn + 1})
        )
        if turn:
            found.append(
                RunEvent("restarted", time + 8, step=step, seconds=12.0, facts={"stop": 1.0})
            )
        found.append(spent(time + 20, 20.0, step, step, start=8.0, compile=12.0))
        found.append(spent(time + 90, 70.0, step, step + 70, step=60.0, save=6.0, evaluate=4.0))
        time, step = time + 100, step + 40
        if turn < faults:
            label = ("gpu uncorrectable memory error", "", "disk full")[turn % 3]
            about = {
                "node": "node1",
                "process": turn,
                "step": step,
                "seen": "SIGKILL",
                "concluded": label,
            }
            facts = {"start": turn + 1}
            found.append(
                RunEvent(
                    "died", time, "critical", **about, done="restart", seconds=3.0, facts=facts
                )
            )
            time += 3
    facts = {"step": step - 10, "at": step, "batches": 6}
    found.append(RunEvent("spike", time, "numbers", step=step, seen="loss <9.1>", facts=facts))
    return [*found, RunEvent("ended", time + 1, step=step, facts={"code": 0})]


def write(folder, found):
    path = folder / FOLDER / FILES["agent"]
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(dataclasses.asdict(event)) + "\n" for event in found))
    return folder


def section(text):
    return text[text.index("<h2>Interruptions") :].split("</section>")[0]


def test_a_supervised_run_has_its_part(tmp_path):
    source = write_report(write(write_run(tmp_path / "run", 60), befallen())).read_text()
    text = checked(source)
    for title in ("Timeline", "Goodput", "Interruptions by cause", "Where the time went"):
        assert title in text, title
    part = section(source)
    assert part.count("gpu uncorrectable memory error") >= 1 and "died: SIGKILL" in part


def test_tables_are_what_the_account_says(tmp_path):
    folder = write(write_run(tmp_path / "run", 20), befallen(6))
    account = accounts.account_of(befallen(6))
    source, text = write_report(folder).read_text(), supervised.account_text(account)
    part, rows = section(source), accounts.by_cause(account)
    assert math.isclose(
        sum(row.lost for row in rows), sum(cause.lost for cause in account.interruptions)
    )
    for row in rows:
        assert f'<th scope="row">{row.label}</th><td>{row.group}</td><td>{row.count}</td>' in part
        assert supervised.duration(row.lost) in part and row.label in text
    whole = supervised.duration(account.end - account.begin)
    assert f"<td>{whole}</td><td>100 %</td>" in part and re.search(
        rf"together +\| +{whole} \| +100 % \|", text
    )
    assert supervised.percent(account.goodput) in text.splitlines()[0]
    assert supervised.account_text(None) == "No agent has recorded a start here.\n"
