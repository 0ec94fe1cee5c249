"""The report: one self-contained page, `report.html`, drawn from what a run leaves in its workdir.

`read` streams the workdir's files into bounded memory; `svg`, `heat` and `bars` draw; `curves`, `experts`,
`saves`, `aegis` and `tables` say what of; `style` and `script` are the page's own; `page` puts it together, and
`supervised` makes it anew for an agent. Nothing here needs JAX, a plotting library or a network.
"""

from zaya_jax.report.page import write_report

__all__ = ["write_report"]
