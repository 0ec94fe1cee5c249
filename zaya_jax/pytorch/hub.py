"""Publishes a model directory on the Hugging Face hub.

`check_access` finds out before an export what would fail after it. `push` sends a finished directory
in one commit: readers of the repository get the old files or the new ones, and a push that broke off
is repeated by the same call, which sends only what the hub does not have yet.
"""

import re
from pathlib import Path

from zaya_jax.config import StorageError, UserError, files
from zaya_jax.config.fields import on_a_line
from zaya_jax.pytorch import hf, tensor_files
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


def check_folder(folder: Path) -> None:
    """UserError unless a directory is a whole model or whole adapters, with a card that names a
    license."""
    from huggingface_hub import metadata_load

    if (folder / ADAPTER_CONFIG).is_file():
        base = files.read_object(folder / ADAPTER_CONFIG)["base_model_name_or_path"]
        if not REPOSITORY.fullmatch(base):
            raise UserError(
                f"{folder / ADAPTER_CONFIG} names its base by a path of this machine, {base}; write"
                " the base's OWNER/NAME there, or export again with --base_model=OWNER/NAME"
            )
        tensor_files.open_file(folder / ADAPTER_WEIGHTS)
    else:
        hf.Directory(folder)
    metadata = metadata_load(folder / CARD) if (folder / CARD).is_file() else None
    if not (metadata or {}).get("license"):
        raise UserError(
            f"{folder / CARD} names no license; write `license: apache-2.0`, or your choice, between"
            " its first two lines of ---"
        )


def push(folder: Path, repository: str, private: bool = False) -> str:
    """Sends a directory and gives the commit's address; StorageError, with the directory as it was,
    where the hub does not take it."""
    from huggingface_hub import CommitOperationAdd, HfApi

    check_folder(folder)
    check_access(repository)
    api = HfApi()
    to_send: dict[str, Path] = {}
    for path in sorted(folder.rglob("[!.]*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and "/." not in f"/{name}":
            to_send[name] = path
    try:
        api.create_repo(repository, private=private or None, exist_ok=True)
        found = api.model_info(repository)
        if private and not found.private:
            raise UserError(
                f"{repository} is public already; make it private in its settings, or leave"
                " --private out"
            )
        there = {file.rfilename for file in found.siblings or ()}
        if stale := [name for name in there - to_send.keys() if name.endswith(".safetensors")]:
            raise UserError(
                f"{repository} has other weights, {', '.join(stale[:3])}, which a reader might take"
                " for these; delete them there, or give another name"
            )
        additions = [CommitOperationAdd(name, path) for name, path in to_send.items()]
        message = f"Upload a model of zaya_jax {__version__}"
        return api.create_commit(repository, additions, commit_message=message).commit_url
    except UserError:
        raise
    except Exception as error:  # the hub's own classes, the network's, the disk's
        reasons = ": ".join(on_a_line(reason) for reason in (error, error.__cause__) if reason)
        raise StorageError(f"{repository} did not take {folder} ({reasons})") from None
