"""Which kernels and tiles the programs of a run on a GPU have: the table's, or what `tune` found."""

import json
import types

import pytest
import tiny_runs

from pallas_kernels import chip, table
from zaya_jax.training import kernels, notes

MI300X = types.SimpleNamespace(platform="rocm", device_kind="gfx942")
B200 = types.SimpleNamespace(platform="cuda", device_kind="NVIDIA B200")
ROW = {"source": "measured", "chip": "a card", "date": "2026-12-01", "jax": "0.12", "ms": 0.2}
TILE = {"rows": 64, "keys": 32, "warps": 4, "stages": 1}


@pytest.fixture
def own(monkeypatch, tmp_path):
    """Writes what `tune` found on a card of this kind."""
    monkeypatch.setattr(chip, "_used", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def write(kind, operators, tiles, **changed):
        rows = {name: {**ROW, "tile": tile} for name, tile in tiles.items()}
        found = {"key": table.key(kind) | changed, "kernels": operators, "tiles": rows}
        table.write_measured(kind, found)

    return write


def test_a_start_says_how_many_tiles_were_measured_and_checkpoints_have_them(own):
    config = tiny_runs.settings()
    cpu = types.SimpleNamespace(platform="cpu", device_kind="cpu")
    assert kernels.choose_tiles(config, cpu) == ({}, "")
    found = kernels.choose_tiles(config, MI300X)
    assert found.summary == "tiles: 21 modelled" and len(found.kernels) == 21
    own("gfx942", ["attention", "cca_mix"], {"attention_forward": TILE, "attention_keys 64": TILE})
    measured = kernels.choose_tiles(config, MI300X)
    assert measured.summary == "tiles: 2 measured on a card, 5 modelled"
    assert measured.kernels["attention_forward"] == measured.kernels["attention_keys"] == TILE
    assert chip.chip_of(MI300X).taking(("auto",)).kernels == ("attention", "cca_mix")
    before = {"kernels": found.kernels, "devices": 2, "processes": 1}
    assert notes.other_rounding(before, 2, found.kernels, 3) == ""
    assert notes.other_rounding({}, 2, found.kernels, 0) == ""  # a fresh run
    note = notes.other_rounding(before, 4, measured.kernels, 3)
    assert "the number of devices (2 before, 4 now), our kernels or their tiles: sums" in note


def test_an_unknown_card_has_xlas_kernels_until_tune_found_its_tiles(own):
    config = tiny_runs.settings()
    found = kernels.choose_tiles(config, B200)
    assert found.kernels == {} and found.summary == (
        "kernels: XLA's on NVIDIA B200, for which no tiles were chosen; python -m"
        " pallas_kernels.tune finds the tiles of this card"
    )
    assert chip.chip_of(B200).taking(("auto",)).kernels == ()
    own("NVIDIA B200", ["attention"], {"attention_forward": TILE})
    assert kernels.choose_tiles(config, B200).summary == "tiles: 1 measured on a card, 2 modelled"


@pytest.mark.parametrize("changed", ["driver", "jax", "code"])
def test_measured_tiles_are_left_where_what_they_depend_on_changed(own, changed):
    own("gfx942", [], {"attention_forward": TILE}, **{changed: "another"})
    said = kernels.choose_tiles(tiny_runs.settings(), MI300X).summary
    assert (
        said.startswith("tiles: 21 modelled; ") and f"is for another {changed}; python -m" in said
    )


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"gfx942": 1}', '{"gfx942": {"tiles": {"x": {}}, "kernels": []}}']
)
def test_a_damaged_file_is_said_and_another_cards_rows_stay(own, text):
    table.measured_file().parent.mkdir(parents=True)
    table.measured_file().write_text(text)
    said = kernels.choose_tiles(tiny_runs.settings(), MI300X).summary
    assert said.startswith("tiles: 21 modelled; ") and "cannot be read" in said
    own("gfx942", [], {})
    own("gfx950", [], {})
    assert {"gfx942", "gfx950"} <= {*json.loads(table.measured_file().read_text())}
