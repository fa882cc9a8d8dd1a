"""Token ids in, token ids and log-probs out, against one or several vLLM servers."""

import asyncio
import re
import time
import zlib
from dataclasses import dataclass

import httpx

from rsi_fast.rollout.server import MODEL_NAME

NUM_POOLS = 16  # httpx looks through all connections of a pool for each request, so many small ones are faster
HEALTH_EVERY_S = 5.0
HEALTH_TIMEOUT_S = 10.0
HEALTH_FAILURES = 2  # in a row, then the server counts as dead
_TOKENS = re.compile(rb"^vllm:(?:generation|prompt)_tokens_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class ServerError(Exception):
    """A vLLM server is dead, stalled, or answers what it should not."""


@dataclass(frozen=True)
class Completion:
    token_ids: list[int]  # sampled, the stop token included
    logprobs: list[float]  # of each, under the distribution it was sampled from
    finish_reason: str  # "stop" or "length"


class VllmClient:
    """Use as an async context manager. A session stays with the server that took its first request, so that the
    prefix cache there holds its earlier turns."""

    def __init__(self, urls: list[str], api_key: str, request_timeout_s: float, stall_timeout_s: float):
        self.urls = urls
        self._stall_timeout_s = stall_timeout_s
        self._home: dict[str, str] = {}
        self._load = dict.fromkeys(urls, 0)  # sessions
        self._waiting = dict.fromkeys(urls, 0)  # requests without an answer yet
        self._pools = [
            httpx.AsyncClient(
                headers={"Authorization": f"Bearer {api_key}"},
                timeout=httpx.Timeout(request_timeout_s),
                # An idle connection is dropped here before the server drops it: a request on one that the server has
                # just closed would be lost.
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0),
            )
            for _ in range(NUM_POOLS)
        ]

    async def __aenter__(self) -> "VllmClient":
        return self

    async def __aexit__(self, *exception) -> None:
        for pool in self._pools:
            await pool.aclose()

    async def complete(
        self,
        prompt_ids: list[int],
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        stop_token_ids: list[int],
        session: str,
    ) -> Completion:
        """One sampled continuation. Raises ServerError."""
        url = self._home.get(session)
        if url is None:
            url = self._home[session] = min(self.urls, key=self._load.__getitem__)
            self._load[url] += 1
        body = {
            "model": MODEL_NAME,
            "prompt": prompt_ids,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "stop_token_ids": stop_token_ids,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        self._waiting[url] += 1
        try:
            pool = self._pools[zlib.crc32(session.encode()) % NUM_POOLS]
            reply = await pool.post(f"{url}/v1/completions", json=body)
        except httpx.HTTPError as error:
            raise ServerError(f"{url}: the request failed: {type(error).__name__} {error}".rstrip()) from error
        finally:
            self._waiting[url] -= 1
        if reply.status_code != 200:
            raise ServerError(f"{url}: HTTP {reply.status_code}: {reply.text[:300]}")
        return _parse(url, reply, prompt_ids)

    def end_session(self, session: str) -> None:
        url = self._home.pop(session, None)
        if url is not None:
            self._load[url] -= 1

    async def weight_versions(self) -> set[str]:
        """The weight versions that are live in the servers."""
        replies = [await self._get(url, "/weight_info") for url in self.urls]
        return {str(reply.json()["weight_version"]) for reply in replies}

    async def _get(self, url: str, path: str) -> httpx.Response:
        try:
            reply = await self._pools[0].get(f"{url}{path}", timeout=HEALTH_TIMEOUT_S)
            reply.raise_for_status()
        except httpx.HTTPError as error:
            raise ServerError(f"{url}{path}: {type(error).__name__} {error}".rstrip()) from error
        return reply

    async def watch(self) -> None:
        """Never returns; raises ServerError when a server stops answering, or has requests of ours and makes no token
        for the stall timeout: an engine that hangs behind a healthy front looks like that. Its own count of running
        requests says nothing, it comes from the engine."""
        await asyncio.gather(*(self._watch_one(url) for url in self.urls))

    async def _watch_one(self, url: str) -> None:
        failures, last_tokens, last_move = 0, None, time.monotonic()
        while True:
            await asyncio.sleep(min(HEALTH_EVERY_S, self._stall_timeout_s / 4))
            try:
                await self._get(url, "/health")
                tokens = sum(float(v) for v in _TOKENS.findall((await self._get(url, "/metrics")).content))
                failures = 0
            except ServerError:
                failures += 1
                if failures >= HEALTH_FAILURES:
                    raise
                continue
            if tokens != last_tokens or not self._waiting[url]:
                last_tokens, last_move = tokens, time.monotonic()
            elif time.monotonic() - last_move > self._stall_timeout_s:
                raise ServerError(
                    f"{url}: {self._waiting[url]} requests are waiting and no token was made for "
                    f"rollout.stall_timeout_s = {self._stall_timeout_s:g} s: vLLM has stopped working"
                )


def _parse(url: str, reply: httpx.Response, prompt_ids: list[int]) -> Completion:
    try:
        choice = reply.json()["choices"][0]
        token_ids, finish_reason = list(choice["token_ids"]), choice["finish_reason"]
        logprobs = list(choice["logprobs"]["token_logprobs"]) if token_ids else []
        echoed = choice["prompt_token_ids"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ServerError(f"{url}: not the answer of a vLLM server: {type(error).__name__} {error}") from error
    if len(token_ids) != len(logprobs):
        raise ServerError(f"{url}: {len(token_ids)} token ids came with {len(logprobs)} log-probs")
    if echoed is not None and echoed != prompt_ids:
        raise ServerError(f"{url}: the server changed the prompt's token ids")
    if finish_reason not in ("stop", "length"):
        raise ServerError(f"{url}: a completion ended with finish_reason {finish_reason!r}")
    return Completion(token_ids, logprobs, finish_reason)
