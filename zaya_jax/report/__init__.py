"""The report: one self-contained page, `report.html`, drawn from what a run leaves in its workdir.

`read` streams the workdir's files into bounded memory, `svg` draws lines and heat maps, `style` holds the page's colours
and its few lines of script, `page` puts them together. Nothing here needs JAX, a plotting library or a network.
"""

from zaya_jax.report.page import write_report

__all__ = ["write_report"]
