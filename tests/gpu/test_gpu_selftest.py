"""`kvfold selftest` on a GPU: every kernel against the definitions, steps of the fast kernels among them."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip(f"kernels run on a GPU, and torch {torch.__version__} sees none", allow_module_level=True)

from kvfold.bench import selftest
from kvfold.ops.dispatch import AMPERE


def test_every_kernel_is_right():
    rows = list(selftest.run())
    assert [row for row in rows if not row.ok] == []
    met = {(row.path, row.kernel) for row in rows}
    assert met >= {("store", "triton"), ("extend", "triton"), ("decode", "triton"), ("drafts", "gluon")}
    if torch.cuda.get_device_capability() >= AMPERE:
        assert met >= {("extend", "unpacked"), ("decode", "gluon"), ("step", "gluon")}
