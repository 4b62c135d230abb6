"""Runs in a process of its own, which sees eight devices: writes what one device and a mesh compute as JSON."""

import json
import math
import os
import re
import sys
import tempfile
from pathlib import Path

# Nearly all of the time here is compilation, whose last steps do not matter to what is shown.
os.environ["XLA_FLAGS"] = " ".join(
    (
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    )
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from irminsul import decode
from irminsul.blocks import cost_model
from irminsul.cache import CacheConfig, new_cache
from irminsul.compute import run_prefill
from irminsul.engine import Engine
from irminsul.policies import get_policy
from irminsul.prefill import admit, pack_batch
from irminsul.rope import check_rotation
from models import checkpoint, families, sharded_checkpoint, sharding, slab_reader
from models.kv_view import DenseView

VOCABULARY = 64
LATENT = {
    "model_type": "deepseek_v2",
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "intermediate_size": 20,
    "max_position_embeddings": 512,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 12,
}
GROUPED = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 20,
    "max_position_embeddings": 512,
}
SPARSE = {
    **{name: value for name, value in LATENT.items() if not name.endswith(("experts", "per_tok", "replace"))},
    "model_type": "deepseek_v32",
    "first_k_dense_replace": 2,
    "q_lora_rank": 10,
    "index_n_heads": 3,
    "index_head_dim": 8,
    "index_topk": 24,  # of 149 rows, some 37 on a device
}
SPARSE_MESH = {"tensor": 2, "sequence": 4}
CASES = {
    "latent": (LATENT, {"expert": 2, "tensor": 2, "sequence": 2}),
    "grouped": (GROUPED, {"data": 2, "tensor": 2, "sequence": 2}),  # the second of two engines
}
CACHE = CacheConfig(num_pages=32, page_size=16, max_prompt_tokens=192, max_new_tokens=4)


def mesh_of(shape):
    return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def prompts():
    draw = np.random.default_rng(0)
    first = draw.integers(0, VOCABULARY, 149)
    return first, np.concatenate([draw.integers(0, VOCABULARY, 23), first[20:]])


def uncached(model):
    tokens = jnp.asarray(prompts()[0][:37], jnp.int32)
    positions = jnp.arange(37, dtype=jnp.int32)
    forward = jax.jit(lambda model: model.unembed(model.forward(tokens, positions, DenseView(positions))[0]))
    logits = forward(model)
    assert logits.sharding.is_fully_replicated  # or a process of several could not read them
    return np.asarray(logits)


def cached(model, new_tokens=2):
    engine = Engine(model, new_cache(CACHE, model.row_format), get_policy("irminsul"), "deterministic")
    served = [engine.serve(prompt, max_new_tokens=new_tokens) for prompt in prompts()]
    steps = [[one.logits] if one.step_logits is None else [one.logits, *one.step_logits] for one in served]
    return np.asarray(steps), [one.bins["shifted"] for one in served]


def decoded(model):
    """What ``cached`` gives, and the arguments of its first step of decoding, as shapes."""
    step, calls = decode.decode_step, []

    def recorded(*args, **kwargs):
        leaves = jax.tree.leaves(args)
        placed = [leaf.sharding if getattr(leaf, "committed", False) else None for leaf in leaves]
        shapes = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
            for leaf, place in zip(leaves, placed, strict=True)
        ]
        calls.append((jax.tree.unflatten(jax.tree.structure(args), shapes), kwargs))
        return step(*args, **kwargs)

    decode.decode_step = recorded
    served = cached(model)
    decode.decode_step = step
    return served, calls[0]


def program_of_prefill(model):
    cache = new_cache(CACHE, model.row_format)
    admission = admit(model, cache, prompts()[0], "irminsul", mode="deterministic")
    pool = admission.cache.pool
    return pool, run_prefill.lower(
        model, pool, pack_batch(admission.cache, admission.placement, admission.request),
        blocks=admission.blocks, cost=cost_model(model), storage="base", keep_hidden=False,
    ).compile()  # fmt: skip


def largest_move(pool, compiled):
    """Bytes of the largest result of a collective that moves arrays as they are (sums are of tokens, not of rows), of a
    page of the pool's largest array, of one device's pool, and of what is aliased."""
    moves = re.findall(r"= (.+?) (?:all-gather|all-to-all|ragged-all-to-all|collective-permute)", compiled.as_text())
    found = [re.findall(r"([a-z]+)(\d*)\[([\d,]*)\]", result) for result in moves]
    sizes = [
        sum(int(bits or 8) // 8 * math.prod(map(int, filter(None, lengths.split(",")))) for _, bits, lengths in arrays)
        for arrays in found
    ]
    local = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(pool))
    page = max(leaf.nbytes // CACHE.num_pages for leaf in jax.tree.leaves(pool))
    return max(sizes, default=0), page, local, compiled.memory_analysis().alias_size_in_bytes


def loaded(model, mesh, folder):
    """Whether a published checkpoint read part by part, and one of orbax restored on another mesh, are the model."""
    checkpoint.save_safetensors(model, folder / "published")
    checkpoint.save(model, folder / "own")
    other = mesh_of({"tensor": 2})
    slab_reader.SLAB_BYTES = 256  # so that tensors are cut
    read = sharded_checkpoint.load_sharded(folder / "published", mesh, jnp.float32, digest="revision")
    back = sharded_checkpoint.restore_sharded(folder / "own", other, jnp.float32, digest="revision")
    placed = sharding.shard(model, mesh)
    same = [
        all(
            np.array_equal(a, b)
            for a, b in zip(jax.tree.leaves(model.params), jax.tree.leaves(one.params), strict=True)
        )
        for one in (read, back)
    ]
    where = all(
        a.sharding.is_equivalent_to(b.sharding, a.ndim)
        for a, b in zip(jax.tree.leaves(read.params), jax.tree.leaves(placed.params), strict=True)
    )
    return {"read": same[0], "restored": same[1], "placed": where}


def sparse():
    """Logits of sparse attention on one device and on a mesh, and rows reused."""
    model, mesh = families.random_model(SPARSE, seed=2), mesh_of(SPARSE_MESH)
    one, shifted = cached(model, 0)
    with jax.set_mesh(mesh):
        many, shifted_on_mesh = cached(sharding.shard(model, mesh), 0)
    return {"cached": float(np.max(np.abs(one - many))), "shifted": [shifted, shifted_on_mesh]}


def main():
    results = {"sparse": sparse()}
    for name, (config, shape) in CASES.items():
        model, mesh = families.random_model(config, seed=1), sharding.replicas(mesh_of(shape))[-1]
        one, (one_cached, shifted) = uncached(model), cached(model)
        with jax.set_mesh(mesh):
            split = sharding.shard(model, mesh)
            many, ((many_cached, shifted_on_mesh), (args, kwargs)) = uncached(split), decoded(split)
            whole, prefill = program_of_prefill(split)
            gathered, page, pool, aliased = largest_move(whole, prefill)
            step_moves, *_, step_aliased = largest_move(whole, decode.decode_step.lower(*args, **kwargs).compile())
            moved = check_rotation(split, CACHE) if name == "latent" else 0.0  # what ``Engine.create`` does first
        with tempfile.TemporaryDirectory() as folder:
            results[name] = {
                "uncached": float(np.max(np.abs(one - many))),
                "cached": float(np.max(np.abs(one_cached - many_cached))),
                "shifted": [shifted, shifted_on_mesh],
                "gathered_pages": gathered / page / shape["sequence"],
                "moved": moved,
                "pool": pool,
                "aliased": aliased,
                "step_pages": step_moves / page / shape["sequence"],
                "step_aliased": step_aliased,
                **loaded(model, mesh, Path(folder)),
            }
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
