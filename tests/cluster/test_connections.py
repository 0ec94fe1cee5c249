"""Whatever one end of a connection sends, the other goes on."""

import selectors
import socket
from unittest import mock

import pytest

from zaya_jax.cluster import connections


@pytest.mark.parametrize("error", [connections.OddMessage, RuntimeError])
def test_an_odd_message_hangs_up_on_its_sender_and_an_error_of_this_end_is_raised(error):
    """An error of our own was told as the other end's, and written down nowhere."""
    lost, (here, there) = [], socket.socketpair()
    hear = mock.Mock(side_effect=error)
    with selectors.DefaultSelector() as selector, there:
        hub = connections.Hub(selector, "x", 2, "", lambda *_: None, hear, lost.append)
        hub.by_index[1] = connection = connections.Connection(here, "")
        connection.index = 1
        hub.register(connection)
        there.sendall(b'["odd"]\n')
        (key, _), *_ = selector.select(1)
        if error is RuntimeError:
            with pytest.raises(RuntimeError):
                key.data()
            connection.socket.close()
        else:
            key.data()
    assert hear.called and bool(lost) == (error is connections.OddMessage) == (not hub.by_index)
