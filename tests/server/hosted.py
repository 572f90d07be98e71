"""A real server with a real model in a thread of its own, so that clients may block."""

from contextlib import contextmanager

from tests.real_models import smollm2
from tests.served import in_thread
from tinyserve import config
from tinyserve.engine.engine import Engine
from tinyserve.server.face import Service

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
KEY = "sesame"


@contextmanager
def hosting(**options):
    """The Server of SmolLM2 as `smol`, with 1024 tokens of context, behind an API key. options: the command line's."""
    settings = {"model": str(smollm2()), "port": 0, "served_model_name": ("smol",), "api_key": (KEY,),
                "disable_log_stats": True, "use_tqdm_on_load": False, "max_model_len": 1024}  # fmt: skip

    async def make():
        made = config.build({**settings, **options})
        return Service(made, await Engine.start(made))

    with in_thread(make) as server:
        yield server
