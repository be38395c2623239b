//! Rank and size of a process of `mpirun`, read from the environment variables of Open MPI or of PMI (MPICH, Slurm's PMI plug-ins). MPI
//! need not be initialised.

use std::env;

/// This process's rank; `None` if `mpirun` did not start it.
pub fn rank() -> Option<usize> {
    first_number(["OMPI_COMM_WORLD_RANK", "PMI_RANK"])
}

/// The number of processes; `None` if `mpirun` did not start this one.
pub fn size() -> Option<usize> {
    first_number(["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
}

/// Whether rank 0 reports an error that all processes have, so that this process need not. If so, first waits until rank 0 has had time to
/// print, because `mpirun` kills all processes as soon as one exits with an error.
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
