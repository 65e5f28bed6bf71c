"""A failed step is made again by whole engines, to the bytes of an undisturbed run, or all are told to drop it."""

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


def step_again(engine, join, rank, seeds):
    """Reconnect and step again; or drop the window, which is lost, and accumulate it again."""
    try:
        engine.reconnect(join())
    except HandshakeRefused as lost:
        engine.discard()
        engine.reconnect(join())
        for seed in seeds:
            engine.add(gradients(rank, seed))
        return str(lost), engine_step(engine)
    return "", engine_step(engine)


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
        refusal, first = step_again(engine, join, rank, (1, 2))
        engine.add(gradients(rank, 3))
        if streamed:
            engine.add(gradients(rank, 4))
        engine_step(engine)
        engine.exchange.barrier()
        engine.exchange.close()
        return refusal, first

    refusals, steps = zip(*on_all(work, range(WORLD)), strict=True)
    assert [*steps] == undisturbed()
    assert len({*refusals}) == 1, "all are told the same"


@pytest.mark.parametrize("transport", Transport)
def test_all_discard_a_window_whose_sums_a_rank_has(transport):
    with group(transport, WORLD, bucket_bytes=BUCKET) as exchanges:
        engines = on_all(lambda exchange: GradientEngine(SMALL, exchange=exchange, max_norm=1.0), exchanges)

        def fail(engine):
            engine.add(gradients(engine.rank, 0))
            if engine.rank == 1:
                sound = engine.exchange.all_gather
                engine.exchange.all_gather = lambda data: engine.exchange.close() or sound(data)
            with pytest.raises(ExchangeError):
                engine.step()

        on_all(fail, engines)
    with group(transport, WORLD, bucket_bytes=BUCKET) as exchanges:
        for error in outcomes(lambda engine: engine.reconnect(exchanges[engine.rank]), engines):
            assert "discard() the window on every rank" in str(error)
    with group(transport, WORLD, bucket_bytes=BUCKET) as exchanges:

        def again(engine):
            engine.discard()
            engine.reconnect(exchanges[engine.rank])
            for seed in (1, 2):
                engine.add(gradients(engine.rank, seed))
            return engine_step(engine)

        assert on_all(again, engines) == undisturbed()


def all_of(value):
    return [np.full(slot.shape, value, np.float32) for slot in SMALL.slots]


def test_a_window_that_is_joined_anew_after_a_verdict_is_lost_and_the_next_one_is_summed():
    """Its sums belong to the exchange that was left."""
    second, third = (local_group(2, timeout=SOON, join_timeout=SOON) for _ in range(2))

    def work(exchange):
        engine = GradientEngine(SMALL, max_norm=None, exchange=exchange)
        engine.add(all_of(np.nan))
        with pytest.raises(NonFiniteGradient):
            engine.step()
        exchange.barrier()
        exchange.close()
        with pytest.raises(HandshakeRefused, match="the window of step 0 is lost"):
            engine.reconnect(second[exchange.rank])
        engine.discard()
        assert engine.current_step == 0, "all make this step again"
        engine.add(all_of(1 + exchange.rank))
        with pytest.raises(PeerLost, match=r"reconnect on all ranks"):
            engine.step()
        engine.reconnect(third[exchange.rank])
        return float(engine.step().gradients["head"][0])

    assert on_all(work, local_group(2, timeout=SOON)) == [1.5, 1.5]


def test_a_rank_that_lost_its_links_as_the_others_ended_the_step_is_refused_on_all_ranks():
    """Their weights have changed, and its own have not."""
    second = local_group(WORLD, timeout=SOON, join_timeout=SOON)

    def work(exchange):
        engine = GradientEngine(SMALL, exchange=exchange, max_norm=1.0)
        if exchange.rank == 1:
            sound = exchange.all_gather
            exchange.all_gather = lambda data: [sound(data), exchange.close(), exchange.barrier()]
        engine.add(gradients(engine.rank, 1))
        if engine.rank != 1:
            engine.step()
            engine.add(gradients(engine.rank, 2))
        with pytest.raises(ExchangeError):
            engine.step()
        with pytest.raises(HandshakeRefused, match="rank 1 is at a different step: got 0, expected 1; load"):
            engine.reconnect(second[engine.rank])

    on_all(work, local_group(WORLD, timeout=SOON))


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
