"""What a model's name stands for: a folder, a hub's name, a file of weights.

In: a name. Out: a folder with weights, a tokenizer and a chat template. Waits for: the hub, when the name is one.
Start at `resolve.resolve`; `gguf` unpacks the model that comes as a package; `families.known` tells what a folder's
model is.
"""
