"""Links: what moves bytes between the ranks of a group, a file for each way.

In: contiguous NumPy arrays, each with the rank it goes to or comes from, and a tag. Out: which transfers are over, and
`PeerLost` where one never will be. `link.py` is what a link is; `threads.py` joins threads of one process, `mpi.py`
processes that MPI has started, `sockets.py` those that have connected sockets with each other, `shared_memory.py` those
of one host that have Unix sockets.
"""
