"""For the documentation site: the section ``Fields`` of a docstring is shown as a list, as ``Attributes`` are."""

from typing import Any

import griffe


class FieldsAreAttributes(griffe.Extension):
    """Renames the section before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every object once its docstring is known."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nFields:\n", "\nAttributes:\n")
