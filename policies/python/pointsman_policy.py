"""Helper for Pointsman routing policies in Python.

A policy is a subclass of `Policy` with a name, a version, the facts that it asks for, and the methods of its world:

- selector: `select(call, facts)` returns a row, `(row, costs, reason)`, or None to abstain
- scorer: `score(call, facts)` returns one finite cost for each row, lower is better
- filter: `keep(call, facts)` returns the rows to keep, in rising order
- decode override: `decide(call, decode, prefill)` returns "remote" or "local", and `decode_config(call, facts)` returns a dict
  of router settings to replace for the decode leg; without the method they are `AFTER_REMOTE_PREFILL`

Another answer is an error, which counts as a failure of the policy; the slot's fallback then decides.

A candidate is a row, numbered from 0. `call` has `leg`, `attempt`, `rows`, `seed` (for `Rng`) and `now_us` (microseconds since
the Unix epoch). The module `random` is seeded with `call.seed` before each call, so that a decision can be replayed. `print`
writes to the policy's log. There is no clock, file or network, and a component imports nothing after it was built.
`export(MyPolicy, globals())` at the end of the file exports the class from the component. The build copies this file beside
the policy. `pointsman policy new` writes a complete example.

In plain Python, without a component, `export` does nothing, and `ask` and `run_cases` call a policy with the same checks:

    import pointsman_policy as pp
    from policy import LeastLoaded

    def test_the_idle_worker_is_chosen():
        assert pp.ask(LeastLoaded, rows=[{"active-requests": 3}, {"active-requests": 0}]) == 1
"""

import difflib
import io
import json
import math
import struct
import sys
from dataclasses import dataclass

try:
    from componentize_py_types import Err
except ImportError:  # plain Python

    class Err(Exception):
        """Error of the contract; the component has another class."""

MASK = (1 << 64) - 1


class _State:
    """Double of the slot's state, for `from wit_world.imports import state` in plain Python. It has no limits."""

    def __init__(self):
        self.now_us = 0
        self.clear()

    def clear(self) -> None:
        self._kept = {}

    def _expires(self, ttl_ms: int) -> float:
        return self.now_us + ttl_ms * 1_000 if ttl_ms else math.inf

    def get(self, key: str) -> bytes | None:
        value, expires = self._kept.get(key, (None, 0))
        return value if expires > self.now_us else None

    def set(self, key: str, value: bytes, ttl_ms: int) -> None:
        self._kept[key] = (bytes(value), self._expires(ttl_ms))

    def delete(self, key: str) -> None:
        self._kept.pop(key, None)

    def increment(self, key: str, delta: int, ttl_ms: int) -> int:
        value = self.get(key)
        if value is not None and len(value) != 8:
            raise Err("not-a-number")
        expires = self._expires(ttl_ms) if value is None else self._kept[key][1]
        total = int.from_bytes(value or bytes(8), "little", signed=True) + delta
        total = max(-(1 << 63), min((1 << 63) - 1, total))
        self._kept[key] = (total.to_bytes(8, "little", signed=True), expires)
        return total


STATE = _State()
try:
    import wit_world
except ImportError:  # plain Python
    for part in ("wit_world", "wit_world.imports"):
        sys.modules[part] = type(sys)(part)
    sys.modules["wit_world.imports"].state = STATE

# All facts by type. Do not edit: each release writes its own. `pointsman policy facts` describes them.
FACTS = {
    "request": {
        "u32": [
            "prompt-tokens", "prompt-tokens-estimated", "request-blocks", "block-size", "n", "max-tokens",
            "expected-output-tokens", "ttft-target-us", "itl-target-us", "tenant-active-requests",
            "assume-kv-reuse", "track-prefill-tokens", "other-leg-dp-rank", "explain", "queue-us",
            "program-turn", "program-idle-ms",
        ],
        "f32": [
            "priority", "priority-jump-s", "overlap-score-credit", "host-cache-credit", "disk-cache-credit",
            "prefill-load-scale", "active-request-weight", "temperature", "shared-cache-multiplier",
        ],
        "u64": [
            "session-hash", "lora-hash", "tenant-hash", "other-leg-worker-id", "program-hash",
        ],
    },
    "worker": {
        "u32": [
            "dp-rank", "active-requests", "active-prefill-tokens", "decode-blocks", "total-blocks",
            "cached-blocks-device", "cached-blocks-host", "cached-blocks-disk", "engine-running",
            "engine-queue", "load-age-ms", "topology-distance", "lora-loaded", "session-bound", "ttft-ewma-us",
            "itl-ewma-us", "error-ppm", "local-prefill", "max-concurrency", "prefill-us-per-ktoken",
            "engine-running-known", "engine-queue-known", "kv-usage-known", "program-tokens",
            "running-program-tokens", "prefix-requests", "label-is/<key>=<value>", "taint-is/<name>",
        ],
        "f32": [
            "kv-usage", "taint-preference", "label-number/<key>",
        ],
        "u64": [
            "worker-id",
        ],
    },
}
U64 = frozenset(name for types in FACTS.values() for name in types["u64"])
F32 = frozenset(name for types in FACTS.values() for name in types["f32"])
# The smallest numbers that a single cannot hold.
F32_LIMIT = 3.4028235677973366e38
# Values of facts that a test may leave out: of an absent fact, or the gateway's default. Others are 0.
LEFT_OUT = {
    "n": 1, "block-size": 16, "overlap-score-credit": 1, "host-cache-credit": 0.75, "disk-cache-credit": 0.25,
    "prefill-load-scale": 1, "assume-kv-reuse": 1, "track-prefill-tokens": 1, "other-leg-dp-rank": 4294967295,
    "program-idle-ms": 4294967295, "engine-running-known": 1, "engine-queue-known": 1,
    "kv-usage-known": 1,
}


class Policy:
    """Base class of policies. `settings` has the known settings with their defaults; an unknown setting is an error.

    `configure` may set `self.request_facts` and `self.worker_facts`: which facts a policy asks for may depend on its settings.
    """

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

    @classmethod
    def of(cls, policy, request: dict, rows: list[dict], worker_facts: bool = True) -> "Columns":
        """Returns columns with these values. A fact that the policy asks for and that is not given has the value of `LEFT_OUT`,
        otherwise 0."""
        columns = cls([], [], [], [], len(rows))
        worker = policy.worker_facts if worker_facts else []
        for given, asked in [(request, policy.request_facts), *((row, worker) for row in rows)]:
            for name in given:
                if name not in asked:
                    raise KeyError(f"the policy does not ask for the fact '{name}'{_suggestion(name, asked)}")
        for name in policy.request_facts:
            columns._values[name] = _exact(name, request.get(name, LEFT_OUT.get(name, 0)))
        for name in worker:
            columns._values[name] = [_exact(name, row.get(name, LEFT_OUT.get(name, 0))) for row in rows]
        return columns

    def __getitem__(self, name: str):
        if name not in self._values:
            raise KeyError(f"the policy does not ask for the fact '{name}'{_suggestion(name, self._values)}")
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


@dataclass(frozen=True)
class Call:
    """The arguments of a call besides facts, as `ask` passes them."""

    leg: str = "prefill"
    attempt: int = 0
    rows: int = 0
    seed: int = 0
    now_us: int = 0


class Shed(Exception):
    """Raise this to refuse the request, with status 429, 503 or 529 and a message for the client."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        if status not in (429, 503, 529):
            raise ValueError(f"shed status {status} is not allowed: use 429, 503 or 529")
        self.status, self.reason = status, reason


class Unsupported(Exception):
    """Raise this for a call that the policy does not support. It counts as a failure, and the slot's fallback decides.

    Where that is no failure, answer instead: None of a selector, equal costs, all rows, or "remote".
    """


def least(costs: list[float], seed: int) -> int | None:
    """Returns the row of the lowest cost. Ties are drawn uniformly. None: there is no row, or every cost is NaN."""
    finite = [cost for cost in costs if not math.isnan(cost)]
    if not finite:
        return None
    lowest = min(finite)
    rows = [row for row, cost in enumerate(costs) if cost == lowest]
    return rows[0] if len(rows) == 1 else rows[Rng(seed).below(len(rows))]


def ask(policy_class, rows=(), request=None, decode=None, settings=None, call=None):
    """Configures a policy and calls it once, in plain Python, with the checks of the component and of the host.

    `rows` has one dict of worker facts for each candidate, `request` the request facts. Returns the row, `(row, costs, reason)` or
    None of a selector, the costs of a scorer, the rows of a filter, and "remote" or "local" of a decode override, for which
    `decode` has the facts of the decode worker. `Shed` and errors are raised.
    """
    policy = configured(policy_class, json.dumps(_with_hashes(settings or {})))
    _check_facts(policy)
    rows = [_with_numbers(row) for row in rows]
    request, decode = _with_numbers(request or {}), None if decode is None else _with_numbers(decode)
    call = call or Call(rows=len(rows))
    many = Columns.of(policy, request, rows)
    _seed(call)
    if hasattr(policy, "decide"):
        # A call without a decode worker has no facts of one.
        one = Columns.of(policy, request, [decode] if decode is not None else [])
        return _plan(policy.decide(call, one, many))
    if hasattr(policy, "select"):
        answer = _choice(policy.select(call, many), len(rows))
        return answer if answer is None or answer[1] or answer[2] else answer[0]
    if hasattr(policy, "score"):
        return _costs(policy.score(call, many), len(rows), "score")
    return _kept(policy.keep(call, many), len(rows))


def run_cases(policy_class, path: str = "cases.toml") -> None:
    """Runs the cases of a `cases.toml` in plain Python (3.11 or later). Raises AssertionError with every case that fails.

    Cases with `outcomes` need the component: `pointsman policy test` runs them. Names of tenants, sessions and adapters get
    hashes that differ from those of a gateway.
    """
    import tomllib

    with open(path, "rb") as file:
        cases = tomllib.load(file)["case"]
    wrong = [failure for case in cases if (failure := _case(policy_class, case))]
    assert not wrong, "\n".join(wrong)


def _case(policy_class, case: dict) -> str | None:
    if "outcomes" in case:
        return None
    rows, expect = case.get("rows", []), case["expect"]
    request = case.get("request", {})
    STATE.clear()
    for key, number in case.get("state", {}).items():
        STATE.set(key, number.to_bytes(8, "little", signed=True), 0)
    call = Call(rows=len(rows), seed=case.get("seed", 0), now_us=case.get("now-us", 0), attempt=case.get("attempt", 0))
    try:
        answer = ask(policy_class, rows, request, case.get("decode", {}), case.get("settings"), call)
    except Shed as shed:
        answer = {"shed": shed.status}
    except Exception as problem:
        answer = {"refused": str(problem)}
    else:
        named = {"row": answer[0] if isinstance(answer, tuple) else answer, "costs": answer, "keep": answer, "plan": answer}
        answer = "abstain" if answer is None else {key: named[key] for key in expect if key in named} if isinstance(expect, dict) else answer
    if isinstance(expect, dict) and "refused" in expect:
        met = expect["refused"] in answer.get("refused", "\0")
    elif isinstance(expect, dict) and "costs" in expect and isinstance(answer, dict) and "costs" in answer:
        pairs = list(zip(expect["costs"], answer["costs"]))
        near = all(abs(cost - wanted) <= max(1e-3, abs(wanted) * 1e-6) for wanted, cost in pairs)
        met = near and len(pairs) == len(answer["costs"]) == len(expect["costs"])
    else:
        met = answer == expect
    return None if met else f"{case['name']}: expected {expect}, got {answer}"


def _hashed(value, fact: str):
    """Returns the hash (FNV-1a) of a name that a case gives for a fact; `tenant:NAME` is that of the tenant NAME.
    Other whole numbers of 64 bits may be texts, too."""
    if not isinstance(value, str):
        return value
    if not fact.endswith("-hash"):
        return int(value) if fact in U64 and value.isdigit() else value
    number = 0xCBF29CE484222325
    for byte in (value.removeprefix("tenant:") if fact == "tenant-hash" else value).encode():
        number = (number ^ byte) * 0x100000001B3 & MASK
    return number


def _with_numbers(facts: dict) -> dict:
    return {name: _hashed(value, name) for name, value in facts.items()}


def _with_hashes(settings):
    """Returns settings with hashes in the place of `tenant:NAME`, as the gateway passes them."""
    if isinstance(settings, dict):
        return {_with_hashes(key): _with_hashes(value) for key, value in settings.items()}
    if isinstance(settings, list):
        return [_with_hashes(value) for value in settings]
    named = isinstance(settings, str) and settings.startswith("tenant:")
    return str(_hashed(settings, "tenant-hash")) if named else settings


def configured(policy_class, settings: str):
    """Returns the policy with its settings, as the component's `configure` makes it."""
    policy = policy_class()
    given = json.loads(settings or "{}")
    for key, value in given.items():
        if key not in policy.settings:
            raise ValueError(f"settings: unknown field `{key}`{_suggestion(key, policy.settings)}")
        wanted = _kind(policy.settings[key])
        if wanted != _kind(value) and wanted != "null":
            raise ValueError(f"settings: `{key}` is a {_kind(value)}: expected a {wanted}")
    policy.configure({**policy.settings, **given})
    for scope, asked in (("request", policy.request_facts), ("worker", policy.worker_facts)):
        if not isinstance(asked, (list, tuple)) or not all(isinstance(name, str) for name in asked):
            raise ValueError(f"{scope}_facts is {asked!r}: expected a list of names")
    return policy


def export(policy_class, module: dict) -> None:
    """Exports a policy: call `export(MyPolicy, globals())`. It adds the classes that componentize-py looks for.

    In plain Python it only checks that the class has a method of one world.
    """
    worlds = [name for name in ("select", "score", "keep", "decide") if hasattr(policy_class, name)]
    if len(worlds) != 1:
        found = " and ".join(worlds) or "none of them"
        raise TypeError(f"{policy_class.__name__} has {found}: a policy has one of select, score, keep and decide")
    try:
        from wit_world.exports import policy as wit
    except ImportError:
        return

    state = {}

    class Exported:
        def describe(self):
            return wit.About(policy_class.name, policy_class.version)

        def configure(self, settings: str):
            _confine(module)
            try:
                policy = configured(policy_class, settings)
            except BaseException as problem:
                raise Err(_told(problem) if not isinstance(problem, ValueError) else str(problem)) from problem
            finally:
                _flush()
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
                chosen = _choice(state["policy"].select(call, columns(facts, call.rows)), call.rows)
                return wit.Decision_Abstain() if chosen is None else wit.Decision_Choose(wit.Choice(*chosen))
            return _guarded(types, call, answer, lambda shed: wit.Decision_Shed(shed))

    module["Selecting"] = Exported


def _scoring(policy_class, state, columns, module):
    if not hasattr(policy_class, "score"):
        return
    from wit_world.imports import types

    class Exported:
        def score(self, call, facts):
            def answer():
                return _costs(state["policy"].score(call, columns(facts, call.rows)), call.rows, "score")
            return _guarded(types, call, answer)

    module["Scoring"] = Exported


def _filtering(policy_class, state, columns, module):
    if not hasattr(policy_class, "keep"):
        return
    from wit_world.imports import types

    class Exported:
        def keep(self, call, facts):
            def answer():
                return _kept(state["policy"].keep(call, columns(facts, call.rows)), call.rows)
            return _guarded(types, call, answer)

    module["Filtering"] = Exported


def _disaggregation(policy_class, state, columns, module):
    if not hasattr(policy_class, "decide"):
        return
    from wit_world.exports import disaggregation as wit
    from wit_world.imports import types

    class Exported:
        def decide(self, call, request, decode, prefill):
            def answer():
                policy = state["policy"]
                names = (policy.request_facts, policy.worker_facts)
                one = Columns(*names, request, decode, 1 if decode or not names[1] else 0)
                many = Columns(*names, request, prefill, call.rows)
                return wit.Plan_Remote() if _plan(policy.decide(call, one, many)) == "remote" else wit.Plan_Local()
            return _guarded(types, call, answer, lambda shed: wit.Plan_Shed(shed))

        def decode_config(self, call, facts):
            def answer():
                policy = state["policy"]
                over = AFTER_REMOTE_PREFILL
                if hasattr(policy, "decode_config"):
                    over = _override(policy.decode_config(call, Columns(policy.request_facts, [], facts, [], 0)))
                return wit.RouterConfigOverride(*(over.get(field) for field in OVERRIDES))
            return _guarded(types, call, answer)

    module["Disaggregation"] = Exported


# Router settings that `decode_config` may replace, and their types.
OVERRIDES = {
    "overlap_score_credit": "number", "prefill_load_scale": "number", "temperature": "number",
    "assume_kv_reuse": "boolean", "track_prefill_tokens": "boolean", "shared_cache_multiplier": "number",
}


# Default of `decode_config`: the decode worker receives all blocks, whatever it has cached, and does not prefill.
AFTER_REMOTE_PREFILL = {"overlap_score_credit": 0.0, "assume_kv_reuse": False, "track_prefill_tokens": False}


def _choice(answer, rows: int):
    """Returns row, costs and reason of a selector's answer, or None."""
    if answer is None:
        return None
    row, costs, reason = answer if isinstance(answer, tuple) and len(answer) == 3 else (answer, [], None)
    if _kind(row) != "number" or row != int(row):
        raise TypeError(f"select returned {answer!r}: expected a row, (row, costs, reason) or None")
    if not 0 <= row < rows:
        raise ValueError(f"select returned row {row} of {rows}")
    if reason is not None and not isinstance(reason, str):
        raise TypeError(f"select returned the reason {reason!r}: expected a text or None")
    return int(row), _costs(costs, rows, "select") if len(costs) else [], reason


def _costs(answer, rows: int, method: str) -> list:
    if isinstance(answer, (str, bytes, dict)) or not hasattr(answer, "__iter__"):
        raise TypeError(f"{method} returned {answer!r}: expected one cost for each row")
    costs = list(answer)
    if len(costs) != rows:
        raise ValueError(f"{method} returned {len(costs)} costs for {rows} rows")
    for row, cost in enumerate(costs):
        if _kind(cost) != "number" or not abs(cost) < F32_LIMIT:
            raise ValueError(f"{method} returned the cost {cost!r} in row {row}: expected a finite number of 32 bits")
    return costs


def _kept(answer, rows: int) -> list:
    if isinstance(answer, (str, bytes, dict)) or not hasattr(answer, "__iter__"):
        raise TypeError(f"keep returned {answer!r}: expected the rows to keep")
    kept, last = list(answer), -1
    for row in kept:
        if isinstance(row, bool) or not isinstance(row, int) or not last < row < rows:
            raise ValueError(f"keep returned {kept!r}: expected rising rows below {rows}")
        last = row
    return kept


def _plan(answer) -> str:
    if answer not in ("remote", "local"):
        raise ValueError(f'decide returned {answer!r}: expected "remote" or "local"')
    return answer


def _override(answer) -> dict:
    if not isinstance(answer, dict):
        raise TypeError(f"decode_config returned {answer!r}: expected a dict")
    for key, value in answer.items():
        if key not in OVERRIDES:
            raise ValueError(f"decode_config returned the unknown key '{key}'{_suggestion(key, OVERRIDES)}")
        if value is not None and _kind(value) != OVERRIDES[key]:
            raise TypeError(f"decode_config returned {value!r} for '{key}': expected a {OVERRIDES[key]}")
    return answer


def _guarded(types, call, answer, shed=None):
    try:
        _seed(call)
        return answer()
    except Shed as refusal:
        if shed is None:
            raise Err(types.Error_Internal("only selectors and decode overrides may shed")) from refusal
        return shed(types.ShedReason(refusal.status, refusal.reason))
    except Unsupported as problem:
        raise Err(types.Error_Unsupported(str(problem))) from problem
    except BaseException as problem:  # an exception that left the guest would destroy the instance
        raise Err(types.Error_Internal(_told(problem))) from problem
    finally:
        _flush()


def _flush() -> None:
    """Writes what was printed without a line break at its end."""
    sys.stdout.flush()
    sys.stderr.flush()


class _Log(io.TextIOBase):
    """Writes each line to the policy's log."""

    def __init__(self, write):
        self._write_line, self._rest = write, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._write_line(line)
        return len(text)

    def flush(self):
        if self._rest:
            self.write("\n")


class _NoModules:
    """Ends the search for a module."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        raise ImportError(f"a component loads no module: import {name} at the top of policy.py")


def _confine(module: dict) -> None:
    """Replaces what a component lacks: it would trap, and not say why. `module` may have imported that by name."""
    from wit_world.imports import log

    sys.stdout = _Log(lambda line: log.log(log.Level.INFO, line))
    sys.stderr = _Log(lambda line: log.log(log.Level.ERROR, line))
    sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "__name__", "") != "PathFinder"] + [_NoModules]
    replaced = []

    def replace(place, name, new):
        replaced.append((getattr(place, name), new))
        setattr(place, name, new)

    for place, names, advice in ABSENT:
        for name in names.split():
            if hasattr(sys.modules.get(place), name):
                replace(sys.modules[place], name, _absent(name.lstrip("_"), advice))
    for name, place in WITH_TIME.items():
        if "time" in sys.modules:
            replace(sys.modules["time"], name, _with_time(getattr(sys.modules["time"], name), name, place))
    if "datetime" in sys.modules:
        datetime, now = sys.modules["datetime"], staticmethod(_absent("datetime.now", NO_CLOCK))
        replace(datetime, "datetime", type("datetime", (datetime.datetime,), {"now": now, "utcnow": now}))
    if "random" in sys.modules:
        random = sys.modules["random"]
        replace(random, "Random", type("Random", (random.Random,), {"seed": _seeded(random.Random.seed)}))
    for name, value in list(module.items()):
        for old, new in replaced:
            if value is old:
                module[name] = new


NO_CLOCK = "a policy has no clock: use call.now_us"
NO_FILES = "a policy has no files: put the values into its settings"
NO_ENTROPY = "a policy has no other randomness than its seed: use the module random, or Rng(call.seed)"
NO_EXIT = "a policy cannot exit: return an answer or raise an exception"
# Functions that need a system, by module, and what to use instead.
ABSENT = [
    ("time", "time time_ns monotonic monotonic_ns perf_counter perf_counter_ns process_time process_time_ns", NO_CLOCK),
    ("time", "clock_gettime clock_gettime_ns thread_time thread_time_ns", NO_CLOCK),
    ("time", "sleep", "a policy cannot wait: answer at once"),
    ("builtins", "open input", NO_FILES),
    ("io", "open open_code", NO_FILES),
    ("_io", "open open_code", NO_FILES),
    ("os", "open listdir scandir stat lstat mkdir remove rename replace rmdir unlink getcwd chdir access readlink", NO_FILES),
    ("os", "urandom", NO_ENTROPY),
    ("random", "_urandom", NO_ENTROPY),
    ("os", "_exit", NO_EXIT),
    ("sys", "exit", NO_EXIT),
]
# Functions of `time` that read the clock without their argument at this place.
WITH_TIME = {"localtime": 0, "gmtime": 0, "ctime": 0, "asctime": 0, "strftime": 1}


def _absent(name: str, advice: str):
    def refuse(*_, **__):
        raise OSError(f"{name}(): {advice}")

    return refuse


def _with_time(function, name: str, place: int):
    def checked(*args):
        return function(*args) if len(args) > place and args[place] is not None else _absent(name, NO_CLOCK)()

    return checked


def _seeded(seed):
    def checked(self, a=None, version=2):
        return seed(self, a, version) if a is not None else _absent("Random", NO_ENTROPY)()

    return checked


def _told(problem: BaseException) -> str:
    """Returns an exception's type, message and place in the policy."""
    text = problem.args[0] if isinstance(problem, KeyError) and problem.args else problem
    places, at = [], problem.__traceback__
    while at is not None:
        places.append((at.tb_frame.f_code.co_filename.rsplit("/", 1)[-1], at.tb_lineno))
        at = at.tb_next
    own = [place for place in places if place[0] != "pointsman_policy.py"]
    place = f" ({own[-1][0]}:{own[-1][1]})" if own else ""
    return f"{type(problem).__name__}: {text}{place}"


def _seed(call) -> None:
    """Makes `random` start anew from the seed of the call, when the policy uses it."""
    STATE.now_us = call.now_us
    if "random" in sys.modules:
        sys.modules["random"].seed(call.seed)


def _suggestion(name: str, known) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f": did you mean '{close[0]}'?" if close else ""


def _check_facts(policy) -> None:
    """Refuses facts that no gateway has. In a component the gateway does, which may have newer ones."""
    for scope, asked in (("request", policy.request_facts), ("worker", policy.worker_facts)):
        known = [name for names in FACTS[scope].values() for name in names]
        for name in asked:
            if not any(_is_fact(name, fact) for fact in known):
                raise ValueError(f"{scope}_facts: unknown {scope} fact '{name}'{_suggestion(name, known)}")


def _is_fact(name: str, fact: str) -> bool:
    """Returns whether this is the name of a fact. That of a label or taint has parts in <>."""
    begin, *rest = fact.split("<")
    return name == fact if not rest else len(name) > len(begin) and name.startswith(begin) and ("=" in name or "=" not in fact)


def _kind(value) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    kinds = {str: "text", list: "list", dict: "table", type(None): "null"}
    return kinds.get(type(value), type(value).__name__)


def _exact(name: str, value):
    """Returns a fact's value as the component would get it."""
    if name in F32 or name.startswith("label-number/"):
        return struct.unpack("<f", struct.pack("<f", value))[0]
    limit = 1 << (64 if name in U64 else 32)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < limit:
        raise ValueError(f"the fact '{name}' is {value!r}: expected a whole number from 0 to {limit - 1}")
    return value


def _width(name: str) -> int:
    return 2 if name in U64 else 1


def _decode(name: str, words, rows: int) -> list:
    if name in U64:
        return [words[row] | words[rows + row] << 32 for row in range(rows)]
    if name in F32 or name.startswith("label-number/"):
        return list(struct.unpack(f"<{rows}f", struct.pack(f"<{rows}I", *words)))
    return words if isinstance(words, list) else list(words)
