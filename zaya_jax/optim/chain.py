"""The optimizer: one Optax chain, a table of each weight's method, and its state for checkpoints.

    optimizer = chain.build(config.optim, config.precision, params, specs=specs, axes=mesh.shape)
    state = optimizer.init()  # global arrays; optimizer.specs() gives their PartitionSpecs
    updates, state = optimizer.update(grads, state, params, lr=lr)  # with a mesh: inside jax.shard_map
    params = optax.apply_updates(params, updates)

`update` follows Optax's protocol with one extra argument, the learning rate: progress is counted in
tokens, so the caller knows it (`zaya_jax.schedule`), not the state. Within one update:

    reduce    gradients, summed over devices, to each device's share (`zaya_jax.optim.zero`)
    norm      of all gradients; by it skip the update (`zaya_jax.optim.skip`) or clip
    core      Muon's (`zaya_jax.optim.muon`) and AdamW's directions, only on the share
    gather    every device's directions
    finish    size, decay of the weights (times the learning rate, not times Muon's scale), learning rate

Of weights that devices hold as bfloat16 copies (`layout.copied`) the owner finishes its own, in
float32; the new copies are gathered then, in the place of directions.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from pallas_kernels.cpu import apart_on_cpus as apart
from zaya_jax import trees
from zaya_jax.config import Optim, Precision, UserError
from zaya_jax.optim import muon, skip, zero


@dataclasses.dataclass(frozen=True)
class Row:
    """Weights (a regular expression for the path), their group in figures, their method, decay or
    not; of Muon's the number of last dims that are one matrix."""

    pattern: str
    group: str
    method: str
    decay: bool
    reason: str
    matrix_dims: int = 2


TABLE = (
    # pattern, group, method, decay, reason
    # The factors of a low-rank update (a and b, `model.lora`) are trained as their matrix would be.
    Row(
        r"layers/cca/(q|k|v_now|v_prev|o)/kernel(/[ab])?",
        "attention",
        "muon",
        True,
        "matrices: bounded in spectral norm",
    ),
    Row(
        r"layers/attention/(q|k|v|o)/kernel(/[ab])?",
        "attention",
        "muon",
        True,
        "a dense model's; matrices",
    ),
    Row(
        r"layers/mlp/(gate|up|down)/kernel(/[ab])?",
        "mlp",
        "muon",
        True,
        "a dense model's; matrices",
    ),
    Row(
        r"layers/experts/gate_up",
        "experts",
        "muon",
        True,
        "matrices, one for each layer and expert: the columns of gate and up read the same input",
        matrix_dims=3,
    ),
    Row(
        r"layers/experts/(down|(gate_up|down)/[ab])",
        "experts",
        "muon",
        True,
        "matrices, one for each layer and expert",
    ),
    Row(r"layers/router/(down|fc1|fc2|out)/kernel", "router", "muon", True, "matrices, small ones"),
    # A table: most rows have no gradient in a step, so Muon would amplify noise in them and decay
    # would erase them.
    Row(
        r"embed/embedding",
        "embedding",
        "adamw",
        False,
        "a table of rows, most without a gradient in a step",
    ),
    # Taps, not maps: the last one starts and stays different from the others; few numbers.
    Row(
        r"layers/cca/conv_(depthwise|grouped)/kernel",
        "convolution",
        "adamw",
        False,
        "taps, not maps; few numbers",
    ),
    Row(
        r"(.*[/_])bias",
        "vectors",
        "adamw",
        False,
        "no matrix; decay would pull it to 0 without need",
    ),
    Row(
        r"(.*[/_])scale",
        "vectors",
        "adamw",
        False,
        "no matrix; decay would pull it to 0, and it starts at 1",
    ),
    Row(r"layers/cca/temperature", "vectors", "adamw", False, "one number per head, starts at 1"),
    Row(r"layers/router/eda", "vectors", "adamw", False, "one number per channel, starts at 1"),
)


SLASH = "/"  # between the parts of a weight's path
KINDS = ("momentum", "mean", "square", "weights")  # the state's arrays, by bucket


class State(NamedTuple):
    """The state that the optimizer carries from step to step; `figures` describe the last one."""

    core: Any
    skip: skip.SkipState
    figures: dict[str, Any]  # scalars by name
    weights: dict[str, Any]  # by bucket, float32: those that devices hold as copies


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An Optax transformation, with the layout that a program around it needs."""

    transformation: optax.GradientTransformationExtraArgs
    layout: zero.Layout
    claims: dict[str, Row]  # the table's row of every weight

    def init(self) -> State:
        """The state at the start, as global arrays; on a mesh jit it with the shardings of
        `specs`."""
        return self.transformation.init(None)

    def update(
        self, grads: Any, state: State, params: Any, *, lr: jax.Array | float
    ) -> tuple[Any, State]:
        """(updates to add to the parameters, new state); inside shard_map if it was built for a
        mesh.

        Copies have no updates: `apply` alone changes them.
        """
        assert not self.layout.copied, "copies of weights are given by `apply`"
        return self.transformation.update(grads, state, params, lr=lr)

    def apply(
        self, grads: Any, state: State, params: Any, *, lr: jax.Array | float
    ) -> tuple[Any, State]:
        """(new parameters, new state), in the same way. New parameters take the place of donated
        ones."""
        return self.transformation.update(grads, state, params, lr=lr, apply=True)

    def specs(self) -> State:
        """The PartitionSpec of every array of the state."""
        specs = {name: self.layout.spec(name) for name in self.layout.methods}

        def spec(path, leaf):
            del leaf
            return specs.get(_bucket_name(path, specs), PartitionSpec())

        return jax.tree_util.tree_map_with_path(spec, jax.eval_shape(self.init))

    def arrays(self, state: State) -> dict[str, Any]:
        """The part of the state that goes into checkpoints, without copies: `steps`, `skip`, and
        KINDS by bucket (`layout.held` lists the boxes in these)."""
        parts = _parts(state.core) | {"weights": state.weights}
        return {"steps": _adam(state.core).count, "skip": state.skip._asdict(), **parts}

    def with_arrays(self, arrays: Mapping[str, Any], figures: dict[str, Any]) -> State:
        """The inverse: a state with these arrays and empty `figures`."""
        core = _with_parts(jax.eval_shape(self.init).core, arrays, arrays["steps"])
        return State(core, skip.SkipState(**arrays["skip"]), figures, arrays["weights"])

    def no_figures(self) -> dict[str, Any]:
        """The figures before any step, zeros on the host."""
        figures = jax.eval_shape(self.init).figures
        return {name: np.zeros(x.shape, x.dtype) for name, x in figures.items()}


def claim(
    paths_and_shapes: Mapping[str, tuple[int, ...]], table: tuple[Row, ...] = TABLE
) -> dict[str, Row]:
    """The one row that claims each weight; UserError naming the weight if no row or several rows
    do."""
    claims = {}
    for path, shape in paths_and_shapes.items():
        rows = [row for row in table if re.fullmatch(row.pattern, path)]
        if len(rows) != 1 or (rows[0].method == "muon" and len(shape) < rows[0].matrix_dims):
            patterns = " and ".join(repr(row.pattern) for row in rows) or "none"
            raise UserError(
                f"the weight {path} {list(shape)} is claimed by {patterns} of the rows of TABLE in"
                " zaya_jax/optim/chain.py; exactly one must say how it is trained, and Muon takes"
                " only matrices"
            )
        claims[path] = rows[0]
    return claims


def build(
    optim: Optim,
    precision: Precision,
    params: Any,
    *,
    specs: Any = None,
    axes: Mapping[str, int] | None = None,
    node: int = 1,
    two_levels_under: int = 0,
    skip_update: str = "never",
    spike_deviations: float = 6.0,
    table: tuple[Row, ...] = TABLE,
) -> Optimizer:
    """The optimizer for parameters of these shapes (arrays or ShapeDtypeStructs, over all devices).

    `axes` are the mesh's axis sizes; with more than one device the state is spread over them
    (ZeRO-1) and `update` must run in `jax.shard_map` over all of them; `node` of them are in each
    node, and what leaves a layer is summed inside nodes first where a device's share has fewer
    numbers than `two_levels_under`. `specs`, a tree like `params`, gives the weights' own
    PartitionSpecs; by default every device has all of them. `optim.name` "adamw" gives Muon's rows to AdamW.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    shapes = {trees.name_of(path, SLASH): tuple(leaf.shape) for path, leaf in leaves}
    claims = claim(shapes, table)
    if optim.name == "adamw":
        claims = {path: dataclasses.replace(row, method="adamw") for path, row in claims.items()}
    copy = (
        precision.compute
        if (precision.weights, precision.compute) == ("compute", "bfloat16")
        else ""
    )
    layout = _layout(shapes, treedef, claims, specs, dict(axes or {}), copy, node, two_levels_under)
    methods = jax.tree.unflatten(treedef, [row.method for row in claims.values()])
    decay = jax.tree.unflatten(treedef, [row.decay for row in claims.values()])
    iteration = (
        precision.compute if precision.newton_schulz == "compute" else precision.newton_schulz
    )
    core = optax.partition(
        {
            "muon": muon.scale_by_muon(
                optim.momentum,
                optim.nesterov,
                muon.coefficients(optim.newton_schulz, optim.newton_schulz_steps),
                jnp.dtype(iteration),
                jnp.dtype(precision.momentum),
                layout.owned,
            ),
            "adamw": _kept(optax.scale_by_adam(optim.b1, optim.b2, optim.eps)),
        },
        layout.methods,
    )
    finish = optax.chain(
        _size(optim.muon_scale, layout),
        optax.add_decayed_weights(optim.weight_decay, decay),
        _scale_by_learning_rate(optim.adamw_lr_factor, methods),
    )
    transformation = _around(
        core, finish, finish.init(params), layout, optim.clip_norm, skip_update, spike_deviations
    )
    return Optimizer(transformation, layout, claims)


def _layout(shapes, treedef, claims, specs, axes, copy, *nodes) -> zero.Layout:
    flat = [PartitionSpec()] * len(shapes) if specs is None else treedef.flatten_up_to(specs)
    weights = []
    for (path, shape), spec in zip(shapes.items(), flat, strict=True):
        dims = tuple((dim,) if isinstance(dim, str) else tuple(dim or ()) for dim in spec)
        dims = tuple(tuple(axis for axis in dim if axes.get(axis, 1) > 1) for dim in dims)
        row = claims[path]  # the router's products are not in the compute format
        weights.append(
            zero.Weight(
                path,
                shape,
                row.method,
                row.group,
                dims,
                "" if row.group == "router" else copy,
                row.matrix_dims,
            )
        )
    return zero.Layout(weights, treedef, axes, *nodes)


def _around(
    core, finish, finish_state, layout, clip_norm, rule, deviations
) -> optax.GradientTransformationExtraArgs:
    """The whole update around `core` (on shares) and `finish` (on whole weights, without own
    state)."""
    groups = sorted({w.group for w in layout.weights})
    names = ["grad_norm", "update_norm", "param_norm"]
    figure_names = [
        *names,
        *(f"{name}/{group}" for name in names for group in groups),
        "clipped",
        "skipped",
    ]

    def init(params):
        del params  # only shapes matter, and these are known
        shares = {
            name: jnp.zeros(shape, jnp.float32) for name, shape in layout.state_shapes().items()
        }
        figures = {name: jnp.zeros((), jnp.float32) for name in figure_names}
        return State(
            core.init(shares),
            skip.init(),
            figures,
            {name: shares[name] for name in layout.copied.values()},
        )

    def update(grads, state, params, *, lr, apply=False, **extra):
        del extra
        shares = layout.reduce(grads)
        squares = layout.sum_squares(apart(shares))
        norm = jnp.sqrt(sum(squares.values()))
        keep, skip_state = skip.decide(rule, norm, state.skip, deviations)
        factor = (
            jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-30)) if clip_norm else jnp.ones(())
        )
        always = rule == "never"
        # Clipped where they are read: on one device shares are all gradients, and scaled ones would
        # be a second copy.
        clip = functools.partial(jnp.multiply, factor) if clip_norm else lambda g: g
        directions, core_state = core.update(
            shares, state.core, keep=True if always else keep, clip=clip
        )
        lr = lr if always else lr * keep  # directions are finite in any case
        directions = layout.gather(directions)
        params = layout.with_leaves(
            params, {path: state.weights[name] for path, name in layout.copied.items()}
        )
        # Norms are sums over each device's own part, and all are read before the weights are
        # overwritten: a chip that reads them in the same pass writes the new weights elsewhere, and
        # copies them.
        own_weights = layout.own_parts(params)
        own, _ = finish.update(layout.own_parts(directions), finish_state, own_weights, lr=lr)
        figures = _norms("grad_norm", squares)
        of_updates, of_weights = layout.tree_sum_squares(own, own_weights)
        figures |= _norms("update_norm", of_updates) | _norms("param_norm", of_weights)
        params, figures = jax.lax.optimization_barrier((params, figures))
        updates, _ = finish.update(directions, finish_state, params, lr=lr)
        kept = {}
        if apply:
            updates = optax.apply_updates(params, updates)
            kept = {name: layout.by_path(updates)[path] for path, name in layout.copied.items()}
            updates = layout.with_leaves(updates, layout.copies(kept))
        figures["clipped"] = (factor < 1).astype(jnp.float32)
        figures["skipped"] = 1 - keep.astype(jnp.float32)
        return updates, State(core_state, skip_state, figures, kept)

    return optax.GradientTransformationExtraArgs(init, update)


def _kept(transformation: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Adam of clipped gradients; if `keep` is false its state does not change, and directions are
    its means."""

    def update(updates, state, params=None, *, keep=True, clip=lambda g: g, **extra):
        del extra
        directions, new = transformation.update(jax.tree.map(clip, updates), state, params)
        if keep is True:
            return directions, new
        chosen = functools.partial(jax.tree.map, lambda new, old: jnp.where(keep, new, old))
        return chosen(directions, state.mu), chosen(new, state)

    return optax.GradientTransformationExtraArgs(transformation.init, update)


def _size(kind: str, layout: zero.Layout) -> optax.GradientTransformation:
    """Scales Muon's directions in float32; AdamW's are scaled already."""

    def factor(w: zero.Weight) -> float:  # from the whole matrix; a device may hold only a part
        return muon.matrix_scale(kind, w.matrix) if w.method == "muon" else 1.0

    factors = jax.tree.unflatten(layout.treedef, map(factor, layout.weights))

    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda u, f: u.astype(jnp.float32) * f, updates, factors), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _scale_by_learning_rate(
    adamw_factor: float, methods: Any
) -> optax.GradientTransformationExtraArgs:
    """Times minus the learning rate that the caller gives at each update, and AdamW's factor on
    it."""

    def update(updates, state, params=None, *, lr, **extra):
        del params, extra
        rates = {"muon": -lr, "adamw": -lr * adamw_factor}
        return jax.tree.map(lambda u, method: rates[method] * u, updates, methods), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _norms(name: str, squares: dict[str, jax.Array]) -> dict[str, jax.Array]:
    by_group = {f"{name}/{group}": jnp.sqrt(x) for group, x in squares.items()}
    return {name: jnp.sqrt(sum(squares.values())), **by_group}


def _adam(core: Any) -> Any:
    return core.inner_states["adamw"].inner_state


def _parts(core: Any) -> dict[str, dict[str, Any]]:
    """The arrays of the core's state by kind, then by bucket."""
    adam = _adam(core)
    parts = {
        "momentum": core.inner_states["muon"].inner_state.momentum,
        "mean": adam.mu,
        "square": adam.nu,
    }
    return {
        name: {key: x for key, x in part.items() if not isinstance(x, optax.MaskedNode)}
        for name, part in parts.items()
    }


def _with_parts(core: Any, parts: Mapping[str, Any], count: jax.Array) -> Any:
    """The core's state with other arrays."""
    old, adam = core.inner_states, _adam(core)
    momentum = old["muon"].inner_state.momentum | parts["momentum"]
    adam = adam._replace(count=count, mu=adam.mu | parts["mean"], nu=adam.nu | parts["square"])
    inner = {
        "muon": old["muon"]._replace(inner_state=muon.MuonState(momentum)),
        "adamw": old["adamw"]._replace(inner_state=adam),
    }
    return core._replace(inner_states=inner)


def _bucket_name(path: tuple, names: Mapping[str, Any]) -> str:
    """The bucket that an array of the state belongs to, by its place there; "" if it belongs to no
    bucket."""
    keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey) and key.key in names]
    return keys[-1] if keys else ""
