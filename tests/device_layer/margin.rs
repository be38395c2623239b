//! A pass beside another kernel that waits for its peers, such as NCCL's: a pass must leave it multiprocessors.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use aristos::moe::device::DeviceExperts;

use super::caller::{Arrays, Memory, external, forward};
use super::experts::any_choices;
use super::*;

/// Multiprocessors of a device, and of the other kernel.
const ALL: u32 = 10;
const OTHER: u32 = 8;

/// Runs a pass on two PEs beside a kernel that spins on [`OTHER`] multiprocessors of each until it runs on both. On PE 0 that kernel runs
/// before the pass is launched, and on PE 1 the pass before that kernel.
fn pass_beside_spinning_kernel(spare: u32, wait_limit: Duration) -> Vec<Result<(), MoeError>> {
    let device = with!(EmulatedDevice::default(); multiprocessors = ALL);
    let world = World { device, options: with!(small_options(); wait_limit = wait_limit), ..World::new() };
    let source = synthetic(external(mixtral(32, 24, 7, 4)), 4);
    let choices = any_choices(16, 7, 4, 3);
    let splits = common::even(16, 2);
    let (requested, on_both) = (Barrier::new(2), Barrier::new(2));
    on_pes(world.pes(2), |gpu| {
        let range = splits[gpu.my_pe()].clone();
        let rows = [source.hidden_states(range.clone()), source.grad_output(range.clone())];
        let options = with!(DeviceOptions::default(); spare_multiprocessors = spare);
        let layer = DeviceExperts::new(gpu, spec_of(&world, &source, 2, 8), &options).unwrap();
        let arrays = Arrays::weights(gpu, layer.spec(), &source);
        let memory = Memory::new(gpu, &layer, rows.each_ref().map(Vec::as_slice), &choices.of(range, 4));
        let (multiprocessors, blocks, ended) = (gpu.multiprocessors(), layer.blocks(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            if gpu.my_pe() == 0 {
                let resident = multiprocessors.occupy(OTHER);
                scope.spawn(|| {
                    on_both.wait();
                    drop(resident);
                });
                requested.wait();
            } else {
                scope.spawn(|| {
                    while multiprocessors.occupied() < blocks && !ended.load(SeqCst) {
                        std::thread::yield_now();
                    }
                    requested.wait();
                    let resident = multiprocessors.occupy(OTHER);
                    on_both.wait();
                    drop(resident);
                });
            }
            let done = forward(&layer, &memory.forward(&arrays)).and_then(|()| layer.finish());
            ended.store(true, SeqCst);
            done
        })
    })
}

#[test]
fn margin_prevents_a_deadlock_with_a_spinning_kernel() {
    for (pe, done) in pass_beside_spinning_kernel(OTHER, Duration::from_secs(60)).into_iter().enumerate() {
        done.unwrap_or_else(|error| panic!("PE {pe}: {error}"));
    }
    // Without the margin PE 0's pass waits for its multiprocessors, and PE 1's for PE 0 until its limit.
    let done = pass_beside_spinning_kernel(0, Duration::from_secs(2));
    let error = done[1].as_ref().expect_err("no deadlock without the margin");
    assert_eq!(error.awaited_pe(), Some(0), "{error}");
}
