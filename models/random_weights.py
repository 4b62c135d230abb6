"""Random weights of shapes too large for a host to draw: 16 billion parameters in seconds, where they are needed."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from models.families import Family, Model, Parameter, is_parameter, read_config


def init_on_device(family: Family, config: Any, seed: int = 0, dtype: Any = jnp.bfloat16) -> Any:
    """Random parameters started as ``families.init`` starts them, from other draws.

    One program draws all of them, stacks a layer at a time, so that float32 never takes more than one layer of one
    parameter.
    """
    wanted, structure = jax.tree.flatten(family.parameters(config), is_leaf=is_parameter)

    def draw(key: Array, parameter: Parameter) -> Array:
        kind, shape = parameter.dtype or dtype, parameter.shape
        if parameter.start != "normal":
            return (jnp.ones if parameter.start == "ones" else jnp.zeros)(shape, kind)
        deviation = parameter.gain / math.sqrt(parameter.fan_in)

        def part(key: Array, shape: tuple[int, ...]) -> Array:
            return (deviation * jax.random.normal(key, shape, jnp.float32)).astype(kind)

        if len(shape) < 3:
            return part(key, shape)
        return jax.lax.map(lambda key: part(key, shape[1:]), jax.random.split(key, shape[0]))

    @jax.jit
    def draw_all(key: Array) -> list[Array]:
        return [draw(jax.random.fold_in(key, index), parameter) for index, parameter in enumerate(wanted)]

    return jax.tree.unflatten(structure, draw_all(jax.random.key(seed)))


def random_model_on_device(source: Any, seed: int = 0, dtype: Any = jnp.bfloat16, **overrides: Any) -> Model:
    """A model with random weights that never pass the host, named by its seed instead of a hash of its weights.

    Arguments and errors are those of ``families.random_model``.
    """
    family, config = read_config(source, **overrides)
    params = init_on_device(family, config, seed, dtype)
    name = f"random {seed} {jnp.dtype(dtype)} {sorted(family.config_to_dict(config).items())}"
    return Model(params, family.rotary(config), config, family, name)
