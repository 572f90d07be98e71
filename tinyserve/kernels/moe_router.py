"""Which experts a token goes to, and with what weight: scores, groups, top-k and scaling in one launch.

    scores   softmax(logits) or sigmoid(logits)                                        [E]
    keys     logits; with a correction bias or groups scored by two: scores + bias     [E]
    groups   the experts in G equal groups, a group's score = sum of its best one or two keys; only the best groups stay
    ids      the K largest keys; equal keys: the lower id first
    weights  scores at ids, divided by their sum if `renormalise`, times `scale`

The bias steers the choice and never the weight (DeepSeek-V3). Kind "sparsemixer" (Phi-3.5-MoE) takes one expert after
the other and weighs it against those nearly as good: 1 / sum of exp(s - best) over s within 2% of the best one left.

One program holds a few tokens' logits in registers; what would be a dozen launches of tiny operations is one. T·E
numbers are read, 2·T·K written.

Source: arXiv:2401.06066, arXiv:2405.04434 sec. 2.1.2 (groups), arXiv:2412.19437 sec. 2.1.2 (bias); arXiv:2409.12136.

Before: the router's product.  After: `moe_align.py` or `moe_decode.py`.
"""

import torch
import triton
import triton.language as tl

from .launch import cdiv, check_rows, choose, next_power_of_2, overlap, start_next, use_kernel, wait_inputs

KINDS = ("softmax", "sigmoid", "sparsemixer")
JITTER = 0.01  # of "sparsemixer": experts within twice this share of the best one count as nearly as good


def moe_router_reference(
    logits: torch.Tensor,
    *,
    top_k: int,
    kind: str = "softmax",
    bias: torch.Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    group_best: int = 1,
    renormalise: bool = False,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification of `moe_router`, with its arguments."""
    logits = logits.float()
    if kind == "sparsemixer":
        return _sparsemixer(logits, top_k)
    scores = logits.softmax(dim=-1) if kind == "softmax" else logits.sigmoid()
    keys = logits if bias is None and group_best == 1 else scores if bias is None else scores + bias.float()
    if groups > 1:
        parts = keys.unflatten(-1, (groups, -1))
        best = parts.topk(group_best, dim=-1).values.sum(dim=-1)
        chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(top_groups, dim=-1).indices, True)
        keys = parts.masked_fill(~chosen[..., None], -torch.inf).flatten(-2)
    ids = keys.topk(top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-20)
    return weights * scale, ids.to(torch.int32)


def _sparsemixer(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    left, weights, ids = logits, [], []
    for _ in range(top_k):
        best, index = left.max(dim=-1, keepdim=True)
        near = best - left <= 2 * JITTER * logits.abs().clamp(min=best)
        weights.append(1 / (left - best).exp().where(near, 0.0).sum(dim=-1, keepdim=True))
        ids.append(index)
        left = left.scatter(-1, index, -torch.inf)
    return torch.cat(weights, dim=-1), torch.cat(ids, dim=-1).to(torch.int32)


@triton.jit
def _best(keys, expert, E: tl.constexpr):
    """Largest key of each row, and its lowest place; a row of NaN gives the last place."""
    best = tl.max(keys, axis=1, keep_dims=True)
    place = tl.min(tl.where(keys == best, expert, E), axis=1, keep_dims=True)
    return best, tl.minimum(place, E - 1)


@triton.jit
def _keep_best_groups(
    keys, expert, E: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Keys of experts outside the best groups become -inf."""
    group = tl.arange(0, BLOCK_G)[None, :]
    score = tl.full([ROWS, BLOCK_G], float("-inf"), tl.float32)
    for number in tl.static_range(GROUPS):
        inside = tl.where(expert // (E // GROUPS) == number, keys, float("-inf"))
        best, place = _best(inside, expert, E)
        if GROUP_BEST == 2:
            best += tl.max(tl.where(expert == place, float("-inf"), inside), axis=1, keep_dims=True)
        score = tl.where(group == number, best, score)
    kept = expert < 0
    for _ in tl.static_range(TOP_GROUPS):
        _, place = _best(score, group, GROUPS)
        kept = kept | (expert // (E // GROUPS) == place)
        score = tl.where(group == place, float("-inf"), score)
    return tl.where(kept, keys, float("-inf"))


@triton.jit(do_not_specialize=["num_tokens"])
def _moe_router_kernel(
    logits_ptr,  # [T, E]
    bias_ptr,  # [E]; read if BIAS
    weights_ptr,  # [T, K] float32
    ids_ptr,  # [T, K] int32
    logits_stride,  # elements between rows
    num_tokens,  # T
    scale,
    jitter,  # twice JITTER
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    RENORMALISE: tl.constexpr,
    ROWS: tl.constexpr,  # tokens a program, a power of two
    BLOCK_E: tl.constexpr,  # a power of two, at least E
    BLOCK_K: tl.constexpr,  # a power of two, at least K
    BLOCK_G: tl.constexpr,  # a power of two, at least GROUPS
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_inputs(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    expert = tl.arange(0, BLOCK_E)[None, :]
    inside = (row < num_tokens) & (expert < E)
    logits = tl.load(logits_ptr + row * logits_stride + expert, mask=inside, other=float("-inf")).to(tl.float32)
    if KIND == "sigmoid":
        scores = tl.sigmoid(logits)
    else:
        powers = tl.exp(logits - tl.maximum(tl.max(logits, axis=1, keep_dims=True), -1e30))
        scores = powers / tl.sum(powers, axis=1, keep_dims=True)
    keys = logits
    if BIAS:
        keys = scores + tl.load(bias_ptr + expert, mask=expert < E, other=0.0).to(tl.float32)
    elif GROUP_BEST == 2:
        keys = scores
    keys = tl.where(expert < E, keys, float("-inf"))
    if GROUPS > 1:
        keys = _keep_best_groups(keys, expert, E, GROUPS, TOP_GROUPS, GROUP_BEST, ROWS, BLOCK_G)

    column = tl.arange(0, BLOCK_K)[None, :]
    weights = tl.zeros([ROWS, BLOCK_K], tl.float32)
    ids = tl.zeros([ROWS, BLOCK_K], tl.int32)
    for number in tl.static_range(TOP_K):
        best, place = _best(keys, expert, E)
        if KIND == "sparsemixer":
            near = best - keys <= jitter * tl.maximum(tl.abs(logits), best)
            weight = 1.0 / tl.sum(tl.where(near, tl.exp(keys - best), 0.0), axis=1, keep_dims=True)
        else:
            weight = tl.sum(tl.where(expert == place, scores, 0.0), axis=1, keep_dims=True)
        weights = tl.where(column == number, weight, weights)
        ids = tl.where(column == number, place, ids)
        keys = tl.where(expert == place, float("-inf"), keys)
    if RENORMALISE:
        weights = weights / tl.maximum(tl.sum(weights, axis=1, keep_dims=True), 1e-20)
    out = row * TOP_K + column
    kept = (row < num_tokens) & (column < TOP_K)
    tl.store(weights_ptr + out, weights * scale, mask=kept)
    tl.store(ids_ptr + out, ids, mask=kept)


def moe_router(
    logits: torch.Tensor,
    *,
    top_k: int,
    kind: str = "softmax",
    bias: torch.Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    group_best: int = 1,
    renormalise: bool = False,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose and weigh the experts of each token.

    Args:
        logits: [T, E]; rows may lie apart.
        top_k: K, experts of a token, 1..E.
        kind: one of KINDS.
        bias: [E] added to the scores for the choice only, or None.
        groups: G, which divides E; top_groups: how many of them stay, 1..G, with at least K experts.
        group_best: a group's score is the sum of its best one or two.
        renormalise: the weights of a token sum to `scale`.
        scale: factor on the weights. "sparsemixer" uses none of the five.

    Returns:
        weights [T, K] float32 and ids [T, K] int32, both contiguous, the best expert first.

    Raises:
        ValueError: an unknown kind, or numbers that do not fit each other.
    """
    experts = logits.shape[1]
    _check(kind, experts, top_k, groups, top_groups, group_best)
    options = {"top_k": top_k, "kind": kind, "bias": bias, "groups": groups, "top_groups": top_groups}
    options |= {"group_best": group_best, "renormalise": renormalise, "scale": scale}
    if not use_kernel(logits):
        return moe_router_reference(logits, **options)
    check_rows("moe_router", logits)
    if bias is not None and (bias.shape != (experts,) or not bias.is_contiguous()):
        raise ValueError(f"moe_router: bias must be [{experts}], contiguous, is {list(bias.shape)}")
    weights = torch.empty((logits.shape[0], top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((logits.shape[0], top_k), dtype=torch.int32, device=logits.device)
    if logits.shape[0]:
        _launch(logits, weights, ids, **options)
    return weights, ids


def _launch(logits, weights, ids, *, top_k, kind, bias, groups, top_groups, group_best, renormalise, scale) -> None:
    tokens, experts = logits.shape
    block = max(next_power_of_2(experts), 2)
    # The same for any number of tokens, so that a token's weights do not depend on how many stand beside it.
    default = {"ROWS": 1, "num_warps": 1 if block <= 128 else 4}
    options = choose("moe_router", logits, default, tokens=tokens, experts=experts)
    plain = kind == "sparsemixer"
    _moe_router_kernel[(cdiv(tokens, options["ROWS"]),)](
        logits,
        logits if bias is None else bias,
        weights,
        ids,
        logits.stride(0),
        tokens,
        1.0 if plain else float(scale),
        2 * JITTER,
        E=experts,
        TOP_K=top_k,
        KIND=kind,
        BIAS=bias is not None and not plain,
        GROUPS=1 if plain else groups,
        TOP_GROUPS=top_groups,
        GROUP_BEST=1 if plain else group_best,
        RENORMALISE=renormalise and not plain,
        BLOCK_E=block,
        BLOCK_K=max(next_power_of_2(top_k), 2),
        BLOCK_G=max(next_power_of_2(groups), 2),
        **options,
        **overlap(logits),
    )


def _check(kind: str, experts: int, top_k: int, groups: int, top_groups: int, group_best: int) -> None:
    if kind not in KINDS:
        raise ValueError(f"moe_router: unknown kind {kind!r}; known: {', '.join(KINDS)}")
    if groups < 1 or experts % groups or not 1 <= top_groups <= groups or group_best not in (1, 2):
        raise ValueError(f"moe_router: {experts} experts, {top_groups} of {groups} groups by their best {group_best}")
    if not 1 <= top_k <= experts // groups * top_groups or experts // groups < group_best:
        raise ValueError(f"moe_router: {top_k} of {experts} experts in {top_groups} of {groups} groups")
