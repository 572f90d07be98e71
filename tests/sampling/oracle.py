"""The slow, obvious sampler: one row, one rule after another, with lists and dicts."""

import math

import torch

INF = float("inf")


def edited(logits, params, prompt, output):
    """Logits [V] after allowed ids, bias, min_tokens, penalties and bad words, in the documented order."""
    row = logits.float().tolist()
    if params.allowed is not None:
        row = [x if token in params.allowed else -INF for token, x in enumerate(row)]
    for token, value in params.bias:
        row[token] += value
    if len(output) < params.min_tokens:
        for token in params.masked:
            row[token] = -INF
    for token in set(prompt) | set(output):
        row[token] = (
            row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        )
    for token in set(output):
        row[token] -= params.frequency_penalty * output.count(token)
        row[token] -= params.presence_penalty
    for word in params.bad_words:
        *begin, last = word
        if output[len(output) - len(begin) :] == begin:
            row[last] = -INF
    return row


def filtered(row, params):
    """Logits over temperature, with -inf for what min-p, top-k and top-p drop; a greedy row stays as it is."""
    if params.temperature == 0:
        return row
    row = [x / params.temperature for x in row]
    if params.min_p > 0:
        least = max(row) + math.log(params.min_p) - 1e-6
        row = [x if x >= least else -INF for x in row]
    if 0 < params.top_k < len(row):
        least = sorted(row, reverse=True)[params.top_k - 1]
        row = [x if x >= least else -INF for x in row]
    if params.top_p < 1:
        shares = torch.tensor(row, dtype=torch.float64).softmax(-1).tolist()
        order = sorted(range(len(row)), key=lambda token: (-row[token], token))
        kept, mass = set(), 0.0
        for token in order:
            kept.add(token)
            mass += shares[token]
            if mass >= params.top_p - 1e-7:
                break
        row = [x if token in kept else -INF for token, x in enumerate(row)]
    return row
