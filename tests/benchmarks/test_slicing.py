from lapcli.benchmarks.slicing import slicing_benchmark


def test_a_small_checkpoint_is_sliced_and_copied(tmp_path):
    row = slicing_benchmark(0.005, small=True, runs=1, folder=tmp_path)
    assert row.shards > 1
    assert 0 < row.bytes_before - row.bytes_after < row.bytes_before
    assert row.slice_seconds > 0
    assert row.copy_synced_seconds >= row.copy_seconds > 0
    assert row.memory_bytes >= 0
    assert not list(tmp_path.iterdir())
