"""Pictures of the experts' load: balance, skipped tokens, single layers, all layers at the end.

`load` is [L, E+1] with the skip class last, shares of all real tokens. Balance is the paper's
health figure: the entropy of the shares over the E experts alone, divided by its greatest value ln
E; 1 is an even load.
"""

import numpy as np

from zaya_jax.report.curves import list_map
from zaya_jax.report.document import Section
from zaya_jax.report.read import Series, Workdir
from zaya_jax.report.svg import CELLS, HeatMap, columns
from zaya_jax.report.text import counted

# Powers of two of an even share.
FAIR, FAIR_ENDS = (-2.0, 2.0), ("¼", "4 × an even share")


def experts_section(run: Workdir) -> Section:
    """Expert load; empty if the run recorded neither load nor its entropy."""
    load, entropy = run.vectors.get("load"), run.vectors.get("load_entropy")
    pictures = list_map(run, "skip_share")
    if not entropy:
        return Section("Expert load", pictures=pictures)
    pictures = _balance_map(run, entropy) + pictures
    if not load:
        return Section(
            "Expert load", "Normalised load entropy: 1 is an even load.", pictures=pictures
        )
    layers, experts = load.shape[0], load.shape[1] - 1  # the last class is the skip class
    least_balanced = int(np.nan_to_num(entropy.good, nan=1.0).mean(0).argmin())
    bins = load.coarse(columns(experts))
    for layer in sorted({0, layers // 2, layers - 1, least_balanced}):
        title, cells = f"Experts of layer {layer}", _fair_shares(bins.means[:, layer]).T
        pictures += HeatMap(title, bins.steps, cells, FAIR, run.steps, FAIR_ENDS).draw()
    end = load.end()
    if end.size <= CELLS:
        pictures += HeatMap(
            "Experts of all layers at the end",
            range(experts),
            _fair_shares(end),
            FAIR,
            (-0.5, experts - 0.5),
            FAIR_ENDS,
            "A mean over the last twentieth of the recorded steps, by layer.",
            over="expert",
        ).draw()
    return Section("Expert load", _summary(end, entropy.end()), pictures=pictures)


def _fair_shares(load: np.ndarray) -> np.ndarray:
    """Each expert's share of the routed tokens, as a power of two of an even share; NaN where no
    token was routed."""
    routed = load[..., :-1]
    even = routed.mean(-1, keepdims=True)
    shares = np.divide(routed, even, out=np.full_like(routed, np.nan), where=even > 0)
    return np.log2(np.maximum(shares, 1e-9))


def _summary(end: np.ndarray, entropy: np.ndarray) -> str:
    parts = []
    if np.isfinite(entropy).any():
        worst, best = int(np.nanargmin(entropy)), int(np.nanargmax(entropy))
        least, most = f"{entropy[worst]:.3f}", f"{entropy[best]:.3f}"
        where = f"is {most} in every layer"
        if least != most:
            where = f"lies between {least} (layer {worst}) and {most} (layer {best})"
        parts.append(f"At the end the load’s normalised entropy {where}; 1 is an even load.")
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
        (1.0, low),
        run.steps,
        ("1, even", f"≤ {low:.2f}" if low else "0"),
        "Normalised load entropy over the experts, by layer.",
    ).draw()
