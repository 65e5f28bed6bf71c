"""A failed step can be run again by whole engines: the bytes are those of an undisturbed run."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from ranks import on_ranks
from transports import (
    SMALL,
    SOON,
    Failing,
    Transport,
    contributions,
    free_port,
    group,
    on_all,
    outcomes,
)

from gradengine import GradientEngine
from gradengine.errors import (
    DeviceFailed,
    ExchangeError,
    GradientError,
    HandshakeRefused,
    NonFiniteGradient,
    PeerLost,
)
from gradengine.exchange import Exchange, connect, local_group
from gradengine.exchange.links.link import Link
from gradengine.exchange.links.mpi import MpiLink
from gradengine.exchange.links.threads import thread_links

pytestmark = pytest.mark.timeout(150)
BUCKET = 128
WORLD = 3


# ---- the whole engine ----


def engine_step(engine):
    result = engine.step()
    return result.norm, {name: gradient.tobytes() for name, gradient in result.gradients.items()}


def gradients(rank, seed):
    arena = contributions(SMALL, WORLD, seed)[rank]
    return {slot.name: arena[slot.offset : slot.stop].reshape(slot.shape) for slot in SMALL.slots}


def undisturbed():
    def work(exchange):
        engine = GradientEngine(SMALL, exchange=exchange, max_norm=1.0)
        for seed in (1, 2):
            engine.add(gradients(exchange.rank, seed))
        return engine_step(engine)

    return on_all(work, local_group(WORLD, bucket_bytes=BUCKET))


def test_over_mpi_which_takes_no_message_back_no_error_says_reconnect(monkeypatch):
    """Neither what the ranks are told, nor what they are told when they go on all the same."""
    monkeypatch.setattr(Link, "way_on", MpiLink.way_on)

    def work(exchange):
        engine, told = GradientEngine(SMALL, exchange=exchange), []
        engine.add(gradients(exchange.rank, 1))
        if exchange.rank == 1:
            exchange.close()
        for call in (engine.step, lambda: engine.add(gradients(0, 1)), exchange.barrier, engine.step):
            with pytest.raises(GradientError) as error:
                call()
            told.append(str(error.value))
        engine.discard()
        engine.add(gradients(exchange.rank, 1))
        with pytest.raises(GradientError) as error:
            engine.step()
        return [*told, str(error.value)]

    exchanges = [Exchange(link, url="mpi://", timeout=SOON) for link in thread_links(WORLD)]
    told = [each for found in on_all(work, exchanges) for each in found]
    assert [each for each in told if "reconnect" in each] == []
    assert sum("start the job again from a checkpoint" in each for each in told) >= WORLD


@pytest.mark.parametrize(("scheme", "streamed", "lost"), [("tcp", False, 9), ("unix", True, 1), ("unix", False, 1)])
def test_engine_reconnects_at_the_same_address_and_steps_again(scheme, streamed, lost, tmp_path):
    """Each rank closes, connects and steps again as soon as it hears of the failure; nobody waits for the others."""
    url = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"unix://{tmp_path}/s"
    micro_batches = 2 if streamed else None

    def work(rank):
        def join():
            return connect(url, rank, WORLD, bucket_bytes=BUCKET, timeout=SOON, join_timeout=SOON)

        engine = GradientEngine(SMALL, exchange=join(), micro_batches=micro_batches, max_norm=1.0)
        if rank == 1:
            pump = engine.exchange._pump
            pump._link = Failing(pump._link, lost)
        for seed in (1, 2):
            engine.add(gradients(rank, seed))
        with pytest.raises(ExchangeError):
            engine.step()
        engine.exchange.close()
        engine.reconnect(join())
        first = engine_step(engine)
        engine.add(gradients(rank, 3))
        if streamed:
            engine.add(gradients(rank, 4))
        engine_step(engine)
        engine.exchange.barrier()
        engine.exchange.close()
        return first

    assert on_all(work, range(WORLD)) == undisturbed()


def test_engines_discard_where_the_server_lost_its_sums():
    with group(Transport.SERVER, WORLD, bucket_bytes=BUCKET) as exchanges:
        engines = on_all(lambda exchange: GradientEngine(SMALL, exchange=exchange, max_norm=1.0), exchanges)
        pump = exchanges[1]._pump
        pump._link = Failing(pump._link, 9)

        def fail(engine):
            engine.add(gradients(engine.rank, 0))
            with pytest.raises(ExchangeError):
                engine.step()

        on_all(fail, engines)
    with group(Transport.SERVER, WORLD, bucket_bytes=BUCKET) as exchanges:
        for error in outcomes(lambda engine: engine.reconnect(exchanges[engine.rank]), engines):
            assert "discard() the window on every rank" in str(error)
    with group(Transport.SERVER, WORLD, bucket_bytes=BUCKET) as exchanges:

        def again(engine):
            engine.discard()
            engine.reconnect(exchanges[engine.rank])
            for seed in (1, 2):
                engine.add(gradients(engine.rank, seed))
            return engine_step(engine)

        assert on_all(again, engines) == undisturbed()


def all_of(value):
    return [np.full(slot.shape, value, np.float32) for slot in SMALL.slots]


def joined_anew_after_a_verdict(exchange, second):
    engine = GradientEngine(SMALL, max_norm=None, exchange=exchange)
    engine.add(all_of(np.nan))
    with pytest.raises(NonFiniteGradient):
        engine.step()
    exchange.barrier()
    exchange.close()
    engine.reconnect(second[exchange.rank])
    return engine


def test_a_group_joined_anew_after_a_verdict_sums_the_next_window():
    """What all agreed on belongs to the lost exchange; the new one is waited for, and left clean."""
    second = local_group(2, timeout=SOON, join_timeout=SOON)

    def work(exchange):
        engine = joined_anew_after_a_verdict(exchange, second)
        with pytest.raises(NonFiniteGradient):
            engine.step()
        engine.discard()
        sums = []
        for step in (1, 2):
            engine.add(all_of(step + exchange.rank))
            sums.append(float(engine.step().gradients["head"][0]))
        return sums

    assert on_all(work, local_group(2, timeout=SOON)) == [[1.5, 2.5]] * 2


def test_a_window_dropped_right_after_joining_anew_says_what_to_do():
    second, third = (local_group(2, timeout=SOON, join_timeout=SOON) for _ in range(2))

    def work(exchange):
        engine = joined_anew_after_a_verdict(exchange, second)
        engine.discard()  # its spans are on their way again
        engine.add(all_of(1 + exchange.rank))
        with pytest.raises(PeerLost, match=r"dropped a window that was partly sent; reconnect\(\) on all ranks"):
            engine.step()
        engine.reconnect(third[exchange.rank])
        return float(engine.step().gradients["head"][0])

    assert on_all(work, local_group(2, timeout=SOON)) == [1.5, 1.5]


# ---- a rank one message behind ----


def loses_the_answers(exchange):
    """Let the exchange lose its links right after the others have all that they need of this rank in the step."""
    sound = exchange.all_gather

    def all_gather(data):
        sound(data)
        exchange.close()
        raise PeerLost("all links of this rank were lost")

    exchange.all_gather = all_gather


def a_step_that_only_some_have_made(engine, steps, behind=(1,)):
    """One rank or more end a step in an error that is over for all others, which fail in the next one."""
    if engine.rank in behind:
        loses_the_answers(engine._reducer.workers.exchange)
    engine.add(gradients(engine.rank, 1))
    if engine.rank not in behind:
        steps.append(engine_step(engine))
        engine.add(gradients(engine.rank, 2))
    with pytest.raises(ExchangeError):
        engine.step()


@pytest.mark.parametrize("behind", [(1,), (0, 2)], ids=str)
@pytest.mark.parametrize("transport", Transport)
def test_a_rank_ends_a_step_with_what_the_others_have_kept_that_have_gone_on(transport, behind):
    def work(exchange):
        engine, steps = GradientEngine(SMALL, exchange=exchange, max_norm=1.0), []
        a_step_that_only_some_have_made(engine, steps, behind)
        engine.reconnect(second[exchange.rank])
        if exchange.rank in behind:
            steps.append(engine_step(engine))
            engine.add(gradients(exchange.rank, 2))
        steps.append(engine_step(engine))
        engine.add(gradients(exchange.rank, 3))
        steps.append(engine_step(engine))
        return steps

    with group(transport, WORLD, bucket_bytes=BUCKET) as first, group(transport, WORLD, bucket_bytes=BUCKET) as second:
        found = on_all(work, first)
    assert found == [three_steps()] * WORLD


def three_steps():
    def work(exchange):
        engine, steps = GradientEngine(SMALL, exchange=exchange, max_norm=1.0), []
        for seed in (1, 2, 3):
            engine.add(gradients(exchange.rank, seed))
            steps.append(engine_step(engine))
        return steps

    first, *_ = on_all(work, local_group(WORLD, bucket_bytes=BUCKET))
    return first


def drop(engine):
    engine.discard()


def load(engine):
    engine.discard()
    engine.load_state_dict(engine.state_dict())


@pytest.mark.parametrize(
    ("world_size", "who", "how"),
    [
        (WORLD, [1], drop),  # the window that it had told the others of: nothing is left to end the step with
        (WORLD, [0, 2], load),  # what was kept goes with it
        (2, [], drop),  # a smaller group
    ],
)
def test_a_rank_that_is_behind_for_another_reason_is_refused(world_size, who, how):
    second = local_group(world_size, timeout=SOON, join_timeout=SOON)

    def work(exchange):
        engine = GradientEngine(SMALL, exchange=exchange, max_norm=1.0)
        a_step_that_only_some_have_made(engine, [])
        if exchange.rank in who:
            how(engine)
        if exchange.rank < world_size:
            with pytest.raises(HandshakeRefused, match=r"rank 1 is at another step: got 0, expected 1"):
                engine.reconnect(second[exchange.rank])

    on_all(work, local_group(WORLD, timeout=SOON))


def test_what_was_kept_of_another_window_ends_no_step():
    second = local_group(WORLD, timeout=SOON, join_timeout=SOON)

    def work(exchange):
        engine = GradientEngine(SMALL, exchange=exchange, max_norm=1.0)
        a_step_that_only_some_have_made(engine, [])
        answers = engine._reducer.workers.progress.kept.answers
        for parts in answers.values():
            parts[1] = parts[0][:-1] + b"x"
        engine.reconnect(second[exchange.rank])
        if exchange.rank == 1:
            with pytest.raises(ExchangeError, match="rank 1 ended step 0 otherwise than the others"):
                engine.step()
        second[exchange.rank].close()
        return True

    assert on_all(work, local_group(WORLD, timeout=SOON)) == [True] * WORLD


@pytest.mark.parametrize("others", ["new", "loaded"])
def test_a_rank_that_was_told_what_it_missed_does_not_take_its_sums_for_its_own_part(others):
    """It reconnects once more before it has ended its step, to others that begin that step anew."""
    second, third = (local_group(WORLD, timeout=SOON, join_timeout=SOON) for _ in range(2))

    def work(exchange):
        engine = GradientEngine(SMALL, exchange=exchange, max_norm=1.0)
        state = engine.state_dict()
        a_step_that_only_some_have_made(engine, [])
        engine.reconnect(second[exchange.rank])
        second[exchange.rank].close()
        if exchange.rank != 1:
            engine.discard()
            engine = GradientEngine(SMALL, max_norm=1.0) if others == "new" else engine
            engine.load_state_dict(state)
            engine.add(gradients(exchange.rank, 1))
        with pytest.raises(HandshakeRefused, match=r"rank 0 has not contributed to what step 0 has summed"):
            engine.reconnect(third[exchange.rank])
        return True

    assert on_all(work, local_group(WORLD, timeout=SOON)) == [True] * WORLD


def test_a_rank_whose_device_fails_leaves_the_group_at_once():
    """No other rank waits for its time limit."""
    over = threading.Barrier(2)

    def failed(*_, **__):
        raise DeviceFailed("work on the GPU ended in an error")

    def work(exchange):
        engine = GradientEngine(SMALL, exchange=exchange)
        if exchange.rank == 1:
            engine.accumulator.add = failed
        with pytest.raises(DeviceFailed if exchange.rank == 1 else PeerLost):
            engine.add(gradients(exchange.rank, 1)), engine.step()
        over.wait(60)
        return "told"

    assert on_ranks(work, 2, timeout=10.0) == ["told"] * 2
