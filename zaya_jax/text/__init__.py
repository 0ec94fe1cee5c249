"""From files to tokens: text, JSONL, Parquet and chats, in memory or prepared as token shards.

    box        what makes it                           takes → gives
    files      `text_files.find_files`                 a path or glob → the files below, each once
               `inputs.find_inputs`                    several, and `hf:` → the same
    samples    `inputs.samples`                        a range of a file → texts, turns of chats
    documents  `tokenizers.Tokenizer.encode_document`  a text → its ids, begin and end included
               `chat_template.Template.encode_within`  turns, a context → ids, which are predicted
    tokens     `token_block.concatenate`               documents → one block, in memory
               `shard_format.ShardWriter`              documents → a shard of the prepared format

A chat goes through three: `chat` brings a record's many forms into one, `chat_template` renders and
encodes it, `answer_spans` finds the model's words in what a foreign template writes.

`memory` goes the whole way when a run starts. `prepare` goes it once for many runs: it cuts the
files into tasks, and `prepare_task` runs them, on one machine or many. `hub` reads data sets of the
Hugging Face hub. The way goes on in `zaya_jax.data`.

What is held out is decided by a hash: of a sample's name for texts (`memory.split_texts`) and for
all that is prepared (`prepare_task`), of what is said for chats in memory (`memory.last_held_out`).
A text that is alone in memory gives its end.
"""
