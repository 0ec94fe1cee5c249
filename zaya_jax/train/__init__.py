"""Training: the state, the pure step, the figures it leaves. `zaya_jax.train(config, workdir)` trains."""

import sys
import types
from typing import Any


class _Package(types.ModuleType):
    """A package that can be called: it has the name that the library's function has to have."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`zaya_jax.library.train`."""
        import zaya_jax

        return zaya_jax.library.train(*args, **kwargs)


sys.modules[__name__].__class__ = _Package
