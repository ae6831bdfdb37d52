"""Endings: the part of the roster that takes in what ends, be it a worker, a round, an agent or its connection."""

from __future__ import annotations

from holdfast.cluster import compose
from holdfast.cluster.admission import Admission
from holdfast.cluster.generations import Generations, RosterSettings
from holdfast.cluster.limbo import Limbo
from holdfast.cluster.membership import Judge, Message, machine_of
from holdfast.cluster.register import Host
from holdfast.cluster.rounds import Failure, Rounds

DONE = "it is done"  # cause of a host's end that is no failure


class Endings(Generations):
    """Decides what an end is: a loss, a restart of all workers of a script without a ``Run``, or the end of the run."""

    def __init__(self, settings: RosterSettings, *, judge: Judge, now: float) -> None:
        super().__init__(settings, judge=judge, now=now)
        self._admission = Admission()
        self._limbo = Limbo()
        self._errors: list[str] = []  # the last line of each error that ended a worker
        self._has_run = False  # a worker has come, or its agent says so: the script has a ``Run``
        self._rounds = Rounds()  # of a script without one
        self._rejoined = False  # there are agents whose workers were started under another coordinator, as etcd knows
        self._deserted = False  # the last host is done

    def _disconnected(self, host: Host) -> None:
        """Take in a closed connection. It is no loss yet: the network may have closed it, and the agent comes back.

        Training does not need it. ``_waits_for_absent`` says when it is a loss.
        """
        self._strike_out_host(host, "connection lost")
        if any(name not in self._gone for name in self._muster.members_on(host.number)):
            self.absent[host.number] = self._now
            self._hung_up.add(host.number)
        self.advance()

    def _host_done(self, host: Host, *, stays: bool) -> None:
        """Take in that an agent ends, or only keeps the coordinator from now on (``stays``)."""
        self._strike_out_host(host, DONE, stays=stays)
        self._machine_gone(host.number, "its agent has ended")
        self.advance()

    def _strike_out_host(self, host: Host, cause: str, *, stays: bool = False) -> None:
        """Strike out a host, and forget its workers: it tells of them when it comes back."""
        if stays:
            self._register.retire(host)
        else:
            self._register.remove(host)
        for name in self._muster.workers_on(host.number):
            self._muster.remove(name)
        self._register.log("host-gone", host=host.number, cause=cause)
        self._deserted = not self.hosts and (cause == DONE or self._finishing)
        self._end_if_deserted()

    def _end_if_deserted(self) -> None:
        """End the run if the last host is done, unless others may come: soon after a restart not all are back."""
        others = bool(self.absent or self._limbo) or (self._is_restarted and self._now < self.first_look)
        if self._deserted and not self.hosts and (self._finishing or not others):
            self.stopped = True

    def _worker_ended(self, report: Message) -> None:
        """Take in an agent's report that a worker has ended."""
        self._register.log("exit", **{k: v for k, v in report.items() if k not in ("type", "incarnation")})
        name, error = report["worker"], report["error"]
        if self._admission.is_another(name, report["incarnation"]):
            return  # it was refused, because its name belongs to another
        if report.get("run"):
            self._note_run()
        ends_round = report["code"] and "round" in report and not report["cleared"]
        if ends_round and not self._has_run and not (error is not None and error["final"]):
            failure = Failure(who=f"worker {name}", cause=report["cause"], error=error)
            if not (self._begun or self._finishing):
                self._clear_round(self._rounds.failed(report["round"], failure))
            return
        is_known = name in self.workers or (self._muster.is_member(name) and machine_of(name) in self.absent)
        if report["code"] == 0 and error is None:
            self._ended_well(name, finished=report["finished"], is_known=is_known)
        elif is_known:
            self._strike_out(name, report["cause"])
        self.advance()
        if error is not None:
            self._judge_error(name, error, cleared=bool(report.get("cleared")))

    def _ended_well(self, name: str, *, finished: bool, is_known: bool) -> None:
        """Take in that a worker has ended with code 0: the run is over, or it was asked to leave."""
        if finished and self._muster.is_member(name):
            self._let_go(name)
            self.finish()
        elif is_known and self._muster.is_member(name):
            self._strike_out(name, "it has ended")
        else:
            self._let_go(name)

    def _judge_error(self, name: str, error: Message, *, cleared: bool) -> None:
        """Stop the run for an error of the script, or tell the hosts that it goes on."""
        if error["final"]:
            if not error.get("refused") or self.generation is None:  # a refused joiner does not end the training
                self.stop(error["code"], error["text"])
            return
        if cleared:
            return
        last = (error["text"].strip() or "no error text").splitlines()[-1]
        verdict = compose.judge_error(error=last, earlier=self._errors, alive=len(self.workers))
        self._errors.append(last)
        if verdict.stop:
            self.stop(error["code"], f"{error['text'].rstrip()}\nstopped: {verdict.reason}")
        else:
            notice = f"holdfast: worker {name} failed ({last}); {verdict.reason}"
            self._register.send_all(self.hosts.values(), {"type": "say", "text": notice})

    def _nobody_left_on(self, host: Host, reason: str) -> None:
        """Take in that a host has no worker and may start none: end the run, or let that host go."""
        if not self.workers:
            self.stop(3, self._last_words[1] if self._last_words is not None else f"too few workers: {reason}")
        else:  # the run goes on without this machine
            self._register.send(host.connection, {"type": "stop", "code": 3, "message": f"too few workers: {reason}"})

    # --- scripts without a Run -------------------------------------------------------------------

    def _note_run(self) -> None:
        """Note that the script has a ``Run``, and tell the hosts: from here on lost workers are replaced one by one."""
        if not self._has_run:
            self._has_run = True
            self._register.send_all(self.hosts.values(), {"type": "run"})

    def _waits_for_round(self) -> bool:
        """Whether a new host waits for the next round, since the present one has other members, or is over.

        The first round has no list of members: who comes late to it starts at once, as scripts with a ``Run`` need it.
        """
        goes_on = self._rounds.number > 0 or self._rounds.clearing or self._rejoined
        return goes_on and not (self._has_run or self._begun)

    def _missed_round(self, hello: Message) -> bool:
        """Whether an agent that comes back is still in a round that was over meanwhile."""
        rounds = self._rounds
        known = hello["host"] is not None and "round" in hello and not self._has_run
        return known and (hello["round"] < rounds.number or (rounds.clearing and hello["round"] == rounds.number))

    def _clear_round(self, is_new: bool) -> None:
        """Have all hosts kill what is left of a round that has failed, if they were not told yet."""
        if is_new:
            self._register.send_all(self.hosts.values(), {"type": "clear", "round": self._rounds.number})
        self._settle_round()

    def _settle_round(self) -> None:
        """End the run if all workers have ended well; begin the next round, or end the run, after one that failed."""
        hosts = self._slots().keys()
        if not self._has_run and self._rounds.is_over(hosts) and self._all_have_come(len(hosts)):
            self.finish()
        if not self._rounds.settled(hosts):
            return
        verdict = self._rounds.verdict()
        if verdict.stop:
            self.stop(verdict.code, verdict.text)
        elif len(hosts) >= self.settings.minimum_hosts:
            order = self._rounds.begin(hosts)
            self._register.log("restart", round=order["round"], hosts=order["hosts"], reason=verdict.text)
            self._register.send_all(self.hosts.values(), {"type": "say", "text": f"holdfast: {verdict.text}"})
            self._register.send_all([self.hosts[number] for number in hosts], order)

    def _all_have_come(self, hosts: int) -> bool:
        """Whether the first round has all its hosts, or has waited long enough for them.

        A short script may be over on one host before another one has started.
        """
        needed = self.settings.first_hosts or self.settings.minimum_hosts
        return self._rounds.number > 0 or hosts >= needed or self._now - self._born > self.settings.patience
