"""The batches of a run as a Grain dataset in a foreign loop: equal, sliced, resumed elsewhere,
saved by Orbax."""

import grain
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from data_helpers import make_config, side_by_side
from refusals import check_error

import zaya_jax as zj
from zaya_jax.data import pipeline
from zaya_jax.text import tokenizers


@pytest.fixture
def config(prepare_text):
    web, code = prepare_text("web", 300), prepare_text("code", 100, seed=1)
    return make_config(mixture=(f"{web}=0.7", f"{code}=0.3"), packing="best_fit", seq_len=128)


@pytest.fixture
def whole(config):
    """The data that a run of this config reads."""
    stream = pipeline.train_stream(config, tokenizers.load("bytes"))
    batches = [next(stream) for _ in range(24)]
    stream.close()
    return batches


def test_element_t_is_the_batch_of_step_t_whoever_asks(config, whole):
    dataset = zj.data.dataset(config)
    np.testing.assert_equal([dataset[step] for step in (5, 0, 23)], [whole[5], whole[0], whole[23]])
    np.testing.assert_equal(list(dataset[3:20:4]), whole[3:20:4])
    halves = [zj.data.dataset(config, (index, 2)) for index in range(2)]
    joined = [side_by_side([half[step] for half in halves]) for step in range(4)]
    np.testing.assert_equal(joined, whole[:4])
    for process in ((5, 2), (2, 2), (-1, 2), (0, 0)):
        check_error(
            ValueError,
            rf"process=\({process[0]}, {process[1]}\) is \(index, count\)",
            zj.data.dataset,
            config,
            process,
        )
    threads = grain.ReadOptions(num_threads=8, prefetch_buffer_size=16)
    mapped = iter(dataset.map(lambda batch: batch["tokens"].sum()).to_iter_dataset(threads))
    assert [next(mapped) for _ in range(24)] == [batch["tokens"].sum() for batch in whole]


def test_one_integer_is_the_state_of_any_number_of_processes(config, whole, tmp_path):
    few = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    iterator = iter(zj.data.dataset(config).to_iter_dataset(few))
    np.testing.assert_equal([next(iterator) for _ in range(9)], whole[:9])
    assert iterator.get_state() == {"next_index": 9}
    ocp.save_checkpointables(tmp_path / "saved", {"data": iterator})
    next(iterator)
    again = iter(zj.data.dataset(config).to_iter_dataset(few))
    ocp.load_checkpointables(tmp_path / "saved", {"data": again})
    np.testing.assert_equal([next(again) for _ in range(3)], whole[9:12])
    parts = [iter(zj.data.dataset(config, (index, 4)).to_iter_dataset(few)) for index in range(4)]
    for part in parts:
        part.set_state({"next_index": 9})
    joined = [side_by_side([next(part) for part in parts]) for _ in range(6)]
    np.testing.assert_equal(joined, whole[9:15])
