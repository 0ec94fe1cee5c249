"""Loops whose length is known only when they run, and what a compiled program says of them."""

from contextlib import AbstractContextManager

import jax


def turning(about: float, of: int | None = None) -> AbstractContextManager[None]:
    """A name for the loops inside that says how often they turn, as a rule; `of` so many times at most.

    The compiler writes the length of other loops into the program. Who reads the program (`zaya_jax.hardware.kernels`)
    takes this for those of which nobody knows.
    """
    return jax.named_scope(f"turns={about:g}" + (f"of{of}" if of else ""))


def visiting(share: float) -> AbstractContextManager[None]:
    """A name for what is called inside: its loops that turn `of` so many times do so this often, the caller knows."""
    return jax.named_scope(f"visits={share:g}")
