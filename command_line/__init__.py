"""The command ``irminsul``: one module a sub-command, each of them a ``Command``."""
