"""The optimizer: a table of each weight's method, one update for all of them, and its state for
checkpoints.

    optimizer = chain.build(config.optim, config.precision, params, specs=specs, axes=mesh.shape)
    state = optimizer.init()  # global arrays; optimizer.specs() gives their PartitionSpecs
    params, state = optimizer.apply(grads, state, params, lr=lr)  # with a mesh: inside jax.shard_map

The learning rate is an argument: progress is counted in tokens, so the caller knows it
(`zaya_jax.schedule`), not the state. Within one update:

    reduce    gradients, summed over devices, to each device's share (`zaya_jax.optim.zero`)
    norm      of all gradients; by it skip the update (`zaya_jax.optim.skip`) or clip
    method    Muon's (`zaya_jax.optim.muon`) and AdamW's directions, only on the share
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

from pallas_kernels.cpu import unfused_on_cpus
from zaya_jax import trees
from zaya_jax.config import Optim, Precision, UserError
from zaya_jax.optim import muon, skip, zero


class WeightRule(NamedTuple):
    """One rule of the table: which weights (a regular expression for the path), the metric group
    they belong to, the method, and whether they decay; of Muon's how many last dims are one
    matrix."""

    pattern: str
    group: str
    method: str
    decay: bool
    matrix_dims: int = 2


TABLE = (
    # Matrices, whose updates Muon bounds in spectral norm. The factors of a low-rank update (a and
    # b, `model.lora`) are trained as their matrix would be.
    WeightRule(r"layers/cca/(q|k|v_now|v_prev|o)/kernel(/[ab])?", "attention", "muon", True),
    WeightRule(r"layers/attention/(q|k|v|o)/kernel(/[ab])?", "attention", "muon", True),
    WeightRule(r"layers/mlp/(gate|up|down)/kernel(/[ab])?", "mlp", "muon", True),
    # The columns of gate and up read the same input: they are one matrix.
    WeightRule(r"layers/experts/gate_up", "experts", "muon", True, matrix_dims=3),
    WeightRule(r"layers/experts/(down|(gate_up|down)/[ab])", "experts", "muon", True),
    WeightRule(r"layers/router/(down|fc1|fc2|out)/kernel", "router", "muon", True),
    # A table: most rows have no gradient in a step, so Muon would amplify noise in them and decay
    # would erase them.
    WeightRule(r"embed/embedding", "embedding", "adamw", False),
    # Taps, not maps: the last one starts and stays different from the others; few numbers.
    WeightRule(r"layers/cca/conv_(depthwise|grouped)/kernel", "convolution", "adamw", False),
    # No matrices; decay would pull them to 0 without need, and some start at 1.
    WeightRule(r"(.*[/_])(bias|scale)", "vectors", "adamw", False),
    WeightRule(r"layers/cca/temperature|layers/router/eda", "vectors", "adamw", False),
)
SLASH = "/"  # between the parts of a weight's path
KINDS = ("momentum", "mean", "square", "weights")  # the state's arrays, by bucket
NORMS = ("grad_norm", "update_norm", "param_norm")  # figures, of all weights and of each group


class OptimizerState(NamedTuple):
    """The state that the optimizer carries from step to step; `figures` describe the last one."""

    adam: optax.ScaleByAdamState
    momentum: dict[str, Any]  # Muon's, by bucket
    skip: skip.SkipState
    figures: dict[str, Any]  # scalars by name
    weights: dict[str, Any]  # by bucket, float32: those that devices hold as copies


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """The update of all weights, with the layout that a program around it needs."""

    optim: Optim
    layout: zero.Layout
    rules: dict[str, WeightRule]  # of every weight
    muon: optax.GradientTransformationExtraArgs
    adam: optax.GradientTransformation
    skip_update: str
    spike_deviations: float

    def init(self) -> OptimizerState:
        """The state at the start, as global arrays; on a mesh jit it with the shardings of `specs`.

        With copies, `weights` are zeros until the caller puts in those of
        `layout.split_master_weights`.
        """
        shapes = self.layout.state_shapes()
        shares = {name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()}
        matrices, vectors = self._by_method(shares)
        names = [*NORMS, "clipped", "skipped"]
        for norm in NORMS:
            names += [f"{norm}/{group}" for group in self.layout.metric_groups]
        figures = {name: jnp.zeros((), jnp.float32) for name in names}
        weights = {name: shares[name] for name in self.layout.copied.values()}
        adam, momentum = self.adam.init(vectors), self.muon.init(matrices)
        return OptimizerState(adam, momentum, skip.init(), figures, weights)

    def apply(
        self, grads: Any, state: OptimizerState, params: Any, *, lr: jax.Array | float
    ) -> tuple[Any, OptimizerState]:
        """(new parameters, new state); inside shard_map if it was built for a mesh. New parameters
        can reuse the memory of donated ones. Of weights that devices hold as copies the owner
        updates its own."""
        layout, always = self.layout, self.skip_update == "never"
        shares = layout.reduce_gradients(grads)
        squares = layout.sum_squares(unfused_on_cpus(shares))
        norm = jnp.sqrt(sum(squares.values()))
        keep, skip_state = skip.decide(self.skip_update, norm, state.skip, self.spike_deviations)
        factor, clip = jnp.ones(()), lambda g: g
        if self.optim.clip_norm:
            factor = jnp.minimum(1.0, self.optim.clip_norm / jnp.maximum(norm, 1e-30))
            # Clip on read. On one device the shares are the gradients themselves, so a clipped
            # tree would be a second full copy.
            clip = functools.partial(jnp.multiply, factor)
        directions, momentum, adam = self._directions(shares, state, always or keep, clip)
        if not always:
            lr = lr * keep  # directions are finite in any case
        directions = layout.gather_directions(directions)
        masters = {path: state.weights[name] for path, name in layout.copied.items()}
        weights = layout.replace_leaves(params, masters)
        # Updates are made twice: for the norms on each device's share of the weights, and then of
        # all weights. All norms are read before the weights are overwritten; otherwise XLA cannot
        # update them in place and inserts a copy.
        share = layout.disjoint_shares(weights)
        share_updates = self._finish(layout.disjoint_shares(directions), share, lr)
        figures = _norms("grad_norm", squares)
        of_updates, of_weights = layout.tree_sum_squares(share_updates, share)
        figures |= _norms("update_norm", of_updates) | _norms("param_norm", of_weights)
        weights, figures = jax.lax.optimization_barrier((weights, figures))
        weights = optax.apply_updates(weights, self._finish(directions, weights, lr))
        by_path = layout.leaves_by_path(weights)
        masters = {name: by_path[path] for path, name in layout.copied.items()}
        weights = layout.replace_leaves(weights, layout.copies(masters))
        figures["clipped"] = (factor < 1).astype(jnp.float32)
        figures["skipped"] = 1 - keep.astype(jnp.float32)
        return weights, OptimizerState(adam, momentum, skip_state, figures, masters)

    def _directions(self, shares, state, keep, clip):
        """Each bucket's directions, and the new states of both methods. If `keep` is false these
        are unchanged, and directions are finite placeholders."""
        matrices, vectors = self._by_method(shares)
        directions, momentum = self.muon.update(matrices, state.momentum, keep=keep, clip=clip)
        of_vectors, adam = self.adam.update(jax.tree.map(clip, vectors), state.adam)
        if keep is not True:
            choose = functools.partial(jax.tree.map, lambda new, old: jnp.where(keep, new, old))
            of_vectors, adam = choose(of_vectors, state.adam.mu), choose(adam, state.adam)
        return directions | of_vectors, momentum, adam

    def _finish(self, directions, weights, lr):
        """Updates of directions, all in float32: their size, decay of the weights, learning
        rate."""
        optim, layout = self.optim, self.layout
        rates = {"muon": -lr, "adamw": -lr * optim.adamw_lr_factor}
        directions, weights = jax.tree.leaves(directions), jax.tree.leaves(weights)
        updates = []
        for w, direction, weight in zip(layout.weights, directions, weights, strict=True):
            size = 1.0
            if w.method == "muon":  # from the whole matrix; a device may hold only a part
                size = muon.matrix_scale(optim.muon_scale, w.matrix)
            update = direction.astype(jnp.float32) * size
            if optim.weight_decay and self.rules[w.path].decay:
                update = update + optim.weight_decay * weight
            updates.append(rates[w.method] * update)
        return jax.tree.unflatten(layout.treedef, updates)

    def _by_method(self, shares: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Muon's buckets, and AdamW's."""
        buckets: dict[str, dict[str, Any]] = {"muon": {}, "adamw": {}}
        for name, x in shares.items():
            buckets[self.layout.methods[name]][name] = x
        return buckets["muon"], buckets["adamw"]

    # ############################################################################################
    # The state in programs and checkpoints
    # ############################################################################################

    def specs(self) -> OptimizerState:
        """The PartitionSpec of every array of the state."""
        state = jax.eval_shape(self.init)

        def spread(buckets: Mapping[str, Any]) -> dict[str, PartitionSpec]:
            return {name: self.layout.spec(name) for name in buckets}

        specs = jax.tree.map(lambda x: PartitionSpec(), state)
        return specs._replace(
            adam=specs.adam._replace(mu=spread(state.adam.mu), nu=spread(state.adam.nu)),
            momentum=spread(state.momentum),
            weights=spread(state.weights),
        )

    def arrays(self, state: OptimizerState) -> dict[str, Any]:
        """The part of the state that goes into checkpoints, without copies: `steps`, `skip`, and
        KINDS by bucket (`Bucket.state_boxes` lists the boxes in these)."""
        return {
            "steps": state.adam.count,
            "skip": state.skip._asdict(),
            "momentum": state.momentum,
            "mean": state.adam.mu,
            "square": state.adam.nu,
            "weights": state.weights,
        }

    def state_from_arrays(
        self, arrays: Mapping[str, Any], figures: dict[str, Any]
    ) -> OptimizerState:
        """The inverse: a state with these arrays and `figures`."""
        adam = optax.ScaleByAdamState(arrays["steps"], arrays["mean"], arrays["square"])
        skipping = skip.SkipState(**arrays["skip"])
        return OptimizerState(adam, arrays["momentum"], skipping, figures, arrays["weights"])

    def empty_figures(self) -> dict[str, Any]:
        """The figures before any step, zeros on the host."""
        figures = jax.eval_shape(self.init).figures
        return {name: np.zeros(x.shape, x.dtype) for name, x in figures.items()}


def match_rules(
    shapes: Mapping[str, tuple[int, ...]], table: tuple[WeightRule, ...] = TABLE
) -> dict[str, WeightRule]:
    """The one rule that matches each weight, by path; UserError naming a weight that none or
    several match."""
    matches = {}
    for path, shape in shapes.items():
        weight = f"the weight {path} {list(shape)}"
        rules = [rule for rule in table if re.fullmatch(rule.pattern, path)]
        if not rules:
            raise UserError(
                f"no rule of TABLE in zaya_jax/optim/chain.py matches {weight}; add one that says"
                f" how it is trained, or for a layer of your own config.optim.rows='{path}=adamw'"
            )
        if len(rules) > 1:
            patterns = " and ".join(repr(rule.pattern) for rule in rules)
            raise UserError(
                f"the rules {patterns} of TABLE in zaya_jax/optim/chain.py all match {weight}; let"
                " one of them match"
            )
        if rules[0].method == "muon" and len(shape) < rules[0].matrix_dims:
            raise UserError(
                f"the rule {rules[0].pattern!r} trains {weight} with Muon, but it is no matrix; use"
                " adamw"
            )
        matches[path] = rules[0]
    return matches


def _rule_of_row(row: str) -> WeightRule:
    """The rule of an entry of `optim.rows`."""
    pattern, _, method = row.rpartition("=")
    if method not in ("muon", "adamw"):
        raise UserError(f"config.optim.rows has {row!r}; it must be PATH=muon or PATH=adamw")
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(
            f"config.optim.rows has {row!r}, whose path is not a regular expression ({error}); write"
            " the path of the weight, with \\ before (, ), [, ], * and +"
        ) from None
    return WeightRule(pattern, "own", method, decay=method == "muon")


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
    table: tuple[WeightRule, ...] = TABLE,
) -> Optimizer:
    """The optimizer for parameters of these shapes (arrays or ShapeDtypeStructs, over all devices).

    `axes` are the mesh's axis sizes; with more than one device the state is spread over them
    (ZeRO-1) and an update must run in `jax.shard_map` over all of them; `node` of them are in each
    node, and what leaves a layer is summed inside nodes first where a device's share has fewer
    numbers than `two_levels_under`. `specs`, a tree like `params`, gives the weights' own
    PartitionSpecs; by default every device has all of them. `optim.name` "adamw" gives Muon's
    weights to AdamW.
    """
    treedef: Any = jax.tree.structure(params)
    shapes = {path: tuple(x.shape) for path, x in trees.flat(params, SLASH).items()}
    rules = match_rules(shapes, (*table, *map(_rule_of_row, optim.rows)))
    if optim.name == "adamw":
        rules = {path: rule._replace(method="adamw") for path, rule in rules.items()}
    flat_specs = [PartitionSpec()] * len(shapes)
    if specs is not None:
        flat_specs = treedef.flatten_up_to(specs)
    copies = precision.weights == "compute" and precision.compute == "bfloat16"
    weights = []
    for (path, rule), spec in zip(rules.items(), flat_specs, strict=True):
        # Products read matrices in the compute format, except the router's, whatever trains them.
        copied = copies and rule.group != "router"
        weight = zero.Weight(
            path,
            shapes[path],
            rule.method,
            rule.group,
            _axes_of_dims(spec, axes or {}),
            precision.compute if copied else "",
            rule.matrix_dims,
        )
        weights.append(weight)
    layout = zero.Layout(weights, treedef, axes or {}, node, two_levels_under)
    iteration = precision.newton_schulz
    if iteration == "compute":
        iteration = precision.compute
    by_muon = muon.scale_by_muon(
        optim.momentum,
        optim.nesterov,
        muon.coefficients(optim.newton_schulz, optim.newton_schulz_steps),
        jnp.dtype(iteration),
        jnp.dtype(precision.momentum),
        layout.owned,
    )
    adam = optax.scale_by_adam(optim.b1, optim.b2, optim.eps)
    return Optimizer(optim, layout, rules, by_muon, adam, skip_update, spike_deviations)


def _axes_of_dims(spec: PartitionSpec, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of more than one device that split each dim."""
    dims = []
    for axes in spec:
        if isinstance(axes, str):
            axes = (axes,)
        dims.append(tuple(axis for axis in axes or () if sizes.get(axis, 1) > 1))
    return tuple(dims)


def _norms(name: str, squares: dict[str, jax.Array]) -> dict[str, jax.Array]:
    by_group = {f"{name}/{group}": jnp.sqrt(x) for group, x in squares.items()}
    return {name: jnp.sqrt(sum(squares.values())), **by_group}
