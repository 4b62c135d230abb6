"""Sparse latent attention (DSA): an indexer ranks the tokens in view, and attention reads the highest."""
