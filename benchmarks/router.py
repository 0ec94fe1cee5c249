"""How many tokens go to another expert, by the number format of the router's products.

    python -m benchmarks.router [--tokens=16384] [--width=2048] [--experts=16]

Random numbers pass one router of ZAYA1-base's size in float64, by NumPy, and in each format. Of a format the page
prints the error of its first product relative to float64's norm, the share of tokens whose choice differs, and on
a GPU the first product's time. A GPU multiplies as XLA would there; elsewhere operands are rounded, or cut in parts,
and these are multiplied in float32. Where two classes are nearly equal, any rounding decides: float32's own share is
the one to compare with.
"""

import argparse
import functools
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.lax import DotAlgorithmPreset, Precision
from scipy.special import ndtr

from pallas_kernels import chip, timing
from zaya_jax.report.document import Table

# The bits of a part, how many parts an operand is cut in, and what a GPU is asked for.
FORMATS: dict[str, tuple[int, int, Any]] = {
    "float32": (24, 1, Precision.HIGHEST),
    "three of TF32": (11, 2, DotAlgorithmPreset.TF32_TF32_F32_X3),
    "six of bfloat16": (8, 3, DotAlgorithmPreset.BF16_BF16_F32_X6),
    "three of bfloat16": (8, 2, DotAlgorithmPreset.BF16_BF16_F32_X3),
    "TF32": (11, 1, DotAlgorithmPreset.TF32_TF32_F32),
    "bfloat16": (8, 1, DotAlgorithmPreset.BF16_BF16_F32),
}


def parts(x: np.ndarray, bits: int, count: int) -> list[np.ndarray]:
    """Numbers of so many bits, the largest first, that add up to x or nearly so."""
    found = []
    for _ in range(count):
        mantissa, exponent = np.frexp(x)
        found.append(
            np.ldexp(np.rint(np.ldexp(mantissa, bits)), exponent - bits).astype(np.float32)
        )
        x = x - found[-1]
    return found


def product(x: np.ndarray, w: np.ndarray, name: str) -> np.ndarray:
    """x w in a format, as float32."""
    bits, count, precision = FORMATS[name]
    if not chip.current().is_host:
        return np.asarray(jnp.matmul(x, w, precision=precision, preferred_element_type=jnp.float32))
    left, right = parts(x, bits, count), parts(w, bits, count)
    pairs = [(i, j) for i in range(count) for j in range(count) if i + j < count]
    return sum(left[i] @ right[j] for i, j in sorted(pairs, key=sum, reverse=True))


def choices(x: np.ndarray, weights: list[np.ndarray], multiply) -> tuple[np.ndarray, np.ndarray]:
    """The first product, and each token's class: an MLP of the normed product, as the router's."""
    first = z = multiply(x, weights[0])
    z = z / np.sqrt((z * z).mean(1, keepdims=True) + 1e-5)
    for w in weights[1:]:
        z = multiply(z, w)
        z = z if w is weights[-1] else z * ndtr(z)  # GELU
    return first, z.argmax(1)


def rows(tokens: int, width: int, experts: int) -> list[list[str]]:
    """A row of the table for each format."""
    rng, narrow = np.random.default_rng(0), width // 8
    sides = (width, narrow, narrow, narrow, experts + 1)
    x = rng.standard_normal((tokens, width), np.float32)
    weights = [
        rng.standard_normal((a, b), np.float32) / np.float32(a**0.5)
        for a, b in itertools.pairwise(sides)
    ]
    exact, wanted = choices(
        x.astype(np.float64), [w.astype(np.float64) for w in weights], np.matmul
    )
    found = []
    for name in FORMATS:
        first, chosen = choices(x, weights, lambda a, b, name=name: product(a, b, name))
        error = np.linalg.norm(first - exact) / np.linalg.norm(exact)
        how: dict[str, Any] = {"precision": FORMATS[name][2], "preferred_element_type": jnp.float32}
        run = functools.partial(jnp.matmul, *map(jnp.asarray, (x, weights[0])), **how)
        ms = (
            "" if chip.current().is_host else f"{1e3 * timing.time_call(run, 0.2, True).median:.3f}"
        )
        found.append([name, f"{error:.1e}", f"{np.mean(chosen != wanted):.3%}", ms])
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, number in (("tokens", 16_384), ("width", 2048), ("experts", 16)):
        parser.add_argument(f"--{name}", type=int, default=number)
    found = rows(**vars(parser.parse_args()))
    head = ("format", "error", "tokens elsewhere", "ms")
    print(Table("The router's products", head, found).markdown())


if __name__ == "__main__":
    main()
