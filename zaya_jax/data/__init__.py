"""Data: from text to the batches of a training run, the same batches whatever reads them.

Preparing: `inputs` finds samples in files, `chat` and `trim` make conversations fit, `tokenizers` turns text into
ids, `prepare` writes token shards in the format of `tokens`, on one machine or many. Reading: `storage` fetches
bundles, `sources` has text that needs no preparing and `chats` conversations, `stores` opens whichever a path is,
`order` and `pack` say what a row holds, `mix` which source it comes from; `pipeline` makes the stream of batches of
these, `windows` the batches of evaluation, `prefetch` sends batches to the device.
"""
