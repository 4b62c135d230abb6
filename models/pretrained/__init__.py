"""Reference checkpoints that come with the project; ``models.checkpoint.load(name)`` reads them.

Each is a folder with ``config.json``, int8 weights by row in the published layout (``models.row_int8``), the course of
its training and a model card (``README.md``). They share one tokenizer. How they were trained: ``docs/corpus.md`` and
``experiments/configs/train_reference.py``.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
TOKENIZER = FOLDER / "irminsul-mini" / "tokenizer.json"


def names() -> list[str]:
    """The checkpoints there are."""
    return sorted(path.parent.name for path in FOLDER.glob("*/config.json"))
