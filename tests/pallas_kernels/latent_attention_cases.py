"""Cases that every implementation of rotated latent attention passes. Subclasses name the implementation."""

from dataclasses import replace
from functools import partial
from typing import ClassVar

import jax
import numpy as np
import pytest

from pallas_kernels.rotated_latent_attention.api import rotated_latent_attention
from tests.pallas_kernels.latent_oracle import oracle, random_problem
from tests.tolerances import assert_close


class LatentAttentionCases:
    """What holds for any implementation, against the float64 oracle."""

    implementation: str
    log_sum_exp_tolerance: ClassVar[dict[str, float]] = {}

    def problem(self, seed, **shape):
        """A random problem of that shape, or of the nearest one the implementation takes."""
        return random_problem(seed, **shape)

    def attend(self, problem):
        """Output and log-sum-exp of the implementation, jitted, as numpy."""
        out, lse = _jitted(self.implementation, problem.scale)(*problem.arguments())
        assert out.dtype == problem.dtype
        assert lse.dtype == np.float32
        return np.asarray(out, np.float64), np.asarray(lse)

    def check(self, problem):
        out, lse = self.attend(problem)
        expected_out, expected_lse = oracle(problem)
        assert_close(out, expected_out, problem.dtype)
        # The rows are what they are in either dtype: nothing but the output is rounded to bfloat16.
        seen = np.isfinite(expected_lse)
        assert np.array_equal(seen, np.isfinite(lse))
        exact = self.log_sum_exp_tolerance
        assert_close(np.where(seen, lse, 0), np.where(seen, expected_lse, 0), "float32", **exact)
        return out, lse

    @pytest.mark.parametrize("heads", [1, 3, 8])
    @pytest.mark.parametrize(("interleaved", "dtype"), [(True, "float32"), (False, "float32"), (True, "bfloat16")])
    def test_shuffled_partial_pages(self, heads, interleaved, dtype):
        self.check(self.problem(heads, heads=heads, interleaved=interleaved, dtype=dtype, rows=(79,)))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_model_widths_past_a_million_positions(self, dtype):
        self.check(
            self.problem(
                5, latent_width=512, rope_width=64, page_size=64, rows=(331,), queries=(7,), num_pages=31,
                first_position=1_500_000, dtype=dtype,
            )
        )  # fmt: skip

    def test_tails_of_every_length(self):
        """One compiled program, page tails of 1 to 64 rows."""
        for tail in range(1, 65):
            self.check(
                self.problem(
                    tail, page_size=64, rows=(64 + tail,), queries=(3,), num_pages=5, capacity=13, full_pages=True
                )
            )

    def test_query_in_every_place_of_a_page(self):
        """A row is visible from its own position on, and not one position earlier."""
        problem = self.problem(3, page_size=7, rows=(21,), queries=(21,), full_pages=True)
        _, lse = self.check(problem)
        later = replace(problem, query_position=problem.query_position + 1)
        _, shifted = self.check(later)
        assert np.all(shifted[:-1] != lse[:-1])
        assert np.array_equal(shifted[-1], lse[-1])

    def test_one_row(self):
        problem = self.problem(1, rows=(1,), queries=(2,))
        assert list(problem.query_position) == [-1, 0]
        self.check(problem)

    def test_empty_table(self):
        for capacity in (0, 3):
            out, lse = self.check(self.problem(1, rows=(0,), queries=(2,), capacity=capacity))
            assert not out.any()
            assert np.all(lse == -np.inf)

    def test_padding_queries_and_queries_before_every_row(self):
        problem = self.problem(2, first_position=100)
        position = problem.query_position.copy()
        position[[0, 4]], position[7] = -1, 99
        out, lse = self.check(replace(problem, query_position=position))
        assert np.all(lse[[0, 4, 7]] == -np.inf)
        assert not out[[0, 4, 7]].any()

    def test_rows_of_the_future_are_not_read(self):
        """Rows after the last query may not have been written."""
        problem = self.problem(4, rows=(37,), queries=(5,))
        latent, rope = problem.latent_pages.copy(), problem.rope_pages.copy()
        for page, begin, end, target, _ in problem.entries[0]:
            unwritten = target + np.arange(end - begin) > 20
            latent[problem.layer, page, begin:end][unwritten] = np.nan
            rope[problem.layer, page, begin:end][unwritten] = np.nan
        self.check(replace(problem, query_position=problem.query_position - 16, latent_pages=latent, rope_pages=rope))

    def test_same_page_twice_at_two_distances(self):
        problem = self.problem(6, rows=(23,), queries=(1,))
        once = problem.entries[0]

        def again(turned):
            """The same pages once more behind themselves, their keys turned by 23 more than at first, or no more."""
            more = tuple((page, begin, end, at + 23, base + 23 - turned) for page, begin, end, at, base in once)
            return replace(problem, entries=(once + more,), query_position=problem.query_position + 23, capacity=47)

        assert len(once) * 2 <= 47
        _, moved = self.check(again(23))
        _, level = self.check(again(0))
        assert np.all(np.abs(moved - level) > 1e-4)

    def test_ragged_decode(self):
        self.check(self.problem(7, rows=(37, 0, 1, 13, 71), queries=(1, 1, 1, 1, 1)))

    def test_ragged_decode_with_several_tokens_and_idle_requests(self):
        self.check(self.problem(8, rows=(37, 5, 11, 71), queries=(2, 0, 3, 1)))

    def test_ragged_extend(self):
        """Requests longer than a block, shorter, and without tokens."""
        self.check(self.problem(9, rows=(149, 5, 0, 71), queries=(131, 0, 3, 67), num_pages=211))

    def test_tokens_of_no_request_are_padding(self):
        problem = self.problem(10, rows=(37, 11), queries=(5, 3))
        assert problem.query_offsets[-1] == 8
        out, lse = self.check(replace(problem, query_offsets=np.array([2, 5, 7], np.int32)))
        assert np.all(lse[[0, 1, 7]] == -np.inf)
        assert not out[[0, 1, 7]].any()

    def test_run_twice_bitwise(self):
        for queries in ((11, 3), (131, 31)):
            problem = self.problem(11, rows=(137, 37), queries=queries, num_pages=199)
            for first, second in zip(self.attend(problem), self.attend(problem), strict=True):
                assert np.array_equal(first, second)


_CACHE = {}


def _jitted(implementation, scale):
    """One compiled function per implementation and scale: cases of equal shapes share a program."""
    if (implementation, scale) not in _CACHE:
        _CACHE[implementation, scale] = jax.jit(
            partial(rotated_latent_attention, scale=scale, implementation=implementation)
        )
    return _CACHE[implementation, scale]
