"""Trains the byte-level BPE tokenizer that the reference models share.

    python tools/corpus/train_tokenizer.py --work=DIR --out=models/pretrained/irminsul-mini

Digits stand alone, so a planted code is one token a digit. Special tokens come first: their ids never change.
"""

import argparse
import json
import random
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Letters with one leading space, single digits, runs of other signs, white space: as in recent byte-level vocabularies.
SPLIT = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def train(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer without any unknown token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(SPLIT, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab_size", type=int, default=8192)
    parser.add_argument("--megabytes", type=float, default=60, help="training text, drawn evenly from the corpus")
    arguments = parser.parse_args()
    texts = [json.loads(line)["text"] for line in (arguments.work / "train.jsonl").open(encoding="utf-8")]
    random.Random(0).shuffle(texts)
    share = min(1.0, arguments.megabytes * 1e6 / sum(map(len, texts)))
    tokenizer = train(texts[: int(len(texts) * share)], arguments.vocab_size)
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(arguments.out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 4096,
    }
    (arguments.out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
