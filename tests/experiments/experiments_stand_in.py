"""An engine with the interface of ``irminsul.engine.Engine`` and none of its machinery, for tests of the studies."""

from types import SimpleNamespace

import numpy as np

BINS = ("exact", "shifted", "new", "short", "sink", "last", "repair", "refused", "evicted")
VOCABULARY = 31


class StandInEngine:
    """Finds prefixes and 64-token windows by brute force; logits are noise seeded by all tokens read so far."""

    def __init__(self, model, config, policy, mode):
        self.model, self.config, self.policy = model, config, policy
        self.streams: dict[str, list[list[int]]] = {}
        self.served: list[tuple[str, int]] = []

    @classmethod
    def create(cls, model, config, policy="irminsul", mode="fast"):
        return cls(model, config, policy, mode)

    def serve(self, tokens, namespace="default", continuation=None, max_new_tokens=0):
        tokens = [int(token) for token in tokens]
        assert 0 < len(tokens) <= self.config.max_prompt_tokens
        self.served.append((namespace, len(tokens)))
        bins = self._bins(tokens, self.streams.get(namespace, []))
        steps, text = [], list(tokens)
        forced = [] if continuation is None else [int(token) for token in continuation]
        assert max(len(forced), max_new_tokens) <= self.config.max_new_tokens
        while self.model is not None and len(steps) < (len(forced) or max_new_tokens):
            steps.append(self._logits(text))
            text.append(forced[len(steps) - 1] if forced else int(steps[-1].argmax()))
        if self.policy != "full":
            self.streams.setdefault(namespace, []).append(tokens + (forced or text[len(tokens) :]))
        names = np.array(bins)
        return SimpleNamespace(
            bins={name: int((names == name).sum()) for name in BINS},
            bin_of_token=np.array([BINS.index(name) for name in bins], np.int8),
            logits=None if self.model is None else self._logits(tokens),
            tokens=text[len(tokens) :],
            step_logits=np.array(steps) if steps else None,
            timings={
                "plan_ms": 0.5,
                "prefill_ms": 1.0,
                "register_ms": 0.25,
                "ttft_ms": 2.0 + sum(names == "new") / 100,
            },
        )

    def _bins(self, tokens, streams):
        bins = ["new"] * len(tokens)
        if self.policy in ("naive", "irminsul"):
            seen = {tuple(s[i : i + 64]) for s in streams for i in range(len(s) - 63)}
            for i in range(len(tokens) - 63):
                if tuple(tokens[i : i + 64]) in seen:
                    bins[i : i + 64] = ["shifted"] * 64
        if self.policy != "full":
            for stream in streams:
                length = next((i for i, (a, b) in enumerate(zip(tokens, stream, strict=False)) if a != b), len(stream))
                bins[:length] = ["exact"] * min(length, len(tokens))
        bins[-1] = "last"
        return bins

    def _logits(self, text):
        noise = np.random.default_rng(sum(text) + 7 * len(text)).normal(size=VOCABULARY)
        wrong = np.random.default_rng(len(text)).normal(size=VOCABULARY)
        return (noise + (3 * wrong if self.policy == "naive" else 0)).astype(np.float32)
