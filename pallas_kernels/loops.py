"""Loops whose length is known only when they run, and what a compiled program says of them."""

from contextlib import AbstractContextManager

import jax


def turning(about: float) -> AbstractContextManager[None]:
    """A name for the loops inside that says how often they turn, as a rule.

    The compiler writes the length of other loops into the program. Who reads the program (`zaya_jax.hardware.kernels`)
    takes this for those of which nobody knows.
    """
    return jax.named_scope(f"turns={about:g}")
