"""CCA's mixing on a CPU: XLA's, with a barrier before the norm.

XLA's CPU backend hands a sum and its neighbours to YNNPACK as one piece, and YNNPACK is slow at
short broadcast dimensions such as the queries of a group: 6 ms instead of less than one.
"""

import functools

from pallas_kernels.cca_mix import xla
from pallas_kernels.cpu import unfused

convolve, convolve_gradients = xla.convolve, xla.convolve_gradients
queries_and_keys = functools.partial(xla.queries_and_keys, before_norm=unfused)
