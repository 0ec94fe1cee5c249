"""Chips' peaks, and what joins them in a cluster."""

import pytest

from zaya_jax.config import Precision
from zaya_jax.hardware import clusters
from zaya_jax.hardware.chips import peak_flops

CLUSTER = clusters.CLUSTERS["mi300x_pollara"]


@pytest.mark.parametrize(
    ("kind", "bfloat16", "tf32", "float32"),
    [
        ("AMD Instinct MI300X", 1307.4e12, 653.7e12, 163.4e12),
        ("AMD Instinct MI300X VF", 1307.4e12, 653.7e12, 163.4e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12, 494.7e12, 66.9e12),
        ("NVIDIA H200", 989.4e12, 494.7e12, 66.9e12),
    ],
)
def test_float32_is_tf32_unless_all_its_bits_are_asked_for(kind, bfloat16, tf32, float32):
    for matmul in ("default", "high", "highest"):
        assert peak_flops(kind, Precision(matmul=matmul)) == bfloat16
        expected = float32 if matmul == "highest" else tf32
        assert peak_flops(kind, Precision(compute="float32", matmul=matmul)) == expected


def test_an_unknown_chip_has_no_peak():
    assert peak_flops("cpu", Precision()) is None


def test_a_group_gets_the_cards_of_its_devices_in_a_node():
    assert CLUSTER.bandwidth([0, 3, 7]) == CLUSTER.inside
    assert CLUSTER.bandwidth([0, 8, 16]) == CLUSTER.card
    assert CLUSTER.bandwidth([0, 1, 8, 9]) == 2 * CLUSTER.card
    assert CLUSTER.bandwidth([0, 1, 2, 8]) == CLUSTER.card  # the fewest of a node
    assert CLUSTER.bandwidth(list(range(16))) == min(CLUSTER.inside, 8 * CLUSTER.card)


def test_nodes_are_alike():
    """Of 12 devices two with six, as they are compiled for: no group of eight in one node."""
    twelve = CLUSTER.of_devices(12)
    assert [CLUSTER.of_devices(count).node for count in (1, 7, 12, 14, 24, 1024)] == [
        1,
        7,
        6,
        7,
        8,
        8,
    ]
    assert twelve.bandwidth(list(range(6))) == CLUSTER.inside
    assert twelve.bandwidth([5, 6]) == CLUSTER.card
    assert twelve.bandwidth(list(range(12))) == 6 * CLUSTER.card
