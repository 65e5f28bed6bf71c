"""Links move bytes between the ranks of a group. Each kind of link has its own module.

A link takes contiguous NumPy arrays, each with a tag and the rank to send it to or receive it from. It reports which
transfers are over, and raises `PeerLost` for one that never will be. `link.py` is the interface. `threads.py` links
threads of one process, and `mpi.py` links processes that MPI has started. `sockets.py` uses connected sockets, to
which `shared_memory.py` adds shared memory on one host. `collectives.py` uses the all-to-all of torch or MPI.
"""
