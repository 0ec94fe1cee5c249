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
    load, recorded = run.vectors.get("load"), run.vectors.get("load_entropy")
    entropy = recorded or (Series(load.steps, entropies(load.good)) if load else None)
    pictures = _balance_map(run, entropy) if entropy else ""
    if "skip_share" in run.vectors:
        pictures += list_map(run, "skip_share")
    if not load or not entropy:
        return Section(
            "Expert load", "Normalised load entropy: 1 is an even load.", pictures=pictures
        )
    layers, classes = load.shape
    experts = classes - 1  # the last class is the skip class
    least_balanced = int(np.nan_to_num(entropy.good, nan=1.0).mean(0).argmin())
    bins = load.coarse(columns(experts))
    for layer in sorted({0, layers // 2, layers - 1, least_balanced}):
        title, ends = f"Experts of layer {layer}", ("¼", "4 × an even share")
        shares = fair_shares(bins.means[:, layer])
        pictures += HeatMap(title, bins.steps, shares.T, FAIR, run.steps, "expert", ends).draw()
    end, averaged = load.end()
    tables = [_shares(end, averaged)] if experts <= TABLE_EXPERTS else []
    return Section("Expert load", _summary(end), tables, pictures=pictures)


def entropies(load: np.ndarray) -> np.ndarray:
    """Normalised load entropy over the experts, of loads [..., E+1]; NaN where no token was
    routed."""
    routed = load[..., :-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        f = routed / routed.sum(-1, keepdims=True)
        return -(f * np.log(np.where(f > 0, f, 1.0))).sum(-1) / np.log(max(2, routed.shape[-1]))


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
        between = f"lies between {least} (layer {worst}) and {most} (layer {best})"
        between = between if least != most else f"is {most} in every layer"
        parts.append(f"At the end the load’s normalised entropy {between}; 1 is an even load.")
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
    good = bins.means[np.isfinite(bins.means)]
    low = float(np.floor(np.quantile(good, 0.02) * 20) / 20) if good.size else 0.0
    low = min(max(low, 0.0), 0.9)
    ends, note = (
        (f"≤ {low:.2f}" if low else "0", "1, even"),
        "Normalised load entropy over the experts, by layer.",
    )
    scale = Scale(low, 1.0, "r")
    return HeatMap(
        "Balance of each layer", bins.steps, bins.means.T, scale, run.steps, "layer", ends, note
    ).draw()


def _shares(end: np.ndarray, steps: int) -> Table:
    """Layer by expert: the last shares as numbers."""

    def cell(value: float, digits: int) -> str:
        return f"{value:.{digits}f}" if np.isfinite(value) else "–"

    rows = [
        [str(layer), *(cell(100 * share, 1) for share in shares), cell(entropy, 3)]
        for layer, (shares, entropy) in enumerate(zip(end, entropies(end), strict=True))
    ]
    of = f"end (mean of the last {steps:,} recorded steps)" if steps > 1 else "last step"
    head = ["layer", *map(str, range(end.shape[1] - 1)), "skip", "entropy"]
    return Table(f"Shares at the {of}", head, rows, "num narrow", "Percent of all tokens.")
