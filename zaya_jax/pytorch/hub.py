"""Publishes a model directory on the Hugging Face hub.

`check_access` finds out before an export what would fail after it. `push` sends a finished directory
in one commit: readers of the repository get the old files or the new ones.
"""

import re
import shlex
from pathlib import Path

from zaya_jax.config import StorageError, UserError
from zaya_jax.config.fields import on_a_line
from zaya_jax.version import __version__

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/")  # a folder of the hub's own cache
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CARD = "README.md"


def name_of(model: str) -> str | None:
    """OWNER/NAME of a model that was taken from the hub: named so, or by its folder in the hub's
    cache. None for anything else: runs/tiny looks the same, but the cache does not have it."""
    if cached := CACHED.search(model):
        return f"{cached[1]}/{cached[2]}"
    name, _, revision = model.partition("@")
    if not REPOSITORY.fullmatch(name) or Path(name).exists():
        return None
    from huggingface_hub import try_to_load_from_cache  # takes 0.3 s

    copy = try_to_load_from_cache(name, "config.json", revision=revision or None)
    return name if isinstance(copy, str) else None


def check_access(repository: str) -> None:
    """UserError unless the user's token may write to a repository of this owner."""
    from huggingface_hub import HfApi

    try:
        user = HfApi().whoami()
    except Exception as error:  # the hub's own classes, the network's
        raise UserError(
            f"{repository} cannot be written: {on_a_line(error)}; check the network, HF_ENDPOINT and"
            " the token (`hf auth login`, or HF_TOKEN)"
        ) from None
    owners = [user["name"], *(organization["name"] for organization in user.get("orgs", ()))]
    if repository.split("/")[0] not in owners or not REPOSITORY.fullmatch(repository):
        raise UserError(
            f"{repository} is not a repository that this token writes to; it is {user['name']}'s:"
            f" give {' or '.join(f'{owner}/NAME' for owner in owners)}, or take another token"
        )


def push(folder: Path, repository: str, private: bool = False) -> str:
    """Sends a directory and gives the commit's address; StorageError, with the directory as it was,
    where the hub does not take it."""
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    to_send = {path.relative_to(folder).as_posix(): path for path in files}
    try:
        api.create_repo(repository, private=private or None, exist_ok=True)
        found = api.model_info(repository)
        if private and not found.private:
            raise ValueError("it is public already; make it private in its settings")
        there = {file.rfilename for file in found.siblings or ()}
        stale = [
            name for name in there - to_send.keys() if name.endswith((".safetensors", ".jinja"))
        ]
        if stale:
            raise ValueError(
                f"it has other weights or templates, {', '.join(stale[:3])}, which a reader might"
                " take for these; delete them there"
            )
        additions = [CommitOperationAdd(name, path) for name, path in to_send.items()]
        message = f"Upload a model of zaya_jax {__version__}"
        return api.create_commit(repository, additions, commit_message=message).commit_url
    except Exception as error:  # also the hub's own classes, the network's, the disk's
        reasons = ": ".join(on_a_line(reason) for reason in (error, error.__cause__) if reason)
        raise StorageError(
            f"{repository} did not take {folder} ({reasons}); the folder is whole and stays: then"
            f" `hf upload {repository} {shlex.quote(str(folder))} .{' --private' * private}` sends it"
        ) from None
