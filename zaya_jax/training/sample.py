"""Writes the continuation of the config's prompt that a run ends with, for its report.

Process 0 makes it on one of its devices, with the weights of the checkpoint that has just been
saved, so the other devices need no memory for it. There is no sample if the weights do not fit the
free memory of that device.
"""

from pathlib import Path

import jax

from zaya_jax import generation
from zaya_jax.checkpoint import partial
from zaya_jax.checkpoint.source import ArraySource
from zaya_jax.config import Config
from zaya_jax.model import decode, zaya
from zaya_jax.model.sampling import Sampling
from zaya_jax.text.tokenizers import Tokenizer
from zaya_jax.training import start
from zaya_jax.training.logs import say

# In bytes a parameter: float32, and the copy in the products' format that XLA may keep through the
# decoding.
BYTES = 6


def write_sample(workdir: Path, config: Config, tokenizer: Tokenizer, source: ArraySource) -> None:
    """Writes sample.txt, or says why not. `config` is that of the step's phase.

    Only in process 0, when the training's state is gone from its device; `source` has the weights
    of the step.
    """
    path = workdir / "sample.txt"
    path.unlink(missing_ok=True)
    device, model = jax.local_devices()[0], config.model
    needed, has = BYTES * zaya.param_counts(model)["total"], start.free_bytes_of(device)
    if has and needed > has:
        say(
            f"no sample: with these weights it needs {needed / 2**30:,.1f} GiB on one device,"
            f" {has / 2**30:,.1f} are free; python -m experiments.generate --model={workdir} makes"
            " one where there is room"
        )
        return
    with jax.default_device(device), jax.default_matmul_precision(config.precision.matmul):
        weights = [partial.read(source, name) for name in ("params.*", "balance.bias")]
        params, bias = jax.device_put((weights[0]["params"], weights[1]["balance"]["bias"]), device)
        del weights
        text, chats = config.log.sample_prompt, config.data.chats
        turns = [{"role": "user", "content": text}]
        prompt = generation.parse_prompt(turns if chats else text, tokenizer, str(workdir))
        room = model.max_position_embeddings - len(prompt.ids[0])
        rows = decode.Continuation(
            decode.Decoder(model, params, bias, config.precision, kernels=config.kernels),
            prompt.ids,
            min(config.log.sample_tokens, max(room, 0)),
            sampling=Sampling(config.log.sample_temperature),
            seeds=config.run.seed,
            ends=prompt.ends,
        )
        (continued,) = generation.results(rows, prompt, prompt.ids, tokenizer)
    if chats:
        continued = f"{text}\n{continued}"
    path.write_text(continued, encoding="utf-8")
