"""Opens a run's folder, checks that it belongs to this run, and knows which config keys may change
when a run resumes.

config.json        the recorded config            tokenizer/         the tokenizer
checkpoints/STEP/  complete checkpoints           metrics.jsonl      one object per step
events.out.*       TensorBoard's                  report.html        the picture of it all
logs/              one file per process, see `logs`  environment.json   devices, versions, a fork's ancestors
sample.txt         the model's text at the end
tracker.id         the run's id with trackers, see `trackers`
.lock              the process that writes here now, see `checkpoint.run.claims`
imported.json      where the weights came from PyTorch: their config's further keys, their dtypes
"""

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from zaya_jax import config as config_lib
from zaya_jax import schedule
from zaya_jax.checkpoint import folders, source
from zaya_jax.checkpoint.layout import IMPORTED, META
from zaya_jax.checkpoint.run import claims
from zaya_jax.checkpoint.writing import reason
from zaya_jax.cluster import multihost
from zaya_jax.config import Config, StorageError, UserError, fields, files
from zaya_jax.data import mix
from zaya_jax.hardware import sizing
from zaya_jax.model import own_parts
from zaya_jax.text.tokenizers import Tokenizer
from zaya_jax.training import logs, notes

# When a run resumes, keys may differ from the recorded config if they are in one of these three
# lists, or in phases that have not begun. These do not affect what a step computes:
MAY_CHANGE = (
    "name",
    "run.num_steps",
    "run.changed_source",
    "log",
    "eval",
    "checkpoint",
    "guard",
    "data.on_corrupt",
    "phases.eval_seq_len",
    "phases.name",
    "model.max_position_embeddings",
)
COMPARED_BY_CONTENT = ("data.path", "data.tokenizer")  # checkpoints have fingerprints of both
# These change the order of sums, so the run rounds differently; a note reports them.
CHANGES_ROUNDING = (
    "mesh",
    "hardware",
    "kernels",
    "remat",
    "precision.weights",
    "data.micro_batch",
    "phases.mesh",
    "phases.remat",
    "phases.micro_batch",
)


def folder_of(config: Config, workdir: str | os.PathLike | None) -> Path:
    """The run's folder: the one that was given, or runs/NAME."""
    if workdir is None:
        return Path("runs") / config.name
    fields.check_path("--workdir", str(workdir))
    return Path(workdir)


def open_workdir(
    path: str | os.PathLike, config: Config, on_locked: Callable[[], None] = lambda: None
) -> Path:
    """Creates the folder, with the config in it, or checks that it is this run's; UserError
    otherwise.

    `on_locked` is called when no other run writes there and nothing is written yet. Changed keys of
    a run that resumes are recorded later, by `record_start`. The first process opens it; the others
    must have the same config and see the same folder.
    """
    facts = shared_facts(config)
    chosen, first_facts = multihost.broadcast_from_zero(
        "workdir", lambda: [str(_open(Path(path), config, on_locked)), facts]
    )
    workdir = Path(chosen)
    differing = changed_keys(flat(first_facts), flat(facts))
    if differing:
        key, first, local = differing[0]
        raise UserError(
            f"config.{key}={local!r} here, but {first!r} in process 0; "
            "start all processes with the same command and files"
        )
    if not (workdir / "config.json").exists():
        raise UserError(
            f"{workdir} is not the folder that process 0 has opened: config.json is not"
            " there; give one on a file system that all nodes share"
        )
    return workdir


def shared_facts(config: Config) -> dict[str, Any]:
    """What must be the same in all processes: the config, and the files on which their programs
    depend."""
    figures = sizing.figures_at(config.hardware.figures, jax.devices()[0].device_kind)
    files_of = {
        "hardware.figures": zlib.crc32(repr(figures).encode()),
        "model": own_parts.sources(config.model),
    }
    return config_lib.to_dict(config) | {"content of": files_of}


def _open(workdir: Path, config: Config, on_locked: Callable[[], None]) -> Path:
    claims.require_outside(workdir)
    claims.require_writable(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    _check_owner(workdir, config)
    claims.take(workdir, logs.say)
    try:
        # while it waited, another run may have begun there, and ended
        _check_owner(workdir, config)
    except UserError:
        claims.release(workdir)
        raise
    on_locked()
    if not (workdir / "config.json").exists():
        write_json(workdir / "config.json", config_lib.to_dict(config))
    return workdir


def _check_owner(workdir: Path, config: Config) -> None:
    """UserError if a folder is not a run's, or is another run's."""
    recorded, steps = workdir / "config.json", folders.steps_in(workdir / "checkpoints")
    if recorded.exists() or steps:
        old = read_config(workdir)
        if steps:  # the newest checkpoint's own: config.json may have been changed since
            with contextlib.suppress(StorageError, UserError):
                saved = source.read_meta(workdir, steps[-1]).get("config")
                old = config_lib.check(saved) if saved else old
        check_same(old, config, workdir)
        return
    for path in sorted(workdir.iterdir()):
        if path.name != claims.LOCK and not files.is_part_of(path, recorded):
            raise UserError(
                f"{workdir} holds {path.name} and no config.json, so it is not a run's;"
                " give a new folder"
            )


class TakenFolder:
    """A run's folder, which `open_workdir` locks: at the end of a start it is unlocked.

    Before that it is removed, if it is new and the run is refused before its first step. A run of
    several processes leaves it: as long as nothing is saved there, any config may take it.
    """

    def __init__(self, workdir: Path):
        self._workdir, self._new = workdir, False
        self._made = [path for path in workdir.parents if not path.exists()]

    def note_if_new(self) -> None:
        """Notes whether the folder is new; called when no other run writes there and this one has
        written nothing."""
        self._new = not (self._workdir / "config.json").exists()

    def run_began(self) -> None:
        """From here on the folder's content is a run's, and stays."""
        self._new = False

    def __call__(self, kind: type | None, *_: object) -> None:
        """The callback of an ExitStack."""
        if kind and jax.process_count() > 1:
            return  # the process ends, and the lock with it
        if kind and issubclass(kind, UserError) and self._new:
            shutil.rmtree(self._workdir, ignore_errors=True)
            claims.remove_empty(self._made)
        claims.release(self._workdir)


def record_start(workdir: Path, config: Config, tokenizer: Tokenizer, lineage: list) -> None:
    """Opens this process's log, then writes the files of a start, before its first step; `lineage`:
    the runs that this one is forked from."""
    logs.open_log(workdir)
    if not multihost.is_writer():
        return
    write_json(workdir / "config.json", config_lib.to_dict(config))
    tokenizer.save(workdir / "tokenizer")
    write_json(workdir / "environment.json", notes.environment() | {"forked": lineage})


def read_config(workdir: str | os.PathLike) -> Config:
    """The config that a workdir's run was started with."""
    path = Path(workdir) / "config.json"
    try:
        recorded = files.read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{workdir} has no config.json that can be read ({reason(error)}); give the"
            " folder of a run, or restore its config: each checkpoint has it too, in"
            f' {META} under "config"'
        ) from None
    with fields.naming(str(path)):
        return config_lib.check(recorded)


def write_json(path: Path, content: dict) -> None:
    """Writes a small file whole or not at all."""
    files.write(path, (json.dumps(content, indent=1) + "\n").encode())


def check_same(old: Config, new: Config, workdir: Path, reached: int | None = None) -> str:
    """UserError if a run cannot resume from step `reached` (the newest here) with another config
    than it had.

    Otherwise a note of the differences: rounding, or steps that have not begun.
    """
    steps = folders.numbered(workdir / "checkpoints")
    if not steps and reached is None:
        return ""  # nothing is there that could resume
    reached = max(steps) if reached is None else reached
    untrained = (workdir / IMPORTED).exists() and reached == 0
    segments = schedule.make_plan(old).segments
    begun = max((s.phase_index + 1 for s in segments if s.first_step <= reached), default=0)
    rounding = []
    later = old.run.num_steps != new.run.num_steps and not new.schedule.phases
    for key, was, now in changed_keys(_comparable_keys(old), _comparable_keys(new)):
        if untrained and not _is_of_weights(key):
            continue
        phase = re.match(r"schedule\.phases\[(\d+)\]\.", key)
        if phase and begun and int(phase[1]) >= begun:
            later = True
            continue
        general = f"phases.{key[phase.end() :]}" if phase else key
        if _matches_any(general, CHANGES_ROUNDING):
            rounding.append(f"{key} ({was!r} before, {now!r} now)")
        elif not _matches_any(general, MAY_CHANGE + COMPARED_BY_CONTENT):
            raise UserError(
                f"{workdir} was started with config.{key}={was!r}, now it is {now!r}; "
                "restore it, or give a new workdir"
            )
    notes = []
    if rounding:
        notes.append(
            f"{', '.join(rounding)}: sums have another order from here on, so the run rounds"
            " differently"
        )
    if later:
        notes.append("steps that have not begun follow the new plan, and so does the learning rate")
    return f"note: changed since step {reached}: {'; '.join(notes)}" if notes else ""


def changed_keys(old: dict, new: dict) -> list[tuple[str, Any, Any]]:
    """(key, old value, new value) of all keys that differ."""
    keys = sorted(old.keys() | new.keys())
    return [(k, old.get(k), new.get(k)) for k in keys if old.get(k) != new.get(k)]


def _is_of_weights(key: str) -> bool:
    """Whether weights that were imported and not yet trained depend on a key."""
    model = key.startswith("model.") and not key.endswith("_token_id")
    return model or key in ("run.fork", "run.lora", "run.base")


def _matches_any(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(name + ".") for name in names)


def _comparable_keys(config: Config) -> dict:
    """All keys, those of the phases too; of a mixture only the weights, since a source may move."""
    keys = flat(config_lib.to_dict(config))
    for i, phase in enumerate(keys.pop("schedule.phases")):
        for name, value in phase.items():
            keys[f"schedule.phases[{i}].{name}"] = value
    for key, value in keys.items():
        if key.split(".")[-1] == "mixture":
            keys[key] = list(mix.parse_mixture(tuple(value), f"config.{key}").values())
    return keys


def flat(tree: dict, prefix: str = "") -> dict:
    """The leaves of nested dicts by their dotted keys."""
    out: dict = {}
    for key, value in tree.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out
