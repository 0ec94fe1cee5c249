"""The peak that MFU is measured against is that of the format in which products really run."""

import pytest

from zaya_jax.config import Precision
from zaya_jax.hardware.chips import peak_flops


@pytest.mark.parametrize(("kind", "bfloat16", "tf32", "float32"), [
    ("AMD Instinct MI300X", 1307.4e12, 653.7e12, 163.4e12),
    ("AMD Instinct MI300X VF", 1307.4e12, 653.7e12, 163.4e12),
    ("NVIDIA H100 80GB HBM3", 989.4e12, 494.7e12, 66.9e12),
    ("NVIDIA H200", 989.4e12, 494.7e12, 66.9e12),
])  # fmt: skip
def test_float32_is_tf32_unless_all_its_bits_are_asked_for(kind, bfloat16, tf32, float32):
    for matmul in ("default", "high", "highest"):
        assert peak_flops(kind, Precision(matmul=matmul)) == bfloat16
        expected = float32 if matmul == "highest" else tf32
        assert peak_flops(kind, Precision(compute="float32", matmul=matmul)) == expected


def test_an_unknown_chip_has_no_peak():
    assert peak_flops("cpu", Precision()) is None
