"""What is refused because too much is here already: 429, and when to try again."""

from __future__ import annotations

from firsttoken_runtime.engine.prediction import Calibration, Load, Prediction, predict
from firsttoken_runtime.engine.requests import AdmissionError
from firsttoken_runtime.engine.scheduler import uncached_left
from firsttoken_runtime.engine.sequence import Sequence

_LEAST_RETRY_SECONDS, _MOST_RETRY_SECONDS = 1.0, 60.0
# Where nobody set a limit, a prediction is only for the statistics and may not cost much.
_MOST_FOR_STATISTICS = 256


def check_queue(load: Load, max_queued: int) -> None:
    """Raises AdmissionError 429 when `max_queued` requests wait beyond those with a place in the batch.

    Retry-After is what the waiting prompt tokens take at the measured speed.
    """
    places = max(load.settings.max_sequences - len(load.running), 0)
    queued = len(load.waiting) - places
    if queued < max_queued:
        return
    left = sum(uncached_left(sequence, load.pages.page_tokens) for sequence in load.waiting)
    rate = load.rate.tokens_per_second
    seconds = _retry(left / rate if rate else 0.0)
    raise AdmissionError(
        "queue_full",
        f"{queued} requests with {left} tokens wait already, the limit is {max_queued}; "
        f"try again in {seconds:.0f} s",
        429,
        seconds,
    )


def check_ttft(
    sequence: Sequence, load: Load, service_limit: float | None, calibration: Calibration, now_ns: int
) -> Prediction | None:
    """The prediction for a request that comes now, in seconds from now and as it turns out usually.

    Raises AdmissionError 429 when the predicted TTFT, counted from the request's arrival, passes the lower of
    its own limit and the service's. Not for a request that nothing is ahead of: to refuse it would make
    nothing faster, and without it the speed would never be measured again.
    """
    limits = [limit for limit in (sequence.request.ttft_limit_seconds, service_limit) if limit is not None]
    if not limits and len(load.waiting) + len(load.running) > _MOST_FOR_STATISTICS:
        return None
    prediction = predict(sequence, load, now_ns)
    if prediction is None or not limits or not prediction.waits:
        return prediction
    seconds = prediction.seconds * calibration.factor
    ttft = seconds + max(now_ns - sequence.request.arrival_ns, 0) / 1e9
    limit = min(limits)
    if ttft <= limit:
        return prediction
    retry = _retry(ttft - limit)
    raise AdmissionError(
        "ttft_limit",
        f"the first token would come after {ttft:.2f} s, the limit is {limit:g} s: {prediction.ahead} prompt "
        f"tokens are computed before; try again in {retry:.0f} s, or allow more time",
        429,
        retry,
    )


def _retry(seconds: float) -> float:
    return round(min(max(seconds, _LEAST_RETRY_SECONDS), _MOST_RETRY_SECONDS), 1)
