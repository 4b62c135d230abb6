"""The driver that stands in for one where kernels are compiled without a GPU."""

import ctypes
import shutil

import pytest

from pallas_kernels.assembly import empty_driver


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_the_driver_has_every_function_that_the_plugin_names(tmp_path):
    plugin = tmp_path / "plugin.so"
    plugin.write_bytes(b"x\0cuInit\0cuCtxGetCurrent\0cuda\0notcuInit\0cuOf two words\0")
    driver = ctypes.CDLL(str(empty_driver(plugin, tmp_path) / "libcuda.so.1"))
    assert driver.cuInit() == 0
    value = ctypes.c_int()
    assert driver.cuDeviceGetAttribute(ctypes.byref(value), 75, 0) == 0
    assert value.value == 9
    assert not hasattr(driver, "cuda")
    assert not hasattr(driver, "notcuInit")
