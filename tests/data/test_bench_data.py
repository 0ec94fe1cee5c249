"""benchmarks.bench_data at a tiny size, with the libraries that are installed: ours and Grain."""

from benchmarks import bench_data


def test_ours_gives_equal_rows_on_any_number_of_processes_and_grains_own_packing_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_data, "SEQ_LEN", 256)
    bench_data.make_corpus(tmp_path, 1 << 18, 600)
    assert bench_data.prepare_one("ours", tmp_path, "bpe") == sum(map(len, bench_data.encoded(tmp_path, "bpe")))

    def rows(name, count):
        streams = [iter(bench_data.batches(name, tmp_path, (i, count))) for i in range(count)]
        return [sorted(row.tobytes() for s in streams for row in next(s)["tokens"]) for _ in range(4)]

    for name in bench_data.READ:
        assert rows(name, 1) == rows(name, 2) == rows(name, 4)
    one, two = rows("grain", 1), rows("grain", 2)
    assert len(one[0]) == len(two[0]) == bench_data.BATCH and all(a != b for a, b in zip(one, two, strict=True))
