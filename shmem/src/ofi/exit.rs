//! The end of a process that does not come to the end of its transports.
//!
//! libfabric takes itself down when a process exits, whatever threads still are in its calls: they would run into what is gone. So before that, as
//! the process exits, all are kept out.

use std::sync::{Arc, Mutex, Once, Weak};

use super::engine::Engine;
use crate::tcp::lock;

static LIVE: Mutex<Vec<Weak<Engine>>> = Mutex::new(Vec::new());
static REGISTER: Once = Once::new();

/// From now on `engine` is kept out of libfabric when the process exits.
pub(super) fn watch(engine: &Arc<Engine>) {
    REGISTER.call_once(|| {
        // SAFETY: the function is one of this program, and does not unwind. Where there is no room to register it, exits are as they were.
        unsafe { libc::atexit(leave) };
    });
    let mut live = lock(&LIVE);
    live.retain(|engine| engine.strong_count() > 0);
    live.push(Arc::downgrade(engine));
}

extern "C" fn leave() {
    // Not waited for: a thread that holds it here is about to register an engine, or exits itself.
    let Ok(live) = LIVE.try_lock() else { return };
    // What is still there is never dropped: its end would be a call.
    live.iter().filter_map(Weak::upgrade).for_each(|engine| {
        engine.leave();
        std::mem::forget(engine);
    });
}
