"""An HTTP face of an engine, for trainers that speak SGLang's or vLLM's reinforcement-learning paths.

    rollsync http --engine 127.0.0.1:50051 --port 30000

It is a client of the engine like any other, in a process of its own, and adds nothing to what gRPC offers:
every token still carries its weight version, every update is refused or committed. Calls whose payload is a
pickle are refused, and the answer names the typed way. Needs the extra `http` (FastAPI, uvicorn).
"""

from trainers_adapters.http_facade.app import create_app

__all__ = ["create_app"]
