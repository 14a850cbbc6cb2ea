"""Warnings are issued at the nearest line outside of the package."""

import pytest

from unity.base.installation import PACKAGE
from unity.base.user_warnings import warn_user


def test_a_file_beside_the_package_whose_name_begins_alike_is_the_user_s():
    file = f"{PACKAGE}_models.py"
    with pytest.warns(UserWarning, match="text") as caught:
        exec(compile("warn_user('text')", file, "exec"), {"warn_user": warn_user})
    assert caught[0].filename == file
