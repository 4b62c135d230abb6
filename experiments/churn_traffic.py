"""Prompts that come back changed: documents in another order, holes, repeats, near-periodic text, planted secrets.

A prompt is a list of blocks, so that an edit can move a whole document, cut inside one, or take a secret out and leave
nothing of it behind.
"""

import dataclasses

import numpy as np

TENANTS = 4
PUBLIC = "everybody"  # where documents are published
STORED = ("tenant 0",)  # whose pages go to the tiers
NO_SECRET = -1
SECRETS = 48  # a bit each


@dataclasses.dataclass(frozen=True)
class Block:
    """Tokens that stay together unless an edit cuts them; ``secret`` is a bit number, or ``NO_SECRET``."""

    tokens: np.ndarray
    secret: int = NO_SECRET


def tokens_of(blocks: list[Block]) -> np.ndarray:
    """The prompt, int32."""
    return np.concatenate([block.tokens for block in blocks]).astype(np.int32)


def secrets_of(blocks: list[Block]) -> np.ndarray:
    """``uint64 [T]``: the bit of the secret each token belongs to."""
    bits = [np.uint64(0) if block.secret == NO_SECRET else np.uint64(1 << block.secret) for block in blocks]
    return np.repeat(np.array(bits, np.uint64), [len(block.tokens) for block in blocks])


class Traffic:
    """The prompts of several tenants who share documents and nothing else.

    ``history`` keeps each tenant's latest prompts; ``secrets`` those that are planted somewhere.
    """

    def __init__(self, seed: int, tenants: int, vocab_size: int, limit: int, *, documents: int = 16, kept: int = 6):
        rng = np.random.default_rng((seed, 0, 2))  # not that of an operation, whose secrets would be parts of documents
        self.vocab_size, self.limit, self.kept = vocab_size, limit, kept
        self.documents = [self._document(rng) for _ in range(documents)]
        self.history: list[list[list[Block]]] = [[] for _ in range(tenants)]
        self.secrets: dict[int, np.ndarray] = {}

    def _random(self, rng: np.random.Generator, low: int, high: int) -> np.ndarray:
        return rng.integers(0, self.vocab_size, rng.integers(low, high), dtype=np.int32)

    def _document(self, rng: np.random.Generator) -> Block:
        """Random, or nearly periodic like a list of files."""
        if rng.random() < 0.75:
            return Block(self._random(rng, 20, 90))
        text = np.resize(self._random(rng, 5, 17), rng.integers(40, 90)).astype(np.int32)
        text[rng.integers(0, len(text), 4)] = rng.integers(0, self.vocab_size, 4)
        return Block(text)

    def prompt(self, rng: np.random.Generator, tenant: int) -> list[Block]:
        """The next prompt of a tenant."""
        past = self.history[tenant]
        kind = rng.choice(["new", "repeat", "edit", "permute", "secret"], p=[0.2, 0.15, 0.4, 0.15, 0.1])
        if not past or kind == "new":
            order = rng.permutation(len(self.documents))[: rng.integers(1, 5)]
            blocks = [Block(self._random(rng, 3, 40)), *(self.documents[index] for index in order)]
        else:
            blocks = list(past[rng.integers(len(past))])
        if kind == "edit":
            for _ in range(rng.integers(1, 5)):
                blocks = self._edit(rng, blocks)
        elif kind == "permute":
            blocks = [blocks[index] for index in rng.permutation(len(blocks))]
        elif kind == "secret":
            blocks.insert(int(rng.integers(len(blocks) + 1)), self._secret(rng))
        return self._cut(blocks)

    def remember(self, tenant: int, blocks: list[Block], generated: list[int]) -> None:
        """Keeps a prompt and its response for later ones to change."""
        if generated:
            blocks = [*blocks, Block(np.array(generated, np.int32))]
        self.history[tenant] = [*self.history[tenant], blocks][-self.kept :]

    def forget(self, secret: int) -> None:
        """Takes a secret out of every prompt to come."""
        del self.secrets[secret]
        self.history = [
            [kept for blocks in past if (kept := [block for block in blocks if block.secret != secret])]
            for past in self.history
        ]

    def _secret(self, rng: np.random.Generator) -> Block:
        """A secret that is planted already, or a new one while there are bits."""
        free = [bit for bit in range(SECRETS) if bit not in self.secrets]
        if self.secrets and (not free or rng.random() < 0.5):
            bit = int(rng.choice(list(self.secrets)))
        elif free:
            bit = free[0]
            self.secrets[bit] = self._random(rng, 20, 40)
        return Block(self.secrets[bit], bit)

    def _edit(self, rng: np.random.Generator, blocks: list[Block]) -> list[Block]:
        """One hole: a block moved, dropped, repeated or replaced, or some tokens of one inserted, deleted, replaced."""
        at = int(rng.integers(len(blocks)))
        block, before, after = blocks[at], blocks[:at], blocks[at + 1 :]
        kind = rng.choice(["move", "drop", "repeat", "replace", "inside"], p=[0.15, 0.1, 0.1, 0.1, 0.55])
        if kind == "move":
            rest = before + after
            place = int(rng.integers(len(rest) + 1))
            return [*rest[:place], block, *rest[place:]]
        if kind == "drop" and len(blocks) > 1:
            return before + after
        if kind == "repeat":
            return [*before, block, block, *after]
        if kind == "replace" or block.secret != NO_SECRET:
            return [*before, self.documents[rng.integers(len(self.documents))], *after]
        begin, length = int(rng.integers(len(block.tokens) + 1)), int(rng.integers(0, 12))
        new = rng.integers(0, self.vocab_size, rng.integers(0, 12), dtype=np.int32)
        edited = np.concatenate([block.tokens[:begin], new, block.tokens[begin + length :]])
        return [*before, Block(edited), *after] if len(edited) else blocks

    def _cut(self, blocks: list[Block]) -> list[Block]:
        """The blocks that fit, the last of them cut; a secret is kept whole or left out."""
        kept, room = [], self.limit
        for block in blocks:
            if len(block.tokens) <= room:
                kept.append(block)
            elif room and block.secret == NO_SECRET:
                kept.append(Block(block.tokens[:room]))
            room = max(0, room - len(block.tokens))
        return kept
