"""Named evaluations (`eval.named`): the loss on further text, beside that on what the run holds out.

A path of prepared data gives its held-out part. Text files are taken whole, but for a source of the run itself, of
which the part counts that it holds out; files that the run trains on under another path are refused. Of a run of chats
JSONL and Parquet are chats too, and their answers count; other text is text.
"""

import hashlib
import os
from pathlib import Path

from zaya_jax.config import Config, UserError, shown
from zaya_jax.data import chats, order, pieces, pipeline, sources, storage
from zaya_jax.data.pack import Batch
from zaya_jax.data.tokenizers import Tokenizer

# By path, tokenizer, and the context that chats are fitted to (0: text): tokenised once a program.
_whole: dict[tuple[str, str, int], order.Memory] = {}


def parse(config: Config) -> dict[str, str]:
    """{name: path} of config.eval.named."""
    found: dict[str, str] = {}
    if config.eval.named and not config.eval.windows:
        raise UserError(
            "config.eval.windows=0 evaluates on nothing, and eval.named is given; take one of them away"
        )
    for i, part in enumerate(config.eval.named):
        name, _, path = part.partition("=")
        where = f"config.eval.named[{i}]={shown(part)}"
        if not path or not name.replace("-", "_").isidentifier():
            raise UserError(
                f"{where} is no name=path, such as python=data/python; a name has letters, digits, _ and -"
            )
        if name in found or name == "loss":
            taken = "the loss on what the run holds out" if name == "loss" else "another one's"
            raise UserError(f"{where}: {name} is {taken}; give each a name of its own")
        found[name] = path
    return found


def stores(config: Config, tokenizer: Tokenizer) -> dict[str, pipeline.TokenStore]:
    """The tokens of each; UserError for what cannot be evaluated on."""
    return {name: _open(config, name, path, tokenizer) for name, path in parse(config).items()}


def notes(config: Config, tokenizer: Tokenizer) -> list[str]:
    """What was done to fit chats among them, to the person who looks on; UserError likewise."""
    found = stores(config, tokenizer).values()
    return [store.said for store in found if isinstance(store, order.Memory) and store.said]


def batches(
    config: Config, tokenizer: Tokenizer, process: tuple[int, int], rows: int
) -> dict[str, list[Batch]]:
    """{eval/name: fixed batches}, as `pipeline.eval_batches` makes them."""
    return {
        f"eval/{name}": pipeline.windows(config, [store], tokenizer.pad_id, process, rows)
        for name, store in stores(config, tokenizer).items()
    }


def _open(config: Config, name: str, path: str, tokenizer: Tokenizer) -> pipeline.TokenStore:
    where = f"config.eval.named {name}={path}"
    trained = {_real(source): source for source in pipeline.plan_sources(config)[0]}
    store: pipeline.TokenStore
    try:
        if path != "stdlib" and storage.is_prepared(path):
            store = storage.Prepared(path, "held_out", config.data.on_corrupt)
            own = f"config.data.tokenizer={config.data.tokenizer!r}"
            store.require_tokenizer(tokenizer.sha256, "it", own, "prepare it with that, or give its files")
            if config.data.chats and store.manifest.get("trim"):
                chats.require_prepared(path, store, config.data.seq_len)
        elif _real(path) in trained:
            store = pipeline.open_stores(config, trained[_real(path)], tokenizer)[1]
        else:
            _refuse_trained(path, list(trained.values()))
            store = _all_of(config, path, tokenizer)
    except UserError as error:
        raise UserError(f"{where}: {str(error).replace('config.data.path', 'path')}") from None
    if not store.num_tokens:
        raise UserError(f"{where} has no held-out part; prepare it with --held_out, or give files")
    return store


def _refuse_trained(path: str, trained: list[str]) -> None:
    """UserError where some of the files belong to a source of text that is trained on."""
    own = {sources.identity(file): str(file) for _, file in sources.list_files(path)}
    for source in trained:
        if source == "stdlib" or not storage.is_prepared(source):
            both = own.keys() & {sources.identity(file) for _, file in sources.list_files(source)}
            if both:
                some = min(own[file] for file in both)
                raise UserError(
                    f"{len(both):,} of its {len(own):,} files are trained on as part of {source}, such as {some}; "
                    "give others, or move them away from there"
                )


def _all_of(config: Config, path: str, tokenizer: Tokenizer) -> order.Memory:
    context = config.data.seq_len if config.data.chats and chats.are_here(path) else 0
    key = path, tokenizer.sha256, context
    if key not in _whole:
        if context:
            bundle, said = chats.whole(path, tokenizer, context)
        else:
            texts, said = [text for _, text in sources.named_texts(path)], ""
            bundle = sources.concatenate(pieces.encode_all(tokenizer, texts), tokenizer)
        _whole[key] = order.Memory(path, bundle, hashlib.sha256(bundle.tokens).hexdigest(), said)
    return _whole[key]


def _real(path: str) -> str:
    """A path that is there under its one name; others, as globs and URLs, as they are written."""
    return os.path.realpath(path) if path != "stdlib" and Path(path).exists() else path
