//! What `mpirun` tells a process of its place, by Open MPI's variables or those of all that speak PMI (MPICH, Slurm's PMI
//! plug-ins); known before MPI is initialised, and without it.

use std::env;

/// This process's number; `None` where it was not started so.
pub fn rank() -> Option<usize> {
    first_number(["OMPI_COMM_WORLD_RANK", "PMI_RANK"])
}

/// The number of processes started; `None` where this one was not started so.
pub fn size() -> Option<usize> {
    first_number(["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
}

fn first_number(variables: [&str; 2]) -> Option<usize> {
    variables.iter().find_map(|variable| env::var(variable).ok()?.parse().ok())
}
