"""The commands of `python -m tinyserve`: one file each, none of which is needed to embed the engine."""
