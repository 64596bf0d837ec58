"""What one controller can carry at the pace of real engines; a part of controllers.py.

A device is one of four that make an emulated engine, and makes ``RECORDS_PER_DEVICE_S`` records a
second: with 256 running answers of "rl16k", the model of an engine takes 36 ms for a step, and an
answer has 3,600 tokens on average. So 1,024 devices make 500 records a second. Each point is a run
whose records end one by one, at about the rate of so many devices, and whose first step is left
out. Payload goes by reference, so its size does not matter here.

busiest_controller_share_c<C>_at_<N>_devices: processor time of the busiest of C controllers over
the seconds of the step.

records_per_second_one_controller_saturates: what fills one core at the cost of a record at 4,096
devices' rate. It is extrapolated from the busy share there: emulated engines would fill this
machine's cores before.

gain_by_reference_1MB: that rate over the one at which a controller saturates that payload of 1 MB
a record goes through (controllers.py's). gain_by_controllers_heavy_code_c4: seconds of a step whose
filter burns ``HEAVY_US`` for each record in one controller, over four controllers; at most the
number of cores. gain_by_controllers_heavy_advantage_c4: the same with an advantage that burns.

controller_us_per_record_real_pace: of one controller at 1,024 devices' rate, time_scale 0.1;
..._time_scale_1: at the pace of the model itself, with answers of at most 600 tokens.
controller_us_per_record_2048_each: of 64 controllers with 2,048 records each, over one with 2,048;
engines spend no time there. ..._over_strangers: of the same 64 over 64 runs with one controller and
2,048 records each, at the same time on the same cores: what it costs to work together.
..._strangers: of these over one such run alone: what it costs to share the machine. The 64 runs
have 64 times as many other processes, too, so their caches may be colder than those of the 64 that
work together, and the former says rather too little than too much. All three take turns. Where
memory is too small for 64 runs there are as many as fit: strangers_2048_each says how many. Fewer
crowd the machine less than the 64 that work together, so then the former may say too much.

owned_us_over_shared_c<C>: processor time of C controllers at 1,024 devices' rate that own their
replicas, over that of C that share all; owned_step_over_shared_c<C>: seconds of a step, likewise.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from report import Claim, interval
from strangers import count_that_fits, run_strangers
from user_code import user_code

RECORDS_PER_DEVICE_S = 0.5
RATES = (64, 256, 1024, 4096)  # devices
COUNTS = (4, 16, 64)  # controllers, besides one
HEAVY_US = 2000
GROUP = 16
STEPS_OF_2048 = 2  # measured ones, at most: 64 controllers with 2,048 records each take minutes
RECORDS_OF_A_REPLICA = 43  # in a step: a real engine has as many of one, or more
# Seconds that the rollout of a step takes with "chat" at time_scale 0.1.
ROLLOUT_S = 5.5


@dataclass
class Point:
    """Holds what a run's measured steps had; one number for each step.

    us: processor microseconds of all controllers, for each record.
    share: of the busiest controller: its processor time over the seconds of the step.
    records_per_s: records over seconds of the step.
    step_s: seconds of the step.
    messages: of all controllers, for each record.
    """

    us: list[float] = field(default_factory=list)
    share: list[float] = field(default_factory=list)
    records_per_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    messages: list[float] = field(default_factory=list)

    def add(self, point: Point) -> None:
        """Adds the steps of another run of the same kind."""
        for of_steps in fields(self):
            getattr(self, of_steps.name).extend(getattr(point, of_steps.name))


def measured(metrics: Sequence[dict[str, float]], records: int) -> Point:
    """Returns what the steps behind the first one had."""
    point = Point()
    for before, after in itertools.pairwise(metrics[1:]):
        spent_s = [
            value - before[name]
            for name, value in after.items()
            if name.startswith("cpu_seconds/controller.")
        ]
        point.us.append(sum(spent_s) / records * 1e6)
        point.share.append(max(spent_s) / after["seconds/step"])
        point.records_per_s.append(records / after["seconds/step"])
        point.step_s.append(after["seconds/step"])
        point.messages.append(after["controller/messages"] / records)
    return point


class Saturation:
    """Measures the points and makes the claims.

    job, run: ``controllers.job``, and what runs a plan and returns its metrics.
    inline_s: seconds that a controller takes to pass on so many bytes of payload.
    note: tells how far it is.
    steps: measured ones of each run.
    rounds: how often what takes turns is run.
    devices: rates that are measured; the last but one, or the only one, is compared.
    counts: numbers of controllers, besides one.
    """

    def __init__(
        self,
        *,
        job: Callable[..., dict[str, Any]],
        run: Callable[[dict[str, Any]], list[dict[str, float]]],
        inline_s: Callable[[int], float],
        note: Callable[[str], None],
        steps: int,
        rounds: int,
        devices: Sequence[int] = RATES,
        counts: Sequence[int] = COUNTS,
    ) -> None:
        self._job = job
        self._run = run
        self._inline_s = inline_s
        self._note = note
        self._steps = steps
        self._rounds = rounds
        self._devices = devices
        self._counts = counts

    def claims(self) -> list[Claim]:
        """Measures everything."""
        compared = self._devices[-2:][0]
        one = {n: self.at(n, 1) for n in self._devices}
        many = {c: self.at(compared, c) for c in self._counts}
        claims = []
        for n, point in one.items():
            claims += self._point(f"c1_at_{n}_devices", point)
        for c, point in many.items():
            claims += self._point(f"c{c}_at_{compared}_devices", point)
        fastest = one[self._devices[-1]]
        claims += [
            _median(
                "records_per_second_one_controller_saturates",
                [1e6 / us for us in fastest.us],
                "records/s, extrapolated",
            ),
            _median("controller_us_per_record_real_pace", one[compared].us, "us", 80, "<="),
        ]
        claims += self._design(statistics.median(fastest.us))
        claims += self._owned(compared, many)
        claims += self._time_scale_1()
        return claims + self._heavy()

    def _point(self, name: str, point: Point) -> list[Claim]:
        """Returns the claims of one point of the plot."""
        return [
            _median(f"busiest_controller_share_{name}", point.share, "share of a core"),
            _median(f"controller_us_per_record_{name}", point.us, "us"),
            _median(f"controller_messages_per_record_{name}", point.messages, "messages"),
            _median(f"records_per_second_{name}", point.records_per_s, "records/s"),
        ]

    def at(self, devices: int, controllers: int, **controller: Any) -> Point:
        """Measures so many controllers at about the rate of so many devices.

        controller: further settings of the controllers.
        """
        rate = devices * RECORDS_PER_DEVICE_S
        groups = max(controllers, round(rate * ROLLOUT_S / GROUP), 8)
        records = groups * GROUP
        replicas = max(2, records // RECORDS_OF_A_REPLICA)
        if controller.get("replicas") == "owned":
            replicas = max(replicas, controllers)
        plan = self._paced(controllers, groups, replicas, 0.1)
        plan["controller"] |= controller
        return self._point_of(plan, records, f"{controllers} controllers, {devices} devices")

    def _paced(
        self, controllers: int, groups: int, replicas: int, time_scale: float
    ) -> dict[str, Any]:
        """Returns a job whose engines take their time."""
        plan = self._job(controllers, groups, GROUP, ranks=8, replicas=replicas, hosts=1)
        plan["run"]["steps"] = 1 + self._steps
        plan["roles"]["rollout"]["config"]["time_scale"] = time_scale
        plan["data"]["config"] = {"kind": "chat", "prompt_tokens": [16]}
        return plan

    def _point_of(self, plan: dict[str, Any], records: int, text: str) -> Point:
        self._note(text)
        point = measured(self._run(plan), records)
        self._note(
            f"{text}: {statistics.median(point.us):.0f} us a record, "
            f"{statistics.median(point.records_per_s):.0f} records/s, busiest "
            f"{statistics.median(point.share):.3f} of a core"
        )
        return point

    def _design(self, us: float) -> list[Claim]:
        """Compares with a controller that the payload goes through.

        us: what a record costs one of ours.
        """
        records = 256  # of a step of ``inline_s``
        inline_us = [self._inline_s(records * 1_000_000) / records * 1e6 for _ in range(3)]
        gains = [inline / us for inline in inline_us]
        return [
            _median(
                "records_per_second_inline_1MB_saturates",
                [1e6 / inline for inline in inline_us],
                "records/s",
            ),
            _median("gain_by_reference_1MB", gains, "ratio"),
        ]

    def _owned(self, devices: int, shared: dict[int, Point]) -> list[Claim]:
        """Compares controllers that own replicas with those that share them."""
        claims = []
        for c in [c for c in self._counts if c <= 16]:
            owned = self.at(devices, c, replicas="owned")
            for name, values in (("us", "us"), ("step", "step_s")):
                rounds = list(zip(getattr(owned, values), getattr(shared[c], values), strict=True))
                claims.append(_ratio(f"owned_{name}_over_shared_c{c}", rounds))
        return claims

    def _time_scale_1(self) -> list[Claim]:
        """Measures one controller at the pace of the model."""
        plan = self._paced(1, 32, 12, 1.0)
        plan["roles"]["rollout"]["config"]["max_new_tokens"] = 600
        point = self._point_of(plan, 32 * GROUP, "one controller, time_scale 1")
        return [
            _median("controller_us_per_record_time_scale_1", point.us, "us"),
            _median("records_per_second_time_scale_1", point.records_per_s, "records/s"),
        ]

    def _heavy(self) -> list[Claim]:
        """Measures one controller and four whose filter, or whose advantage, burns time."""
        codes = {
            "code": {"filter": {"use": "user/burns"}},
            "advantage": {"advantage": {"use": "user/burns"}},
        }
        claims = []
        groups = 64
        for name, code in codes.items():
            seconds = {}
            for c in (1, 4):
                plan = self._job(c, groups, GROUP, ranks=4, replicas=8, hosts=1) | code
                plan["run"]["steps"] = 1 + self._steps
                text = f"{c} controllers, {HEAVY_US} us of user code a record ({name})"
                with user_code(GROUP, HEAVY_US):
                    seconds[c] = self._point_of(plan, groups * GROUP, text).step_s
            rounds = list(zip(seconds[1], seconds[4], strict=True))
            claims.append(_ratio(f"gain_by_controllers_heavy_{name}_c4", rounds))
        return claims

    def with_2048_each(self, controllers: int) -> list[Claim]:
        """Compares so many controllers with 2,048 records each with one that has 2,048, and with as
        many that work alone at the same time, or as many of these as fit into memory.
        """
        one = Point()
        many = Point()
        strangers = Point()
        jobs = count_that_fits(controllers)
        for _ in range(self._rounds):
            one.add(self._of_2048(1))
            many.add(self._of_2048(controllers))
            if jobs:
                strangers.add(self._strangers_of_2048(jobs))
        name = "controller_us_per_record_2048_each"
        claims = [
            _median(f"{name}_c1", one.us, "us"),
            _median(f"{name}_c{controllers}", many.us, "us"),
            _median(
                f"controller_messages_per_record_2048_each_c{controllers}",
                many.messages,
                "messages",
            ),
            _median("controller_messages_per_record_2048_each_c1", one.messages, "messages"),
            _ratio(name, list(zip(many.us, one.us, strict=True)), 1.1, "<="),
        ]
        if jobs:
            together = list(zip(many.us, strangers.us, strict=True))
            apart = list(zip(strangers.us, one.us, strict=True))
            claims += [
                _ratio(f"{name}_over_strangers", together),
                _ratio(f"{name}_strangers", apart),
                Claim("strangers_2048_each", jobs, "jobs"),
            ]
        return claims

    def _plan_of_2048(self, controllers: int) -> dict[str, Any]:
        plan = self._job(controllers, 128 * controllers, GROUP, ranks=8, replicas=48, hosts=1)
        plan["run"]["steps"] = 1 + min(STEPS_OF_2048, self._steps)
        return plan

    def _of_2048(self, controllers: int) -> Point:
        """Measures controllers that work together and have 2,048 records each."""
        text = f"{controllers} controllers, 2,048 records each"
        return self._point_of(self._plan_of_2048(controllers), 2048 * controllers, text)

    def _strangers_of_2048(self, jobs: int) -> Point:
        """Measures jobs that run at the same time with one controller and 2,048 records each.

        Their last step is left out, since some of them end before others. A number of the point is
        the mean over the jobs.
        """
        self._note(f"{jobs} strangers, 2,048 records each")
        plan = self._plan_of_2048(1)
        plan["run"]["steps"] += 1
        with user_code(GROUP, 0) as gate:
            metrics = run_strangers(self._run, plan, jobs, gate)
        points = [measured(of_job[:-1], 2048) for of_job in metrics]
        mean = Point()
        for of_steps in fields(mean):
            by_job = [getattr(point, of_steps.name) for point in points]
            getattr(mean, of_steps.name).extend(map(statistics.fmean, zip(*by_job, strict=True)))
        self._note(f"{jobs} strangers: {statistics.median(mean.us):.0f} us a record")
        return mean


def _median(
    name: str, values: Sequence[float], unit: str, bar: float | None = None, op: str = ">="
) -> Claim:
    """Returns a claim of the median over the measured steps, with its interval."""
    return Claim(
        name, statistics.median(values), unit, bar, op, interval(values, statistics.median)
    )


def _ratio(
    name: str,
    rounds: Sequence[tuple[float, float]],
    bar: float | None = None,
    op: str = ">=",
) -> Claim:
    """Returns a claim of the median of the first numbers over that of the second ones."""

    def ratio(chosen: Sequence[tuple[float, float]]) -> float:
        return statistics.median(a for a, _ in chosen) / statistics.median(b for _, b in chosen)

    return Claim(name, ratio(rounds), "ratio", bar, op, interval(rounds, ratio))
