"""Continuous batching. Owns who gets memory, who loses it and who is done; refuses HTTP and text.

One thread runs everything here. Others hand it work through ``submit`` and ``run``; it answers through a listener.
Requests join and leave between tokens. A request waits in order of arrival until its prompt and a little room to grow
fit; when memory runs out the youngest one gives its memory back and waits again. The oldest is never the one, and
every request fits alone (``max_new_tokens`` is cut to that), so there is always progress.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from rlrecipes.engines.embedded.batch import Batch, Extension
from rlrecipes.engines.embedded.completion import Stopper, record_prompt_logprobs, record_sampled_logprobs
from rlrecipes.engines.embedded.counters import Counters
from rlrecipes.engines.embedded.radix_cache import RadixCache
from rlrecipes.engines.embedded.request import Listener, Progress, Request
from rlrecipes.engines.embedded.sampling import apply_penalties, sample
from rlrecipes.engines.embedded.transformer import Transformer

logger = logging.getLogger(__name__)

ROOM_TO_GROW_TOKENS = 32
"""Kept free for every running request when another one is let in."""

IDLE_WAIT_S = 1.0

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_WAITING = {"type": "abort", "message": "Abort in waiting queue"}


class Scheduler:
    """The loop over steps.

    Args:
        transformer: computes; its cache is this scheduler's to fill.
        stopper: says when an answer ends.
        listener: called from this thread with what happened in a step.
        on_failure: called when the loop dies of an exception.
        max_running_requests: most that hold memory at once.
        chunk_tokens: most prompt tokens computed in one step.
        max_request_tokens: longest request.
    """

    def __init__(
        self,
        transformer: Transformer,
        stopper: Stopper,
        listener: Listener,
        on_failure: Callable[[BaseException], None],
        max_running_requests: int,
        chunk_tokens: int,
        max_request_tokens: int,
    ) -> None:
        self._transformer = transformer
        self._cache = transformer.cache
        self._stopper = stopper
        self._listener = listener
        self._on_failure = on_failure
        self._max_running_requests = max_running_requests
        self._chunk_tokens = chunk_tokens
        self._prefixes = RadixCache()
        self._batch = Batch(max_running_requests, max_request_tokens, transformer.is_deterministic)
        self._waiting: deque[Request] = deque()
        self._num_admissions = 0
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_paused = False
        self._news: list[Progress] = []
        self._counters = Counters()
        self._thread = threading.Thread(target=self._loop, name="scheduler", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step in hand."""
        self._work.put(None)
        self._thread.join(timeout=10)

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self._work.put(lambda: self._waiting.append(request))

    def run[T](self, function: Callable[[], T]) -> Future[T]:
        """Call ``function`` between two steps, on the scheduler's thread."""
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return  # whoever asked has gone; from here on a cancellation comes too late
            try:
                future.set_result(function())
            except BaseException as error:  # the caller gets it
                future.set_exception(error)

        self._work.put(call)
        return future

    # What follows runs on the scheduler's thread.

    @property
    def is_idle(self) -> bool:
        """No request is running or waiting."""
        return not len(self._batch) and not self._waiting

    def pause(self, is_retracting: bool) -> None:
        """Stop stepping; with ``is_retracting`` every running request goes back to the queue, without its memory."""
        self._is_paused = True
        if is_retracting:
            for request in sorted(self._batch.requests, key=lambda each: each.admission, reverse=True):
                self._retract(request)

    def resume(self) -> None:
        """Step again."""
        self._is_paused = False

    def abort(self, rids: set[str] | None) -> None:
        """End requests (all of them for None); what they generated is kept."""
        kept: deque[Request] = deque()
        for request in self._waiting:
            if rids is None or request.rid in rids:
                request.finish_reason = dict(ABORTED_WAITING)
                self._news.append(Progress(request, len(request.output_ids), request.finish_reason, True))
            else:
                kept.append(request)
        self._waiting = kept
        for request in self._batch.requests:
            if rids is None or request.rid in rids:
                request.is_aborting = True
        self._tell()

    def flush(self) -> bool:
        """Forget all prefixes; False (and nothing done) while a request is running or waiting."""
        if not self.is_idle:
            return False
        self._cache.give_back(self._prefixes.clear())
        for layer in self._cache.layers:
            layer[0] = 0  # what padding wrote, which may be NaN after bad weights
        return True

    def release_cache_memory(self) -> None:
        """Give the memory of keys and values back; requests wait until it is resumed."""
        self._cache.release_memory()

    def resume_cache_memory(self) -> None:
        """Get it again, empty."""
        if not self._cache.layers:
            self._cache.allocate_memory()

    def compute_load(self) -> dict[str, Any]:
        """Count what SGLang's /v1/loads counts."""
        num_used = self._cache.num_slots - self._cache.num_free - self._prefixes.num_evictable
        num_waiting_tokens = sum(request.num_tokens for request in self._waiting)
        return {
            "num_running_reqs": len(self._batch),
            "num_waiting_reqs": len(self._waiting),
            "num_waiting_uncached_tokens": num_waiting_tokens,
            "num_used_tokens": num_used,
            "num_total_tokens": num_used + num_waiting_tokens,
            "num_active_tokens": num_used + num_waiting_tokens,
            "token_usage": round(num_used / self._cache.num_slots, 4),
            **self._counters.describe(),
        }

    def _loop(self) -> None:
        try:
            while self._drain():
                if self._can_step():
                    with torch.inference_mode():
                        self._step()
        except BaseException as error:
            logger.exception("the scheduler died")
            self._on_failure(error)

    def _can_step(self) -> bool:
        return not self._is_paused and not self.is_idle and bool(self._cache.layers)

    def _drain(self) -> bool:
        """Do the work others handed in, waiting for some when there is nothing to step; False to end."""
        try:
            work = self._work.get_nowait() if self._can_step() else self._work.get(timeout=IDLE_WAIT_S)
            while work is not None:
                work()
                work = self._work.get_nowait()
        except queue.Empty:
            return True
        return False

    def _step(self) -> None:
        for row in reversed(range(len(self._batch))):
            if self._batch.requests[row].is_aborting:
                self._finish(row, dict(ABORTED))
        self._admit()
        self._make_room()
        if len(self._batch):
            started_s, num_rows = time.perf_counter(), len(self._batch)
            is_decode = self._run_rows()
            self._counters.count_step(is_decode, num_rows, time.perf_counter() - started_s)
        self._tell()

    def _tell(self) -> None:
        if self._news:
            self._listener(self._news)
            self._news = []

    # Memory

    def _admit(self) -> None:
        """Let in waiting requests, in order, while their tokens and room to grow fit."""
        if not self._waiting:
            return
        skipped: list[Request] = []
        starting = {
            request.prompt_ids.tobytes()
            for request in self._batch.requests
            if request.num_computed < len(request.prompt_ids) - 1
        }
        while self._waiting and len(self._batch) < self._max_running_requests:
            request = self._waiting.popleft()
            # a sibling's prompt is being computed: wait a step and share it
            if request.prompt_ids.tobytes() in starting and not request.num_missing_input_logprobs:
                skipped.append(request)
                continue
            if not self._try_admit(request):
                skipped.append(request)
                break
            if request.num_computed < len(request.prompt_ids) - 1:
                starting.add(request.prompt_ids.tobytes())
        self._waiting.extendleft(reversed(skipped))

    def _try_admit(self, request: Request) -> bool:
        tokens = request.to_token_ids()
        limit = len(tokens) - 1
        if request.wish is not None and request.num_missing_input_logprobs:
            limit = min(limit, len(request.prompt_ids) - 1 - request.num_missing_input_logprobs)
        prefix, node = self._prefixes.match(tokens[:limit], request.namespace)
        self._prefixes.lock(node)
        num_new = len(tokens) - len(prefix)
        room = ROOM_TO_GROW_TOKENS * (len(self._batch) + 1) if len(self._batch) else 1
        if num_new + room > self._cache.num_free + self._prefixes.num_evictable:
            self._prefixes.unlock(node)
            return False
        self._counters.count_admitted(num_new, len(prefix))
        if not request.num_retractions:
            request.num_cached_tokens = len(prefix)
        request.node, request.num_slots = node, len(tokens)
        request.num_shared = request.num_computed = len(prefix)
        request.is_decoding = False
        self._num_admissions += 1
        request.admission = self._num_admissions
        self._batch.add(request, tokens, np.concatenate((prefix, self._take(num_new))))
        return True

    def _take(self, count: int) -> np.ndarray:
        missing = count - self._cache.num_free
        if missing > 0:
            self._cache.give_back(self._prefixes.evict(missing))
        return self._cache.take(count)

    def _retract(self, request: Request) -> None:
        row = self._batch.requests.index(request)
        self._cache.give_back(self._batch.slots[row, request.num_shared : request.num_slots].copy())
        self._leave(row)
        request.num_retractions += 1
        request.num_computed = request.num_shared = request.num_slots = 0
        self._waiting.appendleft(request)

    def _leave(self, row: int) -> None:
        request = self._batch.requests[row]
        assert request.node is not None
        self._prefixes.unlock(request.node)
        request.node = None
        self._batch.remove(row)

    def _share(self, row: int) -> None:
        """Put a row's computed tokens into the prefix cache and read them from there."""
        request = self._batch.requests[row]
        assert request.node is not None
        start, end = request.num_shared, request.num_computed
        own = self._batch.slots[row, start:end]
        shared, node = self._prefixes.insert(request.node, request.to_token_ids()[start:end], own)
        self._cache.give_back(own[own != shared])
        self._prefixes.lock(node)
        self._prefixes.unlock(request.node)
        request.node, request.num_shared = node, end
        own[:] = shared

    def _finish(self, row: int, reason: dict[str, object]) -> None:
        request = self._batch.requests[row]
        request.finish_reason = reason
        self._share(row)
        self._cache.give_back(self._batch.slots[row, request.num_computed : request.num_slots].copy())
        self._leave(row)
        self._news.append(Progress(request, len(request.output_ids), reason))

    # Steps

    def _make_room(self) -> None:
        """Take memory away until every row that decodes can have a slot."""
        while True:
            num_decoding = sum(request.is_decoding for request in self._batch.requests)
            if self._cache.num_free + self._prefixes.num_evictable >= num_decoding:
                break
            self._retract(max(self._batch.requests, key=lambda each: each.admission))

    def _run_rows(self) -> bool:
        """One token for every row that decodes, a piece of every other's prompt; gives whether all decode."""
        requests = self._batch.requests
        decoding = np.flatnonzero([request.is_decoding for request in requests])
        extensions = self._plan_extensions()
        if len(decoding):
            self._batch.append_slots(decoding, self._take(len(decoding)))
        step = self._batch.build_step(decoding, extensions)
        hidden = self._transformer.compute_hidden(step)
        finished, places = decoding.tolist(), list(range(len(decoding)))
        for row in finished:
            requests[row].num_computed += 1
            requests[row].num_slots += 1
        end = len(decoding)
        for part in extensions:
            request = requests[part.row]
            start, end = end, end + part.count
            record_prompt_logprobs(self._transformer, request, hidden[start:end])
            request.num_computed += part.count
            if request.num_computed == request.num_tokens:
                finished.append(part.row)
                places.append(end - 1)
                self._share(part.row)
        if finished:
            self._sample(np.array(finished), hidden if len(places) == len(hidden) else hidden[places])
        return not extensions

    def _plan_extensions(self) -> list[Extension]:
        """Choose what the rows that do not decode compute, shortest pieces first."""
        budget = self._chunk_tokens
        extensions = []
        for row, request in enumerate(self._batch.requests):
            if not request.is_decoding and budget > 0:
                count = min(budget, request.num_tokens - request.num_computed)
                budget -= count
                extensions.append(Extension(row, count))
        return sorted(extensions, key=lambda part: part.count)

    def _sample(self, rows: np.ndarray, hidden: torch.Tensor) -> None:
        requests = [self._batch.requests[row] for row in rows.tolist()]
        logits = self._transformer.compute_logits(hidden)
        for place in np.flatnonzero(self._batch.has_penalty[rows]).tolist():
            request = requests[place]
            apply_penalties(logits[place], request.parameters, request.output_ids, self._stopper.end_ids)
        tokens, scaled = sample(logits, self._batch.build_draw(rows))
        self._batch.last_tokens[rows] = tokens.numpy()
        ids = tokens.tolist()
        self._counters.count_generated(len(ids))
        record_sampled_logprobs(requests, scaled, tokens)
        ended: list[tuple[int, dict[str, object]]] = []
        for row, request, token in zip(rows.tolist(), requests, ids, strict=True):
            request.is_decoding = True
            if request.max_new_tokens > 0:
                request.output_ids.append(token)
            reason = self._stopper.find_reason(request)
            if reason is not None:
                ended.append((row, reason))
            elif request.wants_steps and not self._stopper.is_holding(request):
                self._news.append(Progress(request, len(request.output_ids)))
        for row, reason in sorted(ended, key=lambda each: each[0], reverse=True):
            self._finish(row, reason)
