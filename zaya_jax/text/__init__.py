"""From files to tokens: text, JSONL, Parquet and chats, in memory or prepared as token shards.

    box        what makes it                     takes → gives
    files      `sources.find`, `inputs.find`     paths and globs → the files below, each once
    documents  `inputs.samples`                  a file → names, each with a text or a chat's turns
    tokens     `tokenizers.Tokenizer.document`   a text → its ids, begin and end included
               `chat_template.Template.prepare`  turns, a context → ids, and which are learnt
               `sources.Bundle`                  documents, joined in memory
               `tokens.ShardWriter`              documents → a shard in the format of `tokens`

`sources` (for text) and `chats` go the whole way when a run starts. `prepare` goes it once for many
runs: it cuts the files into tasks, and `prepare_task` runs them, on one machine or many. `hub` opens
what the `datasets` library saved. The way goes on in `zaya_jax.data`.
"""
