"""Plans a run on a cluster by formulas, before anything is compiled.

`case` describes a program: a phase's config on a mesh. Of a case `work` counts FLOPs, bytes and
launches, `footprint` the memory, `network` the collectives; `rates` has the shares of the peaks
that programs reach, from which `step_time` estimates a step and `serving` a token. `goodput` says
how often to save; `phases` puts the days of a whole run together. docs/planning.md has the
assumptions.
"""
