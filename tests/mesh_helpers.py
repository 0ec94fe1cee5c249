"""One model, one batch of uneven documents, and its loss and gradients on any mesh, for
comparison."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import logical_state
import numpy as np
from compared import assert_norms_close
from jax.sharding import PartitionSpec

from zaya_jax import config
from zaya_jax.config import Rope, RopeKinds
from zaya_jax.model import zaya
from zaya_jax.parallel import sharding
from zaya_jax.parallel.mesh import batch_spec, make_mesh
from zaya_jax.parallel.spread import spread_of
from zaya_jax.training import snapshot
from zaya_jax.training import state as states
from zaya_jax.training import step as steps

ROWS, LENGTH = 8, 32
SETTINGS = config.check(
    {
        "model": dict(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=8,
            moe_intermediate_size=16,
            num_experts=8,
            router_hidden_size=8,
            pad_token_id=None,
            attention_bias=True,
            lm_head_bias=True,
            layer_types=("hybrid", "hybrid_sliding"),
            sliding_window=9,
        ),
        "precision": {"compute": "float32", "newton_schulz": "float32", "matmul": "highest"},
        "data": {"seq_len": LENGTH},
        "optim": {"newton_schulz_steps": 1},  # five compile longer; test_against_torch.py has them
    }
)


def with_model(**keys) -> config.Config:
    """The settings with other keys of the model."""
    return dataclasses.replace(SETTINGS, model=dataclasses.replace(SETTINGS.model, **keys))


DENSE = with_model(
    model_type="dense",
    num_experts=1,
    intermediate_size=48,
    attention_bias=False,
    num_key_value_heads=8,
    rope_parameters=RopeKinds(Rope(partial_rotary_factor=1.0)),
)
GROUPED = with_model(
    model_type="dense",
    num_experts=1,
    intermediate_size=48,
    attention_bias=False,
    num_attention_heads=16,
    num_key_value_heads=4,
)
MIXED = with_model(
    layer_types=("hybrid_linear", "hybrid") * 2, num_hidden_layers=4, sliding_window=None
)


def batch(rows: int = ROWS, length: int = LENGTH, seed: int = 0) -> dict[str, np.ndarray]:
    """Rows of documents of uneven lengths, and very uneven numbers of real targets."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 64, (rows, length + 1)).astype(np.int32)
    segments = (1 + np.cumsum(rng.random((rows, length)) < 0.1, 1)).astype(np.int32)
    mask = (np.arange(length) < rng.integers(0, length + 1, (rows, 1))).astype(np.float32)
    mask[3:4], mask[5:6] = 0, 1
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": segments,
        "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        "loss_mask": mask,
    }


PAIRS = dataclasses.replace(SETTINGS, run=config.Run(preference="dpo", beta=3.0))


def batch_of_pairs() -> dict[str, np.ndarray]:
    """Rows of one to three pairs of answers of uneven lengths, and padding."""
    rng = np.random.default_rng(1)
    found = {name: 0 * x for name, x in batch().items()}
    for row in range(ROWS):
        for column in range(2 * (1 + row % 3)):
            begin = np.count_nonzero(found["segment_ids"][row])
            length = rng.integers(3, 6)
            place = np.s_[row, begin : begin + length]
            found["segment_ids"][place] = column + 1
            found["positions"][place] = np.arange(length)
            found["loss_mask"][place] = np.arange(length) >= rng.integers(0, length)
            found["tokens"][place] = rng.integers(0, 64, length)
            found["targets"][place] = rng.integers(0, 64, length)
    return found


def parameters(settings: config.Config):
    """Parameters that are all of some size, biases and scales too: zeros would hide mistakes."""
    return _parameters(settings.model, settings.precision)


@functools.cache
def _parameters(model: config.Model, precision: config.Precision):
    tree = jax.jit(lambda: zaya.init(model, jax.random.key(0), precision))()
    # On the host: a program for each shape would take longer to compile. With this seed the router
    # uses most experts.
    rng = np.random.default_rng(7)
    return jax.tree.map(
        lambda x: jnp.asarray(
            np.asarray(x) + np.float32(0.1) * rng.standard_normal(x.shape, np.float32)
        ),
        tree,
    )


def program(settings: config.Config, num_devices: int):
    """(mesh, function of (params, bias, batch)): loss, counts and summed gradients on the mesh of
    the settings."""
    mesh = make_mesh(settings.mesh, jax.devices()[:num_devices])
    spread = spread_of(settings.mesh, mesh.shape)
    sharding.check(settings, spread)
    specs = sharding.param_specs(settings.model, settings.precision, spread)
    loss = steps.objective_of(settings, spread)

    def compute(params, bias, batch):
        total = jax.lax.psum(loss.count(batch), spread.token_axes)
        micro = jax.tree.map(lambda x: x[0], batch)
        first = {"params": jax.tree.map(lambda x: 0.7 * x, params), "scales": {}}
        frozen = first if settings.run.takes_pairs else None
        value = functools.partial(loss.value, frozen=frozen)
        grads, (parts, sums) = jax.grad(value, has_aux=True)(params, bias, micro, total)

        def whole(g, spec):
            used = {
                axis for dim in spec for axis in ((dim,) if isinstance(dim, str) else dim or ())
            }
            return jax.lax.psum(g, tuple(axis for axis in mesh.axis_names if axis not in used))

        grads = jax.tree.map(whole, grads, specs)
        counts = jax.lax.psum(sums["counts"], spread.token_axes)
        return jax.lax.psum(parts["loss"], mesh.axis_names), counts, grads

    def precise(*args):
        with jax.default_matmul_precision("highest"):
            return compute(*args)

    in_specs = (specs, PartitionSpec(), batch_spec(spread))
    out_specs = (PartitionSpec(), PartitionSpec(), specs)
    mapped = jax.shard_map(
        precise, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return mesh, jax.jit(mapped)


def arguments(settings: config.Config, mesh: jax.sharding.Mesh, host: dict, bias=None) -> tuple:
    """The program's arguments."""
    spread = spread_of(settings.mesh, mesh.shape)
    bias = zaya.init_balance(settings.model) if bias is None else bias
    return parameters(settings), bias, steps.put_batch(mesh, host, 1, spread)


def loss_and_gradients(settings: config.Config, num_devices: int, host: dict, bias=None):
    """Loss, counts and gradients, on the host."""
    mesh, run = program(settings, num_devices)
    return jax.device_get(run(*arguments(settings, mesh, host, bias)))


def compiled(
    settings: config.Config, num_devices: int, host: dict | None = None
) -> jax.stages.Compiled:
    """The program that `loss_and_gradients` runs: where a test has run it, none is compiled
    again."""
    mesh, run = program(settings, num_devices)
    return run.lower(*arguments(settings, mesh, host or batch())).compile()


def assert_same(ours, theirs):
    """Loss within 1e-6, counts equal, every gradient within 1e-5 of its norm."""
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6)
    np.testing.assert_array_equal(ours[1], theirs[1])
    assert_norms_close(ours[2], theirs[2], 1e-5, 1e-8)


class Run:
    """A training run on so many devices, step by step."""

    def __init__(self, devices: int, settings: config.Config):
        self.settings = settings
        self.mesh = make_mesh(settings.mesh, jax.devices()[:devices])
        self.setup = states.set_up(settings, self.mesh)
        self.optimizer = self.setup.optimizer
        self.step = steps.make_train_step(settings, self.setup)
        self.abstract = states.abstract(settings, self.setup)
        self.snapshots = snapshot.Snapshots(self.optimizer, self.abstract)
        self.restart()

    def restart(self):
        """The state before the first step."""
        self.state = states.init(self.settings, self.setup)

    def train(self, seeds):
        """The losses of a step for each seed."""
        spread, losses = self.setup.spread, []
        micro_batches = 2 if ROWS // 2 % (spread.data * spread.expert) == 0 else 1
        for seed in seeds:
            given = steps.put_batch(self.mesh, batch(seed=seed), micro_batches, spread)
            self.state, figures = self.step(self.state, given, np.float32(1e-3))
            losses.append(float(figures["loss"]))
        return losses

    def logical(self):
        """The state as a checkpoint holds it, on the host."""
        state = jax.device_get(self.state)
        return {
            "params": state["params"],
            "optimizer": logical_state.of(self.optimizer, state["optimizer"]),
            "balance": state["balance"]._asdict(),
        }
