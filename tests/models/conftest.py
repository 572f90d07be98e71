"""Checkpoints that several tests of a file read."""

import pytest

from tests import moe_configs, oracles

CONFIGS = oracles.CONFIGS | moe_configs.CONFIGS


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Folder of a family's checkpoint, saved once."""
    folders = {}

    def get(name):
        if name not in folders:
            folders[name] = oracles.save_config(CONFIGS[name](), tmp_path_factory.mktemp(name))
        return folders[name]

    return get
