"""Names for loops whose length is known only when they run, for readers of the compiled program."""

from contextlib import AbstractContextManager

import jax


def turning(about: float, of: int | None = None) -> AbstractContextManager[None]:
    """A name for the usual number of turns of the loops inside; `of` is the greatest number.

    The compiler writes the length of other loops into the program; for these,
    `zaya_jax.compiled.launches` reads the name.
    """
    return jax.named_scope(f"turns={about:g}" + (f"of{of}" if of else ""))


def visiting(share: float) -> AbstractContextManager[None]:
    """A name by which a caller corrects `turning`: the loops inside turn this share of their
    most."""
    return jax.named_scope(f"visits={share:g}")
