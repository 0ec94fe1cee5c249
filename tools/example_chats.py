"""Makes a small chat set from Python itself: questions about the parameters of the standard
library's functions.

    python tools/example_chats.py chats.jsonl
    python tools/example_chats.py pairs.jsonl --pairs

Every question quotes a signature, as `inspect` finds it, in one of several wordings; the answer
lists its parameters. With `--pairs` that answer is preferred to a sentence with the same names. The
same Python gives the same file. It is for trying out fine-tuning
(docs/finetuning.md): no network, no licence.
"""

import argparse
import importlib
import inspect
import json
import random
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

# Modules that import without doing anything to be seen.
MODULES = """
    argparse ast asyncio base64 bisect calendar codecs collections configparser contextlib copy csv
    ctypes datetime decimal difflib dis doctest email.utils enum fileinput fnmatch fractions
    functools getpass gettext glob gzip hashlib heapq html http.client imaplib importlib.util
    inspect io ipaddress json locale logging lzma mailbox mimetypes multiprocessing.pool operator os
    pathlib pickle pickletools pkgutil platform plistlib posixpath pprint profile pydoc queue quopri
    random re reprlib sched secrets selectors shelve shlex shutil signal smtplib socket socketserver
    sqlite3 ssl stat statistics string stringprep struct subprocess symtable sysconfig tarfile
    tempfile textwrap threading timeit token tokenize trace traceback types typing unicodedata
    unittest unittest.mock urllib.parse urllib.request uuid warnings wave weakref webbrowser
    wsgiref.util xml.dom.minidom xml.etree.ElementTree xmlrpc.client zipapp zipfile
"""
WORDINGS = (
    "Which parameters has {}?",
    "What are the parameters of {}?",
    "Name the parameters of {}.",
    "{}: which parameters?",
)
LONGEST = 110  # characters of a signature, so that a chat fits into 256 bytes
SYSTEM = "Answer with names alone."
# Parts of signatures that quote the Python that runs this, and not its library.
PLACES = {
    sys.executable: "python",
    sysconfig.get_path("stdlib"): "lib",
    sysconfig.get_default_scheme(): "posix_prefix",
}


def main() -> int:
    """Writes the file that is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("path", type=Path, help="the file to write")
    parser.add_argument("--pairs", action="store_true", help="pairs of answers, not chats")
    args = parser.parse_args()
    chosen = random.Random(0)
    chats: list[dict] = []
    for name, signature, parameters in sorted(set(found())):
        question = chosen.choice(WORDINGS).format(f"{name}{signature}")
        messages = []
        if chosen.random() < 0.2:
            messages.append({"role": "system", "content": SYSTEM})
        messages.append({"role": "user", "content": question})
        answer = {"role": "assistant", "content": parameters}
        if args.pairs:
            worse = {"role": "assistant", "content": f"Its parameters are {parameters}."}
            chats.append({"prompt": messages, "chosen": [answer], "rejected": [worse]})
        else:
            chats.append({"messages": [*messages, answer]})
    args.path.write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    print(f"{len(chats):,} {'pairs' if args.pairs else 'chats'} in {args.path}")
    return 0


def found() -> Iterator[tuple[str, str, str]]:
    """(name, signature, its parameters) of functions, and of the methods of classes."""
    for name in MODULES.split():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = importlib.import_module(name)
        except ImportError:  # not every Python has all of them
            continue
        classes = filter(inspect.isclass, vars(module).values())
        for owner in (module, *classes):
            for key, function in vars(owner).items():
                if key.startswith("_") or not inspect.isfunction(function):
                    continue
                try:
                    signature = inspect.signature(function)
                except (TypeError, ValueError):
                    continue
                spelt = str(signature)
                for place, named in PLACES.items():
                    spelt = spelt.replace(repr(place), repr(named))
                if (
                    signature.parameters
                    and len(key) + len(spelt) <= LONGEST
                    and " at 0x" not in spelt
                ):
                    yield key, spelt, ", ".join(signature.parameters)


if __name__ == "__main__":
    sys.exit(main())
