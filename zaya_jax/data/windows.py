"""Makes the fixed batches of evaluation: windows over held-out data, and over further text
(`eval.named`).

A named path of prepared data gives its held-out part. Text files are taken whole, except those of a
source of the run: these give the part that the run holds out. Files that the run trains on under
another path are refused. In a run of chats, JSONL and Parquet are chats too, and the loss is over
their answers; other files are text.
"""

import dataclasses
import hashlib
import os
from pathlib import Path

from zaya_jax import schedule
from zaya_jax.config import Config, Phase, UserError, fields, shown
from zaya_jax.data import mix, order, pack, storage
from zaya_jax.data.pack import Batch, Span
from zaya_jax.data.stores import (
    Memory,
    TokenStore,
    fill,
    local_rows,
    open_store,
    require_prepared,
    tokenised,
)
from zaya_jax.text import chat_template, chats, inputs, sources, tokenizers
from zaya_jax.text.tokenizers import Tokenizer


def eval_batches(
    config: Config,
    tokenizer: Tokenizer,
    process: tuple[int, int] = (0, 1),
    rows: int | None = None,
    *,
    damaged: set[str],
) -> list[Batch]:
    """Fixed held-out batches of `eval.windows` windows, an equal share from each source, spread
    evenly over its text.

    A batch has `rows` rows over all processes (otherwise the global batch's). The last is filled up
    with empty rows; without held-out text the list is empty. `damaged` gets the pieces of data that
    could not be read.
    """
    stores = [
        open_store(config, path, tokenizer, "held_out") for path in mix.plan_sources(config)[0]
    ]
    return spread_windows(
        config, [s for s in stores if s.num_tokens], tokenizer.pad_id, process, rows, damaged
    )


def spread_windows(
    config: Config,
    stores: list[TokenStore],
    pad_id: int,
    process: tuple[int, int],
    rows: int | None,
    damaged: set[str],
) -> list[Batch]:
    """`eval_batches` of these stores."""
    count, chosen = config.eval.windows, list[tuple[TokenStore, list[Span]]]()
    for k, store in enumerate(stores):
        # An answer is judged with all that it answers.
        layout = order.layout_of(
            store, config.data.seq_len, "best_fit" if config.data.chats else "concat"
        )
        share = min(count * (k + 1) // len(stores) - count * k // len(stores), layout.num_rows)
        chosen += [(store, layout.spans(n * layout.num_rows // share)) for n in range(share)]
    mine = local_rows(rows := rows or config.data.global_batch, process)
    batches = []
    for begin in range(0, len(chosen), rows):
        filled = pack.Rows(len(mine), config.data.seq_len, pad_id)
        for row, (store, spans) in enumerate(chosen[begin : begin + rows][mine.start : mine.stop]):
            fill(store, filled, [row], [spans])
        batches.append(pack.finish(filled, config.data.cross_documents))
    for store in stores:
        if isinstance(store, storage.Prepared):
            damaged |= store.counters.corrupt
    return batches


def eval_config(config: Config, phase: Phase) -> Config:
    """The config as evaluation sees it in a phase: its window's length, and the sources of the
    whole run.

    Without the phases: those that leave a key open would take it from this one.
    """
    here = schedule.phase_config(config, phase)
    every = tuple(f"{path}=1" for path in mix.plan_sources(config)[0])
    data = dataclasses.replace(here.data, seq_len=phase.eval_seq_len, mixture=every)
    return dataclasses.replace(
        here, data=data, schedule=dataclasses.replace(here.schedule, phases=())
    )


def named_paths(config: Config) -> dict[str, str]:
    """{name: path} of config.eval.named."""
    found: dict[str, str] = {}
    if config.eval.named and not config.eval.windows:
        raise UserError(
            "config.eval.windows=0 evaluates on nothing, and eval.named is given; take one of them"
            " away"
        )
    for i, part in enumerate(config.eval.named):
        name, _, path = part.partition("=")
        where = f"config.eval.named[{i}]={shown(part)}"
        if not path or not name.replace("-", "_").isidentifier():
            raise UserError(
                f"{where} is no name=path, such as python=data/python; a name has letters, digits,"
                " _ and -"
            )
        if name in found or name == "loss":
            taken = "the loss on the run's held-out data" if name == "loss" else "another one's"
            raise UserError(f"{where}: {name} is {taken}; give each a name of its own")
        found[name] = path
    return found


def named_stores(config: Config, tokenizer: Tokenizer) -> dict[str, TokenStore]:
    """The tokens of each; UserError for what cannot be evaluated on."""
    return {
        name: _open(config, name, path, tokenizer) for name, path in named_paths(config).items()
    }


def _open(config: Config, name: str, path: str, tokenizer: Tokenizer) -> TokenStore:
    where = f"config.eval.named {name}={path}"
    trained = {_real(source): source for source in mix.plan_sources(config)[0]}
    store: TokenStore
    with fields.naming(where):
        if path != "stdlib" and storage.is_prepared(path):
            store = storage.Prepared(path, "held_out", config.data.on_corrupt)
            store.require_tokenizer(tokenizer, f"config.data.tokenizer={config.data.tokenizer!r}")
            if config.data.chats and store.manifest.get("trim"):
                require_prepared(path, store, config.data.seq_len)
        elif _real(path) in trained:
            store = open_store(config, trained[_real(path)], tokenizer, "held_out")
        else:
            _refuse_trained(path, list(trained.values()))
            store = _all_of(config, path, tokenizer)
    if not store.num_tokens:
        raise UserError(f"{where} has no held-out part; prepare it with --held_out, or give files")
    return store


def _refuse_trained(path: str, trained: list[str]) -> None:
    """UserError where some of the files belong to a source of text that is trained on."""
    own = sources.identities(path)
    for source in trained:
        if source == "stdlib" or not storage.is_prepared(source):
            both = own.keys() & sources.identities(source).keys()
            if both:
                some = min(own[file] for file in both)
                raise UserError(
                    f"{len(both):,} of its {len(own):,} files are trained on as part of {source},"
                    f" such as {some}; give others, or move them away from there"
                )


def _all_of(config: Config, path: str, tokenizer: Tokenizer) -> Memory:
    records = any(
        inputs.kind_of(str(file)) in inputs.RECORDS for _, file in sources.list_files(path)
    )
    context = config.data.seq_len if config.data.chats and records else 0

    def make() -> Memory:
        if context:
            bundle, note = chats.whole(path, tokenizer, context)
        else:
            texts, note = [text for _, text in sources.named_texts(path)], ""
            bundle = sources.concatenate(tokenizers.encode_texts(tokenizer, texts), tokenizer)
        return Memory(path, bundle, hashlib.sha256(bundle.tokens).hexdigest(), note)

    form = chat_template.fingerprint(tokenizer) if context else ""
    return tokenised([path], ("whole", tokenizer.sha256, form, context), make)


def _real(path: str) -> str:
    """A path that is there under its one name; others, as globs and URLs, as they are written."""
    return os.path.realpath(path) if path != "stdlib" and Path(path).exists() else path
