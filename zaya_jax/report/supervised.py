"""What `python -m experiments.supervise report` calls: the page made anew, and the account of the time in words."""

from pathlib import Path

from zaya_jax.aegis import accounts, events
from zaya_jax.report.page import write_report


def report(workdir: str | Path) -> str:
    """Writes report.html, and gives the tables for the terminal; UserError where the folder is none."""
    path = write_report(workdir)
    account = accounts.of(events.read(workdir))
    told = accounts.text(account) if account else "no agent has written anything here\n"
    return f"{told}Report: {path}\n"
