"""Functional models. They are handed a KV view and know nothing of pages, registries or policies."""

from models.checkpoint import load
from models.families import Model, RowFormat, preset, presets, random_model
from models.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Model", "RowFormat", "Tokenizer", "load", "load_tokenizer", "preset", "presets", "random_model"]
