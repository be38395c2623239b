//! What `mpirun` tells a process about its place, by Open MPI's variables or those of all that use PMI (MPICH, Slurm's PMI
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

/// Whether another process than this one, the first, reports what is wrong with all of them. Waits a moment for that: at the
/// first exit code `mpirun` ends the others, whatever they were about to print.
pub fn first_speaks() -> bool {
    let other = rank().is_some_and(|rank| rank > 0);
    if other {
        std::thread::sleep(std::time::Duration::from_millis(300));
    }
    other
}

fn first_number(variables: [&str; 2]) -> Option<usize> {
    variables.iter().find_map(|variable| env::var(variable).ok()?.parse().ok())
}
