//! PEs that are threads of one process.

use super::{ShmTransport, Shmem, ShmemError};

/// Creates `n_pes` PEs over shared memory in this process, in PE order, one for each of its threads.
///
/// `heap_bytes` is the size of each PE's heap, including the part that [`Shmem::new`] reserves; [`Shmem::heap_bytes_for`]
/// computes the size for a caller's needs.
///
/// # Errors
/// [`ShmemError::Segment`] if the heap is too small for [`Shmem::new`], [`ShmemError::System`] if the host has too little
/// memory.
pub fn threads(n_pes: usize, heap_bytes: usize) -> Result<Vec<Shmem<ShmTransport>>, ShmemError> {
    if n_pes == 0 {
        return Ok(Vec::new());
    }
    check_heap(n_pes, heap_bytes)?;
    Ok(ShmTransport::threads(n_pes, heap_bytes)?.into_iter().map(Shmem::new).collect())
}

/// Checks that a heap has room for the part that [`Shmem::new`] reserves.
pub(super) fn check_heap(n_pes: usize, heap_bytes: usize) -> Result<(), ShmemError> {
    let reserved = Shmem::<ShmTransport>::reserved_bytes(n_pes, heap_bytes);
    if heap_bytes < reserved {
        let why = format!("a symmetric heap for {n_pes} PEs has at least {reserved} bytes, this one {heap_bytes}");
        return Err(ShmemError::Segment(why));
    }
    Ok(())
}
