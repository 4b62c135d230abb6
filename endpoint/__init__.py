"""An OpenAI-compatible endpoint over the content cache: one process, one model, for research and for reading."""
