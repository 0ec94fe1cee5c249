"""Where checkpoints go beside `workdir/checkpoints`: a fast folder before it, a safe place after it.

    [checkpoint.local, each node's own]  →  workdir/checkpoints  →  [checkpoint.durable, a folder or URL]

With a local folder a save is over when each process's part lies there; both further ways are gone by one thread in the
background, in the order of the steps. At the start of a run `bring_newest` makes the newest step of any tier whole in
`workdir/checkpoints`: parts that a killed run had only in local folders are put together by whoever sees them.
"""

import concurrent.futures
import contextlib
import functools
import heapq
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google_crc32c
import jax

from zaya_jax.checkpoint import audit, layout, places, writing
from zaya_jax.checkpoint.layout import META
from zaya_jax.checkpoint.seal import RUN, Seal, Sums, signed, unsigned, wrong_with
from zaya_jax.cluster import multihost
from zaya_jax.config import Checkpoint, StorageError, files
from zaya_jax.config.fields import parse_json

if TYPE_CHECKING:
    from zaya_jax.checkpoint import remote

GONE = "gone"
PART = "part.json"  # of one process: its files, and of how many parts it is one


class Tiers:
    """The ways of a run's checkpoints; `record` takes their times."""

    def __init__(
        self, root: Path, settings: Checkpoint, say: Callable[[str], None], record: Callable[..., None],
        delete_old: Callable[[], None], accept: Callable[[dict[str, Any]], object] | None = None,
    ):  # fmt: skip
        self.root, self._say, self._record, self._delete_old = root, say, record, delete_old
        self._settings, self._accept = settings, accept
        self._local = local_folder(root, settings)
        if self._local:
            writing.require_writable(self._local, f"config.checkpoint.local={settings.local}")
        self._vault = _vault(settings.durable) if settings.durable else None
        others = {
            f"config.checkpoint.local={settings.local}": self._local,
            f"config.checkpoint.durable={settings.durable}": self._vault.folder if self._vault else None,
        }
        places.require_apart([root.parent, root], {name: place for name, place in others.items() if place})
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "tiers")
        # A step, what brings it, and whether it was owed from before.
        self._jobs: list[tuple[int, concurrent.futures.Future, bool]] = []
        self._owed: list[int] = []
        self._deleted: list[int] = []
        self._failed: dict[int, str] = {}  # steps whose last copy failed, and why

    def _mine(self) -> Path:
        assert self._local is not None
        return self._local / f"process-{jax.process_index()}"

    def staging(self, step: int) -> Path:
        """Where this process writes its pieces of a step."""
        return (self._mine() if self._local else self.root) / f"{writing.SAVING}{step}"

    def commit(self, step: int, folder: Path, files: Sums) -> None:
        """Makes a step whole, when all processes have written; in process 0."""
        if self._local is None:
            writing.commit(folder, self.root / str(step), Seal(files, step, self.run() or None))

    def written(self, step: int, files: Sums) -> None:
        """Notes what this process has written in its local folder."""
        if self._local:
            part = {
                "step": step, "process": jax.process_index(), "count": jax.process_count(), "files": files,
                "run": self.run(),
            }  # fmt: skip
            writing.write_files(self.staging(step), {PART: signed(part)})

    def give_up(self, step: int) -> None:
        """Clears this process's local folder of a step that others could not write."""
        if self._local:
            shutil.rmtree(self.staging(step), ignore_errors=True)

    def pass_on(self, step: int) -> None:
        """Begins to bring a saved step to the next tiers."""
        if self._local:
            target = self._mine() / str(step)
            shutil.rmtree(target, ignore_errors=True)
            with contextlib.suppress(OSError):  # it is then missed where it is read
                self.staging(step).rename(target)
        if self._local or self._vault:
            self._jobs = [job for job in self._jobs if not job[1].done()]
            self._jobs.append((step, self._thread.submit(self._bring, step), False))
            self._pay(1)

    def may_go(self, step: int) -> bool:
        """Whether nobody needs a step in workdir/checkpoints any more; if so, its copy goes too."""
        if any(waiting == step and not job.done() for waiting, job, _ in self._jobs):
            return False
        self._deleted.append(step)
        return True

    def settle(self, seconds: float | None, most: int = 0) -> bool:
        """Waits until at most so many steps are on their way; False if that takes longer.

        What is owed from before counts only where all is waited for.
        """
        waiting = [job for _, job, owed in self._jobs if not job.done() and not (owed and most)]
        waiting = waiting[: max(len(waiting) - most, 0)]
        done, late = concurrent.futures.wait(waiting, seconds)
        for job in done:
            job.result()
        return not late

    def make_up(self) -> None:
        """Begins to bring to the durable place what is here and not there: copies that failed or were cut short."""
        if multihost.is_writer():
            self._warn_of_strangers()
        self._owed = self._missing()[0]
        self._pay(1)

    def _pay(self, count: int) -> None:
        """Puts some of what is owed on its way, the newest first.

        One beside each save: more would keep the copy of that waiting. All processes do so at the same points, since
        their threads must have the same steps in the same order.
        """
        for _ in range(min(count, len(self._owed))):
            step = self._owed.pop()
            self._jobs.append((step, self._thread.submit(self._bring_copy, step), True))

    def close(self, again: bool = True) -> list[int]:
        """Finishes what is on its way, and tries once more what has failed; the steps without a durable copy."""
        self.settle(None)
        missing, error = self._missing()
        if missing and again and not error:
            self._owed = list(missing)
            self._pay(len(missing))
            self.settle(None)
            missing, error = self._missing()
        self._thread.shutdown()
        if missing and multihost.is_writer():
            # What is damaged here stays damaged, however often it is tried.
            hopeless = {step: why for step, why in self._failed.items() if why.startswith(f"{self.root}/")}
            again_later = [step for step in missing if step not in hopeless]
            if again_later:
                self._say(
                    f"error: {self._settings.durable} has no whole copy of step {', '.join(map(str, again_later))}"
                    f"{f': {error}' if error else ''}; the same command tries again"
                )
            for step in sorted(set(missing) & hopeless.keys()):
                self._say(
                    f"error: {self._settings.durable} has no whole copy of step {step}, and cannot get one: "
                    f"{hopeless[step]}; restore {self.root / str(step)}, or move it away"
                )
        return missing

    def _missing(self) -> tuple[list[int], str]:
        """Steps here of which the durable place has no whole copy, and why that could not be looked up if so."""
        vault = self._vault
        if vault is None:
            return [], ""

        def look() -> list:
            here = writing.steps_in(self.root)
            try:
                there = set(vault.steps())
                return [[step for step in here if step not in there or not self._copied(vault, step)], ""]
            except StorageError as error:
                return [here, str(error)]

        missing, error = multihost.from_first("missing", look)
        return missing, error

    def _copied(self, vault: "remote.Vault", step: int) -> bool:
        """Whether a step there is a copy of the one here; or whole by itself, where the one here is another's."""
        try:
            whole = audit.own_seal(self.root / str(step), step)
        except StorageError:
            with contextlib.suppress(StorageError):
                return vault.lacks(step, vault.manifest(step)) == []
            return False
        return vault.lacks(step, whole) == []

    def _warn_of_strangers(self) -> None:
        """Says which steps here are damaged in their lists, or another step's or run's: they are never copied."""
        for step in writing.numbered(self.root):
            try:
                audit.own_seal(self.root / str(step), step)
            except StorageError as error:
                self._say(f"WARNING: {error}; it is neither read nor copied: move it away, or restore it")

    def run(self) -> str:
        """The run's own name, made when it begins."""
        return writing.run_of(self.root)

    ####################################################################################################################
    # One step on its way; in all processes together, in a thread
    ####################################################################################################################

    def _bring(self, step: int) -> None:
        error = None
        if self._local:
            parts = {jax.process_index(): self._mine() / str(step)}
            error = self._publish("publish", step, parts)
            if not error:
                for old in writing.numbered(self._mine()):
                    if old < step:
                        writing.remove(self._mine(), old)
        if error:
            self._not_copied(step, error)
        elif self._vault:
            self._bring_copy(step)

    def _bring_copy(self, step: int) -> None:
        error = self._send(step, time.time())
        self._failed.pop(step, None)
        if error and error != GONE:
            self._failed[step] = error
            self._not_copied(step, error)

    def _not_copied(self, step: int, error: str) -> None:
        if multihost.is_writer():
            self._say(f"warning: step {step} is saved, but its copy is NOT: {error}; training goes on")

    def _publish(self, name: str, step: int, parts: dict[int, Path]) -> str | None:
        """Copies parts of a step into workdir/checkpoints and makes it whole there; what went wrong, if anything."""
        files, error = Sums(), None
        folder = self.root / f"{writing.SAVING}{step}"
        try:
            for part in parts.values():
                sums = _read_part(part)["files"]
                with concurrent.futures.ThreadPoolExecutor(writing.THREADS, "publish") as pool:
                    list(pool.map(lambda item, part=part: _copy(part, folder, *item), sums.items()))
                files |= sums
        except (OSError, ValueError, StorageError) as failure:
            error = writing.reason(failure)
        told = multihost.to_first(f"{name} part", [error, files])

        def end() -> str | None:
            errors = [part[0] for part in told or [] if part[0]]
            try:
                if not errors and not (self.root / str(step)).exists():
                    whole = {k: v for part in told or [] for k, v in part[1].items()}
                    writing.commit(folder, self.root / str(step), Seal(whole, step, self.run()))
                    self._delete_old()
            except OSError as failure:
                errors.append(writing.reason(failure))
            if errors:
                shutil.rmtree(folder, ignore_errors=True)
            return errors[0] if errors else None

        return multihost.from_first(f"{name} end", end)

    def _send(self, step: int, begun: float) -> str | None:
        vault, clock, error = self._vault, time.perf_counter(), None
        assert vault is not None
        folder, size = self.root / str(step), 0

        def begin() -> list:
            """What keeps it from being sent, the files to send (None: all), whether a whole copy would go for them."""
            if not folder.exists():
                return [GONE, None, False]  # the rules have deleted it meanwhile
            try:
                whole = audit.own_seal(folder, step)
                vault.claim(self.run())
                names = vault.lacks(step, whole)
                return [None, names, names is None and vault.has(step)]
            except StorageError as failure:
                return [writing.reason(failure), None, False]

        error, names, replaces = multihost.from_first("send", begin)
        if not error and replaces:
            error = self._damaged_here(folder)  # nothing whole is given up for what is not
        if error:
            return error

        def reopen() -> str | None:
            try:
                vault.reopen(step)  # no copy any more as soon as the first of its files is written anew
            except StorageError as failure:
                return writing.reason(failure)
            return None

        error = multihost.from_first("reopen", reopen) if replaces else None
        if error:
            return error
        try:
            sums = audit.own_seal(folder, step).files
            wanted = sums if names is None else {name: sums[name] for name in names if name in sums}
            mine = share(wanted)
            size = sum(sums[name][0] for name in mine)
            vault.upload(folder, step, mine)
        except (StorageError, OSError, ValueError) as failure:
            error = writing.reason(failure)
        stages = {"write": time.perf_counter() - clock}
        told = multihost.to_first("sent", [error, stages, size])

        def end() -> str | None:
            errors = [part[0] for part in told or [] if part[0]]
            if errors:
                return errors[0]
            try:
                clock = time.perf_counter()
                vault.complete(folder, step)
                seconds = time.perf_counter() - clock
                self._record(
                    "copy",
                    step,
                    begun,
                    [p[1] | {"commit": seconds} for p in told or []],
                    [p[2] for p in told or []],
                )
                for old in list(self._deleted):
                    vault.remove(old)
                    self._deleted.remove(old)
            except (StorageError, OSError, ValueError) as failure:
                return writing.reason(failure)
            return None

        return multihost.from_first("sent end", end)

    def _damaged_here(self, folder: Path) -> str | None:
        """What is wrong with a step's files here, each read by one process."""
        try:
            sums = writing.read_seal(folder).files
            found = [
                str(damage) for damage in audit.check_here(folder, {name: sums[name] for name in share(sums)})
            ]
        except (OSError, ValueError) as failure:
            found = [f"{layout.MARKER} is {audit.unreadable(failure)}"]
        told = multihost.to_first("here", found[:1])
        first = multihost.from_first(
            "damaged here", lambda: next((part[0] for part in told or [] if part), None)
        )
        return f"{folder} is damaged: {first}" if first else None

    ####################################################################################################################
    # At the start of a run; in all processes together
    ####################################################################################################################

    def bring_newest(self) -> None:
        """Makes the newest step of any tier whole in workdir/checkpoints; clears what was left half-done."""
        here = multihost.from_first("tiers", self._tidy)
        if self._local:
            self._publish_newest(here)
        if self._vault:
            self._fetch_newest(self._vault)

    def _tidy(self) -> int:
        try:
            writing.clear(self.root)
            self.root.mkdir(parents=True, exist_ok=True)
            self._name_run()
        except OSError as error:
            raise StorageError(
                f"{self.root} cannot be used for checkpoints ({writing.reason(error)}); move away what is in its place"
            ) from None
        return max(writing.steps_in(self.root), default=-1)

    def _name_run(self) -> None:
        """Makes the run's name, or finds it again where it was lost or changed: each checkpoint has it too."""
        runs = set()
        for step in writing.steps_in(self.root):
            with contextlib.suppress(OSError, ValueError):
                runs.add(writing.read_seal(self.root / str(step)).run)
        here, known = self.run(), sorted(run for run in runs if run)
        if here and (here in known or not known):
            return
        if here or len(known) > 1:
            what = f"names run {here!r}" if here else "is missing or empty"
            raise StorageError(
                f"{self.root / RUN} {what}, but the checkpoints beside it are of {' and '.join(known)}; if they "
                "are this run's, write their name into it, otherwise move them away"
            )
        writing.begin_run(self.root, *known)
        if known:
            self._say(f"{self.root / RUN} was missing; it is written again, by what the checkpoints say")

    def _publish_newest(self, here: int) -> None:
        assert self._local is not None
        writing.clear(self._mine())
        seen: dict[int, list] = {}  # by step: [process that wrote it, of how many]
        run = self.run()
        for folder in sorted(self._local.glob("process-*")):
            for step in writing.numbered(folder):
                try:
                    part = _read_part(folder / str(step))
                    if part["run"] != run:
                        shutil.rmtree(folder / str(step), ignore_errors=True)
                    elif part["step"] != step:
                        raise ValueError(f"of step {part['step']}")
                    else:
                        seen.setdefault(step, []).append([part["process"], part["count"]])
                except (OSError, ValueError, KeyError, TypeError) as damage:
                    self._say(f"warning: {folder / str(step) / PART} is not taken: {writing.reason(damage)}")
        told = multihost.to_first("local", {str(step): parts for step, parts in seen.items()})

        def choose(failed: list[int]) -> list:
            for step in sorted({int(s) for view in told or [] for s in view}, reverse=True):
                if step <= here:
                    break
                if step in failed:
                    continue
                views = [view.get(str(step), []) for view in told or []]
                count = max(c for parts in views for _, c in parts)
                # Each part is copied by the first process that sees it.
                who = {p: i for i, parts in reversed(list(enumerate(views))) for p, c in parts if c == count}
                if len(who) == count:
                    return [step, who]
            return [None, {}]

        failed: list[int] = []
        while True:
            step, who = multihost.from_first("local step", functools.partial(choose, failed))
            if step is None:
                return
            mine = [int(part) for part, reader in who.items() if reader == jax.process_index()]
            error = self._publish("rescue", step, {i: self._local / f"process-{i}" / str(step) for i in mine})
            if multihost.is_writer():
                self._say(
                    f"warning: step {step} of the local folders could not be put together: {error}"
                    if error
                    else f"step {step} was only in the local folders; it is put together in {self.root}"
                )
            if not error:
                return
            failed.append(step)

    def _fetch_newest(self, vault: "remote.Vault") -> None:
        from zaya_jax.checkpoint import owner  # with `remote`

        def look() -> list[int]:
            here = writing.steps_in(self.root)
            option = f"config.checkpoint.durable={vault.url}"
            owner.require_one(vault, self.run() if here else owner.UNKNOWN, str(self.root.parent), option)
            if not here and self._accept:
                owner.require_accepted(vault, self.root.parent, self._accept)
            vault.clear()
            return sorted((step for step in vault.steps() if step > max(here, default=-1)), reverse=True)

        steps, error = multihost.from_first("durable", look), None
        for step in steps:
            error = self._fetch(vault, step)
            if not error:
                return
            if self._settings.on_corrupt == "stop":
                raise StorageError(
                    f"{error}; --config.checkpoint.on_corrupt=previous goes on from the one before"
                )
            if multihost.is_writer():
                self._say(f"WARNING: step {step} could not be fetched: {error}; looking for the one before")
        if error and not multihost.from_first("left", lambda: bool(writing.numbered(self.root))):
            raise StorageError(
                f"{error}; no copy in {vault.url} is whole: restore one, or give another checkpoint.durable"
            )

    def _fetch(self, vault: "remote.Vault", step: int) -> str | None:
        """Makes a step of the vault whole in workdir/checkpoints; what went wrong, if anything."""
        folder, error = self.root / f"{writing.SAVING}{step}", None
        try:
            vault.download(step, folder, share(vault.manifest(step).files))
        except (StorageError, OSError) as failure:
            error = writing.reason(failure)
        told = multihost.to_first("fetched", error)

        def end() -> str | None:
            errors = [part for part in told or [] if part]
            if errors:
                shutil.rmtree(folder, ignore_errors=True)
                return errors[0]
            found = vault.manifest(step)
            run = found.run or files.read_json(folder / META).get("run")
            writing.begin_run(self.root, run or self.run())
            writing.commit(folder, self.root / str(step), Seal(found.files, step, run))
            self._say(f"step {step} was fetched from {vault.url}")
            return None

        return multihost.from_first("fetched end", end)


def local_folder(root: Path, settings: Checkpoint) -> Path | None:
    """Where a run's parts lie in the fast folder; runs that share one are told apart by where their workdirs are."""
    if not settings.local:
        return None
    return (
        Path(settings.local).absolute() / f"{root.parent.name}-{google_crc32c.value(str(root).encode()):08x}"
    )


def _vault(url: str) -> "remote.Vault":
    from zaya_jax.checkpoint import remote  # with all that reaches other machines

    return remote.Vault(url)


def _read_part(folder: Path) -> dict[str, Any]:
    content = files.read(folder / PART)
    return unsigned(content) if b'"crc32c"' in content else parse_json(content)  # an older version's has none


def _copy(source: Path, target: Path, name: str, sums: list[int]) -> None:
    content = files.read(source / name)
    what = wrong_with([memoryview(content)], len(content), sums)
    if what:
        raise StorageError(f"{source / name} is not what was written there, but {what}")
    writing.write_files(target, {name: content})


def share(files: Sums) -> list[str]:
    """Which files this process handles: about as many bytes as each other one."""
    loads, mine = [(0, process) for process in range(jax.process_count())], []
    for name, (size, *_) in sorted(files.items(), key=lambda f: (-f[1][0], f[0])):
        load, least = loads[0]
        heapq.heapreplace(loads, (load + size, least))
        if least == jax.process_index():
            mine.append(name)
    return mine
