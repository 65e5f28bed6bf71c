"""The addresses and the link by which ranks reach each other: what each says, as the others understand it."""

from __future__ import annotations

from collections.abc import Sequence

from gradengine.arguments import refuse_unknown, said
from gradengine.arrays.shared import refuse_without_shared_memory
from gradengine.errors import CallerError, HandshakeRefused, ProtocolError
from gradengine.exchange.addresses import Address
from gradengine.exchange.rendezvous import address_of, everywhere, is_loopback

LINKS = ("tcp", "unix", "shared_memory")  # each needs more of where the ranks are
_EVERYWHERE = {"0.0.0.0", "::"}  # noqa: S104  (in a list of ranks: who listens there is beside rank 0)


def address_told(url: object) -> Address:
    """The address in the URL at which a rank says that it listens."""
    try:
        return address_of(url)
    except CallerError as fault:
        raise ProtocolError("a rank sent an invalid address", got=fault.got) from None


def own_host(called: str, host: str) -> str:
    """The host at which a rank listens: the one from which it has called rank 0.

    It listens everywhere if rank 0's name, which other machines may know, means loopback on this one, as Debian's
    /etc/hosts has it: then this rank is on rank 0's host, and ranks elsewhere find it at rank 0's address.
    """
    if not is_loopback(host) or is_loopback(called):
        return host
    return everywhere().strip("[]")


def addresses_of(urls: Sequence[object], count: int, host_of_rank_0: str) -> list[Address]:
    """The addresses of `count` ranks, from the list that rank 0 sent."""
    if len(urls) != count:
        raise ProtocolError("rank 0 sent an invalid list of ranks", got=urls, expected=f"{count} URLs")
    addresses = [address_told(url) for url in urls]
    return [(host_of_rank_0, int(each[1])) if each[0] in _EVERYWHERE else each for each in addresses]


def refuse_out_of_reach(urls: list[str]) -> None:
    """Raise `HandshakeRefused` if some ranks, not all, called from loopback: other machines cannot reach them."""
    hosts = {rank: address[0] for rank, url in enumerate(urls, 1) if not isinstance(address := address_told(url), str)}
    near = [rank for rank, host in hosts.items() if is_loopback(host)]
    far = [rank for rank, host in hosts.items() if rank not in near and host not in _EVERYWHERE]
    if near and far:
        what = f"rank {far[0]} cannot reach rank {near[0]}, which called rank 0 from loopback"
        do = "give all ranks the address of rank 0 that all machines reach"
        raise HandshakeRefused(what, got=f"{hosts[near[0]]} and {hosts[far[0]]}", do=do)


def refuse_other_link(link: str | None, address: Address) -> None:
    """Raise `CallerError` for an unknown link, or one that is not possible at this address."""
    if link is not None:
        refuse_unknown("link", link, LINKS, do="or pass None for the best")
    if link == "tcp" and isinstance(address, str):
        raise CallerError('link="tcp" over a Unix socket', do="pass tcp://host:port of rank 0, or another link")
    if link == "shared_memory":
        refuse_without_shared_memory()


def chosen_link(link: str, own: str | None, rank: int) -> str:
    """The link that rank 0 has chosen; raises an error if it is unknown, or not the one that this rank was given."""
    if link not in LINKS:
        raise ProtocolError("rank 0 chose an unknown link", got=said(link), expected=f"one of {', '.join(LINKS)}")
    if own not in {None, link}:
        what = f"rank {rank} was given another link than the group's"
        raise HandshakeRefused(what, got=repr(own), expected=repr(link), do="pass the same link on all ranks")
    return link
