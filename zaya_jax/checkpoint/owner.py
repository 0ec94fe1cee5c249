"""Whose copies lie in a durable place: asked of every step there before anything is fetched, copied or deleted.

A place bears its run's name (`.run`) from the first copy on. Of older ones, and where it was lost, each step's list
tells it, or the small file in the step where the list is damaged or an upload was cut short.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from zaya_jax.checkpoint.layout import META
from zaya_jax.checkpoint.remote import Vault, each, unreachable
from zaya_jax.checkpoint.seal import RUN
from zaya_jax.config import StorageError, UserError
from zaya_jax.config.fields import parse_json

UNKNOWN = ""


def runs_at(vault: Vault) -> dict[int | None, str | None]:
    """The run of each step of a place, cut-short ones too, and by None that of the place itself, where it has one.

    UNKNOWN where nothing tells, None where it was written before runs had names.
    """
    owner = vault.owner()
    found: dict[int | None, str | None] = {None: owner} if owner else {}
    steps = sorted({*vault.steps(), *vault.unfinished()})
    return found | dict(zip(steps, each(lambda step: _run_of(vault, step), steps), strict=True))


def _run_of(vault: Vault, step: int) -> str | None:
    told: list[str | None] = []
    for look in (lambda: vault.manifest(step).run, lambda: parse_json(vault.get(step, META)).get("run")):
        try:
            run = look()
        except StorageError as error:
            if unreachable(error):
                raise
        except (ValueError, AttributeError):
            pass
        else:
            if run:
                return run
            told.append(run)
    return None if told else UNKNOWN


def require_one(vault: Vault, run: str, who: str, option: str) -> None:
    """UserError where a place holds copies of another run than `run`, of several, or of nobody knows whom.

    `run` is UNKNOWN for who has none of its own yet, and may take the place's.
    """
    found = runs_at(vault)
    known = {name for name in found.values() if name}
    if not known and UNKNOWN in found.values():
        step = max(step for step, name in found.items() if name == UNKNOWN and step is not None)
        raise UserError(
            f"{option} holds step {step}, of which nothing tells whose it is; move it away, or give another place"
        )
    strangers = known - {run} if run else set()
    if strangers:
        steps = [step for step, name in found.items() if name in strangers and step is not None]
        other = found[max(steps)] if steps else found[None]
        what = f"step {max(steps)}" if steps else f"the name ({RUN})"
        raise UserError(
            f"{option} holds {what} of another run than {who} (that is run {other}, this is run {run}); "
            "give each run a place of its own"
        )
    if len(known) > 1:
        raise UserError(
            f"{option} holds steps of more than one run ({mixed(found.items())}); give each run a place of its own"
        )


def mixed(found: Iterable[tuple[int | None, str | None]]) -> str:
    """Which steps are of which run."""
    by_run: dict[str, list[str]] = {}
    for step, run in found:
        if run:
            by_run.setdefault(run, []).append(RUN if step is None else str(step))
    return "; ".join(f"{', '.join(steps)} of run {run}" for run, steps in by_run.items())


def require_accepted(vault: Vault, who: Path, accept: Callable[[dict[str, Any]], object]) -> None:
    """UserError where the newest copy that can be read is of another config than a new workdir's."""
    for step in reversed(vault.steps()):
        try:
            meta = parse_json(vault.checked(step, META, vault.manifest(step)))
            accept(meta)
            return
        except UserError as error:
            what = str(error)
        except StorageError as error:
            if unreachable(error):
                raise
            continue  # damaged: whoever fetches it says so
        except (ValueError, AttributeError, TypeError, KeyError):
            continue
        raise UserError(
            f"config.checkpoint.durable={vault.url} holds step {step} of another run than {who} ({what}); "
            "give each run a place of its own"
        )
