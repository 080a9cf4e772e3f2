"""The trainer: a byte-level language model, trained as a pipeline on text found on every machine."""
