//! A transport that is chosen at run time.

use std::ptr::NonNull;
use std::time::Instant;

use super::{LostPe, RawWait, SignalOp, Transport};

macro_rules! forward {
    ($(fn $name:ident(&self $(, $argument:ident: $type:ty)*) $(-> $result:ty)?;)*) => {
        impl Transport for Box<dyn Transport + Send + Sync> {$(
            fn $name(&self $(, $argument: $type)*) $(-> $result)? {
                (**self).$name($($argument),*)
            }
        )*}
    };
}

forward! {
    fn my_pe(&self) -> usize;
    fn n_pes(&self) -> usize;
    fn world_pe(&self, pe: usize) -> usize;
    fn heap_bytes(&self) -> usize;
    fn put(&self, dest: usize, src: &[u8], pe: usize);
    fn put_nbi(&self, dest: usize, src: usize, bytes: usize, pe: usize);
    fn get(&self, dest: &mut [u8], src: usize, pe: usize);
    fn get_nbi(&self, dest: usize, src: usize, bytes: usize, pe: usize);
    fn put_signal(&self, dest: usize, src: &[u8], signal: usize, value: u64, op: SignalOp, pe: usize);
    fn signal_op(&self, signal: usize, value: u64, op: SignalOp, pe: usize);
    fn signal_fetch(&self, signal: usize) -> u64;
    fn fetch_add(&self, target: usize, value: u64, pe: usize) -> u64;
    fn wait_any(&self, waits: &[RawWait], deadline: Instant) -> Option<usize>;
    fn fence(&self);
    fn quiet(&self);
    fn lost(&self) -> Option<LostPe>;
    fn has_ended(&self, pe: usize) -> bool;
    fn ptr(&self, offset: usize, pe: usize) -> Option<NonNull<u8>>;
    fn is_reachable(&self, pe: usize) -> bool;
}
