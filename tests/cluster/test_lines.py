"""Whatever one end of a line sends, the other goes on."""

import selectors
import socket
from unittest import mock

import pytest

from zaya_jax.cluster import lines


@pytest.mark.parametrize("error", [lines.OddMessage, RuntimeError])
def test_an_odd_message_hangs_up_on_its_sender_and_an_error_of_this_end_is_raised(error):
    """An error of our own was told as the other end's, and written down nowhere."""
    lost, (here, there) = [], socket.socketpair()
    hear = mock.Mock(side_effect=error)
    with selectors.DefaultSelector() as selector, there:
        door = lines.Door(selector, "x", 2, "", lambda *_: None, hear, lost.append)
        door.known[1] = line = lines.Line(here)
        line.index = 1
        door.attend(line)
        there.sendall(b'["odd"]\n')
        (key, _), *_ = selector.select(1)
        if error is RuntimeError:
            with pytest.raises(RuntimeError):
                key.data()
            line.connection.close()
        else:
            key.data()
    assert hear.called and bool(lost) == (error is lines.OddMessage) == (not door.known)
