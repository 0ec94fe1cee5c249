"""A folder or URL that holds files: s3://, gs:// or whatever fsspec reaches, each request with
several attempts.

    place = Place("s3://bucket/run")      the endpoint of s3:// is AWS_ENDPOINT_URL's
    place.put("5/meta/data.json", x)      a file, whole or not at all
    place.get("5/meta/data.json")         StorageError about the file, Unreachable about the place
"""

import concurrent.futures
import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fsspec

from zaya_jax.checkpoint import writing
from zaya_jax.config import StorageError, UserError, files

IN_FLIGHT = 8  # files at once, each of at most layout.CHUNK_BYTES
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds between attempts
READ_TIMEOUT = 60  # seconds without a byte of an answer
ANSWER = 300.0  # seconds for a whole one, of 32 MiB at most
# Seconds without a whole answer, after which nothing is tried a second time until there is one.
PATIENCE = 100.0
# Errors that tell of the file, not of the place.
ODD = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class Unreachable(StorageError):
    """The place did not answer; any other StorageError is about a file."""


class Place:
    """The files below a URL or in a folder; names are relative to it."""

    def __init__(self, url: str | Path):
        self.url = str(url).rstrip("/")
        if "::" in self.url:
            raise UserError(
                f"{self.url} is a chain of file systems; give the address itself, without ::"
            )
        protocol = self.url.split("://", 1)[0] if "://" in self.url else "file"
        on_s3 = protocol in ("s3", "s3a")
        self._local = protocol in ("file", "local")
        options: dict[str, Any] = {}
        if on_s3:
            # Attempts are made here, so that the first that fails is said soon: with botocore's and
            # s3fs's own, a store that takes requests and never answers was silent for 605 s.
            options["config_kwargs"] = {
                "connect_timeout": 10,
                "read_timeout": READ_TIMEOUT,
                "retries": {"total_max_attempts": 1},
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
        if on_s3:
            self._files.retries = 1
        # The folder, if it is on this machine.
        self.folder = Path(self._root) if self._local else None
        self.tell: Callable[[str], None] = lambda _: None  # called once when attempts begin to fail
        self._failing_since: float | None = None
        self.given_up = threading.Event()  # nothing more is begun: the run must end now

    def names(self) -> list[str]:
        """The names of the files and folders in it; none where it does not exist yet."""

        def listed() -> list[str]:
            try:
                return [str(entry["name"]) for entry in self._files.ls(self._root, detail=True)]
            except FileNotFoundError:
                if not self._local and "/" in self._root:  # a bucket that is not there is an error
                    self._files.ls(self._root.split("/", 1)[0], detail=False)
                return []

        paths = self.attempt("list", "", listed)
        return [path.rstrip("/").rsplit("/", 1)[-1] for path in paths]

    def sizes(self, name: str) -> dict[str, int]:
        """The size of each file below a name; in a folder also of links and empty folders, which a
        checkpoint does not have."""
        prefix = f"{self._root}/{name}"

        def sizes() -> dict[str, int]:
            if not self._local:
                found = self._files.find(prefix, detail=True)
                return {
                    path[len(prefix) + 1 :]: int(entry["size"]) for path, entry in found.items()
                }
            return {
                str(path.relative_to(prefix)): path.lstat().st_size
                for path in Path(prefix).rglob("*")
                if path.is_symlink() or not path.is_dir() or not any(path.iterdir())
            }

        return self.attempt("list", name, sizes)

    def exists(self, name: str) -> bool:
        """Whether it has this file."""
        return self.attempt("look at", name, self._files.exists, f"{self._root}/{name}")

    def get(self, name: str) -> bytes:
        """A file's content."""
        if self._local:
            return self.attempt("read", name, Path(self._root, name).read_bytes)
        return self.attempt("read", name, self._files.cat_file, f"{self._root}/{name}")

    def put(self, name: str, content: bytes | memoryview) -> None:
        """A file of this content, whole or not at all."""
        self.attempt("write", name, self._write, name, bytes(content))

    def delete(self, names: Sequence[str]) -> None:
        """Deletes files, and empty folders; those that are gone already are no error."""
        each(lambda name: self.attempt("delete", name, self._unlink, name), names)

    def _write(self, name: str, content: bytes) -> None:
        if not self._local:
            self._files.pipe_file(f"{self._root}/{name}", content)
            return
        path = Path(self._root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, content)

    def _unlink(self, name: str) -> None:
        path = f"{self._root}/{name}"
        with contextlib.suppress(FileNotFoundError):
            # a folder, as a kill leaves it
            if self._local and os.path.isdir(path) and not os.path.islink(path):
                os.rmdir(path)
            else:
                self._files.rm_file(path)

    def attempt[T](self, verb: str, name: str, function: Callable[..., T], *args: Any) -> T:
        """function(*args), tried again while that may help; the error says what could not be
        done."""
        where = f"{self.url}/{name}" if name else self.url
        for number, pause in enumerate((*PAUSES, None), 1):
            if self.given_up.is_set():
                raise Unreachable(f"{where} is slow or dead, and the run may not wait")
            begun = time.monotonic()
            try:
                found = function(*args) if self._local else _in_time(function, *args)
                self._failing_since = None
                return found
            except Exception as error:  # client libraries' own classes are no OSErrors
                why = f"cannot {verb} {where}"
                # A disk that cannot read a file now will not in a second: that is damage, and
                # reported at once.
                of_file = isinstance(error, OSError if self._local and verb == "read" else ODD)
                if of_file or isinstance(error, PermissionError):
                    self._failing_since = None
                    raise self._failure(of_file, why, error) from error
                first, since = self._failing_since is None, self._failing_since or begun
                self._failing_since = since
                if pause is None or time.monotonic() - since > PATIENCE:
                    why += f" after {number} attempt{'s' if number > 1 else ''}"
                    raise self._failure(False, why, error) from error
                if first:
                    self.tell(f"warning: {why} yet: {writing.reason(error)}; trying again")
            self.given_up.wait(pause)
        raise AssertionError("not reached")

    def _failure(self, of_file: bool, why: str, error: Exception) -> StorageError:
        advice = "; look at the address, the credentials and (for s3://) AWS_ENDPOINT_URL"
        kind = StorageError if of_file else Unreachable
        return kind(f"{why}: {writing.reason(error)}{'' if self._local else advice}")


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


def each[T](function: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
    """function(item) of all, several at once: a store far away answers each request late."""
    with concurrent.futures.ThreadPoolExecutor(IN_FLIGHT, "place") as pool:
        waiting = [pool.submit(function, item) for item in items]
        try:
            return [done.result() for done in waiting]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
