"""A language model as a judge. `judge` is the verifier, `prompts` its questions, `clients` the models that answer."""
