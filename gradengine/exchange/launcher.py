"""The job's name from the launcher's environment variables, which are read nowhere else.

The first of `VARIABLES` that is set counts. Launchers come before the schedulers that they run under: of the ranks that
one mpirun starts over ssh, only some see the scheduler's variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from gradengine.exchange.handshake import refuse_bad_job

VARIABLES = (
    "TORCHELASTIC_RUN_ID",  # torchrun's --rdzv-id; "none" where it was not given
    "PMIX_NAMESPACE",  # mpirun of Open MPI 2 to 5, prterun; srun --mpi=pmix, which is left to SLURM_JOB_ID
    "OMPI_MCA_ess_base_jobid",  # mpirun of Open MPI 1
    "SLURM_JOB_ID",  # one for each element of an array, one for all steps and for all parts of a heterogeneous job
    "PBS_JOBID",  # with the index in an array
    "LSB_JOBID",  # LSF's, the same in the whole of an array: LSB_JOBINDEX is its index, 0 outside
)


def job_or_launchers(job: str | None) -> str:
    """The job's name, or the launcher's if it is None."""
    if job is None:
        return launchers_job(os.environ)
    refuse_bad_job(job)
    return job


def launchers_job(environment: Mapping[str, str]) -> str:
    """The launcher's job as "variable=value", so that those of two launchers differ; "" without a launcher."""
    for variable in VARIABLES:
        value = environment.get(variable, "")
        if _names_a_job(variable, value):
            job = f"{variable}={value}{_index_in_array(variable, environment)}"
            refuse_bad_job(job, source="the environment's job")
            return job
    return ""


def _names_a_job(variable: str, value: str) -> bool:
    if variable == "PMIX_NAMESPACE" and value.startswith("slurm."):
        return False  # slurm.pmix.<job>.<step>: ranks of one run may come by several steps
    return bool(value) and (variable, value) != ("TORCHELASTIC_RUN_ID", "none")


def _index_in_array(variable: str, environment: Mapping[str, str]) -> str:
    index = environment.get("LSB_JOBINDEX", "") if variable == "LSB_JOBID" else ""
    return f"[{index}]" if index not in {"", "0"} else ""
