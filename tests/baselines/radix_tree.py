"""A radix tree over token ids, token-granular, in the manner of SGLang's RadixAttention: the exact-prefix baseline.

Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", NeurIPS 2024, section 3. Children are
found by their first token; an edge that is left half-way is split. Values are the row indices of the tokens.
"""

import numpy as np


class RadixNode:
    def __init__(self, key: np.ndarray, value: np.ndarray):
        self.key, self.value = key, value
        self.children: dict[int, RadixNode] = {}


class RadixTree:
    def __init__(self):
        self.root = RadixNode(np.empty(0, np.int32), np.empty(0, np.int64))

    def match_prefix(self, tokens: np.ndarray) -> np.ndarray:
        """The values of the longest stored prefix of `tokens`."""
        node, values = self.root, [self.root.value]
        while tokens.size and (child := node.children.get(int(tokens[0]))):
            shared = _common_prefix(child.key, tokens)
            values.append(child.value[:shared])
            if shared < child.key.size:
                break
            node, tokens = child, tokens[shared:]
        return np.concatenate(values)

    def insert(self, tokens: np.ndarray, values: np.ndarray) -> int:
        """Stores `tokens` with their `values`; returns how many were there already, whose old values stay."""
        node, present = self.root, 0
        while tokens.size:
            child = node.children.get(int(tokens[0]))
            if child is None:
                node.children[int(tokens[0])] = RadixNode(tokens.copy(), values.copy())
                break
            shared = _common_prefix(child.key, tokens)
            present += shared
            if shared < child.key.size:
                self._split(node, child, shared)
                child = node.children[int(tokens[0])]
            node, tokens, values = child, tokens[shared:], values[shared:]
        return present

    def _split(self, parent: RadixNode, child: RadixNode, at: int) -> None:
        upper = RadixNode(child.key[:at], child.value[:at])
        child.key, child.value = child.key[at:], child.value[at:]
        upper.children[int(child.key[0])] = child
        parent.children[int(upper.key[0])] = upper


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    length = min(a.size, b.size)
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length
