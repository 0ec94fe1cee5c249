"""From files to tokens: text, JSONL, Parquet and chats, in memory or prepared as token shards.

    box        what makes it                           takes → gives
    files      `text_files.find_files`                 a path or glob → the files below, each once
               `inputs.find_inputs`                    several, and `hf:` → the same
    documents  `inputs.samples`                        a file → texts, and the turns of chats
    tokens     `tokenizers.Tokenizer.encode_document`  a text → its ids, begin and end included
               `chat_template.Template.encode_within`  turns, a context → ids, which are predicted
               `token_block.TokenBlock`                documents, joined in memory
               `shard_format.ShardWriter`              documents → a shard of the prepared format

A chat goes through three: `chat` brings a record's many forms into one, `chat_template` renders and
encodes it, `answer_spans` finds the model's words in what a foreign template writes.

`memory` goes the whole way when a run starts. `prepare` goes it once for many runs: it cuts the
files into tasks, and `prepare_task` runs them, on one machine or many. `hub` reads data sets of the
Hugging Face hub. The way goes on in `zaya_jax.data`.
"""
