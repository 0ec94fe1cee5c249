"""Finished checkpoints in another place: a folder, s3://, gs:// or whatever fsspec reaches.

    vault = Vault("s3://bucket/run")          the endpoint: argument, else AWS_ENDPOINT_URL
    vault.upload(folder, step, names)         some files of a whole local checkpoint; several processes share them
    vault.complete(folder, step)              its marker, last: before this the step does not exist there
    vault.download(step, folder)              checked on the way

Objects lie at URL/STEP/NAME. Object stores cannot rename, so it is `checksums.json` that makes a step whole; deleting
takes it away first.
"""

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from zaya_jax.checkpoint import audit, seal, writing
from zaya_jax.checkpoint.audit import Damage, Progress
from zaya_jax.checkpoint.layout import MARKER, META, STATE
from zaya_jax.checkpoint.seal import Seal, Sums
from zaya_jax.config import StorageError, UserError, files

IN_FLIGHT = 8  # files at once, each of at most layout.CHUNK_BYTES
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds between attempts
READ_TIMEOUT = 60  # seconds without a byte of an answer
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
# What trying again does not mend.
ODD = (FileNotFoundError, NotADirectoryError, IsADirectoryError, files.Irregular)
FINAL = (*ODD, PermissionError)
OURS = (MARKER, "_CHECKPOINT", f"{META.split('/')[0]}/", f"{STATE}/")  # how a checkpoint's files begin

T = TypeVar("T")


class Vault:
    """Whole checkpoints below a URL."""

    def __init__(self, url: str, endpoint: str | None = None, megabytes_per_second: float = 0.0):
        """`megabytes_per_second` bounds what this process writes; 0: as fast as it goes."""
        self.url = url.rstrip("/")
        if "::" in self.url:
            raise UserError(f"{self.url} is a chain of file systems; give the address itself, without ::")
        protocol = self.url.split("://", 1)[0] if "://" in self.url else "file"
        options: dict[str, Any] = {}
        if protocol in ("s3", "s3a"):
            # Attempts are made here, so that the first that fails is said soon: with botocore's and s3fs's own, a store
            # that takes requests and never answers was silent for 605 s.
            once = {"total_max_attempts": 1}
            options = {
                "config_kwargs": {"connect_timeout": 10, "read_timeout": READ_TIMEOUT, "retries": once}
            }
            if endpoint:
                options["endpoint_url"] = endpoint
        if protocol not in ("file", "local"):
            options["use_listings_cache"] = False  # others write there too
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.url, **options)
        except ImportError as error:
            extra = EXTRAS.get(protocol, protocol)
            raise UserError(
                f"{self.url} needs a package more ({error}): pip install 'zaya_jax[{extra}]'"
            ) from None
        except ValueError as error:
            raise UserError(f"{self.url} is no folder and no URL that fsspec knows ({error})") from None
        except OSError as error:  # some file systems connect at once
            raise StorageError(
                f"{self.url} cannot be reached ({error}); see that it can, or give another"
            ) from None
        self._local = protocol in ("file", "local")
        if protocol in ("s3", "s3a"):
            self._files.retries = 1
        self.tell: Callable[[str], None] = lambda _: None  # is told once when an attempt has failed
        self._failing = False
        self.given_up = threading.Event()  # nothing more is begun: whoever waits for it must go
        self._rate, self._lock, self._free_at = megabytes_per_second * 1e6, threading.Lock(), 0.0

    @property
    def folder(self) -> Path | None:
        """Where it lies, if that is a folder of this machine."""
        return Path(self._root) if self._local else None

    def steps(self) -> list[int]:
        """The whole checkpoints, oldest first."""

        def whole(steps: list[int]) -> list[int]:
            return [step for step, there in zip(steps, each(self.has, steps), strict=True) if there]

        return writing.whole_of(self._numbered, whole)

    def has(self, step: int) -> bool:
        """Whether it has this one."""
        return self._attempt("look at", f"{step}/{MARKER}", self._exists, f"{step}/{MARKER}")

    def owner(self) -> str:
        """The name of the run whose copies these are, which it leaves with its first one; "" before."""
        if not self._attempt("look at", seal.RUN, self._exists, seal.RUN):
            return ""
        return self._get(seal.RUN).decode("utf-8", errors="replace").strip()

    def claim(self, run: str) -> None:
        """Makes the place a run's before its first copy; StorageError where another has done so meanwhile."""
        owner = self.owner()
        if owner and run and owner != run:
            raise StorageError(
                f"{self.url} is run {owner}'s by now, this is run {run}; give each run a place of its own"
            )
        if not owner and run:
            self._put(seal.RUN, run.encode())

    def manifest(self, step: int) -> Seal:
        """A whole checkpoint's files with sizes and checksums, and whose they are."""
        try:
            found = seal.parse(self._get(f"{step}/{MARKER}"))
        except ValueError as error:
            raise StorageError(f"{self.url}/{step}/{MARKER} is {error}") from None
        what = found.differs(step, None)
        if what:
            raise StorageError(f"{self.url}/{step}/{MARKER} is {what}")
        return found

    def upload(self, folder: Path, step: int, names: Sequence[str]) -> None:
        """Copies files of a local checkpoint; any process may give any of them."""
        sums = audit.own_seal(folder, step).files

        def one(name: str) -> None:
            content = files.read(folder / name)
            what = wrong_with(content, sums[name])
            if what:
                raise StorageError(f"{folder / name} is {what}")
            self._throttle(len(content))
            self._put(f"{step}/{name}", content)

        each(one, names)

    def lacks(self, step: int, whole: Seal) -> list[str] | None:
        """Files that a step needs to be a copy of `whole`: those that are missing or of another size, and such as are
        too many; None, all of them, where it is no copy of it.

        What they hold is not read: `verify` does that.
        """
        try:
            found = self.manifest(step)
        except StorageError as error:
            if unreachable(error):
                raise
            return None
        return None if found.files != whole.files else self._wrong_sizes(step, whole.files)

    def _wrong_sizes(self, step: int, sums: Sums) -> list[str]:
        there = self._sizes(step)
        wrong = [name for name, entry in sums.items() if there.pop(name, None) != entry[0]]
        return wrong + sorted(there.keys() - {MARKER})

    def reopen(self, step: int) -> None:
        """Makes a step that is to be written again no whole one."""
        self._attempt("delete", f"{step}/{MARKER}", self._delete, f"{step}/{MARKER}")

    def complete(self, folder: Path, step: int) -> None:
        """Makes an uploaded step whole, if all its files are there; what an earlier upload has left there goes."""
        whole = audit.own_seal(folder, step)
        wrong = self._wrong_sizes(step, whole.files)
        lacking = [name for name in wrong if name in whole.files]
        if lacking:
            raise StorageError(
                f"{self.url}/{step} lacks {len(lacking)} of {len(whole.files)} files, such as {lacking[0]}; "
                "upload them first"
            )
        each(lambda name: self._attempt("delete", name, self._delete, f"{step}/{name}"), wrong)
        self._put(f"{step}/{MARKER}", files.read(folder / MARKER))

    def download(self, step: int, folder: Path, names: Iterable[str] | None = None) -> None:
        """Fetches a step's files (but the marker), or those named, below a folder; StorageError if one is damaged."""
        sums = self.manifest(step).files

        def one(name: str) -> None:
            content = self._get(f"{step}/{name}")
            what = wrong_with(content, sums[name])
            if what:
                raise StorageError(f"{self.url}/{step}/{Damage(name, what)}")
            writing.write_files(folder, {name: content})

        each(one, list(sums if names is None else names))

    def verify(
        self, step: int, progress: Progress | None = None, some: Sums | None = None, run: str | None = None
    ) -> list[Damage] | None:
        """What is wrong with a step's files, or with some of them, or that it is not of `run`.

        None where it has gone meanwhile.
        """
        what = None
        try:
            if some is None:
                found = self.manifest(step)
                sums, what = found.files, found.differs(step, run)
                extra = sorted(self._sizes(step).keys() - sums.keys() - {MARKER})
            else:
                sums, extra = some, []
        except StorageError as error:
            return [Damage(MARKER, str(error))] if step in self.steps() else None

        def one(name: str) -> str | None:
            try:
                return wrong_with(self._get(f"{step}/{name}"), sums[name])
            except StorageError as error:
                return "missing" if isinstance(error.__cause__, FileNotFoundError) else str(error)

        damages = [Damage(MARKER, what)] if what else []
        damages += audit.check(sums, one, progress)
        damages += [Damage(name, "not part of the checkpoint") for name in extra]
        return damages if not damages or step in self.steps() else None

    def checked(self, step: int, name: str, found: Seal) -> bytes:
        """One file, that must be as listed."""
        content = self._get(f"{step}/{name}")
        what = wrong_with(content, found.files[name]) if name in found.files else "not listed"
        if what:
            raise StorageError(f"{self.url}/{step}/{Damage(name, what)}")
        return content

    def get(self, step: int, name: str) -> bytes:
        """One file."""
        return self._get(f"{step}/{name}")

    def put(self, step: int, name: str, content: bytes | memoryview) -> None:
        """One file; the marker last."""
        self._throttle(len(content))
        self._put(f"{step}/{name}", bytes(content))

    def remove(self, step: int) -> None:
        """Deletes a step: the marker first, so that a half-deleted one is none."""
        names = sorted(self._sizes(step), key=lambda name: name != MARKER)
        for part in (names[:1], names[1:]):
            each(lambda name: self._attempt("delete", name, self._delete, f"{step}/{name}"), part)
        if self._local:
            with contextlib.suppress(OSError):
                self._files.rm(f"{self._root}/{step}", recursive=True)

    def unfinished(self) -> list[int]:
        """Steps of which an upload has not ended: it is under way, or was cut short."""
        return sorted(set(self._numbered()) - set(self.steps()))

    def clear(self) -> list[int]:
        """Deletes what uploads that never ended have left, and says of which steps."""
        left = self.unfinished()
        for step in left:
            for name in self._sizes(step):
                if not name.startswith(OURS) and not name.endswith(".part"):
                    raise UserError(
                        f"{self.url}/{step} holds {name}, which is no checkpoint's, so it is not deleted as an upload "
                        "that was cut short; move it away, or give another place"
                    )
        for step in left:
            self.remove(step)
        return left

    def _numbered(self) -> list[int]:
        def names() -> list[str]:
            try:
                return [str(entry["name"]) for entry in self._files.ls(self._root, detail=True)]
            except FileNotFoundError:
                self._must_exist()
                return []

        found = self._attempt("list", "", names)
        return sorted(writing.steps_of(name.rstrip("/").rsplit("/", 1)[-1] for name in found))

    def _must_exist(self) -> None:
        """An empty place is fine; a bucket that is not there is an error."""
        if not self._local and "/" in self._root:
            self._files.ls(self._root.split("/", 1)[0], detail=False)

    def _exists(self, name: str) -> bool:
        return self._files.exists(f"{self._root}/{name}")

    def _sizes(self, step: int) -> dict[str, int]:
        prefix = f"{self._root}/{step}"

        def find() -> dict[str, int]:
            found = self._files.find(prefix, detail=True)
            return {path[len(prefix) + 1 :]: int(entry["size"]) for path, entry in found.items()}

        return self._attempt("list", str(step), find)

    def _get(self, name: str) -> bytes:
        return self._attempt(
            "read", name, files.read if self._local else self._files.cat_file, f"{self._root}/{name}"
        )

    def _put(self, name: str, content: bytes) -> None:
        self._attempt("write", name, self._write, name, content)

    def _write(self, name: str, content: bytes) -> None:
        if not self._local:
            self._files.pipe_file(f"{self._root}/{name}", content)
            return
        path = Path(self._root) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, content)

    def _delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{name}")

    def _throttle(self, size: int) -> None:
        if self._rate:
            with self._lock:
                begin = max(time.monotonic(), self._free_at)
                self._free_at = begin + size / self._rate
            time.sleep(max(self._free_at - time.monotonic(), 0))

    def _attempt(self, verb: str, name: str, function: Callable[..., T], *args: Any) -> T:
        where = f"{self.url}/{name}" if name else self.url
        for pause in (*PAUSES, None):
            if self.given_up.is_set():
                raise StorageError(f"{where} is slow or dead, and the run may not wait") from TimeoutError()
            try:
                found = function(*args)
                self._failing = False
                return found
            except Exception as error:
                # Whatever a client library raises: its own classes are no OSErrors.
                if isinstance(error, FINAL) or pause is None:
                    tries = "" if isinstance(error, FINAL) else f" after {len(PAUSES) + 1} attempts"
                    raise StorageError(
                        f"cannot {verb} {where}{tries}: {writing.reason(error)}; look at the address, the credentials "
                        "and (for s3://) AWS_ENDPOINT_URL"
                    ) from error
                if not self._failing:
                    self._failing = True
                    self.tell(f"warning: cannot {verb} {where} yet: {writing.reason(error)}; trying again")
            self.given_up.wait(pause)
        raise AssertionError("not reached")


def vault_at(place: str | Path) -> Vault | None:
    """The vault at a URL, or in a folder of steps; None for a workdir or anything else."""
    folder = Path(place)
    if "://" in str(place) or (writing.steps_in(folder) and not (folder / "checkpoints").is_dir()):
        return asked_for(str(place))
    return None


def asked_for(place: str) -> Vault:
    """The vault at a place that somebody gave for this one command, which may be none at all."""
    vault = Vault(place)
    if vault.folder:
        above = files.existing(vault.folder)
        if not above.is_dir():
            raise UserError(f"{place} is no folder, since {above} is a file; give the folder of the steps")
    return vault


def unreachable(error: StorageError) -> bool:
    """Whether it says that a place did not answer; otherwise it tells of what lies there."""
    return error.__cause__ is not None and not isinstance(error.__cause__, ODD)


def wrong_with(content: bytes, entry: list[int]) -> str | None:
    """What is wrong with a file's content; None if nothing is."""
    return seal.wrong_with([memoryview(content)], len(content), entry)


def each[T](function: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
    """function(item) of all, several at once: a store far away answers each request late."""
    with concurrent.futures.ThreadPoolExecutor(IN_FLIGHT, "vault") as pool:
        waiting = [pool.submit(function, item) for item in items]
        try:
            return [done.result() for done in waiting]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
