"""Selector: the least loaded worker. Ties are drawn uniformly. Same rule and test cases as policies/least-loaded."""

import math

import pointsman_policy as pp


class LeastLoaded(pp.Policy):
    name = "least-loaded"
    request_facts = ["explain"]
    worker_facts = ["active-requests", "active-prefill-tokens", "engine-queue", "engine-queue-known"]
    settings = {"active-requests": 1.0, "prefill-kilotokens": 0.0, "engine-queue": 0.0}

    def configure(self, settings):
        for key, weight in settings.items():
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"{key}: {weight:g} is not a finite number of 0 or more")
        self.weights = (settings["active-requests"], settings["prefill-kilotokens"] / 1000, settings["engine-queue"])

    def select(self, call, facts):
        a, b, c = self.weights
        queues = list(zip(facts["engine-queue"], facts["engine-queue-known"]))
        told = [queue for queue, known in queues if known]
        # A queue that the engine does not tell counts as the mean of the others.
        mean = sum(told) / len(told) if told else 0
        queues = [queue if known else mean for queue, known in queues]
        rows = zip(facts["active-requests"], facts["active-prefill-tokens"], queues)
        costs = [a * requests + b * tokens + c * queue for requests, tokens, queue in rows]
        row = pp.least(costs, call.seed)
        return None if row is None else (row, costs if facts["explain"] else [], None)


pp.export(LeastLoaded, globals())
