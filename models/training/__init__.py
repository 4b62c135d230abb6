"""Training of small models: a KV view for long sequences, deterministic batches, a resumable loop."""
