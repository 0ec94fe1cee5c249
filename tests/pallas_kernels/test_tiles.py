"""What kernels are made of: rounding as the chip's own conversion does it, products that keep the
bits of float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import chip, table, tiles


@pytest.mark.parametrize("kind", ["gfx942", "gfx950", "NVIDIA H200"])
def test_narrow_rounds_to_the_nearest_and_ties_to_even(kind):
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    # below, at and above the middle
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    numbers = (upper[:, None] | lower).ravel().view(np.float32)
    numbers = np.concatenate([numbers[~np.isnan(numbers)], np.array([np.nan], np.float32)])
    with chip.making(chip.Chip("cpu", kind)):
        found = jax.jit(lambda x: tiles.narrow(x, jnp.bfloat16))(numbers)
    np.testing.assert_array_equal(
        np.asarray(found).astype(np.float32), numbers.astype(jnp.bfloat16).astype(np.float32)
    )


@pytest.mark.parametrize("length", [31, 32, 33, 63, 64])
def test_the_guards_show_reads_and_writes_beyond_an_array(length):
    """Stretches of 32: those that `within` masks are whole, one more than there are is seen."""
    x = jnp.arange(1.0, length + 1)

    def copied(stretches):
        def body(refs, out):
            x = refs["x"]
            for start in range(0, 32 * stretches, 32):
                places, own = tiles.within(jnp.int32(start), 32, length)
                tiles.store(out.at[places], tiles.load(x.at[places], mask=own, other=0), mask=own)

        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        with chip.making(chip.Chip("cpu", "gfx942")):
            return tiles.call(body, {"x": x}, name="copied", grid=(1,), out_shapes=like)

    np.testing.assert_array_equal(copied(-(-length // 32)), x)
    if length % 32 == 0:
        assert np.isnan(copied(length // 32 + 1)).any()


def test_products_of_float32_ask_for_all_its_bits():
    """The interpreter on a CPU gives them anyway, a GPU does not."""
    precisions = {
        dtype: (
            jax.make_jaxpr(tiles.dot)(*[jnp.ones((16, 16), dtype)] * 2).eqns[0].params["precision"]
        )
        for dtype in ("float32", "bfloat16")
    }
    assert set(precisions["float32"]) == {jax.lax.Precision.HIGHEST}
    assert precisions["bfloat16"] is None or set(precisions["bfloat16"]) == {None}


@pytest.mark.parametrize("kind", ["gfx942", "NVIDIA H200", "gfx1100"])
def test_powers_of_two_are_one_instruction_of_the_chips_where_it_needs_no_care(kind):
    """Interpreted they are NumPy's; below 2 ** -126, where a GPU may give zero, they weigh
    nothing."""
    x, less = np.linspace(-60, 90, 48, dtype=np.float32).reshape(4, 12), np.full((4, 1), 7.5)
    with chip.making(chip.Chip("cpu", kind)):
        found = tiles.exp2(jnp.asarray(x), 1.5, jnp.asarray(less, jnp.float32))
    np.testing.assert_allclose(found, np.exp2(x * 1.5 - 7.5), rtol=1e-5)
    with chip.making(chip.Chip("gpu", kind)):
        program = jax.make_jaxpr(lambda x, y: tiles.exp2(x, 1.5, y))(x, less)
    assert ("exp2" in str(program)) == (kind == "gfx1100")
    assert ("0f3fc00000" in str(program)) == (kind == "NVIDIA H200")


def test_a_record_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = table.measured_file()
    file.mkdir(parents=True)  # a folder, which no file can replace
    with pytest.raises(IsADirectoryError):
        table.write_measured("NVIDIA B200", {"kernels": [], "tiles": {}})
    assert list(file.parent.iterdir()) == [file]
