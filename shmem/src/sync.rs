//! The synchronisation of a team, with the words and rounds of `team.rs`.

use std::time::Instant;

use super::team::{SyncWords, rounds};
use super::{Shmem, SignalOp, Team, Transport, WaitTimeout};

impl SyncWords {
    /// See [`Shmem::sync`].
    pub(super) fn sync<T: Transport>(
        &mut self,
        shmem: &Shmem<T>,
        team: &Team,
        deadline: Instant,
    ) -> Result<(), WaitTimeout> {
        for (to, from) in rounds(team.my_index(), team.size()) {
            let (to, from) = (team.members()[to], team.members()[from]);
            shmem.signal_op(self.arrived.at(shmem.my_pe()), 1, SignalOp::Add, to);
            self.expected[from] += 1;
            shmem.wait_at_least(self.arrived.at(from), self.expected[from], from, deadline)?;
        }
        Ok(())
    }
}
