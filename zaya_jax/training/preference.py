"""Direct preference optimization (DPO): the better of two answers becomes likelier than the worse
one, beside the weights that the run began with.

    reward   beta (log p(answer) - log p(answer) with the frozen weights), summed over its tokens
    loss     -log sigmoid(reward of the better answer - reward of the worse one), a mean over pairs

Both answers of a pair lie in one row, as segments 2 k - 1 and 2 k, each with its prompt
(`data.stores`). The frozen weights are in the state: those under the adapters, or a copy of the
first ones. Their log-probabilities are computed in the step, so nothing is prepared or kept, and a
run resumes as any other does.

The log-probabilities are summed without a gradient first. Then each token's weight in the gradient
of the loss is known, and `cross_entropy` computes that as in any step: logits exist for a chunk of
tokens at a time, and no gradient passes a sum over devices.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.cross_entropy import cross_entropy
from zaya_jax.config import Config
from zaya_jax.model import zaya
from zaya_jax.model.scan_hooks import PLAIN
from zaya_jax.parallel.spread import TENSOR, Spread, share_of_tokens
from zaya_jax.training.loss import Objective, run_model


def loss_of_pairs(config: Config, spread: Spread) -> Objective:
    """The loss of DPO; its parts have TRL's names."""
    model, precision, beta = config.model, config.precision, config.run.beta
    sharing = spread.sequence_parts * spread.head_shards  # devices that have a row's tokens

    def value(params, bias, batch, total, hooks=PLAIN, frozen=None):
        segments, mask = batch["segment_ids"], batch["loss_mask"]
        with jax.named_scope("reference"):
            of_reference = run_model(config, spread, None, bias, batch, frozen=frozen)
            reference = log_probs(of_reference, batch)
        base = frozen if config.run.lora else None
        params, out = run_model(config, spread, params, bias, batch, hooks=hooks, frozen=base)
        policy = log_probs(jax.lax.stop_gradient((params, out)), batch)
        rewards = beta * (policy - reference)
        margins = rewards[..., 0] - rewards[..., 1]
        real = (of_answers(mask, segments) > 0).all(-1)
        # how much a nat more of the better answer, or less of the worse one, takes from the loss
        slope = jnp.where(real, beta * jax.nn.sigmoid(-margins), 0.0) / total
        slopes = jnp.stack([slope, -slope], axis=-1).reshape(len(segments), -1)
        weights = mask * jnp.take_along_axis(slopes, jnp.maximum(segments - 1, 0), axis=1)
        with jax.named_scope("head"):
            weighted, _ = cross_entropy(
                share(out.hidden),
                params["embed"]["embedding"],
                params["head"]["bias"] if model.lm_head_bias else None,
                share(batch["targets"]),
                share(weights),
                dtype=precision.compute,
            )
        by_pair = {
            "loss": -jax.nn.log_sigmoid(margins),
            "rewards/chosen": rewards[..., 0],
            "rewards/rejected": rewards[..., 1],
            "rewards/margins": margins,
            "rewards/accuracies": margins > 0,
            "logps/chosen": policy[..., 0],
            "logps/rejected": policy[..., 1],
        }
        parts = {
            name: jnp.sum(jnp.where(real, x, 0.0)) / total / sharing for name, x in by_pair.items()
        }
        loss = parts["loss"] + (weighted - jax.lax.stop_gradient(weighted))
        return loss, (parts, {"counts": out.counts, **out.sums})

    def share(x):
        return share_of_tokens(x.reshape(-1, *x.shape[2:]), spread)

    def log_probs(of_pass, batch):
        """The log-probability of each answer, [B, pairs, 2]."""
        params, out = of_pass
        with jax.named_scope("head"):
            hidden, targets = share(out.hidden), share(batch["targets"])
            scores, _ = zaya.scores(model, params, hidden, targets, precision)
        if spread.head_shards > 1:
            scores = jax.lax.all_gather(scores, TENSOR, tiled=True)
        scores = scores.reshape(batch["targets"].shape)
        return of_answers(jnp.where(batch["loss_mask"] > 0, scores, 0.0), batch["segment_ids"])

    def of_answers(x, segments):
        """Sums of the tokens' numbers over each answer, [B, pairs, 2]."""
        # of a row at most: an answer and its prompt are two tokens or more
        pairs = max(segments.shape[1] * spread.sequence_parts // 4, 1)
        # Not a scatter: on a GPU its sums change from run to run.
        belongs = segments[:, :, None] == 1 + jnp.arange(2 * pairs)
        sums = jnp.sum(jnp.where(belongs, x[:, :, None], 0.0), axis=1)
        return jax.lax.psum(sums, spread.sequence_axes).reshape(len(x), pairs, 2)

    return Objective("pairs", count_pairs, value)


def count_pairs(batch: dict) -> jax.Array:
    """The pairs whose better answer begins among a device's tokens."""
    begins = (batch["positions"] == 0) & (batch["segment_ids"] % 2 == 1)
    return jnp.sum(begins.astype(jnp.float32))
