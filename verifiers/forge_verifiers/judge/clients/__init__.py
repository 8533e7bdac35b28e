"""Who answers a judge's questions: our own engine, or an endpoint.

In: chats. Out: answers, with logprobs where there are any. Waits for: the engine or the endpoint, with deadlines.
"""
