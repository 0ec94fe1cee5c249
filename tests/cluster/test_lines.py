"""Whatever one end of a line sends, the other goes on."""

import selectors
import socket
from unittest import mock

import pytest

from zaya_jax.cluster import lines


@pytest.mark.parametrize("error", [ValueError, KeyError, IndexError, AttributeError, OverflowError])
def test_an_error_at_a_message_hangs_up_on_its_sender_alone(error):
    lost, (here, there) = [], socket.socketpair()
    hear = mock.Mock(side_effect=error)
    with selectors.DefaultSelector() as selector, there:
        door = lines.Door(selector, "x", 2, "", lambda *_: None, hear, lost.append)
        door.known[1] = line = lines.Line(here)
        line.index = 1
        door.attend(line)
        there.sendall(b'["odd"]\n')
        for key, _ in selector.select(1):
            key.data()
    assert hear.called and lost == [line] and not door.known
