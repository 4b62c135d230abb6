"""The one tolerance table. Absolute and relative, per dtype of the arithmetic being compared with float32 HIGHEST."""

import numpy as np

TOLERANCE = {
    "float64": {"atol": 1e-10, "rtol": 1e-10},
    "float32": {"atol": 2e-5, "rtol": 2e-5},
    "bfloat16": {"atol": 2e-2, "rtol": 2e-2},
}
# Logits of whole models against another framework's float32.
PARITY = {"atol": 1e-4, "rtol": 1e-4}


def assert_close(actual, expected, dtype="float32", **override):
    """Asserts closeness within the table and names the position of the worst error."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    limits = {**TOLERANCE[str(np.dtype(dtype))], **override}
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    error = np.abs(actual - expected) - limits["rtol"] * np.abs(expected)
    worst = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error)), error.shape)
    np.testing.assert_allclose(actual, expected, **limits, err_msg=f"worst at {worst}")
