"""Grouped-query and multi-head attention rewritten as Multi-Head Latent Attention, without training.

Three steps, each a pure function: ``calibrate`` runs the original over text and keeps second moments of its queries,
keys and values; ``convert`` chooses from them which rotary components stay rotated and what the latent keeps;
``apply`` folds that choice into the original's weights. The choice is small beside the weights (``save``, ``load``),
so a converted model can be shipped as a delta to public ones, or exported whole with
``models.checkpoint.save_safetensors`` as ``model_type`` "converted_mla".
"""

from models.convert.calibration import Statistics, calibrate, token_blocks
from models.convert.conversion import METHODS, Conversion, convert, load, save
from models.convert.fold import apply

__all__ = ["METHODS", "Conversion", "Statistics", "apply", "calibrate", "convert", "load", "save", "token_blocks"]
