"""Links: they move bytes between the ranks of a group; a file for each kind.

In: contiguous NumPy arrays, each with the rank to send it to or receive it from, and a tag. Out: which transfers are
over, and `PeerLost` if one never will be. `link.py` is the interface; `threads.py` links threads of one process,
`mpi.py` processes that MPI has started, `sockets.py` processes with connected sockets, `shared_memory.py` those of one
host with Unix sockets.
"""
