"""What the latent keeps of the stripped key components and the values.

The features of a token are the real pairs of its stripped slots, then the values of all key heads. Scaled by what an
error in each would cost, their leading principal directions lose least for a given rank.
"""

import numpy as np
from jaxtyping import Complex, Float

from models.convert.calibration import Statistics
from models.convert.key_basis import KeyBasis, query_energy
from models.convert.pairs import real_map
from models.families import Model
from models.gqa import GQAConfig

Latent = tuple[Float[np.ndarray, "L Y"], Float[np.ndarray, "L Y C"]]


def whole(config: GQAConfig, features: int) -> Latent:
    """Keeps every feature as it is."""
    layers = config.num_hidden_layers
    return np.ones((layers, features)), np.broadcast_to(np.eye(features), (layers, features, features))


def stripped(slots: np.ndarray, total: int) -> np.ndarray:
    """The slots of one layer that lost their rotation, in order."""
    return np.setdiff1d(np.arange(total), slots)


def full_mix(mix: Complex[np.ndarray, "P S S"], heads: int) -> Complex[np.ndarray, "J F JF"]:
    """One layer's basis over all frequencies: ``k_{g,f} = sum_s out[g, f, s] k'_s``."""
    folds, size, _ = mix.shape
    fold = size // heads
    out = np.zeros((heads, folds, fold, folds, size), complex)
    for index in range(folds):
        out[:, index, :, index] = mix[index].reshape(heads, fold, size)
    return out.reshape(heads, folds * fold, folds * size)


def error_weighted(model: Model, statistics: Statistics, basis: KeyBasis, rank: int) -> Latent:
    """Principal directions of features scaled by the cost of their errors.

    A key component counts by the energy of the queries that meet it, a value component by the norm of its column of the
    output projection over the heads of its group; both kinds are brought to one total energy, since a score's error and
    an output's have no common unit.
    """
    found = [_layer(model, statistics, basis, layer, rank) for layer in range(len(statistics.rows))]
    scales, vectors = zip(*found, strict=True)
    return np.stack(scales), np.stack(vectors)


def _layer(model: Model, statistics: Statistics, basis: KeyBasis, layer: int, rank: int) -> tuple:
    config: GQAConfig = model.config
    heads, width = config.num_key_value_heads, config.head_dim
    mix = full_mix(basis.mix[layer], heads)
    left = stripped(basis.slots[layer], mix.shape[-1])
    extract = real_map(np.linalg.inv(mix.reshape(-1, mix.shape[-1]))[left])  # [2 stripped, J K]
    features = np.zeros((len(extract) + heads * width, 2 * heads * width))
    features[: len(extract), : heads * width] = extract
    features[len(extract) :, heads * width :] = np.eye(heads * width)
    moment = features @ statistics.rows[layer] @ features.T
    damped = np.abs(basis.damping[layer]).reshape(heads, -1, width // 2) ** 2
    met = (query_energy(statistics, config)[layer] * damped).sum(axis=1)  # [J, F]
    of_keys = np.repeat(np.einsum("JFS,JF->S", np.abs(mix[..., left]) ** 2, met), 2)
    out = np.asarray(model.params["layers"]["attention"]["out"][layer], np.float64)
    of_values = np.square(out).sum(axis=-1).reshape(heads, -1, width).sum(axis=1).reshape(-1)
    energy = np.diagonal(moment)
    keys_total = (of_keys * energy[: len(of_keys)]).sum()
    values_total = (of_values * energy[len(of_keys) :]).sum()
    scale = np.sqrt(np.concatenate([of_keys / keys_total, of_values / values_total]))
    scale /= np.sqrt(np.mean(np.square(scale)))
    # A component that nothing ever meets still needs an inverse.
    scale = np.maximum(scale, 1e-4)
    _, vectors = np.linalg.eigh(scale[:, None] * moment * scale)
    return scale, vectors[:, ::-1][:, :rank]
