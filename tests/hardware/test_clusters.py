"""What joins a cluster's chips, and collectives that a program never runs."""

from experiments import _compiling as compiling
from zaya_jax.hardware import clusters
from zaya_jax.hardware.hlo import Array, Collective
from zaya_jax.hardware.kernels import GpuKernel, Program

CLUSTER = clusters.CLUSTERS["mi300x_pollara"]


def test_a_group_gets_the_cards_of_its_devices_in_a_node():
    assert CLUSTER.bandwidth([0, 3, 7]) == CLUSTER.inside
    assert CLUSTER.bandwidth([0, 8, 16]) == CLUSTER.card
    assert CLUSTER.bandwidth([0, 1, 8, 9]) == 2 * CLUSTER.card
    assert CLUSTER.bandwidth([0, 1, 2, 8]) == CLUSTER.card  # the fewest of a node
    assert CLUSTER.bandwidth(list(range(16))) == min(CLUSTER.inside, 8 * CLUSTER.card)


def test_nodes_are_alike():
    """Of 12 devices two with six, as they are compiled for: no group of eight in one node."""
    twelve = CLUSTER.of_devices(12)
    assert [CLUSTER.of_devices(count).node for count in (1, 7, 12, 14, 24, 1024)] == [1, 7, 6, 7, 8, 8]
    assert twelve.bandwidth(list(range(6))) == CLUSTER.inside
    assert twelve.bandwidth([5, 6]) == CLUSTER.card
    assert twelve.bandwidth(list(range(12))) == 6 * CLUSTER.card


def test_a_collective_in_a_loop_that_does_not_turn_takes_no_time():
    array = (Array("f32", (1 << 20,)),)
    sent = Collective("all-to-all", "a", array, array, 8, True, None, "", (tuple(range(8)),))
    kernels = tuple(
        GpuKernel(name, op, "", 0.0, 1 << 22, 1 << 22, 0.0, False, collective)
        for name, op, collective in (("a", "all-to-all-start", "all-to-all"), ("k", "fusion", None))
    )
    found = compiling.bound_of(Program(kernels, {}, {"a": (1, 2)}), [sent], "MI300X", CLUSTER)
    assert found is not None and found.seconds == found.hidden == 0
