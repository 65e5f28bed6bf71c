"""A virtual clock, and tasks that run one at a time, on threads of their own; which runs next follows from the seed."""

import _thread
import heapq
import itertools
import random

from gradengine.threads import Bell

_LAG = 1e-4  # seconds until a task that is woken runs, at most; of a slow process many times as much


class Stopped(BaseException):
    """Ends a task whose process has died, or whose schedule is over."""


class Process:
    """One rank's process, as long as it lives."""

    def __init__(self, name):
        self.name, self.is_dead, self.slowness, self.sleeps_until = name, False, 1.0, 0.0
        self.sockets = {}  # those that are open; a dict, as the order of a set is not the seed's


class Task:
    """Code of a process that runs until it pauses."""

    def __init__(self, process):
        self.process, self.ticket, self.is_over, self.turn = process, 0, False, _thread.allocate_lock()
        self.turn.acquire()


class Clock:
    """The time, what happens when, and whose turn it is."""

    def __init__(self, seed, limit):
        self.random, self.now, self._limit = random.Random(seed), 0.0, limit
        self._events, self._count, self._tasks = [], itertools.count(), []
        self._main = self.current = Task(Process("the schedule"))
        self._is_ending, self.faults = False, []

    def __call__(self):
        return self.now

    def after(self, seconds, call, *arguments):
        """Make a call at a later time; a task that it returns has the next turn."""
        heapq.heappush(self._events, (self.now + seconds, next(self._count), call, arguments))

    def spawn(self, process, work, *arguments):
        """Run code as a task of a process, from about now on."""
        task = Task(process)
        self._tasks.append(task)
        _thread.start_new_thread(self._run, (task, work, arguments))
        self.wake(task)

    def wake(self, task):
        """End a task's pause, once its process comes to it."""
        lag = self.random.random() * _LAG * task.process.slowness
        self.after(lag, self._resumed, task, task.ticket)

    def pause(self, seconds=None):
        """Let others run until this task is woken, or for so long."""
        task = self.current
        self.refuse_stopped()
        task.ticket += 1
        if seconds is not None:
            self.after(max(seconds, 1e-6), self._resumed, task, task.ticket)
        self._hand_over(task)
        self.refuse_stopped()

    def refuse_stopped(self):
        """Raise `Stopped` where the task that runs is to end."""
        if self._is_ending or self.current.process.is_dead:
            raise Stopped

    def kill(self, process):
        """Let the tasks of a process end at their next pause, or where they are in one."""
        process.is_dead = True
        for task in self._tasks:
            if task.process is process and task is not self.current:
                self.after(0.0, self._resumed, task, task.ticket)

    def run(self):
        """Run until nothing more happens or the time is over; returns the processes whose tasks had not ended."""
        self._hand_over(self._main)
        self._is_ending = True
        hanging = [task.process for task in self._tasks if not task.is_over]
        for task in self._tasks:
            while not task.is_over:
                self._give(task, self._main)
        return hanging

    # ---- inside ----

    def _run(self, task, work, arguments):
        task.turn.acquire()
        try:
            self.refuse_stopped()
            work(*arguments)
        except Stopped:
            pass
        except BaseException as fault:
            self.faults.append(fault)
        task.is_over = True
        self._hand_over(task)

    def _hand_over(self, mine):
        chosen = self._main if self._is_ending else self._next()
        if chosen is not mine:
            self._give(chosen, mine)

    def _give(self, chosen, mine):
        self.current = chosen
        chosen.turn.release()
        if not mine.is_over:
            mine.turn.acquire()

    def _next(self):
        while self._events and self._events[0][0] <= self._limit:
            self.now, _, call, arguments = heapq.heappop(self._events)
            chosen = call(*arguments)
            if chosen is not None:
                return chosen
        return self._main

    def _resumed(self, task, ticket):
        if task.is_over or task.ticket != ticket:
            return None
        if task.process.sleeps_until > self.now and not task.process.is_dead:
            return self.after(task.process.sleeps_until - self.now, self._resumed, task, ticket)
        return task


class VirtualBell(Bell):
    """A bell whose waits take the clock's time."""

    def __init__(self, clock):
        self._clock, self._is_rung, self._task = clock, False, None

    def ring(self):
        self._is_rung = True
        if self._task is not None:
            self._clock.wake(self._task)

    def wait(self, seconds=None):
        if not self._is_rung:
            self._task = self._clock.current
            try:
                self._clock.pause(seconds)
            finally:
                self._task = None
        is_rung, self._is_rung = self._is_rung, False
        return is_rung


class VirtualLock:
    """A lock under which a task may pause."""

    def __init__(self, clock):
        self._clock, self._is_held, self._waiting = clock, False, []

    def __enter__(self):
        while self._is_held:
            self._waiting.append(self._clock.current)
            self._clock.pause()
        self._is_held = True

    def __exit__(self, *_):
        self._is_held, waiting, self._waiting = False, self._waiting, []
        for task in waiting:
            self._clock.wake(task)
