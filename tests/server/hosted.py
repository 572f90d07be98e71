"""A real server with a real model in a thread of its own, so that clients may block."""

import asyncio
import threading

from tests.real_models import smollm2
from tinyserve import config
from tinyserve.engine.engine import Engine
from tinyserve.server.face import Service
from tinyserve.server.serve import Server, open_socket

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
KEY = "sesame"


class Hosted:
    """SmolLM2 as `smol`, with 1024 tokens of context, behind an API key. Options are the command line's."""

    def __init__(self, **options):
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.address = self._do(self._start(options))

    def _do(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(200)

    async def _start(self, options):
        settings = {"model": str(smollm2()), "port": 0, "served_model_name": ("smol",), "api_key": (KEY,),
                    "disable_log_stats": True, "use_tqdm_on_load": False, "max_model_len": 1024}  # fmt: skip
        made = config.build({**settings, **options})
        self._engine = await Engine.start(made)
        service = Service(made, self._engine)
        self._server = Server(service, open_socket(made.server))
        await self._server.start()
        return self._server.address

    def idle(self):
        stats = self._engine.stats()
        return (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)

    def stop(self):
        self._do(self._server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
