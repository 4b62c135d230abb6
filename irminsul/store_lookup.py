"""Which stored pages a prompt wants: those of its plan over the catalog where the plan over the pool has none as good.

The catalog has the form of a cache, so both are the plan that ``prefill`` makes, over all that the request may read.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Int32

from irminsul.cache import ContentCache, open_namespace
from irminsul.commit import pages_in_use
from irminsul.content import PromptContent, read_content
from irminsul.plan import ReusePlan, plan_prompt
from irminsul.policies import Policy
from irminsul.sources import Sources, readable
from irminsul.store_catalog import Catalog, Entry
from irminsul.store_pool import PoolPages, better_pages, pages_written


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Stored pages to bring, in prompt order; pages of the pool that must stay; the clock of the cache of which this is
    true; for how many pages there is no room."""

    entries: list[Entry]
    keep: Bool[np.ndarray, " N"]
    clock: int
    left_out: int = 0


def wanted_pages(
    cache: ContentCache,
    catalog: Catalog,
    pages: PoolPages,
    sources: Sources,
    tokens: Int32[np.ndarray, " T"],
    policy: Policy,
    new_tokens: int,
) -> Wanted:
    """What ``prefill`` would be served from if it were in the pool. Marks as used what the prompt uses of the catalog,
    and gives pages of the pool their left context back where it has come back."""
    tree, in_flight = cache.tree, cache.in_flight > 0
    owners = [catalog.owner(key) for key in sources.keys]
    if not np.isin(catalog.tree.namespace, owners).any():
        return Wanted([], in_flight, cache.clock)
    content = read_content(tokens, cache.config.chunking, sources.key)
    pooled, pooled_paths = _plan(cache, content, sources, policy)
    used = pages_in_use(tree, pooled)
    used[[page for path in pooled_paths for page in path]] = True
    names = [pages.name(page, cache) for page in np.flatnonzero(used).tolist()]
    catalog.touch([catalog.entries[name].slot for name in names if name in catalog.entries])
    if pooled.bins["exact"] == len(tokens) - 1:
        return Wanted([], in_flight, cache.clock)
    stored, stored_paths = _plan(catalog.cache, content, sources, policy)
    paths = [path for path, there in zip(stored_paths, pooled_paths, strict=True) if not there]
    slots = dict.fromkeys([*better_pages(stored, pooled), *(slot for path in paths for slot in path)])
    entries = [catalog.at(slot) for slot in slots]
    catalog.touch([entry.slot for entry in entries])
    pages.adopt(tree, entries)
    keep = used | in_flight | tree.pinned
    keep[[page for entry in entries if (page := pages.page(entry.name, tree)) is not None]] = True
    missing = [entry for entry in entries if pages.page(entry.name, tree) is None]
    room = max(0, tree.num_pages - int(keep.sum()) - pages_written(catalog.tree, stored, policy, new_tokens))
    return Wanted(missing[:room], keep, cache.clock, len(missing[room:]))


def _plan(
    cache: ContentCache, content: PromptContent, sources: Sources, policy: Policy
) -> tuple[ReusePlan, list[list[int]]]:
    """The plan of a prompt over the pool or the catalog, and for each chunk that rows behind the sink may serve the
    pages of its path, the sink's own included, if there is one."""
    config = cache.config
    cache, owner = open_namespace(cache, sources.key)
    published = readable(cache, sources.published, content.tokens)
    reads = sources.isolated.reads(cache, content, policy) if sources.isolated else []
    spans = tuple(span for span, _ in reads)  # those without rows as well: the exact prefix ends before the first
    plan = plan_prompt(
        cache.tree, cache.registry, content, owner, policy, config.chunking.anchor_window, config.planned_entries,
        published, spans,
    )  # fmt: skip
    return plan, [[piece.page for piece in path] for _, path in reads]
