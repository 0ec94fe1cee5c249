"""Finished checkpoints in another place: a folder, s3://, gs:// or whatever fsspec reaches.

    vault = Vault("s3://bucket/run")          the endpoint of s3:// is AWS_ENDPOINT_URL's
    vault.claim(run)                          bears the run's name before its first copy
    vault.upload(folder, step, sums)          some files of a whole local checkpoint; several processes share them
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
from zaya_jax.checkpoint.layout import MARKER
from zaya_jax.checkpoint.seal import Seal, Sums, wrong_with
from zaya_jax.config import StorageError, UserError, files

IN_FLIGHT = 8  # files at once, each of at most layout.CHUNK_BYTES
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds between attempts
READ_TIMEOUT = 60  # seconds without a byte of an answer
PATIENCE = (
    100.0  # seconds without a whole answer, after which nothing is tried a second time until there is one
)
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
# What trying again does not mend.
ODD = (FileNotFoundError, NotADirectoryError, IsADirectoryError, files.Irregular)
FINAL = (*ODD, PermissionError)

T = TypeVar("T")


class Vault:
    """Whole checkpoints below a URL."""

    def __init__(self, url: str):
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
        self._failing_since: float | None = None
        self.given_up = threading.Event()  # nothing more is begun: whoever waits for it must go

    @property
    def folder(self) -> Path | None:
        """Where it lies, if that is a folder of this machine."""
        return Path(self._root) if self._local else None

    def steps(self) -> list[int]:
        """The whole checkpoints, oldest first."""

        numbered = self._numbered()
        return [step for step, whole in zip(numbered, each(self.has, numbered), strict=True) if whole]

    def has(self, step: int) -> bool:
        """Whether it has this one."""
        return self._attempt("look at", f"{step}/{MARKER}", self._exists, f"{step}/{MARKER}")

    def owner(self) -> str:
        """The name of the run whose copies these are; "" before the first one."""
        if not self._attempt("look at", seal.RUN, self._exists, seal.RUN):
            return ""
        return self._get(seal.RUN).decode("utf-8", errors="replace").strip()

    def claim(self, run: str) -> None:
        """Makes an empty place a run's; StorageError where another was faster."""
        owner = self.owner()
        if owner and owner != run:
            raise StorageError(
                f"{self.url} is run {owner}'s by now, this is run {run}; give each run a place of its own"
            )
        if not owner and run:
            self._put(seal.RUN, run.encode())

    def require_own(self, run: str, who: str, option: str) -> None:
        """UserError where a place is another run's, or holds steps and no name. `run` is "" for one that has none yet.

        Asked before anything is fetched, copied or deleted: a place bears its name from before the first copy on.
        """
        owner = self.owner()
        if not owner and self._numbered():
            raise UserError(
                f"{option} holds step {self._numbered()[-1]}, and no {seal.RUN} tells whose it is; write the run's "
                "name there, or give another place"
            )
        if owner and run and owner != run:
            raise UserError(
                f"{option} is the place of another run than {who} (that is run {owner}, this is run {run}); "
                "give each run a place of its own"
            )

    def manifest(self, step: int, run: str | None = None) -> Seal:
        """The list of a whole checkpoint; StorageError if it is damaged, another step's, or not of `run`."""
        try:
            found = seal.parse(self._get(f"{step}/{MARKER}"))
            what = found.differs(step, run)
        except ValueError as error:
            what = str(error)
        if what:
            raise StorageError(f"{self.url}/{step}/{MARKER} is {what}")
        return found

    def holds(self, step: int, whole: Seal) -> bool:
        """Whether it has a copy of `whole`, all files of the right size; what they hold `verify` reads."""
        try:
            found = self.manifest(step)
        except StorageError as error:
            if unreachable(error):
                raise
            return False
        return found.files == whole.files and not self._wrong_sizes(step, whole.files)

    def upload(self, folder: Path, step: int, sums: Sums) -> None:
        """Copies files of a local checkpoint, checked on the way; any process may give any of them."""

        def one(name: str) -> None:
            content = files.read(folder / name)
            what = wrong_with(content, sums[name])
            if what:
                raise StorageError(f"{folder / name} is {what}")
            self._put(f"{step}/{name}", content)

        each(one, list(sums))

    def _wrong_sizes(self, step: int, sums: Sums) -> list[str]:
        there = self._sizes(step)
        wrong = [name for name, entry in sums.items() if there.pop(name, None) != entry[0]]
        return wrong + sorted(there.keys() - {MARKER})

    def reopen(self, step: int) -> None:
        """Makes a step that is to be written again no whole one."""
        self._attempt("delete", f"{step}/{MARKER}", self._delete, f"{step}/{MARKER}")

    def complete(self, folder: Path, step: int) -> None:
        """Makes an uploaded step whole, if all its files are there; what an earlier upload left beside them goes."""
        whole = audit.own_seal(folder)
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
        found = self.manifest(step)
        each(
            lambda name: writing.write_files(folder, {name: self.checked(step, name, found)}),
            list(found.files if names is None else names),
        )

    def verify(self, step: int, progress: Progress | None = None, run: str = "") -> list[Damage] | None:
        """What is wrong with a step's files, or that it is not of `run`; None where it has gone meanwhile."""
        try:
            found = self.manifest(step)
            what, there = found.differs(step, run), self._sizes(step).keys() - {MARKER}
            damages = [Damage(MARKER, what)] if what else []
            damages += self.check(step, found.files, progress)
            damages += [
                Damage(name, "not part of the checkpoint") for name in sorted(there - found.files.keys())
            ]
        except StorageError as error:
            damages = [Damage(MARKER, str(error))]
        return damages if not damages or step in self.steps() else None

    def check(self, step: int, sums: Sums, progress: Progress | None = None) -> list[Damage]:
        """What is wrong with some of a step's files."""

        def one(name: str) -> str | None:
            try:
                return wrong_with(self._get(f"{step}/{name}"), sums[name])
            except StorageError as error:
                return "missing" if isinstance(error.__cause__, FileNotFoundError) else str(error)

        return audit.check(sums, one, progress)

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
        """Deletes what uploads that never ended have left, in a place of its own; their steps."""
        left = self.unfinished()
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

    def _attempt(self, verb: str, name: str, function: Callable[..., T], *args: Any) -> T:
        where = f"{self.url}/{name}" if name else self.url
        for number, pause in enumerate((*PAUSES, None), 1):
            if self.given_up.is_set():
                raise StorageError(f"{where} is slow or dead, and the run may not wait") from TimeoutError()
            begun = time.monotonic()
            try:
                found = function(*args)
                self._failing_since = None
                return found
            except Exception as error:  # client libraries' own classes are no OSErrors
                final = isinstance(error, FINAL)
                first = not final and self._failing_since is None
                since = begun if self._failing_since is None else self._failing_since
                self._failing_since = None if final else since
                if final or pause is None or time.monotonic() - since > PATIENCE:
                    tries = "" if final else f" after {number} attempt{'s' if number > 1 else ''}"
                    raise StorageError(
                        f"cannot {verb} {where}{tries}: {writing.reason(error)}; look at the address, the credentials "
                        "and (for s3://) AWS_ENDPOINT_URL"
                    ) from error
                if first:
                    self.tell(f"warning: cannot {verb} {where} yet: {writing.reason(error)}; trying again")
            self.given_up.wait(pause)
        raise AssertionError("not reached")


def vault_at(place: str | Path) -> Vault | None:
    """The vault at an address, or in a folder of steps; None for a workdir or anything else."""
    folder = Path(place)
    if "://" in str(place) or (writing.steps_in(folder) and not (folder / "checkpoints").is_dir()):
        return Vault(str(place))
    return None


def unreachable(error: StorageError) -> bool:
    """Whether it says that a place did not answer; otherwise it tells of what lies there."""
    return error.__cause__ is not None and not isinstance(error.__cause__, ODD)


def each[T](function: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
    """function(item) of all, several at once: a store far away answers each request late."""
    with concurrent.futures.ThreadPoolExecutor(IN_FLIGHT, "vault") as pool:
        waiting = [pool.submit(function, item) for item in items]
        try:
            return [done.result() for done in waiting]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
