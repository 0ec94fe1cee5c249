"""Makes the fixed batches of evaluation: windows over held-out data, and over further text
(`eval.named`).

For prepared data the held-out split is used. Text files are used whole, unless the run trains on
that path: then the part that it holds out is used. Files that the run trains on under another path
are refused. In a run of chats, JSONL and Parquet are chats too, and the loss is over their answers;
other files are text.
"""

import dataclasses
import hashlib
import logging

from zaya_jax import schedule
from zaya_jax.config import Config, Phase, UserError, fields, shown
from zaya_jax.data import layout, mix, pack
from zaya_jax.data.pack import Batch, Span
from zaya_jax.data.prepared_store import PreparedStore, is_prepared
from zaya_jax.data.stores import (
    MemoryStore,
    TokenStore,
    fill,
    local_rows,
    made_once,
    open_prepared,
    open_store,
    require_chats,
)
from zaya_jax.text import chat_template, inputs, memory, text_files
from zaya_jax.text.token_block import encode_texts
from zaya_jax.text.tokenizers import Tokenizer

_log = logging.getLogger(__name__)


def eval_batches(
    config: Config,
    tokenizer: Tokenizer,
    process: tuple[int, int] = (0, 1),
    batch_rows: int | None = None,
    *,
    damaged: set[str],
) -> list[Batch]:
    """Fixed held-out batches of `eval.windows` windows, an equal number from each source, spread
    evenly over its text.

    A batch has `batch_rows` rows over all processes (otherwise the global batch's). The last is
    filled up with empty rows; without held-out text the list is empty. `damaged` gets the bundles
    that could not be read.
    """
    paths, _ = mix.plan_sources(config)
    stores = [open_store(config, path, tokenizer, "held_out") for path in paths]
    stores = [store for store in stores if store.num_tokens]
    batch_rows = batch_rows or config.data.global_batch
    return spread_windows(config, stores, tokenizer.pad_id, process, batch_rows, damaged)


def spread_windows(
    config: Config,
    stores: list[TokenStore],
    pad_id: int,
    process: tuple[int, int],
    batch_rows: int,
    damaged: set[str],
) -> list[Batch]:
    """`eval_batches` of these stores."""
    windows: list[tuple[TokenStore, list[Span]]] = []
    for k, store in enumerate(stores):
        # An answer is judged with all that it answers.
        packing = "best_fit" if config.data.chats else "concat"
        rows = layout.layout_of(store, config.data.seq_len, packing)
        first, stop = (config.eval.windows * index // len(stores) for index in (k, k + 1))
        if config.eval.windows and first == stop:
            _log.warning(
                "%s gives no held-out window: eval.windows=%d are fewer than the %d sources",
                store.name,
                config.eval.windows,
                len(stores),
            )
        count = min(stop - first, rows.num_rows)
        windows += [(store, rows.spans(n * rows.num_rows // count)) for n in range(count)]
    ours = local_rows(batch_rows, process)
    batches = []
    for begin in range(0, len(windows), batch_rows):
        batch = pack.BatchBuilder(len(ours), config.data.seq_len, pad_id)
        our_windows = windows[begin : begin + batch_rows][ours.start : ours.stop]
        for row, (store, spans) in enumerate(our_windows):
            fill(store, batch, [row], [spans])
        batches.append(batch.build(config.data.cross_documents))
    for store in stores:
        if isinstance(store, PreparedStore):
            damaged |= store.corrupt
    return batches


def eval_config(config: Config, phase: Phase) -> Config:
    """The config as evaluation sees it in a phase: its window's length, and the sources of the
    whole run.

    Phases are dropped: one that leaves a key unset would inherit it from this config.
    """
    of_phase = schedule.phase_config(config, phase)
    mixture = tuple(f"{path}=1" for path in mix.plan_sources(config)[0])
    data = dataclasses.replace(of_phase.data, seq_len=phase.eval_seq_len, mixture=mixture)
    without_phases = dataclasses.replace(of_phase.schedule, phases=())
    return dataclasses.replace(of_phase, data=data, schedule=without_phases)


def named_paths(config: Config) -> dict[str, str]:
    """{name: path} of config.eval.named."""
    paths: dict[str, str] = {}
    if config.eval.named and not config.eval.windows:
        raise UserError(
            "config.eval.windows=0 turns evaluation off, but eval.named is set; remove one of them"
        )
    for i, entry in enumerate(config.eval.named):
        name, _, path = entry.partition("=")
        where = f"config.eval.named[{i}]={shown(entry)}"
        if not path or not name.replace("-", "_").isidentifier() or name in (*paths, "loss"):
            raise UserError(
                f"{where} is not of the form name=path, such as python=data/python; a name has"
                " letters, digits, _ and -, is not loss, which is that of the run's held-out data,"
                " and is used once"
            )
        paths[name] = path
    return paths


def named_stores(config: Config, tokenizer: Tokenizer) -> dict[str, TokenStore]:
    """{name: store} of config.eval.named; UserError for what cannot be evaluated on."""
    return {
        name: _open(config, name, path, tokenizer) for name, path in named_paths(config).items()
    }


def _open(config: Config, name: str, path: str, tokenizer: Tokenizer) -> TokenStore:
    where = f"config.eval.named {name}={path}"
    store: TokenStore
    with fields.naming(where):
        if is_prepared(path):
            store = open_prepared(config, path, tokenizer, "held_out")
            if config.data.chats and store.manifest["chats"]:
                require_chats(store, config.data.seq_len)
        elif source := _same_source(config, path):
            store = open_store(config, source, tokenizer, "held_out")
        else:
            store = open_whole(config, path, tokenizer)
    if not store.num_tokens:
        raise UserError(f"{where} has no held-out part; prepare it with --held_out, or give files")
    return store


def _same_source(config: Config, path: str) -> str | None:
    """The source of text that has the same files; UserError where one has some of them."""
    files = text_files.identities(path)
    for source in mix.plan_sources(config)[0]:
        trained = {} if is_prepared(source) else text_files.identities(source)
        shared = files.keys() & trained.keys()
        if shared and files.keys() == trained.keys():
            return source
        if shared:
            example = min(files[identity] for identity in shared)
            raise UserError(
                f"{len(shared):,} of its {len(files):,} files are trained on as part of"
                f" {source}, such as {example}; give others, or move them away from there"
            )
    return None


def open_whole(config: Config, path: str, tokenizer: Tokenizer) -> MemoryStore:
    """All text of a path, or in a run of chats or pairs all of these."""
    files = text_files.list_files(path)
    records = any(text_files.file_kind(str(file)) in inputs.RECORDS for _, file in files)
    pairs = config.run.takes_pairs
    context = config.data.seq_len if config.data.chats and (records or pairs) else 0

    def make() -> MemoryStore:
        if context:
            block, note = memory.read_whole(path, tokenizer, context, pairs)
        else:
            texts = [text for _, text in memory.named_texts(path)]
            block = encode_texts(texts, tokenizer)
            note = ""
        fingerprint = hashlib.sha256(block.tokens).hexdigest()
        return MemoryStore(path, block, fingerprint, note, are_pairs=pairs)

    template = chat_template.fingerprint(tokenizer) if context else ""
    return made_once([path], ("whole", tokenizer.sha256, template, context, pairs), make)
