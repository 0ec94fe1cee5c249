"""What a mistake is answered with."""

from collections.abc import Callable

import pytest

from zaya_jax.config import UserError


def refusal(call: Callable, *args, **keys) -> str:
    """The one line by which a call is refused."""
    with pytest.raises(UserError) as refused:
        call(*args, **keys)
    assert "\n" not in str(refused.value), refused.value
    return str(refused.value)
