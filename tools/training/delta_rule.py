"""The gated delta rule over chunks, for training: triangular solves instead of a loop over a chunk's rows."""

import torch
from torch import Tensor

CHUNK = 32


def chunk_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    **_: object,
) -> tuple[Tensor, None]:
    """Per head, from a zero state: S = exp(g) S; d = beta (v - S^T k); S = S + k d^T; out = S^T q / sqrt(dim).

    query, key [B, T, heads, K], value [B, T, heads, V], g (logarithm of the decay) and beta [B, T, heads] -> [B, T, heads, V].
    Within a chunk the d of all rows solve one triangular system (arXiv 2412.06464, section 3.3).
    """
    assert initial_state is None and not output_final_state
    dtype, rows = value.dtype, value.shape[1]
    if use_qk_l2norm_in_kernel:
        query = query * torch.rsqrt((query * query).sum(-1, keepdim=True) + 1e-6)
        key = key * torch.rsqrt((key * key).sum(-1, keepdim=True) + 1e-6)
    padding = -rows % CHUNK
    q, k, v = (
        torch.nn.functional.pad(x.float(), (0, 0, 0, 0, 0, padding)).transpose(1, 2).unflatten(2, (-1, CHUNK))
        for x in (query * query.shape[-1] ** -0.5, key, value)
    )
    g, beta = (
        torch.nn.functional.pad(x.float(), (0, 0, 0, padding)).transpose(1, 2).unflatten(2, (-1, CHUNK)) for x in (g, beta)
    )
    total = g.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    decay = torch.where(lower, total[..., :, None] - total[..., None, :], float("-inf")).exp()
    system = (beta[..., None] * (k @ k.transpose(-1, -2)) * decay).tril(-1) + torch.eye(CHUNK)
    # d = own - read S, where S is the state before the chunk
    right = torch.cat([v * beta[..., None], k * (beta * total.exp())[..., None]], -1)
    own, read = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1
    )
    within = (q @ k.transpose(-1, -2)) * decay
    q_in, k_out = q * total.exp()[..., None], k * (total[..., -1:] - total).exp()[..., None]
    last = total[..., -1].exp()[..., None, None]
    state = torch.zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    out = []
    for i in range(q.shape[2]):
        d = own[:, :, i] - read[:, :, i] @ state
        out.append(q_in[:, :, i] @ state + within[:, :, i] @ d)
        state = state * last[:, :, i] + k_out[:, :, i].transpose(-1, -2) @ d
    return torch.stack(out, 2).flatten(2, 3)[:, :, :rows].transpose(1, 2).to(dtype), None
