"""Plans against an oracle in plain Python: what every row of the pool holds, kept in a dict beside the cache."""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from irminsul.cache import CacheConfig, new_cache
from irminsul.cache_key import request_key
from irminsul.chunking import ChunkingConfig
from irminsul.commit import PoolTooSmallError
from irminsul.content import extend_content, read_content
from irminsul.engine import Engine
from irminsul.fingerprint import key_bytes
from irminsul.page_tree import NONE, ORPHAN, ROOT
from irminsul.plan import EXACT, LAST, NEW, SHIFTED, SHORT, plan_prompt
from irminsul.policies import POLICIES, get_policy
from irminsul.prefill import complete, prefill
from models import families
from tests.irminsul.conftest import SMALL_CHUNKS, TINY_MLA
from tests.irminsul.serving import edits, prompts, random_tokens

LIMIT = 300
SPLIT_CHUNKS = dataclasses.replace(SMALL_CHUNKS, window_tokens=11, marker=(3, 1, 4, 1, 5, 9, 2, 6))
MANY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
EAGER = get_policy("irminsul", min_reuse=16, sink_tokens=8)
PLAIN = [policy for policy in POLICIES.values() if policy.repair == "none"]  # the others: test_repair.py


@dataclasses.dataclass(frozen=True)
class Row:
    """What one row of the pool holds: ``left`` are the tokens it was computed behind if those were all its own
    request's, computed or exact, and None if anything else stood there (or if it was decoded, where the policy is
    ``bitwise``)."""

    token: int
    base: int
    namespace: str
    left: tuple[int, ...] | None


class Oracle:
    """Rows by ``(page, row)``; checks each request against them before it writes its own."""

    def __init__(self, config: CacheConfig):
        self.cache = new_cache(config)
        self.rows: dict[tuple[int, int], Row] = {}

    def serve(self, tokens, policy, namespace="a", generated=(), reserved=0):
        serials = self.cache.tree.serial.copy()
        result = prefill(None, self.cache, tokens, policy, namespace=namespace, new_tokens=reserved)
        request, plan = result.request, result.request.plan
        namespace = f"{namespace}, bitwise={request.policy.bitwise}"  # policies that ask for less keep to themselves
        reused = self.check_spans(plan, request.policy, namespace)
        placed = self.check_entries(request, reused)
        self.forget_pages(result.cache.tree.serial != serials)
        assert not set(request.pages.tolist()) & {page for page, _ in self.rows}
        self.write(request, placed, reused, namespace, generated)
        self.check_parents(result.cache.tree, request, placed)
        serials = result.cache.tree.serial.copy()
        self.cache = complete(result.cache, request, np.asarray(generated, np.int32))
        self.forget_pages(self.cache.tree.serial != serials)
        self.check_tree()
        return plan

    def check_spans(self, plan, policy, namespace) -> dict[int, tuple[int, int]]:
        """Each position is covered once; what is reused holds the prompt's tokens. Returns the place of each."""
        tokens = plan.content.tokens.tolist()
        reused = {}
        end = 0
        for span in plan.spans:
            assert span.begin == end < span.end
            end = span.end
            position = span.begin
            for piece in span.pieces:
                assert piece.position == position
                for number in range(piece.row_begin, piece.row_end):
                    row = self.rows[piece.page, number]
                    assert (row.token, row.namespace) == (tokens[position], namespace)
                    if span.exact:
                        assert row.left == tuple(tokens[:position])
                    else:
                        assert min(position, row.base) >= policy.sink_tokens
                    reused[position] = (piece.page, number)
                    position += 1
            assert not span.pieces or position == span.end
            behind_exact = span.begin == int((plan.bin_of_token == EXACT).sum())
            assert span.computed or span.exact or span.end - span.begin * (not behind_exact) >= policy.min_reuse
        assert end == len(tokens)
        served = np.isin(plan.bin_of_token, (EXACT, SHIFTED))
        assert set(np.flatnonzero(served).tolist()) == set(reused)
        assert plan.bin_of_token[-1] == LAST
        assert sum(plan.bins.values()) == len(tokens)
        return reused

    def check_entries(self, request, reused) -> dict[int, tuple[int, int]]:
        """The page table shows each position once, at the base position of its row. Returns the place of each."""
        placed = {}
        for page, begin, end, target, base in request.entries.tolist():
            for step in range(end - begin):
                assert target + step not in placed
                placed[target + step] = (page, begin + step)
                stored = self.rows.get(reused.get(target + step), Row(0, target + step, "", None))
                assert base + step == (stored.base if request.policy.rotate else target + step)
        assert sorted(placed) == list(range(request.plan.length))
        return placed

    def write(self, request, placed, reused, namespace, generated):
        tokens = request.plan.content.tokens.tolist()
        shifted = np.flatnonzero(request.plan.bin_of_token == SHIFTED)
        pure_end = shifted[0] if len(shifted) else len(tokens)
        new = {}
        for record, page in zip(request.fresh, request.pages.tolist(), strict=True):
            for number in range(record.copied_rows):
                new[page, number] = self.rows[record.copied_from, number]
        for position, place in placed.items():
            if position not in reused:
                left = tuple(tokens[:position]) if position < pure_end else None
                new[place] = Row(tokens[position], position, namespace, left)
            elif place != reused[position]:
                assert new[place] == self.rows[reused[position]]
        for step, token in enumerate(generated):
            place = tuple(request.slots[step].tolist())
            assert place not in new
            exact = not request.policy.bitwise and not len(shifted)
            left = (*tokens, *generated[:step]) if exact else None
            new[place] = Row(token, len(tokens) + step, namespace, left)
        assert not set(new) & set(self.rows)
        self.rows |= new

    def check_parents(self, tree, request, placed):
        """The page to the left of a fresh page ends with the token before its first one."""
        length = request.plan.length
        place = dict(placed) | {length + i: tuple(slot) for i, slot in enumerate(request.slots.tolist())}
        for page, record in zip(request.pages.tolist(), request.fresh, strict=True):
            left = int(tree.parent[page]), int(tree.parent_end[page])
            if record.begin == 0:
                assert left == (ROOT, 0)
            elif left[0] != ORPHAN and not record.copied_rows:
                assert left == (place[record.begin - 1][0], place[record.begin - 1][1] + 1)
            elif record.copied_rows:
                assert left == (tree.parent[record.copied_from], tree.parent_end[record.copied_from])

    def forget_pages(self, gone):
        self.rows = {place: row for place, row in self.rows.items() if not gone[place[0]]}

    def check_tree(self):
        tree = self.cache.tree
        held = (tree.namespace >= 0)[:, None] & (np.arange(tree.page_size) < tree.fill[:, None])
        assert set(zip(*(axis.tolist() for axis in np.nonzero(held)), strict=True)) == set(self.rows)
        for (page, number), row in self.rows.items():
            assert tree.tokens[page, number] == row.token
            assert tree.base_position[page] + number == row.base
            assert row.left is not None or not tree.pure[page, number]
        for page in range(tree.num_pages):
            before, child = NONE, int(tree.first_child[page])
            while child != NONE:
                assert tree.parent[child] == page
                assert tree.parent_end[child] <= tree.fill[page]
                assert tree.namespace[child] == tree.namespace[page]
                assert tree.previous_sibling[child] == before
                before, child = child, int(tree.next_sibling[child])
        assert not self.cache.in_flight.any()


@st.composite
def sessions(draw):
    """Policies, prompts that edit earlier ones, tenants, responses."""
    turns = []
    seen = [draw(prompts(LIMIT))]
    for _ in range(draw(st.integers(1, 6))):
        tokens = draw(edits(draw(st.sampled_from(seen)), LIMIT))
        generated = random_tokens(draw(st.integers(0, 3)), draw(st.integers(0, 20))).tolist()
        policy = draw(st.sampled_from((EAGER, EAGER, *PLAIN)))
        turns.append((tokens, policy, draw(st.sampled_from("aab")), generated, draw(st.integers(0, 11))))
        seen.append(np.concatenate([tokens, np.array(generated, np.int32)]))
    return turns


def run(oracle, turns):
    for tokens, policy, namespace, generated, spare in turns:
        try:
            oracle.serve(tokens, policy, namespace, generated, len(generated) + spare)
        except PoolTooSmallError:
            empty = new_cache(oracle.cache.config)  # refused only if an empty pool would have to refuse it, too
            with pytest.raises(PoolTooSmallError):
                prefill(None, empty, tokens, "full", new_tokens=len(generated) + spare)


@MANY
@given(turns=sessions(), page_size=st.sampled_from((1, 13, 64)))
def test_law_9_every_position_once_and_every_row_what_it_claims(turns, page_size):
    config = CacheConfig(3001 // page_size, page_size, LIMIT, 31, chunking=SMALL_CHUNKS)
    run(Oracle(config), turns)


@MANY
@given(turns=sessions(), spare=st.integers(0, 20))
def test_law_9_under_memory_pressure(turns, spare):
    config = CacheConfig(-(-LIMIT // 13) + spare, 13, LIMIT, 31, chunking=SMALL_CHUNKS)
    run(Oracle(config), turns)


@settings(MANY, max_examples=20)
@given(turns=sessions())
def test_law_9_with_a_constant_hash(turns):
    """Every fingerprint is 7: whatever the hints say, no row is served for a token or a tenant it does not hold."""
    with pytest.MonkeyPatch.context() as patch:
        use_constant_hash(patch)
        run(Oracle(CacheConfig(97, 13, LIMIT, 31, chunking=SMALL_CHUNKS)), turns)


def constant_hash_content(tokens, config, key):
    return read_content(tokens, config, key, lambda data, seed: 7)


def use_constant_hash(patch):
    def extend(content, generated, config, key):
        return extend_content(content, generated, config, key, lambda data, seed: 7)

    patch.setattr("irminsul.prefill.read_content", constant_hash_content)
    patch.setattr("irminsul.prefill.extend_content", extend)


@MANY
@given(
    seed=st.integers(0, 2**32),
    split=st.integers(1, 2999),
    chunks=st.sampled_from([SMALL_CHUNKS, ChunkingConfig(), ChunkingConfig(8, 16, 40, 128, 16, 4), SPLIT_CHUNKS]),
)
def test_a_response_extends_what_was_read_of_the_prompt(seed, split, chunks):
    """As if prompt and response had been read as one; on periodic text, where only the clamps cut, too."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, 9973, 3000).astype(np.int32)
    tokens[1000:1900] = np.resize(tokens[:7], 900)
    for place in generator.integers(0, 2980, 20).tolist():
        tokens[place : place + len(SPLIT_CHUNKS.marker)] = SPLIT_CHUNKS.marker
    extended = extend_content(read_content(tokens[:split], chunks, b"key"), tokens[split:], chunks, b"key")
    whole = read_content(tokens, chunks, b"key")
    for field in dataclasses.fields(whole):
        np.testing.assert_array_equal(getattr(extended, field.name), getattr(whole, field.name), field.name)


@pytest.mark.parametrize("gap", [0, 1])
def test_matches_that_touch_are_as_long_as_their_span(gap):
    """Two runs of 40 and 47 tokens from two prompts: reused where they touch, computed where a token is between."""
    engine = Engine.create(None, CacheConfig(num_pages=61, page_size=16, chunking=ChunkingConfig(anchor_every=1)))
    left, right, header, middle = (
        random_tokens(0, 300),
        random_tokens(1, 300),
        random_tokens(2, 53),
        random_tokens(3, gap),
    )
    for tokens in (left, right):
        engine.serve(tokens)
    prompt = np.concatenate([header, left[101:141], middle, right[60:107], header[:7]])
    bins = engine.serve(prompt).bin_of_token
    assert (bins[53:93] == (SHORT if gap else SHIFTED)).all()
    assert (bins[93 + gap : 140 + gap] == (SHORT if gap else SHIFTED)).all()
    assert (bins[:53] == NEW).all()


# Law 11: who may share rows.

WEIGHTS = families.random_model({**TINY_MLA, "num_hidden_layers": 1, "first_k_dense_replace": 1})
OTHER_FIELDS = {
    "tenant": {"namespace": "bob"},
    "adapter": {"adapter": "lora"},
    "model digest": {"model": dataclasses.replace(WEIGHTS, digest="0123456789abcdef")},
    "row format": {
        "model": dataclasses.replace(WEIGHTS, config=dataclasses.replace(WEIGHTS.config, rope_interleave=False))
    },
    "storage": {"config": {"storage": "unrotated"}},
    "dtype": {"config": {"dtype": "bfloat16"}},
    "page size": {"config": {"page_size": 17}},
    "chunking": {"config": {"chunking": dataclasses.replace(SMALL_CHUNKS, seed=1)}},
    "mode": {"mode": "fast"},
    "context": {"context": "published"},
}


@pytest.mark.parametrize("constant_hash", [False, True])
@pytest.mark.parametrize("other", OTHER_FIELDS)
def test_law_11_others_never_hit(config, monkeypatch, other, constant_hash):
    """The same tree asked under a key that differs in one field. A constant hash makes every key find every hint."""
    if constant_hash:
        use_constant_hash(monkeypatch)
    read = constant_hash_content if constant_hash else read_content
    tokens = random_tokens(0, 300)
    shifted = np.concatenate([random_tokens(1, 41), tokens])
    owner = {"model": WEIGHTS, "namespace": "ada", "config": {}}
    cache = new_cache(config)
    monkeypatch.setattr("irminsul.sources.request_key", lambda *_: key_of(config, owner))
    result = prefill(None, cache, tokens)
    cache = complete(result.cache, result.request)

    def hits(fields, prompt):
        key = key_of(config, fields)
        owner_id = cache.namespaces.index(key) if key in cache.namespaces else len(cache.namespaces)
        content = read(prompt, config.chunking, key)
        window = config.chunking.anchor_window
        bins = plan_prompt(cache.tree, cache.registry, content, owner_id, get_policy("irminsul"), window).bins
        return bins["exact"], bins["shifted"]

    assert hits({**owner, **OTHER_FIELDS[other]}, tokens) == (0, 0)
    assert hits({**owner, **OTHER_FIELDS[other]}, shifted) == (0, 0)
    assert hits(owner, tokens) == (299, 0)
    if not constant_hash:
        assert hits(owner, shifted)[1] > 200


def key_of(config, fields):
    cache = new_cache(dataclasses.replace(config, **fields["config"]))
    return request_key(cache, **{"adapter": "", **{name: fields[name] for name in fields if name != "config"}})


def test_key_fields_do_not_run_into_each_other():
    assert key_bytes("ab", "c") != key_bytes("a", "bc")
