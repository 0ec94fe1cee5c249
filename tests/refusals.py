"""What a mistake is answered with."""

import functools
import re
from collections.abc import Callable

import pytest

from zaya_jax.config import StorageError, UserError


def refusal(call: Callable, *args, **keys) -> str:
    """The one line by which a call is refused."""
    with pytest.raises(UserError) as refused:
        call(*args, **keys)
    assert "\n" not in str(refused.value), refused.value
    return str(refused.value)


def raising(error: BaseException | type[BaseException]) -> Callable:
    """A function that ends with this error, whatever it is given."""

    def call(*_, **__):
        raise error

    return call


def check_refused(words: str, call: Callable, *args, **keys) -> None:
    """A call is refused in one line that has these words, a regular expression."""
    said = refusal(call, *args, **keys)
    assert re.search(words, said), said


def check_error(error: type[BaseException], words: str, call: Callable, *args, **keys) -> None:
    """A call ends with this error, which has these words, a regular expression."""
    with pytest.raises(error) as ended:
        call(*args, **keys)
    assert re.search(words, str(ended.value)), ended.value


check_storage_error = functools.partial(check_error, StorageError)
