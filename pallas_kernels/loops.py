"""Says how often loops turn whose length is known only when they run, for readers of the compiled
program: as the name of a scope around them."""

from contextlib import AbstractContextManager

import jax


def expected_turns(about: float, of: int | None = None) -> AbstractContextManager[None]:
    """Says that the loops inside usually turn so many times; `of` is the greatest number.

    The compiler writes the length of other loops into the program; for these,
    `zaya_jax.compiled.launches` reads the name.
    """
    return jax.named_scope(f"turns={about:g}" + (f"of{of}" if of else ""))


def expected_share(share: float) -> AbstractContextManager[None]:
    """A caller's correction of `expected_turns`: the loops inside make this share of the greatest
    number of turns."""
    return jax.named_scope(f"visits={share:g}")
