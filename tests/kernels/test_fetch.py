"""The front of one slot of the host's ring, wherever `turn` points."""

import pytest
import torch

from tinyserve.kernels.fetch import fetch, fetch_reference


@pytest.mark.parametrize("op", [fetch, fetch_reference])
@pytest.mark.parametrize("count", [0, 1, 1030])
def test_the_slot_is_chosen_on_the_device(device, op, count):
    """Slot after slot of three; one number behind the front is not touched. 1030 numbers are two programs."""
    mail = torch.arange(3 * 1040, dtype=torch.int32).view(3, 1040)
    mail = mail if device.type == "cpu" else mail.pin_memory()
    out = torch.full((count + 1,), -1, dtype=torch.int32, device=device)

    for turn in (2, 0, 1):
        op(mail, torch.tensor([turn], dtype=torch.int32, device=device), out[:count])

        assert out.tolist() == [*mail[turn, :count].tolist(), -1]


def test_shapes_are_checked(device):
    mail = torch.zeros(2, 4, dtype=torch.int32)

    with pytest.raises(ValueError, match="5 numbers"):
        fetch(mail, torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(5, dtype=torch.int32, device=device))


def compile_cases():
    mail, turn, out = (torch.empty(*shape, dtype=torch.int32) for shape in ((3, 4096), (1,), (2000,)))
    yield lambda: fetch(mail, turn, out)
