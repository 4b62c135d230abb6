"""What the two forms of latent attention cost, so that a caller can take the cheaper one.

Counted in floating-point operations, with every query seeing every row. Letters as in ``page_table.py``, ``K`` and
``V`` the widths of a head's key (without its rotary part) and value. With many rows the expanded form takes fewer
beyond ``C (K + V) / (2 C - K - V)`` queries, whatever the heads: 73 for C = 512, K = V = 64, and 171 for K = V = 128.
Counting suffices on a CPU: both forms spend their time in matrix products and pass over equally many scores. Measured
on two Xeon cores (float32, H = 8, C = 512, K = V = R = 64, 4096 rows), time of absorbed over time of expanded, and the
ratio of the counts:

    queries    16     64    128    256    512   1024   2048
    measured  0.33   0.87   1.22   2.2    3.0    3.6    4.0
    counted   0.26   0.91   1.57   2.5    3.5    4.3    4.9

On one H200 (bfloat16, C = 512, K = V = 128, R = 64, a new distance every 8 pages; ``docs/benchmarks``), time of the
absorbed kernel over that of ``expanded_hopper.py`` end to end in parts of 16,384 rows, and the ratio of the counts:

    heads    16     16     16     16     128    128
    queries  128    128    1024   1024   128    1024
    rows     8320   32896  9216   33792  8320   33792
    measured 0.27   0.26   1.6    1.9    0.69   2.2
    counted  0.82   0.81   2.5    2.4    0.82   2.4

There the expanded form needs 128 queries times heads in plenty: 16 heads of 128 queries occupy 16 of 132 processors.
"""


def absorbed_flops(
    queries: int, rows: int, *, heads: int, latent_width: int, key_width: int, value_width: int, rope_width: int
) -> int:
    """Scores over ``C + R`` and values over ``C``, and ``W_UK`` and ``W_UV`` applied to every query."""
    attention = queries * rows * (2 * latent_width + rope_width)
    absorption = queries * latent_width * (key_width + value_width)
    return 2 * heads * (attention + absorption)


def expanded_flops(
    queries: int, rows: int, *, heads: int, latent_width: int, key_width: int, value_width: int, rope_width: int
) -> int:
    """Scores over ``K + R`` and values over ``V``, and ``W_UK`` and ``W_UV`` applied to every row."""
    attention = queries * rows * (key_width + rope_width + value_width)
    projection = rows * latent_width * (key_width + value_width)
    return 2 * heads * (attention + projection)
