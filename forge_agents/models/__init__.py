"""Model names and model folders.

`resolve.resolve` turns a name into a folder with weights, tokenizer and chat template. `gguf` unpacks the packaged
model, and `families.inspect_model` returns a model's properties.
"""
