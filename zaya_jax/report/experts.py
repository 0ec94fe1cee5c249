"""The report's pictures of expert load: balance, skipped tokens, single layers, shares at the end.

`load` is [L, E+1] with the skip class last, shares of all real tokens. Balance is the paper's health
figure: the entropy of the shares over the E experts alone, divided by its greatest value ln E; 1 is an even
load.
"""

import numpy as np

from zaya_jax.report import svg
from zaya_jax.report.curves import x_range
from zaya_jax.report.heat import CELLS, Scale, columns, heat_map
from zaya_jax.report.read import VectorSeries, Workdir
from zaya_jax.report.svg import number, percent

TABLE_EXPERTS = 32  # above this the shares at the end are a picture, not a table
FAIR = Scale(0.25, 4.0, "d", log=True)


def experts_section(run: Workdir) -> str:
    """Everything on expert load; empty where the run wrote down neither load nor its entropy."""
    load, entropy = run.vectors.get("load"), run.vectors.get("load_entropy")
    pictures = ""
    if entropy or load:
        pictures += _entropy_map(run, entropy, load)
    if not load:
        return svg.section("Expert load", "Normalised load entropy: 1 is an even load.", pictures)
    pictures += _skip_map(run, load)
    end, steps = load.end()
    for layer in _chosen_layers(load):
        pictures += _layer_map(run, load, layer)
    text = svg.section("Expert load", _summary(end), pictures)
    return text + (_end_table(end, steps) if end.shape[1] - 1 <= TABLE_EXPERTS else _end_map(end, steps))


def entropies(load: np.ndarray) -> np.ndarray:
    """Normalised load entropy over the experts, of loads [..., E+1]; NaN where no token was routed."""
    routed = load[..., :-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        f = routed / routed.sum(-1, keepdims=True)
        terms = np.where(f > 0, f * np.log(np.where(f > 0, f, 1.0)), np.where(np.isnan(f), np.nan, 0.0))
        return -terms.sum(-1) / np.log(max(2, routed.shape[-1]))


def _names(count: int) -> list[str]:
    return [str(i) for i in range(count)]


def _fair(load: np.ndarray) -> np.ndarray:
    """Each expert's share of the routed tokens in multiples of an even share; 0 where no token was routed."""
    routed = load[..., :-1]
    total = routed.sum(-1, keepdims=True)
    return np.divide(routed * routed.shape[-1], total, out=np.zeros_like(routed) + 0 * total, where=total > 0)


def _summary(end: np.ndarray) -> str:
    entropy, skip = entropies(end), end[:, -1]
    parts = []
    if np.isfinite(entropy).any():
        worst, best = int(np.nanargmin(entropy)), int(np.nanargmax(entropy))
        least, most = f"{entropy[worst]:.3f}", f"{entropy[best]:.3f}"
        between = f"lies between {least} (layer {worst}) and {most} (layer {best})"
        between = between if least != most else f"is {most} in every layer"
        parts.append(f"At the end the load’s normalised entropy {between}; 1 is an even load.")
    if np.isfinite(skip).any():
        parts.append(
            f"{percent(float(np.nanmean(skip)))} of the tokens are skipped, averaged over the layers."
        )
    dead = int((end[:, :-1] == 0).sum())
    if dead:
        parts.append(f"{dead} expert{'s' if dead > 1 else ''} received no token.")
    return " ".join(parts)


def _entropy_map(run: Workdir, entropy: VectorSeries | None, load: VectorSeries | None) -> str:
    source = entropy or load
    assert source is not None
    steps, values = source.coarse(columns(source.shape[0]))
    values = values if entropy else entropies(values)
    good = values[np.isfinite(values)]
    low = float(np.floor(np.quantile(good, 0.02) * 20) / 20) if good.size else 0.0
    low = min(max(low, 0.0), 0.9)
    return heat_map(
        "Balance of each layer",
        _names(source.shape[0]),
        steps,
        values.T.tolist(),
        Scale(low, 1.0, "r"),
        x_range=x_range(run),
        row_name="layer",
        ends=(f"≤ {low:.2f}" if low else "0", "1, even"),
        describe=f"Heat map, layer by step, of the normalised load entropy; colours from {low:.2f} to 1. "
        + (f"Least value {number(float(good.min()))}." if good.size else "No finite value."),
        note="Normalised load entropy over the experts, by layer.",
    )


def _skip_map(run: Workdir, load: VectorSeries) -> str:
    steps, values = load.coarse(columns(load.shape[0]))
    skip = values[..., -1]
    good = skip[np.isfinite(skip)]
    high = max(float(good.max()), 0.01) if good.size else 1.0
    return heat_map(
        "Skipped tokens",
        _names(load.shape[0]),
        steps,
        skip.T.tolist(),
        Scale(0.0, high),
        x_range=x_range(run),
        row_name="layer",
        ends=("0 %", percent(high)),
        describe=f"Heat map, layer by step, of the share of tokens in the skip class; up to {percent(high)}.",
        note="Share of all tokens that take the skip class, by layer.",
        in_percent=True,
    )


def _chosen_layers(load: VectorSeries) -> list[int]:
    """First, middle and last layer, and the one that was least balanced over the run."""
    layers = load.shape[0]
    chosen = {0, layers // 2, layers - 1}
    entropy = np.nan_to_num(entropies(load.coarse(columns(layers))[1]), nan=1.0).mean(0)
    for layer in np.argsort(entropy).tolist():
        if len(chosen) < 4:
            chosen.add(layer)
    return sorted(chosen)


def _layer_map(run: Workdir, load: VectorSeries, layer: int) -> str:
    steps, values = load.coarse(columns(load.shape[1]))
    one = values[:, layer]
    experts = one.shape[1] - 1
    rows = np.concatenate([_fair(one), one[:, -1:]], axis=1)
    skipped = one[:, -1][np.isfinite(one[:, -1])]
    high = max(float(skipped.max()), 0.01) if skipped.size else 1.0
    return heat_map(
        f"Experts of layer {layer}",
        [*_names(experts), "skip"],
        steps,
        rows.T.tolist(),
        FAIR,
        x_range=x_range(run),
        row_name="expert",
        ends=("¼", "4 × an even share"),
        describe=f"Heat map, expert by step, of layer {layer}'s load in multiples of an even share. "
        f"The last row is the skip class's share of all tokens, up to {percent(high)}.",
        last=Scale(0.0, high),
    )


def _end_title(steps: int) -> str:
    return (
        f"Shares at the end (mean of the last {steps:,} recorded steps)"
        if steps > 1
        else "Shares at the last step"
    )


def _end_table(end: np.ndarray, steps: int) -> str:
    """Layer by expert, coloured like the pictures: the last shares as numbers."""
    experts = end.shape[1] - 1
    fair, entropy = _fair(end), entropies(end)
    head = "".join(f'<th scope="col">{e}</th>' for e in range(experts))
    rows = []
    for layer, shares in enumerate(end):
        cells = [
            f'<td class="d{FAIR.level(fair[layer, e])}">{_cell(shares[e])}</td>'
            if np.isfinite(fair[layer, e])
            else "<td>–</td>"
            for e in range(experts)
        ]
        balance = f"{entropy[layer]:.3f}" if np.isfinite(entropy[layer]) else "–"
        rows.append(
            f'<tr><th scope="row">{layer}</th>{"".join(cells)}<td class="apart">{_cell(shares[-1])}</td>'
            f"<td>{balance}</td></tr>"
        )
    note = "Percent of all tokens; colour as above: the share of the routed tokens against an even one."
    after = '<th scope="col" class="apart">skip</th><th scope="col">entropy</th>'
    return (
        f'<div class="card"><h3>{_end_title(steps)}</h3><p class="note">{note}</p><table class="shares">'
        f'<thead><tr><th scope="col">layer</th>{head}{after}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>\n"
    )


def _cell(share: float) -> str:
    return f"{100 * share:.1f}" if np.isfinite(share) else "–"


def _end_map(end: np.ndarray, steps: int) -> str:
    """As a picture where there are too many experts for a table: layers over experts."""
    fair = _fair(end)
    pool = max(1, -(-end.shape[0] * (end.shape[1] - 1) // CELLS))
    count = (end.shape[1] - 1) // pool
    pooled = fair[:, : count * pool].reshape(end.shape[0], count, pool).mean(-1)
    picture = heat_map(
        _end_title(steps),
        _names(end.shape[0]),
        [float(e * pool) for e in range(count)],
        pooled.tolist(),
        FAIR,
        x_range=(0.0, float(end.shape[1] - 2)),
        row_name="layer",
        ends=("¼", "4 × an even share"),
        describe="Heat map, layer by expert, of the load at the end in multiples of an even share.",
        note="Layer by expert, in multiples of an even share of the routed tokens.",
        column_name="expert",
    )
    return f'<div class="grid2">{picture}</div>\n'
