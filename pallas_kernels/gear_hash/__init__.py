"""The hashes of content addressing on the accelerator: the rolling Gear hash of 64 tokens and xxHash64 of token ranges.

64-bit words are pairs of uint32 (``uint64.py``), so nothing needs ``jax_enable_x64``; values equal those of the host
forms (``irminsul.chunking``, ``irminsul.fingerprint``) bit for bit.

These are XLA programs and there is no Pallas kernel beside them. Six doubling steps of the rolling hash are shifts and
additions of whole arrays, and the hashes of 32,768 tokens are 256 KiB, as much as four pages of latents in one layer.
xxHash64 hashes all ranges side by side and takes as many steps as the longest of them has stripes. A kernel would gain
nothing that shows beside the attention of the tokens that are saved.
"""

GEAR_WINDOW = 64
"""Tokens the rolling hash sees: one per bit."""

SPLITMIX_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
SPLITMIX_LAST_SHIFT = 31
