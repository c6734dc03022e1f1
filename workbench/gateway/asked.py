"""Asked: a tagged request, and by what another one is recognised as the same.

    Idempotency-Key, else x-request-id      names the call
    else a retry count over 0 (SDKs)        the one undelivered call with the same body, where exactly one can be meant
Two equal requests with none of these are two calls. No client's id is ever sent on to the worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import orjson
from starlette.datastructures import Headers

from workbench.gateway.dialects import Dialect
from workbench.gateway.refusals import Refused

KEY_HEADERS = ("idempotency-key", "x-request-id")
RETRY_HEADER = "x-stainless-retry-count"
LONGEST_KEY = 256


@dataclass(frozen=True)
class Asked:
    """`key`: None where the client named none. `body`: digest of all that must be the same. `retry`: it says that it
    comes again. `replaces`: the response whose history it declares to replace. `after`: the response that it names as
    the one before it, and `stored_input` what it adds to that (None: nobody may name its own response)."""

    rollout_id: str
    dialect: Dialect
    items: list[dict[str, Any]]
    options: dict[str, Any]
    replaces: str | None
    key: str | None
    body: str
    retry: bool
    after: str | None
    stored_input: list[dict[str, Any]] | None

    @classmethod
    def of(
        cls,
        rollout_id: str,
        dialect: Dialect,
        body: Mapping[str, Any],
        headers: Headers,
        replaces: str | None,
        *,
        after: str | None = None,
        stored_input: list[dict[str, Any]] | None = None,
    ) -> Asked:
        """Raises `Refused` for a body that the dialect cannot read and for a key that is too long or no single one."""
        key = _key(headers)
        count = headers.get(RETRY_HEADER, "")
        same = orjson.dumps([dialect.path, replaces, after, body], option=orjson.OPT_SORT_KEYS)
        return cls(
            rollout_id,
            dialect,
            dialect.request_items(body),
            dialect.prompt_options(body),
            replaces,
            key,
            sha256(same).hexdigest(),
            count.isascii() and count.isdigit() and count.strip("0") != "",
            after,
            stored_input,
        )


def _key(headers: Headers) -> str | None:
    for name in KEY_HEADERS:
        keys = {value for value in headers.getlist(name) if value}
        if len(keys) > 1:
            raise Refused(400, f"Header {name} came with {len(keys)} different values; expected one.", "key_ambiguous")
        for key in keys:
            if len(key) > LONGEST_KEY:
                raise Refused(
                    400, f"A request's key has at most {LONGEST_KEY} characters, got {len(key)}.", "key_too_long"
                )
            return key
    return None
