"""The model: configuration, weights from safetensors and GGUF, decoder, and runner over a paged KV pool.

config, files, gguf and tokenizer import no torch: the API process uses them. load, decoder and runner do.
A model that cannot be used ends as one ModelError line: what, where, what would be right.
"""
