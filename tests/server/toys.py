"""Services around a real engine without a model, whose next token is a rule of the tokens before."""

from contextlib import asynccontextmanager

from tests.engine.toy import letters, make_parts, start
from tinyserve import config
from tinyserve.server.face import Service
from tinyserve.text.template import ChatTemplate

FIRST = ChatTemplate("{{ messages[0].content }}")
ALL = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")


@asynccontextmanager
async def toy_service(rule=letters, *, server=None, template=FIRST, **options):
    """A service; its engine ends with the block. server: options of the server.   options: of the engine's."""
    engine = await start(rule, parts=make_parts(template=template, served_names=("toy",)), **options)
    try:
        yield Service(config.build({"model": "toy", **(server or {})}), engine)
    finally:
        await engine.close()
