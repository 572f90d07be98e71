"""Reported log-probabilities: what they are of, in each mode, and how many each row gets."""

import pytest
import torch

from tests.sampling.test_sampler import Rows, V, normal
from tinyserve.sampling.logprobs import MODES, report
from tinyserve.step import RowParams

INF = float("inf")


def expected(row, token, count):
    """(logprob, rank, ids, values) by torch."""
    values, ids = row.sort(descending=True, stable=True)
    return row[token].item(), int((row >= row[token]).sum()), ids[:count].tolist(), values[:count].tolist()


def check(record, row, token, count):
    logprob, rank, ids, values = expected(row, token, count)

    assert (record.token, record.rank, list(record.top_tokens)) == (token, rank, ids)
    assert record.logprob == pytest.approx(logprob, abs=2e-5)
    assert list(record.top_logprobs) == pytest.approx(values, abs=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_raw_logprobs_know_no_penalty_bias_or_temperature(dtype):
    """Rows ask for 3, nothing, 0 and all 320; each gets what it asked for."""
    rows, counts = Rows(), [3, None, 0, -1]
    for slot, count in enumerate(counts):
        rows.open(
            slot,
            RowParams(seed=slot, temperature=1.7, top_k=9, repetition_penalty=1.8, bias=((7, 4.0),), logprobs=count),
        )
    logits = normal(4).to(dtype)

    tokens, _, records = rows.sample(logits, [0, 1, 2, 3]).to_host()

    assert records[1] is None
    for row in (0, 2, 3):
        check(records[row], logits[row].float().log_softmax(-1), tokens[row], counts[row] if counts[row] >= 0 else V)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_processed_modes_show_what_was_drawn_from(temperature):
    logits = normal(1)
    processed = logits[0].clone()
    processed[7] += 4.0
    if temperature:
        processed /= temperature
        processed[processed < processed.sort(descending=True).values[8]] = -INF
    for mode, row in (("processed_logits", processed), ("processed_logprobs", processed.log_softmax(-1))):
        rows = Rows(logprobs_mode=mode)
        rows.open(0, RowParams(seed=1, temperature=temperature, top_k=9, bias=((7, 4.0),), logprobs=12))

        tokens, _, records = rows.sample(logits, [0]).to_host()

        check(records[0], row, tokens[0], 12)


def test_raw_logits():
    rows, logits = Rows(logprobs_mode="raw_logits"), normal(3)
    rows.open(1, RowParams(seed=3, bias=((7, 4.0),), logprobs=2))
    rows.open(2, RowParams())

    tokens, _, records = rows.sample(logits[1:], [2, 1]).to_host()

    check(records[1], logits[2], tokens[1], 2)
    assert records[0] is None


def test_a_record_does_not_depend_on_the_batch():
    logits = normal(5).round()  # ties
    rows = Rows()
    for slot in range(5):
        rows.open(slot, RowParams(seed=slot, logprobs=slot))
    together = rows.sample(logits, range(5)).to_host()[2]

    assert together == [rows.sample(logits[slot : slot + 1], [slot]).to_host()[2][0] for slot in range(5)]


@pytest.mark.parametrize("mode", MODES)
def test_prompt_logprobs_are_never_processed(mode):
    rows, logits = Rows(logprobs_mode=mode), normal(7)
    targets = torch.randint(0, V, (7,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)

    records = rows.sampler.prompt_logprobs(logits, targets, 4).records()

    for row, record in enumerate(records):
        source = logits[row] if mode.endswith("logits") else logits[row].log_softmax(-1)
        check(record, source, int(targets[row]), 4)


def test_no_prompt_rows():
    assert report(torch.empty(0, V), torch.empty(0, dtype=torch.int32), [], None).records() == []


def test_results_move_to_another_device():
    rows = Rows()
    rows.open(0, RowParams(logprobs=2))
    sampled = rows.sample(normal(1), [0])

    assert sampled.to("cpu", non_blocking=True).to_host() == sampled.to_host()
    assert sampled.to("meta").reports.top_ids.shape == (1, 2)


@pytest.mark.parametrize("mode", MODES)
def test_named_ids_are_reported_at_any_rank(mode):
    """Rows name 3 ids, none and 1; row 1 does not ask at all. Against torch's log_softmax."""
    rows, logits = Rows(logprobs_mode=mode), normal(4)
    asked = [(7, 319, 0), (), (), (5,)]
    for slot, ids in enumerate(asked):
        logprobs = None if slot == 1 else slot
        rows.open(slot, RowParams(temperature=0.0, logprobs=logprobs, logprob_ids=ids))

    tokens, _, records = rows.sample(logits, [0, 1, 2, 3]).to_host()

    assert records[1] is None
    for row in (0, 2, 3):
        source = logits[row] if mode.endswith("logits") else logits[row].log_softmax(-1)
        check(records[row], source, tokens[row], row)
        assert list(records[row].asked_logprobs) == pytest.approx([source[id].item() for id in asked[row]], abs=2e-5)


def test_named_ids_do_not_depend_on_the_batch_and_follow_its_changes():
    rows, logits = Rows(), normal(3)
    for slot in range(3):
        rows.open(slot, RowParams(seed=slot, logprobs=0, logprob_ids=tuple(range(slot * 2))))
    together = rows.sample(logits, range(3)).to_host()[2]
    alone = [rows.sample(logits[slot : slot + 1], [slot]).to_host()[2][0] for slot in range(3)]
    rows.open(2, RowParams(seed=2, logprobs=0, logprob_ids=(9,)))
    changed = rows.sample(logits, range(3)).to_host()[2]

    assert together == alone and [len(record.asked_logprobs) for record in together] == [0, 2, 4]
    assert changed[:2] == together[:2]
    assert changed[2].asked_logprobs == pytest.approx([logits[2].log_softmax(-1)[9].item()], abs=2e-5)


def test_prompt_rows_name_ids_of_their_own():
    """Row 0 names none, row 2 pads with -1, which scores -inf."""
    rows, logits = Rows(), normal(3)
    targets = torch.tensor([1, 2, 3], dtype=torch.int32)
    ids = [(), (4, 5), (6, -1, 7)]

    records = rows.sampler.prompt_logprobs(logits, targets, 0, ids).records()

    for row, record in enumerate(records):
        check(record, logits[row].log_softmax(-1), int(targets[row]), 0)
        right = [-INF if id == -1 else logits[row].log_softmax(-1)[id].item() for id in ids[row]]
        assert list(record.asked_logprobs) == pytest.approx(right, abs=2e-5)


def test_named_ids_move_with_the_rest():
    rows = Rows()
    rows.open(0, RowParams(logprobs=2, logprob_ids=(3,)))
    sampled = rows.sample(normal(1), [0])

    assert sampled.to("cpu", non_blocking=True).to_host() == sampled.to_host()
    assert sampled.to("meta").reports.asked.values.shape == (1, 1)
