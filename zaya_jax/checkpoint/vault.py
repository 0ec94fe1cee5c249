"""Checkpoints of one run in one place: `workdir/checkpoints`, another folder, s3://, gs:// or
whatever fsspec reaches.

    vault = Vault("s3://bucket/run")          the endpoint of s3:// is AWS_ENDPOINT_URL's
    for damage in vault.verify(step):         every file against the sizes and checksums taken while writing
        print(damage)                         state/params.w/c.0 (array params.w) is changed: crc32c ...
    vault.copy(step, names, other)            files of a step to another place, checked on the way
    other.complete(step, vault.seal(step))    its list, last: before this the step does not exist there

Files lie at URL/STEP/NAME. Object stores cannot rename, so `checksums.json` makes a step whole;
deleting takes it away first. Orbax has a file for the same purpose, `commit_success.txt`, which
goes with it.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import jax

from zaya_jax.checkpoint import seal, writing
from zaya_jax.checkpoint.layout import COMMITTED, DONE, MARKER, META, STATE
from zaya_jax.checkpoint.seal import Seal, Sums, wrong_with
from zaya_jax.cluster import multihost
from zaya_jax.config import StorageError, UserError, files

IN_FLIGHT = 8  # files at once, each of at most layout.CHUNK_BYTES
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds between attempts
READ_TIMEOUT = 60  # seconds without a byte of an answer
ANSWER = 300.0  # seconds for a whole one, of 32 MiB at most
# Seconds without a whole answer, after which nothing is tried a second time until there is one.
PATIENCE = 100.0
# Errors that tell of the file, not of the place.
ODD = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

Step = int | str  # a checkpoint's number, or the name of a folder outside of a run
Progress = Callable[[int, int], None]  # bytes done, bytes in all
T = TypeVar("T")


class Unreachable(StorageError):
    """The place did not answer; any other StorageError is about a file."""


@dataclasses.dataclass(frozen=True)
class Damage:
    """The damage in one file."""

    file: str
    what: str

    @property
    def array(self) -> str:
        """The array that the file is of, or ""."""
        parts = self.file.split("/")
        return parts[1] if parts[0] == STATE and len(parts) > 2 else ""

    def __str__(self) -> str:
        return f"{self.file}{f' (array {self.array})' if self.array else ''} is {self.what}"


class Vault:
    """The checkpoints below a URL or in a folder."""

    def __init__(self, url: str | Path):
        self.url = str(url).rstrip("/")
        if "::" in self.url:
            raise UserError(
                f"{self.url} is a chain of file systems; give the address itself, without ::"
            )
        protocol = self.url.split("://", 1)[0] if "://" in self.url else "file"
        self._local = protocol in ("file", "local")
        options: dict[str, Any] = {}
        if protocol in ("s3", "s3a"):
            # Attempts are made here, so that the first that fails is said soon: with botocore's and
            # s3fs's own, a store that takes requests and never answers was silent for 605 s.
            once = {"total_max_attempts": 1}
            options["config_kwargs"] = {
                "connect_timeout": 10,
                "read_timeout": READ_TIMEOUT,
                "retries": once,
            }
        if not self._local:
            options["use_listings_cache"] = False  # others write there too
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.url, **options)
        except ImportError as error:
            # fsspec's text names the package.
            raise UserError(f"{self.url} needs a package that is not installed: {error}") from None
        except ValueError as error:
            raise UserError(
                f"{self.url} is no folder and no URL that fsspec knows ({error})"
            ) from None
        except OSError as error:  # some file systems connect at once
            raise StorageError(
                f"{self.url} cannot be reached ({error}); see that it can, or give another"
            ) from None
        if protocol in ("s3", "s3a"):
            self._files.retries = 1
        self.tell: Callable[[str], None] = lambda _: None  # called once when attempts begin to fail
        self._owner = ""
        self._failing_since: float | None = None
        self.given_up = threading.Event()  # nothing more is begun: the run must end now

    @property
    def folder(self) -> Path | None:
        """Its folder, if it is on this machine."""
        return Path(self._root) if self._local else None

    # #############################################################################################
    # Steps, and whose they are
    # ##############################################################################################

    def numbered(self) -> list[int]:
        """All folders named like a step, whole or not, oldest first."""

        def names() -> list[str]:
            try:
                return [str(entry["name"]) for entry in self._files.ls(self._root, detail=True)]
            except FileNotFoundError:
                if not self._local and "/" in self._root:  # a bucket that is not there is an error
                    self._files.ls(self._root.split("/", 1)[0], detail=False)
                return []

        found = self._attempt("list", "", names)
        return sorted(writing.steps_of(name.rstrip("/").rsplit("/", 1)[-1] for name in found))

    def steps(self) -> list[int]:
        """The whole checkpoints, oldest first."""
        numbered = self.numbered()
        return [
            step for step, whole in zip(numbered, each(self.has, numbered), strict=True) if whole
        ]

    def has(self, step: int) -> bool:
        """Whether it has this one."""
        return self._attempt("look at", f"{step}/{MARKER}", self._exists, f"{step}/{MARKER}")

    def owner(self) -> str:
        """The name of the run whose checkpoints these are; "" before the first one."""
        if self._local:  # a start may give a folder a name
            return writing.run_of(Path(self._root))
        if not self._owner and self._attempt("look at", seal.RUN, self._exists, seal.RUN):
            self._owner = self._get(seal.RUN).decode("utf-8", errors="replace").strip()
        return self._owner

    def claim(self, run: str) -> None:
        """Makes an empty place a run's; StorageError where another was faster."""
        owner = self.owner()
        if owner and owner != run:
            raise StorageError(
                f"{self.url} is run {owner}'s by now, this is run {run}; give each run a place of"
                " its own"
            )
        if not owner and run:
            self._attempt("write", seal.RUN, self._write, seal.RUN, run.encode())

    def require_own(self, run: str, who: str, option: str) -> None:
        """UserError where a place is another run's, or holds steps and no name. `run` is "" for one
        that has none yet.

        Asked before anything is fetched, copied or deleted: a place bears its name from before the
        first copy on.
        """
        owner = self.owner()
        if not owner and self.numbered():
            raise UserError(
                f"{option} holds step {self.numbered()[-1]}, and no {seal.RUN} tells whose it is;"
                " write the run's name there, or give another place"
            )
        if owner and run and owner != run:
            raise UserError(
                f"{option} is the place of another run than {who} (that is run {owner}, this is run"
                f" {run}); give each run a place of its own"
            )

    # #############################################################################################
    # Reading and checking
    # ##############################################################################################

    def seal(self, step: Step) -> Seal:
        """A step's list; StorageError where it is damaged, or of another step or run than it lies
        as."""
        found = self._seal(step)
        if isinstance(found, Damage):
            raise StorageError(f"{self.url}/{step} is damaged: {found}")
        return found

    def _seal(self, step: Step) -> Seal | Damage:
        try:
            found = seal.parse(self.get(step, MARKER))
            what = found.differs(step if isinstance(step, int) else None, self.owner())
        except ValueError as error:
            what = str(error)
        except Unreachable:
            raise
        except StorageError as error:
            what = _in_words(error)
        return Damage(MARKER, what) if what else found

    def get(self, step: Step, name: str) -> bytes:
        """One file."""
        return self._get(f"{step}/{name}")

    def checked(self, step: Step, name: str, sums: Sums) -> bytes:
        """One file, which must be as listed."""
        content = self.get(step, name)
        what = wrong_with(content, sums[name]) if name in sums else "not listed"
        if what:
            raise StorageError(f"{self.url}/{step} is damaged: {Damage(name, what)}")
        return content

    def meta(self, step: Step) -> dict[str, Any]:
        """A step's small file: tokens, data position, config; StorageError where it is damaged."""
        return json.loads(self.checked(step, META, self.seal(step).files))

    def verify(self, step: Step, progress: Progress | None = None) -> list[Damage]:
        """All damages of a step: changed, exchanged, truncated, missing and foreign files."""
        try:
            found = self._seal(step)
            if isinstance(found, Damage):
                return [found]
            return self.check(step, found.files, progress) + self._foreign(step, found)
        except StorageError as error:
            return [Damage(MARKER, str(error))]

    def check(self, step: Step, sums: Sums, progress: Progress | None = None) -> list[Damage]:
        """The damages of some of a step's files."""

        def one(name: str) -> str | None:
            try:
                if self._local:
                    path = f"{self._root}/{step}/{name}"
                    return self._attempt("read", path, seal.wrong_with_file, path, sums[name])
                return wrong_with(self.get(step, name), sums[name])
            except StorageError as error:
                return _in_words(error)

        total, done, damages = sum(entry[0] for entry in sums.values()), 0, []
        with concurrent.futures.ThreadPoolExecutor(writing.THREADS, "verify") as pool:
            for name, what in zip(sums, pool.map(one, sums), strict=True):
                done += sums[name][0]
                if progress:
                    progress(done, total)
                if what:
                    damages.append(Damage(name, what))
        return damages

    def _foreign(self, step: Step, found: Seal) -> list[Damage]:
        there = self._sizes(step).keys() - {MARKER, *found.files}
        return [Damage(name, "not part of the checkpoint") for name in sorted(there)]

    def verify_together(self, name: str, step: int) -> list[str]:
        """All damages of a step, each file read by one process; all processes call this and get the
        same answer."""
        found = self._seal(step)
        if isinstance(found, Damage):
            damages = [found]
        else:
            damages = self.check(step, {name: found.files[name] for name in share(found.files)})
            damages += self._foreign(step, found) if multihost.is_writer() else []
        reports = multihost.to_first(name, [str(damage) for damage in damages[:100]])
        return multihost.from_first(
            f"{name}: all", lambda: sorted({d for part in reports or [] for d in part})
        )

    def holds(self, step: int, whole: Seal) -> bool:
        """Whether it has a copy of `whole`, all files of the right size; their content is checked
        by `verify`."""
        found = self._seal(step)
        return (
            isinstance(found, Seal)
            and found.files == whole.files
            and not self._wrong_sizes(step, whole)
        )

    # #############################################################################################
    # Writing
    # ##############################################################################################

    def put(self, step: Step, name: str, content: bytes | memoryview) -> None:
        """One file; the list comes last, by `complete`."""
        self._attempt("write", f"{step}/{name}", self._write, f"{step}/{name}", bytes(content))

    def copy(self, step: int, names: Iterable[str], target: "Vault", to: str = "") -> None:
        """Copies files of a step, checked on the way, to another place, and there below another
        name if it is given."""
        sums = self.seal(step).files
        names = [name for name in names if to or name != COMMITTED]  # `complete` writes that one
        each(lambda name: target.put(to or step, name, self.checked(step, name, sums)), names)

    def complete(self, step: int, whole: Seal) -> None:
        """Makes an uploaded step whole, if all its files are there; deletes leftovers of an earlier
        upload."""
        wrong = [name for name in self._wrong_sizes(step, whole) if name != COMMITTED]
        lacking = [name for name in wrong if name in whole.files]
        if lacking:
            raise StorageError(
                f"{self.url}/{step} lacks {len(lacking)} of {len(whole.files)} files, such as"
                f" {lacking[0]}; upload them first"
            )
        self._delete(step, wrong)
        if COMMITTED in whole.files:
            self.put(step, COMMITTED, DONE)
        self.put(step, MARKER, whole.content())

    def reopen(self, step: int) -> None:
        """Makes a step incomplete that is to be written again."""
        self._delete(step, [MARKER])
        self._delete(step, [COMMITTED])

    def remove(self, step: int) -> None:
        """Deletes a step, its list first, so that half a step never counts."""
        self.reopen(step)
        self._delete(step, list(self._sizes(step)))
        if self._local:
            with contextlib.suppress(OSError):
                self._files.rm(f"{self._root}/{step}", recursive=True)

    def unfinished(self) -> list[int]:
        """Steps whose upload is under way, or was cut short."""
        return sorted(set(self.numbered()) - set(self.steps()))

    def clear(self) -> list[int]:
        """Deletes the remains of uploads that never ended, in a run's own place; their steps."""
        left = self.unfinished()
        for step in left:
            self.remove(step)
        return left

    # #############################################################################################
    # Files
    # ##############################################################################################

    def _wrong_sizes(self, step: int, whole: Seal) -> list[str]:
        there = self._sizes(step)
        wrong = [name for name, entry in whole.files.items() if there.pop(name, None) != entry[0]]
        return wrong + sorted(there.keys() - {MARKER})

    def _sizes(self, step: Step) -> dict[str, int]:
        """The size of each file of a step; in a folder also links and empty folders, which a
        checkpoint has not."""
        prefix = f"{self._root}/{step}"

        def find() -> dict[str, int]:
            if self._local:
                paths = [
                    p
                    for p in Path(prefix).rglob("*")
                    if p.is_symlink() or not p.is_dir() or not any(p.iterdir())
                ]
                return {str(path.relative_to(prefix)): path.lstat().st_size for path in paths}
            found = self._files.find(prefix, detail=True)
            return {path[len(prefix) + 1 :]: int(entry["size"]) for path, entry in found.items()}

        return self._attempt("list", str(step), find)

    def _exists(self, name: str) -> bool:
        return self._files.exists(f"{self._root}/{name}")

    def _get(self, name: str) -> bytes:
        if self._local:
            return self._attempt("read", name, Path(self._root, name).read_bytes)
        return self._attempt("read", name, self._files.cat_file, f"{self._root}/{name}")

    def _write(self, name: str, content: bytes) -> None:
        if not self._local:
            self._files.pipe_file(f"{self._root}/{name}", content)
            return
        path = Path(self._root) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, content)

    def _delete(self, step: int, names: Sequence[str]) -> None:
        each(lambda name: self._attempt("delete", name, self._unlink, f"{step}/{name}"), names)

    def _unlink(self, name: str) -> None:
        path = f"{self._root}/{name}"
        with contextlib.suppress(FileNotFoundError):
            # a folder, as a kill leaves it
            empty = self._local and os.path.isdir(path) and not os.path.islink(path)
            (os.rmdir if empty else self._files.rm_file)(path)

    def _attempt(self, verb: str, name: str, function: Callable[..., T], *args: Any) -> T:
        where = f"{self.url}/{name}" if name else self.url
        advice = (
            ""
            if self._local
            else "; look at the address, the credentials and (for s3://) AWS_ENDPOINT_URL"
        )
        for number, pause in enumerate((*PAUSES, None), 1):
            if self.given_up.is_set():
                raise Unreachable(f"{where} is slow or dead, and the run may not wait")
            begun = time.monotonic()
            try:
                found = function(*args) if self._local else _in_time(function, *args)
                self._failing_since = None
                return found
            except Exception as error:  # client libraries' own classes are no OSErrors
                # A disk that cannot read a file now will not in a second: that is damage, and
                # reported at once.
                of_file = isinstance(error, OSError if self._local and verb == "read" else ODD)
                final = of_file or isinstance(error, PermissionError)
                first = not final and self._failing_since is None
                since = begun if self._failing_since is None else self._failing_since
                self._failing_since = None if final else since
                if final or pause is None or time.monotonic() - since > PATIENCE:
                    tries = "" if final else f" after {number} attempt{'s' if number > 1 else ''}"
                    kind = StorageError if of_file else Unreachable
                    raise kind(
                        f"cannot {verb} {where}{tries}: {writing.reason(error)}{advice}"
                    ) from error
                if first:
                    self.tell(
                        f"warning: cannot {verb} {where} yet: {writing.reason(error)}; trying again"
                    )
            self.given_up.wait(pause)
        raise AssertionError("not reached")


def vault_at(place: str | Path) -> Vault | None:
    """The vault at an address, or in a folder of steps; None for a workdir or anything else."""
    folder = Path(place)
    if "://" in str(place) or (writing.steps_in(folder) and not (folder / "checkpoints").is_dir()):
        return Vault(place)
    return None


def _in_time[T](function: Callable[..., T], *args: Any) -> T:
    """The result, if it is there within ANSWER: clients limit an answer's silence, so that one that
    trickles would have no end."""
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()

    def ask() -> None:
        try:
            answer.set_result(function(*args))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name="answer", daemon=True).start()
    if not concurrent.futures.wait([answer], ANSWER).done:
        raise TimeoutError(f"no whole answer within {ANSWER:g} s")
    return answer.result()


def _in_words(error: StorageError) -> str:
    cause = error.__cause__
    if isinstance(cause, OSError) and not isinstance(error, Unreachable):
        return (
            "missing" if isinstance(cause, FileNotFoundError) else f"unreadable ({cause.strerror})"
        )
    return str(error)


def share(sums: Sums) -> list[str]:
    """The files that this process handles: as many bytes as each other one, but for at most the
    largest file's."""
    by_size = sorted(sums, key=lambda name: (-sums[name][0], name))
    return by_size[jax.process_index() :: jax.process_count()]


def each[T](function: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
    """function(item) of all, several at once: a store far away answers each request late."""
    with concurrent.futures.ThreadPoolExecutor(IN_FLIGHT, "vault") as pool:
        waiting = [pool.submit(function, item) for item in items]
        try:
            return [done.result() for done in waiting]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
