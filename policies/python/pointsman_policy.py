"""Helper for Pointsman routing policies in Python.

A policy is a subclass of `Policy` with a name, a version, the facts that it asks for, and the methods of its world:

- selector: `select(call, facts)` returns a row, `(row, costs, reason)`, or None to abstain
- scorer: `score(call, facts)` returns one finite cost for each row, lower is better
- filter: `keep(call, facts)` returns the rows to keep, in rising order
- decode override: `decide(call, decode, prefill)` returns "remote" or "local", and `decode_config(call, facts)` returns a dict
  of router settings to replace for the decode leg

A candidate is a row, numbered from 0. `call` has `leg`, `attempt`, `rows`, `seed` (for `Rng`) and `now_us` (microseconds since
the Unix epoch). `export(MyPolicy, globals())` at the end of the file exports the class from the component. The build copies
this file beside the policy. See policies/python/least-loaded/policy.py for a complete example.
"""

import json
import math
import struct

from componentize_py_types import Err

MASK = (1 << 64) - 1

# Facts that are not one u32. wit/facts.md lists all facts; a test compares these sets with it.
U64 = frozenset({"session-hash", "lora-hash", "tenant-hash", "other-leg-worker-id", "worker-id"})
F32 = frozenset({
    "priority", "priority-jump-s", "overlap-score-credit", "host-cache-credit", "disk-cache-credit",
    "prefill-load-scale", "active-request-weight", "temperature", "shared-cache-multiplier", "kv-usage",
    "taint-preference",
})


class Policy:
    """Base class of policies. `settings` has the known settings with their defaults; an unknown setting is an error."""

    name = "unnamed"
    version = "0.1.0"
    request_facts: list[str] = []
    worker_facts: list[str] = []
    settings: dict = {}

    def configure(self, settings: dict) -> None:
        """Takes the settings. Raise `ValueError` with a message for the operator when they are invalid."""


class Columns:
    """The facts of one call. `facts["n"]` is a number of the request; `facts["engine-queue"]` is a list, one value for each row."""

    def __init__(self, request: list[str], worker: list[str], words, columns, rows: int):
        self._values, self.rows = {}, rows
        place = 0
        for name in request:
            self._values[name] = _decode(name, words[place:place + _width(name)], 1)[0]
            place += _width(name)
        place = 0
        for name in worker:
            end = place + _width(name) * rows
            self._values[name] = _decode(name, columns[place:end], rows)
            place = end

    def __getitem__(self, name: str):
        return self._values[name]


class Rng:
    """SplitMix64. Seed it with `call.seed`, the only source of randomness. The Rust SDK draws the same numbers."""

    def __init__(self, seed: int):
        self._state = seed

    def bits(self) -> int:
        """Returns 64 uniform bits."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & MASK
        mixed = ((self._state ^ (self._state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
        return mixed ^ (mixed >> 31)

    def below(self, bound: int) -> int:
        """Returns a uniform number in range(bound); 0 when `bound` is 0."""
        return (self.bits() * bound) >> 64


class Shed(Exception):
    """Raise this to refuse the request, with status 429, 503 or 529 and a message for the client."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status, self.reason = status, reason


class Unsupported(Exception):
    """Raise this for a call that the policy does not support. The slot's fallback then decides."""


def least(costs: list[float], seed: int) -> int | None:
    """Returns the row of the lowest cost. Ties are drawn uniformly. None: there is no row, or every cost is NaN."""
    finite = [cost for cost in costs if not math.isnan(cost)]
    if not finite:
        return None
    lowest = min(finite)
    rows = [row for row, cost in enumerate(costs) if cost == lowest]
    return rows[0] if len(rows) == 1 else rows[Rng(seed).below(len(rows))]


def export(policy_class, module: dict) -> None:
    """Exports a policy: call `export(MyPolicy, globals())`. It adds the classes that componentize-py looks for."""
    from wit_world.exports import policy as wit

    state = {}

    class Exported:
        def describe(self):
            return wit.About(policy_class.name, policy_class.version)

        def configure(self, settings: str):
            policy = policy_class()
            try:
                given = json.loads(settings or "{}")
                unknown = [key for key in given if key not in policy.settings]
                if unknown:
                    raise ValueError(f"settings: unknown field `{unknown[0]}`")
                policy.configure({**policy.settings, **given})
            except (ValueError, TypeError) as problem:
                raise Err(str(problem)) from problem
            state["policy"] = policy
            return wit.Wants(list(policy.request_facts), list(policy.worker_facts))

    def columns(words, rows: int) -> Columns:
        policy = state["policy"]
        split = sum(_width(name) for name in policy.request_facts)
        return Columns(policy.request_facts, policy.worker_facts, words[:split], words[split:], rows)

    module["Policy"] = Exported
    for world in (_selecting, _scoring, _filtering, _disaggregation):
        world(policy_class, state, columns, module)


def _selecting(policy_class, state, columns, module):
    if not hasattr(policy_class, "select"):
        return
    from wit_world.exports import selecting as wit
    from wit_world.imports import types

    class Exported:
        def select(self, call, facts):
            def answer():
                chosen = state["policy"].select(call, columns(facts, call.rows))
                if chosen is None:
                    return wit.Decision_Abstain()
                row, costs, reason = chosen if isinstance(chosen, tuple) else (chosen, [], None)
                return wit.Decision_Choose(wit.Choice(row, costs, reason))
            return _guarded(types, answer, lambda shed: wit.Decision_Shed(shed))

    module["Selecting"] = Exported


def _scoring(policy_class, state, columns, module):
    if not hasattr(policy_class, "score"):
        return
    from wit_world.imports import types

    class Exported:
        def score(self, call, facts):
            return _guarded(types, lambda: list(state["policy"].score(call, columns(facts, call.rows))))

    module["Scoring"] = Exported


def _filtering(policy_class, state, columns, module):
    if not hasattr(policy_class, "keep"):
        return
    from wit_world.imports import types

    class Exported:
        def keep(self, call, facts):
            return _guarded(types, lambda: list(state["policy"].keep(call, columns(facts, call.rows))))

    module["Filtering"] = Exported


def _disaggregation(policy_class, state, columns, module):
    if not hasattr(policy_class, "decide"):
        return
    from wit_world.exports import disaggregation as wit
    from wit_world.imports import types

    fields = ("overlap_score_credit", "prefill_load_scale", "temperature", "assume_kv_reuse",
              "track_prefill_tokens", "shared_cache_multiplier")

    class Exported:
        def decide(self, call, request, decode, prefill):
            def answer():
                policy = state["policy"]
                names = (policy.request_facts, policy.worker_facts)
                one = Columns(names[0], names[1] if decode else [], request, decode, 1)
                many = Columns(names[0], names[1] if prefill else [], request, prefill, call.rows)
                remote = policy.decide(call, one, many) == "remote"
                return wit.Plan_Remote() if remote else wit.Plan_Local()
            return _guarded(types, answer, lambda shed: wit.Plan_Shed(shed))

        def decode_config(self, call, facts):
            def answer():
                policy = state["policy"]
                over = policy.decode_config(call, Columns(policy.request_facts, [], facts, [], 0))
                return wit.RouterConfigOverride(*(over.get(field) for field in fields))
            return _guarded(types, answer)

    module["Disaggregation"] = Exported


def _guarded(types, answer, shed=None):
    try:
        return answer()
    except Shed as refusal:
        if shed is None:
            raise Err(types.Error_Internal("only selectors and decode overrides may shed")) from refusal
        return shed(types.ShedReason(refusal.status, refusal.reason))
    except Unsupported as problem:
        raise Err(types.Error_Unsupported(str(problem))) from problem
    except Exception as problem:  # an exception that left the guest would destroy the instance
        raise Err(types.Error_Internal(f"{type(problem).__name__}: {problem}")) from problem


def _width(name: str) -> int:
    return 2 if name in U64 else 1


def _decode(name: str, words, rows: int) -> list:
    if name in U64:
        return [words[row] | words[rows + row] << 32 for row in range(rows)]
    if name in F32 or name.startswith("label-number/"):
        return list(struct.unpack(f"<{rows}f", struct.pack(f"<{rows}I", *words)))
    return words if isinstance(words, list) else list(words)
