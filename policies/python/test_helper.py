"""Tests of pointsman_policy.py in plain Python: `python3 policies/python/test_helper.py`."""

import pathlib
import random
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(0, str(pathlib.Path(__file__).parent / "least-loaded"))

import pointsman_policy as pp
import policy as least_loaded


class Answering(pp.Policy):
    """Returns what a test sets."""

    worker_facts = ["engine-queue"]
    settings = {"weight": 1.0, "name": "x"}
    answer = None


class Selector(Answering):
    def select(self, call, facts):
        return self.answer


class Scorer(Answering):
    def score(self, call, facts):
        return self.answer


class Filter(Answering):
    def keep(self, call, facts):
        return self.answer


class Override(Answering):
    def decide(self, call, decode, prefill):
        return self.answer


class Random(Answering):
    def score(self, call, facts):
        return [random.random() for _ in range(call.rows)]


# A component's module with doubles of the bindings, which asks its policy what components lack.
COMPONENT = r"""
import datetime, os, random, re, sys, time, types
from time import monotonic
import pointsman_policy as pp

written, out = [], sys.stdout
log = types.SimpleNamespace(Level=types.SimpleNamespace(INFO="info", ERROR="error"), log=lambda *line: written.append(line))
wit = types.SimpleNamespace(About=tuple, Wants=lambda *names: names)
errors = types.SimpleNamespace(Error_Internal=str)
packages = {"": {}, ".exports": {"policy": wit}, ".imports": {"log": log, "types": errors}}
sys.modules.update({"wit_world" + name: types.SimpleNamespace(**parts) for name, parts in packages.items()})

questions = {
    "print": lambda: print("one\ntwo", 3, end=""),
    "stderr": lambda: print("four", file=sys.stderr),
    "open": lambda: open(os.devnull),
    "time": lambda: time.time(),
    "monotonic": lambda: monotonic(),
    "localtime": lambda: time.localtime(),
    "gmtime": lambda: time.gmtime(0),
    "now": lambda: datetime.datetime.now(),
    "today": lambda: datetime.date.today(),
    "sleep": lambda: time.sleep(0),
    "urandom": lambda: os.urandom(1),
    "SystemRandom": lambda: random.SystemRandom().random(),
    "Random": lambda: random.Random(),
    "seeded": lambda: random.Random(3).random(),
    "fromtimestamp": lambda: datetime.datetime.fromtimestamp(3, datetime.timezone.utc),
    "exit": lambda: sys.exit(0),
    "SystemExit": lambda: exec("raise SystemExit(3)"),
    "import": lambda: __import__("this"),
}

class Rule(pp.Policy):
    settings = {"wrong": False}

    def configure(self, settings):
        print("configured", settings["wrong"], end="")
        if settings["wrong"]:
            raise ValueError("wrong")

    def score(self, call, facts):
        questions[call.leg]()
        return [0.0]

pp.export(Rule, globals())
for settings in ("{}", '{"wrong": true}'):
    try:
        Policy().configure(settings)
    except pp.Err as error:
        out.write(f"{error}\n")
    out.write(f"{settings}: {written}\n")
    written.clear()
for question in questions:
    try:
        answer = Scoring().score(pp.Call(leg=question, rows=1), [])
    except pp.Err as error:
        answer = re.sub(r" \(\S+:\d+\)$", "", str(error))
    out.write(f"{question}: {answer} {written}\n")
    written.clear()
"""
LOGGED = """\
{}: [('info', 'configured False')]
wrong
{"wrong": true}: [('info', 'configured True')]
print: [0.0] [('info', 'one'), ('info', 'two 3')]
stderr: [0.0] [('error', 'four')]
open: OSError: open(): a policy has no files: put the values into its settings []
time: OSError: time(): a policy has no clock: use call.now_us []
monotonic: OSError: monotonic(): a policy has no clock: use call.now_us []
localtime: OSError: localtime(): a policy has no clock: use call.now_us []
gmtime: [0.0] []
now: OSError: datetime.now(): a policy has no clock: use call.now_us []
today: OSError: time(): a policy has no clock: use call.now_us []
sleep: OSError: sleep(): a policy cannot wait: answer at once []
urandom: OSError: urandom(): a policy has no other randomness than its seed: use the module random, or Rng(call.seed) []
SystemRandom: OSError: urandom(): a policy has no other randomness than its seed: use the module random, or Rng(call.seed) []
Random: OSError: Random(): a policy has no other randomness than its seed: use the module random, or Rng(call.seed) []
seeded: [0.0] []
fromtimestamp: [0.0] []
exit: OSError: exit(): a policy cannot exit: return an answer or raise an exception []
SystemExit: SystemExit: 3 []
import: ImportError: a component loads no module: import this at the top of policy.py []
"""


def answering(policy_class, answer):
    return type(policy_class.__name__, (policy_class,), {"answer": answer})


class Helper(unittest.TestCase):
    def refused(self, policy_class, answer, text, **more):
        with self.assertRaises(Exception) as raised:
            pp.ask(answering(policy_class, answer), rows=[{}, {}], **more)
        self.assertIn(text, str(raised.exception))

    def test_a_bad_answer_is_an_error_and_never_a_guess(self):
        self.refused(Override, "Remote", 'decide returned \'Remote\': expected "remote" or "local"')
        self.refused(Override, None, 'decide returned None: expected "remote" or "local"')
        self.refused(Selector, "1", "select returned '1': expected a row, (row, costs, reason) or None")
        self.refused(Selector, True, "select returned True")
        self.refused(Selector, 2, "select returned row 2 of 2")
        self.refused(Selector, (0, [1.0], None), "1 costs for 2 rows")
        self.refused(Scorer, None, "score returned None: expected one cost for each row")
        self.refused(Scorer, [1.0, float("nan")], "the cost nan in row 1")
        # T4.11
        self.refused(Scorer, [1.0, 1e39], "the cost 1e+39 in row 1: expected a finite number of 32 bits")
        self.refused(Filter, None, "keep returned None")
        self.refused(Filter, [1, 0], "expected rising rows below 2")
        for answer, text in [
            (None, "decode_config returned None: expected a dict"),
            ({"overlap_score_credits": 1.0}, "unknown key 'overlap_score_credits': did you mean 'overlap_score_credit'?"),
            ({"temperature": "hot"}, "decode_config returned 'hot' for 'temperature': expected a number"),
        ]:
            with self.assertRaises(Exception) as raised:
                pp._override(answer)
            self.assertIn(text, str(raised.exception))
        with self.assertRaises(ValueError) as raised:
            pp.Shed(418, "teapot")
        self.assertIn("shed status 418 is not allowed: use 429, 503 or 529", str(raised.exception))

    def test_good_answers_pass(self):
        rows = [{"engine-queue": 1}, {"engine-queue": 0}]
        self.assertEqual(pp.ask(answering(Selector, 1), rows), 1)
        self.assertIsNone(pp.ask(answering(Selector, None), rows))
        self.assertEqual(pp.ask(answering(Selector, (1, [1, 0], "why")), rows), (1, [1, 0], "why"))
        self.assertEqual(pp.ask(answering(Scorer, (1, 0.5)), rows), [1, 0.5])
        self.assertEqual(pp.ask(answering(Filter, [0, 1]), rows), [0, 1])
        self.assertEqual(pp.ask(answering(Override, "local"), rows, decode={}), "local")
        # D2.1: a policy without `decode_config` keeps the default.
        default = {"overlap_score_credit": 0.0, "assume_kv_reuse": False, "track_prefill_tokens": False}
        self.assertEqual(pp._override(pp.AFTER_REMOTE_PREFILL), default)

    def test_unknown_names_get_a_suggestion(self):
        self.refused(Scorer, [0, 0], "unknown field `wieght`: did you mean 'weight'?", settings={"wieght": 2})
        self.refused(Scorer, [0, 0], "`weight` is a text: expected a number", settings={"weight": "2"})
        with self.assertRaises(KeyError) as raised:
            pp.ask(answering(Scorer, [0]), rows=[{"engine-queu": 1}])
        self.assertIn("does not ask for the fact 'engine-queu': did you mean 'engine-queue'?", str(raised.exception))

    def test_a_policy_asks_for_a_list_of_facts_that_exist(self):
        def asking(**facts):
            return type("Asking", (answering(Selector, 0),), facts)

        labels = ["label-is/zone=a", "label-number/price", "taint-is/spot"]
        self.assertEqual(pp.ask(asking(request_facts=("n",), worker_facts=labels), rows=[{}]), 0)
        for facts, text in [
            ({"worker_facts": ["engine-que"]}, "unknown worker fact 'engine-que': did you mean 'engine-queue'?"),
            ({"worker_facts": ["n"]}, "unknown worker fact 'n'"),
            ({"request_facts": ["label-is/zone=a"]}, "unknown request fact 'label-is/zone=a'"),
            ({"worker_facts": ["label-is/zone"]}, "unknown worker fact 'label-is/zone'"),
            ({"worker_facts": ["taint-is/"]}, "unknown worker fact 'taint-is/'"),
            ({"worker_facts": "engine-queue"}, "worker_facts is 'engine-queue': expected a list of names"),
            ({"request_facts": [1]}, "request_facts is [1]: expected a list of names"),
        ]:
            with self.assertRaises(ValueError) as raised:
                pp.ask(asking(**facts), rows=[{"engine-queue": 1}])
            self.assertIn(text, str(raised.exception))

    def test_a_class_has_the_method_of_one_world(self):
        with self.assertRaises(TypeError) as raised:
            pp.export(Answering, {})
        self.assertIn("Answering has none of them", str(raised.exception))

    def test_random_depends_on_the_seed_of_the_call_only(self):
        rows = [{}, {}]
        ask = lambda seed: pp.ask(Random, rows, call=pp.Call(rows=2, seed=seed))
        first = ask(7)
        ask(8)
        self.assertEqual(first, ask(7))
        self.assertNotEqual(first, ask(8))

    def test_an_exception_tells_its_place(self):
        try:
            pp.configured(least_loaded.LeastLoaded, '{"active-requests": -1}')
        except ValueError as problem:
            self.assertRegex(pp._told(problem), r"ValueError: active-requests: .* \(policy.py:\d+\)")

    def test_a_component_logs_what_is_printed_and_says_what_to_use_instead_of_a_system(self):
        # A process of its own, because it loses its files and its clock.
        ran = subprocess.run([sys.executable, "-c", COMPONENT], cwd=pathlib.Path(__file__).parent, capture_output=True, text=True)
        self.assertEqual((ran.returncode, ran.stderr), (0, ""), ran.stdout)
        self.assertEqual(ran.stdout, LOGGED)

    def test_t4_a_policy_reads_and_writes_state_in_plain_python(self):
        from wit_world.imports import state

        class Counting(pp.Policy):
            worker_facts = ["active-requests"]

            def select(self, call, facts):
                count = state.increment("count", 1, 1_000)
                return None if count > 2 else 0

        ask = lambda now_us: pp.ask(Counting, [{}], call=pp.Call(rows=1, now_us=now_us))
        # T4.6
        self.assertEqual([ask(0), ask(0), ask(0), ask(1_000_000)], [0, 0, None, 0])
        state.set("text", b"abc", 0)
        self.assertEqual((state.get("text"), state.get("none")), (b"abc", None))
        state.delete("text")
        self.assertIsNone(state.get("text"))
        cases = [{"name": "preset", "rows": [{}], "state": {"count": 2}, "expect": "abstain"},
                 {"name": "without", "rows": [{}], "expect": {"row": 0}}]
        # T4.6: each case has its own state.
        self.assertEqual([pp._case(Counting, case) for case in cases], [None, None])

    def test_t4_a_case_names_tenants(self):
        class Pinned(pp.Policy):
            request_facts, worker_facts, settings = ["tenant-hash"], ["active-requests"], {"tenants": {}}

            def configure(self, settings):
                self.tenants = settings["tenants"]

            def select(self, call, facts):
                return 0 if str(facts["tenant-hash"]) in self.tenants else None

        case = {"name": "x", "rows": [{}], "settings": {"tenants": {"tenant:acme": 1}}, "request": {"tenant-hash": "tenant:acme"}}
        # T4.5
        self.assertIsNone(pp._case(Pinned, {**case, "expect": {"row": 0}}))
        self.assertIsNone(pp._case(Pinned, {**case, "request": {"tenant-hash": "other"}, "expect": "abstain"}))

        # T4.8
        rows = {"rows": [{}], "settings": {"tenants": {"tenant:acme": 1}}}
        self.assertEqual(pp.ask(Pinned, request={"tenant-hash": "acme"}, **rows), 0)
        self.assertIsNone(pp.ask(Pinned, request={"tenant-hash": "other"}, **rows))

    def test_t4_an_id_may_be_given_as_digits(self):
        class ById(pp.Policy):
            worker_facts = ["worker-id"]

            def keep(self, call, facts):
                return [row for row in range(call.rows) if facts["worker-id"][row] == 12349305675965833812]

        # T4.9
        self.assertEqual(pp.ask(ById, [{"worker-id": 1}, {"worker-id": "12349305675965833812"}]), [1])

    def test_t4_facts_that_are_left_out_are_absent(self):
        class Absent(pp.Policy):
            request_facts = ["n", "block-size", "program-idle-ms", "priority", "overlap-score-credit"]
            worker_facts = ["load-age-ms", "engine-queue-known", "engine-queue"]

            def score(self, call, facts):
                seen.update({name: facts[name] for name in self.request_facts + self.worker_facts})
                return [0.0]

        seen = {}
        pp.ask(Absent, [{}])
        none = 4294967295
        request = {"n": 1, "block-size": 16, "program-idle-ms": none, "priority": 0, "overlap-score-credit": 1}
        # T4.10
        self.assertEqual(seen, {**request, "load-age-ms": [0], "engine-queue-known": [1], "engine-queue": [0]})

    def test_t4_facts_may_depend_on_settings(self):
        class Labelled(pp.Policy):
            settings = {"zone": "a"}

            def configure(self, settings):
                self.worker_facts = [f"label-is/zone={settings['zone']}"]

            def score(self, call, facts):
                return [1.0 - value for value in facts[self.worker_facts[0]]]

        # T4.7
        self.assertEqual(pp.ask(Labelled, [{}, {"label-is/zone=b": 1}], settings={"zone": "b"}), [1.0, 0.0])

    def test_the_shipped_policy_passes_its_cases_without_a_component(self):
        cases = pathlib.Path(__file__).parent.parent / "least-loaded" / "cases.toml"
        pp.run_cases(least_loaded.LeastLoaded, str(cases))


if __name__ == "__main__":
    unittest.main()
