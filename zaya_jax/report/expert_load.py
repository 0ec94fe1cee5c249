"""Pictures of the experts' load: balance, skipped tokens, single layers, shares at the end.

`load` is [L, E+1] with the skip class last, shares of all real tokens. Balance is the paper's
health figure: the entropy of the shares over the E experts alone, divided by its greatest value ln
E; 1 is an even load.
"""

import numpy as np

from zaya_jax.report.curves import list_map
from zaya_jax.report.document import Section, Table
from zaya_jax.report.read import Series, Workdir
from zaya_jax.report.svg import HeatMap, Scale, columns
from zaya_jax.report.text import counted, percent

TABLE_EXPERTS = 64  # above this the shares at the end are in the pictures alone
FAIR = Scale(0.25, 4.0, "d", log=True)


def experts_section(run: Workdir) -> Section:
    """Expert load; empty if the run recorded neither load nor its entropy."""
    load, entropy = run.vectors.get("load"), run.vectors.get("load_entropy")
    if load and not entropy:
        entropy = Series(load.steps, entropies(load.good))
    pictures = ""
    if entropy:
        pictures += _balance_map(run, entropy)
    pictures += list_map(run, "skip_share")
    if not load or not entropy:
        text = "Normalised load entropy: 1 is an even load."
        return Section("Expert load", text, pictures=pictures)
    layers, classes = load.shape
    experts = classes - 1  # the last class is the skip class
    least_balanced = int(np.nan_to_num(entropy.good, nan=1.0).mean(0).argmin())
    bins = load.coarse(columns(experts))
    for layer in sorted({0, layers // 2, layers - 1, least_balanced}):
        title, ends = f"Experts of layer {layer}", ("¼", "4 × an even share")
        shares = fair_shares(bins.means[:, layer])
        pictures += HeatMap(title, bins.steps, shares.T, FAIR, run.steps, "expert", ends).draw()
    end, recorded = load.end()
    tables = [_shares(end, recorded)] if experts <= TABLE_EXPERTS else []
    return Section("Expert load", _summary(end), tables, pictures=pictures)


def entropies(load: np.ndarray) -> np.ndarray:
    """Normalised load entropy over the experts, of loads [..., E+1]; NaN where no token was
    routed."""
    routed = load[..., :-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = routed / routed.sum(-1, keepdims=True)
        entropy = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(-1)
        return entropy / np.log(max(2, routed.shape[-1]))


def fair_shares(load: np.ndarray) -> np.ndarray:
    """Each expert's share of the routed tokens in multiples of an even share; 0 where no token was
    routed."""
    routed = load[..., :-1]
    total = routed.sum(-1, keepdims=True)
    return np.divide(
        routed * routed.shape[-1], total, out=np.zeros_like(routed) + 0 * total, where=total > 0
    )


def _summary(end: np.ndarray) -> str:
    entropy, skip = entropies(end), end[:, -1]
    parts = []
    if np.isfinite(entropy).any():
        worst, best = int(np.nanargmin(entropy)), int(np.nanargmax(entropy))
        least, most = f"{entropy[worst]:.3f}", f"{entropy[best]:.3f}"
        where = f"is {most} in every layer"
        if least != most:
            where = f"lies between {least} (layer {worst}) and {most} (layer {best})"
        parts.append(f"At the end the load’s normalised entropy {where}; 1 is an even load.")
    if np.isfinite(skip).any():
        parts.append(
            f"{percent(float(np.nanmean(skip)))} of the tokens are skipped, averaged over the"
            " layers."
        )
    if dead := int((end[:, :-1] == 0).sum()):
        parts.append(f"{counted(dead, 'expert')} received no token.")
    return " ".join(parts)


def _balance_map(run: Workdir, entropy: Series) -> str:
    bins = entropy.coarse(columns(entropy.shape[0]))
    finite = bins.means[np.isfinite(bins.means)]
    low = 0.0
    if finite.size:  # the darkest colour is that of the worst fiftieth
        low = float(np.floor(np.quantile(finite, 0.02) * 20) / 20)
    low = min(max(low, 0.0), 0.9)
    return HeatMap(
        "Balance of each layer",
        bins.steps,
        bins.means.T,
        Scale(low, 1.0, "r"),
        run.steps,
        "layer",
        (f"≤ {low:.2f}" if low else "0", "1, even"),
        "Normalised load entropy over the experts, by layer.",
    ).draw()


def _shares(end: np.ndarray, steps: int) -> Table:
    """Layer by expert: the last shares as numbers."""

    rows = []
    for layer, (shares, entropy) in enumerate(zip(end, entropies(end), strict=True)):
        cells = [f"{100 * share:.1f}" if np.isfinite(share) else "–" for share in shares]
        cells.append(f"{entropy:.3f}" if np.isfinite(entropy) else "–")
        rows.append([str(layer), *cells])
    when = f"end (mean of the last {steps:,} recorded steps)" if steps > 1 else "last step"
    head = ["layer", *map(str, range(end.shape[1] - 1)), "skip", "entropy"]
    return Table(f"Shares at the {when}", head, rows, "num narrow", "Percent of all tokens.")
