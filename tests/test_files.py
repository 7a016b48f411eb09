"""Files of rows that grow."""

import pytest

from kvfold.files import append_rows


def test_rows_are_added_in_the_order_of_the_files_columns(tmp_path):
    file = tmp_path / "rows.csv"
    append_rows(file, [{"a": 1, "b": "x,y"}])
    append_rows(file, [{"b": 4, "a": 3}])
    assert file.read_text() == 'a,b\n1,"x,y"\n3,4\n'


@pytest.mark.parametrize("before", ["a,c\n1,2\n", "a\n1\n", "\n", ""])
def test_a_file_with_other_columns_stays_as_it_is(tmp_path, before):
    file = tmp_path / "rows.csv"
    file.write_text(before)
    with pytest.raises(ValueError, match="other columns"):
        append_rows(file, [{"a": 1, "b": 2}])
    assert file.read_text() == before
