"""Page tables from entries."""

import numpy as np
import pytest

from pallas_kernels.page_table import empty_page_table, page_table_from_entries


def test_entries_then_padding():
    table = page_table_from_entries([(7, 1, 5, 100, 40), (3, 0, 2, 104, 104)], 5)
    assert table.page_id.shape == (1, 5)
    assert table.page_id.dtype == np.int32
    columns = (table.page_id, table.row_begin, table.row_end, table.target_position, table.base_position)
    assert [[int(x) for x in np.asarray(field)[0, :2]] for field in columns] == [
        [7, 3],
        [1, 0],
        [5, 2],
        [100, 104],
        [40, 104],
    ]
    assert np.array_equal(table.row_begin[0, 2:], table.row_end[0, 2:])


def test_no_entries():
    for table in (page_table_from_entries([], 3), empty_page_table(1, 3)):
        assert table.row_end.shape == (1, 3)
        assert not np.any(table.row_begin < table.row_end)


def test_more_entries_than_capacity():
    with pytest.raises(ValueError, match="2 entries exceed capacity=1; raise the capacity"):
        page_table_from_entries([(0, 0, 1, 0, 0)] * 2, 1)
