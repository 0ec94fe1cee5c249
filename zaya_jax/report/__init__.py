"""Reports: self-contained pages without scripts, drawn from the files that a run leaves in its
workdir.

`document` makes a page or Markdown of tables; `svg` draws pictures, `style` is how pages look,
`text` how values read: the programs hand their rows to these. `run_page` tells of one run, with
`curves`, `expert_load` and `supervised`, from the files that `read` reads. Live figures are
TensorBoard's. Nothing here needs JAX, a plotting library or a network.
"""

from zaya_jax.report.run_page import write_report

__all__ = ["write_report"]
