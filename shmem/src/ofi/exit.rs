//! Process exit without dropping transports.
//!
//! libfabric destroys its state when a process exits, even while threads are in its calls; they would access freed state. An
//! exit handler therefore keeps all threads out of libfabric first.

use std::sync::{Arc, Mutex, Once, Weak};

use super::engine::Engine;
use crate::tcp::lock;

static LIVE: Mutex<Vec<Weak<Engine>>> = Mutex::new(Vec::new());
static REGISTER: Once = Once::new();

/// Registers `engine` for the exit handler.
pub(super) fn watch(engine: &Arc<Engine>) {
    REGISTER.call_once(|| {
        // SAFETY: `quiesce_all` is a static function and does not unwind. If it cannot be registered, exits are unprotected as
        // before.
        unsafe { libc::atexit(quiesce_all) };
    });
    let mut live = lock(&LIVE);
    live.retain(|engine| engine.strong_count() > 0);
    live.push(Arc::downgrade(engine));
}

extern "C" fn quiesce_all() {
    // Does not wait for the lock: its holder is registering an engine or exiting too.
    let Ok(live) = LIVE.try_lock() else { return };
    // Engines are leaked, because dropping one would call libfabric.
    live.iter().filter_map(Weak::upgrade).for_each(|engine| {
        engine.quiesce();
        std::mem::forget(engine);
    });
}
