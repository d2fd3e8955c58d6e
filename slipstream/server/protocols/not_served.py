"""Paths of other servers that clients ask for and that this one does not have: what to do instead."""

from __future__ import annotations

_EMBEDDINGS = "this server generates text and makes no embeddings: run an embedding model in another server"
_RANKING = "this server generates text and ranks no documents: run a reranking model in another server"
_MODELS = "this server serves the one model it was started with: start `slipstream serve MODEL` for another one"
_INFILL = (
    "this server does not fill in code between a prefix and a suffix: send the model's own tokens for it in the prompt "
    "to /completion"
)
NOT_SERVED = {
    "/embedding": _EMBEDDINGS,
    "/embeddings": _EMBEDDINGS,
    "/v1/embeddings": _EMBEDDINGS,
    "/api/embed": _EMBEDDINGS,
    "/api/embeddings": _EMBEDDINGS,
    "/rerank": _RANKING,
    "/reranking": _RANKING,
    "/v1/rerank": _RANKING,
    "/v1/reranking": _RANKING,
    "/infill": _INFILL,
    **{f"/api/{action}": _MODELS for action in ("pull", "push", "create", "delete", "copy")},
}
