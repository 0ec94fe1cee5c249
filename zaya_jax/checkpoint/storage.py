"""A folder or URL that holds files: s3://, gs:// or whatever fsspec reaches; each request has
several attempts.

    storage = Storage("s3://bucket/run")     the endpoint of s3:// is AWS_ENDPOINT_URL's
    storage.put("5/meta/data.json", x)       a file, complete or not at all
    storage.get("5/meta/data.json")          FileError about the file, Unreachable about the storage

An error about a file (it is missing, or a disk cannot read it) is final. Any other is tried again
after DELAYS, for at most some GIVE_UP_AFTER seconds.
"""

import concurrent.futures
import contextlib
import errno
import io
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fsspec

from zaya_jax.checkpoint.writing import reason
from zaya_jax.config import StorageError, UserError, files

IN_FLIGHT = 8  # files at once, each of at most layout.CHUNK_BYTES
DELAYS = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds between attempts
READ_TIMEOUT = 60  # seconds without a byte of an answer
RESPONSE_TIMEOUT = 300.0  # seconds for one request, of at most 32 MiB
GIVE_UP_AFTER = 100.0  # seconds, after which a request is not tried again
FILE_ERRORS = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# A disk that cannot read a file now will not in a second: that is damage, and reported at once.
UNREADABLE = (errno.EIO, errno.EBADMSG)


class Unreachable(StorageError):
    """The storage did not answer."""


class FileError(StorageError):
    """A file is missing, damaged, or cannot be read; the storage answers."""


class Storage:
    """The files below a URL or in a folder; names are relative to it."""

    def __init__(self, url: str | Path):
        self.url = str(url).rstrip("/")
        if "::" in self.url:
            raise UserError(
                f"{self.url} is a chain of file systems; give the address itself, without ::"
            )
        protocol = self.url.split("://", 1)[0] if "://" in self.url else "file"
        on_s3 = protocol in ("s3", "s3a")
        local = protocol in ("file", "local")
        options: dict[str, Any] = {}
        if on_s3:
            # Attempts are made here, so that the first that fails is said soon: with botocore's and
            # s3fs's own, a store that takes requests and never answers was silent for 605 s.
            options["config_kwargs"] = {
                "connect_timeout": 10,
                "read_timeout": READ_TIMEOUT,
                "retries": {"total_max_attempts": 1},
            }
        if not local:
            options["use_listings_cache"] = False  # others write there too
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.url, **options)
        except (ImportError, ValueError) as error:  # a missing package is named by fsspec's text
            raise UserError(
                f"{self.url} is no folder and no URL that fsspec can open here ({error})"
            ) from None
        except OSError as error:  # some file systems connect at once
            raise StorageError(
                f"{self.url} cannot be reached ({error}); see that it can, or give another"
            ) from None
        if on_s3:
            self._files.retries = 1
        # The folder, if it is on this machine.
        self.folder = Path(self._root) if local else None
        # Called when requests begin to fail, once until one succeeds.
        self.on_first_failure: Callable[[str], None] = lambda _: None
        self.is_failing = False  # until a request succeeds
        # Whether requests to a folder may be cancelled, too. Each takes a thread then, and threads
        # that read chunks keep their memory.
        self.may_be_cancelled = not local
        self._cancelled: concurrent.futures.Future[None] = concurrent.futures.Future()

    def names(self) -> list[str]:
        """The names of the files and folders in it; none where it does not exist yet."""

        def listed() -> list[str]:
            try:
                return [str(entry["name"]) for entry in self._files.ls(self._root, detail=True)]
            except FileNotFoundError:
                # Before its first file a prefix is missing; a bucket that is missing is an error.
                if not self.folder and "/" in self._root:
                    # Credentials may be for the prefix alone.
                    with contextlib.suppress(PermissionError):
                        self._files.ls(self._root.split("/", 1)[0], detail=False)
                return []

        paths = self.attempt("list", "", listed)
        return [path.rstrip("/").rsplit("/", 1)[-1] for path in paths]

    def sizes(self, name: str) -> dict[str, int]:
        """The size of each file below a name; in a folder also of links, which a checkpoint does
        not have."""
        prefix = f"{self._root}/{name}"

        def listed() -> dict[str, int]:
            if not self.folder:
                entries = self._files.find(prefix, detail=True)
                return {path[len(prefix) + 1 :]: int(x["size"]) for path, x in entries.items()}
            sizes = {}
            with contextlib.suppress(FileNotFoundError):  # it is being deleted
                for path in Path(prefix).rglob("*"):
                    if path.is_symlink() or not path.is_dir():
                        sizes[str(path.relative_to(prefix))] = path.lstat().st_size
            return sizes

        return self.attempt("list", name, listed)

    def exists(self, name: str) -> bool:
        """Whether it has this file; a request that failed tells nothing, and is tried again."""

        def exists() -> bool:
            # Not fsspec's `exists`, which takes any error for a no.
            try:
                self._files.info(f"{self._root}/{name}")
            except (FileNotFoundError, NotADirectoryError):
                return False
            return True

        return self.attempt("look at", name, exists)

    def get(self, name: str) -> bytes:
        """A file's content."""
        return self.read(name, lambda file: file.read())

    def read[T](self, name: str, function: Callable[..., T], *args: Any) -> T:
        """function(file, ...) of an open file; one behind a URL is in memory."""

        def opened() -> T:
            if self.folder:
                with open(self.folder / name, "rb") as file:
                    return function(file, *args)
            content = self._files.cat_file(f"{self._root}/{name}")
            return function(io.BytesIO(content), *args)

        return self.attempt("read", name, opened)

    def put(self, name: str, content: bytes) -> None:
        """Writes a file of this content, complete or not at all."""
        self.attempt("write", name, self._write, name, content)

    def delete(self, names: Sequence[str]) -> None:
        """Deletes files; those that are gone already are no error."""
        for_each(lambda name: self.attempt("delete", name, self._unlink, name), names)

    def delete_below(self, name: str) -> None:
        """Deletes all files below a name, and the folders that they lie in."""
        if self.folder:
            self.attempt("delete", name, _remove_tree, self.folder / name)
        else:
            self.delete([f"{name}/{file}" for file in self.sizes(name)])

    def cancel(self) -> None:
        """Has all requests fail, those under way too: the run must end now."""
        if not self._cancelled.done():
            self._cancelled.set_result(None)

    def attempt[T](self, verb: str, name: str, function: Callable[..., T], *args: Any) -> T:
        """function(*args), tried again while that may help; the error says what could not be
        done."""
        where = f"{self.url}/{name}" if name else self.url
        begun = time.monotonic()
        for number, delay in enumerate((*DELAYS, None), 1):
            try:
                result = (
                    self._in_time(function, *args) if self.may_be_cancelled else function(*args)
                )
            except Exception as error:  # client libraries' own classes are no OSErrors
                failure = error
            else:
                self.is_failing = False
                return result
            if self._cancelled.done():
                raise Unreachable(
                    f"{where} is slow or unavailable, and the run has no time left to wait"
                ) from failure
            why = f"cannot {verb} {where}"
            about_file = self._is_about_file(verb, failure)
            if about_file or isinstance(failure, PermissionError):
                self.is_failing = False  # this is an answer, too
                kind = FileError if about_file else Unreachable
                raise kind(self._failure_text(why, failure)) from failure
            was_failing, self.is_failing = self.is_failing, True
            if delay is None or time.monotonic() - begun > GIVE_UP_AFTER:
                why += f" after {number} attempt{'s' if number > 1 else ''}"
                raise Unreachable(self._failure_text(why, failure)) from failure
            if not was_failing:
                self.on_first_failure(f"warning: {why} yet: {reason(failure)}; trying again")
            concurrent.futures.wait([self._cancelled], delay)
        raise AssertionError("the last attempt returns or raises")

    def _write(self, name: str, content: bytes) -> None:
        if not self.folder:
            self._files.pipe_file(f"{self._root}/{name}", content)
            return
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, content)

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{name}")

    def _in_time[T](self, function: Callable[..., T], *args: Any) -> T:
        """The result; TimeoutError when all is cancelled, and for a URL after RESPONSE_TIMEOUT:
        client libraries time out on silence alone, so an answer that trickles would never end."""
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def ask() -> None:
            try:
                answer.set_result(function(*args))
            except BaseException as error:
                answer.set_exception(error)

        if not self._cancelled.done():
            threading.Thread(target=ask, name="answer", daemon=True).start()
        # In a folder a second attempt would write the same file beside the first.
        limit = None if self.folder else RESPONSE_TIMEOUT
        either: list[concurrent.futures.Future[Any]] = [answer, self._cancelled]
        first = concurrent.futures.FIRST_COMPLETED
        concurrent.futures.wait(either, limit, return_when=first)
        if not answer.done():
            raise TimeoutError(f"no complete answer within {RESPONSE_TIMEOUT:g} s")
        return answer.result()

    def _is_about_file(self, verb: str, error: Exception) -> bool:
        if isinstance(error, FILE_ERRORS):
            return True
        number = getattr(error, "errno", None)
        return self.folder is not None and verb == "read" and number in UNREADABLE

    def _failure_text(self, why: str, error: Exception) -> str:
        advice = "; look at the address, the credentials and (for s3://) AWS_ENDPOINT_URL"
        return f"{why}: {reason(error)}{'' if self.folder else advice}"


def _remove_tree(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def for_each[T](function: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
    """function(item) of all, several at once: a store far away answers each request late. What has
    not begun when the error of an earlier item is seen is left out."""
    with concurrent.futures.ThreadPoolExecutor(IN_FLIGHT, "storage") as pool:
        return list(pool.map(function, items))
