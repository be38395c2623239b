//! A world of threads of one process.

use super::{ShmTransport, Shmem, ShmemError};

/// A world of `n_pes` PEs over shared memory in this process, by number: one for each of as many threads.
///
/// `heap_bytes` is the size of each PE's heap, what [`Shmem::new`] takes of it included: [`Shmem::heap_bytes_for`] says how
/// large it is for what a caller needs.
///
/// # Errors
/// When the heap is too small for [`Shmem::new`], or more than the host has.
pub fn threads(n_pes: usize, heap_bytes: usize) -> Result<Vec<Shmem<ShmTransport>>, ShmemError> {
    if n_pes == 0 {
        return Ok(Vec::new());
    }
    check_heap(n_pes, heap_bytes)?;
    Ok(ShmTransport::threads(n_pes, heap_bytes)?.into_iter().map(Shmem::new).collect())
}

/// Whether a heap has room for what [`Shmem::new`] takes of it.
pub(super) fn check_heap(n_pes: usize, heap_bytes: usize) -> Result<(), ShmemError> {
    let reserved = Shmem::<ShmTransport>::reserved_bytes(n_pes, heap_bytes);
    if heap_bytes < reserved {
        let why = format!("a symmetric heap for {n_pes} PEs has at least {reserved} bytes, this one {heap_bytes}");
        return Err(ShmemError::Segment(why));
    }
    Ok(())
}
